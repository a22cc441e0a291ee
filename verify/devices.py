"""What a report knows of the devices that a program is compiled for, TPUs and GPUs alike: limits, rates, and kernels."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from .compiled import Failure, KernelUse, kernels, too_much_hbm
from .generations import device_of
from .gpu.gpu_device import gpu_device
from .gpu.gpu_kernels import GpuKernelUse, gpu_kernels
from .gpu.gpu_specs import spec_of_kind

__all__ = ["AnyKernelUse", "DeviceLimits", "device_limits", "kernels_of_program", "lowered_for", "tracing_on", "unheld"]

AnyKernelUse = KernelUse | GpuKernelUse
_PALLAS = ("tpu", "cuda")  # platforms for which a program may be lowered without a device


class DeviceLimits(Protocol):
    """One device: its kind, bytes of HBM, and how long work takes at least."""

    @property
    def kind(self) -> str:
        """As jax names it."""
        ...

    @property
    def hbm_bytes(self) -> int:
        """All of it."""
        ...

    def roofline(self, flops: float, moved: float, dtype: str, exact: bool) -> tuple[float, float]:
        """(seconds of arithmetic, seconds of HBM traffic) at the published rates. exact: products of float32 lose no bits."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def device_limits(platform: str, kind: str) -> DeviceLimits | None:
    """Of a device of that platform and kind; None where nothing is known of it."""
    if platform == "tpu":
        return device_of(kind)
    return gpu_device(kind) if platform == "cuda" else None


def kernels_of_program(compiled: Any, text: str, platform: str, kind: str) -> tuple[AnyKernelUse, ...]:
    """The Pallas kernels of a compiled program and what each takes, in its order."""
    if platform == "cuda":
        return gpu_kernels(compiled, text, spec_of_kind(kind))
    return kernels(text)


def tracing_on(mesh: Any, platform: str) -> contextlib.AbstractContextManager[Any]:
    """What a program for GPUs is traced in: from jax 0.12 on Pallas asks the current mesh for whose GPUs it lowers."""
    if platform != "cuda" or mesh is None:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)


def lowered_for(traced: Any, platform: str) -> Any:
    """The traced program lowered for a platform, of which no device need be here."""
    return traced.lower(lowering_platforms=(platform,)) if platform in _PALLAS else traced.lower()


def unheld(platform: str, device: DeviceLimits | None, peak: int) -> Failure | None:
    """The failure of a compiled program that takes more HBM than a GPU has: its compiler doesn't say so, as a TPU's does."""
    if platform != "cuda" or device is None or peak <= device.hbm_bytes:
        return None
    return too_much_hbm(peak, device.hbm_bytes)
