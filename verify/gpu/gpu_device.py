"""GpuDevice: what a report says about one GPU, and its published rates."""

from __future__ import annotations

from typing import NamedTuple

from ...devices import spec_of_kind

__all__ = ["GpuDevice", "gpu_device"]


class GpuDevice(NamedTuple):
    """One GPU: bytes of HBM, multiprocessors, bytes of shared memory per block, and per second bytes of HBM and operations.

    flops_per_second is for bfloat16 and float16; sources names where the figures are published.
    """

    kind: str
    hbm_bytes: int
    multiprocessors: int
    shared_bytes: int
    bytes_per_second: float
    flops_per_second: float
    flops_tf32_per_second: float
    flops_float32_per_second: float
    sources: tuple[str, ...]

    def roofline(self, flops: float, moved: float, dtype: str, exact: bool) -> tuple[float, float]:
        """(seconds of arithmetic, seconds of HBM traffic) at the published rates; a float32 product that need not be exact may
        use TF32."""
        rate = self.flops_per_second
        if dtype == "float32":
            rate = self.flops_float32_per_second if exact else self.flops_tf32_per_second
        return flops / rate, moved / self.bytes_per_second


def gpu_device(kind: str) -> GpuDevice | None:
    """The GPU of jax's device kind; None if its figures aren't in the table."""
    spec = spec_of_kind(kind)
    if spec is None:
        return None
    return GpuDevice(
        spec.kind,
        spec.hbm_bytes,
        spec.cores,
        spec.shared_bytes_a_block,
        spec.bytes_per_second,
        spec.flops_float16,
        spec.flops_tf32,
        spec.flops_float32,
        spec.sources,
    )
