"""What a report says of the target devices, TPUs and GPUs alike: limits, rates, and kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from ..devices import spec_of_kind
from ..operators.call.current_device import current_device
from .compiled import Failure, KernelUse, kernels, too_much_hbm
from .generations import device_of
from .gpu.gpu_device import gpu_device
from .gpu.gpu_kernels import GpuKernelUse, gpu_kernels

__all__ = [
    "AnyKernelUse",
    "DeviceLimits",
    "compiles_here",
    "device_limits",
    "kernels_of_program",
    "lowered_for",
    "tracing_on",
    "unheld",
]

AnyKernelUse = KernelUse | GpuKernelUse
_PALLAS = ("tpu", "cuda")  # platforms that a program can be lowered for without a device


class DeviceLimits(Protocol):
    """One device: its kind, bytes of HBM, and the least time that work takes."""

    @property
    def kind(self) -> str:
        """The kind's name in jax."""
        ...

    @property
    def hbm_bytes(self) -> int:
        """Its total HBM."""
        ...

    def roofline(self, flops: float, moved: float, dtype: str, exact: bool) -> tuple[float, float]:
        """(seconds of arithmetic, seconds of HBM traffic) at the published rates. exact: float32 products keep full precision."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def device_limits(platform: str, kind: str, cores: int | None = None) -> DeviceLimits | None:
    """The device of that platform and kind; None if it isn't known. cores: those of a TPU's device, as jax reports them; None: as
    on a machine.
    """
    if platform == "tpu":
        return device_of(kind, cores)
    return gpu_device(kind) if platform == "cuda" else None


def kernels_of_program(compiled: Any, text: str, platform: str, kind: str) -> tuple[AnyKernelUse, ...]:
    """The Pallas kernels of a compiled program and what each takes, in program order."""
    if platform == "cuda":
        return gpu_kernels(compiled, text, spec_of_kind(kind))
    return kernels(text)


@contextlib.contextmanager
def tracing_on(mesh: Any, platform: str) -> Iterator[None]:
    """The context in which to trace a program for GPUs: from jax 0.12 on Pallas asks the current mesh which GPUs it lowers
    for, and other libraries' kernels ask the default device."""
    with contextlib.ExitStack() as stack:
        if platform == "cuda" and isinstance(mesh, Mesh):
            stack.enter_context(jax.set_mesh(mesh))
            stack.enter_context(jax.default_device(mesh.devices.flat[0]))
        elif platform == "cuda" and mesh is not None:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def lowered_for(traced: Any, platform: str) -> Any:
    """The traced program lowered for a platform; no device of it is needed."""
    return traced.lower(lowering_platforms=(platform,)) if platform in _PALLAS else traced.lower()


def compiles_here(mesh: Any, platform: str) -> bool:
    """Whether a program on this mesh can be compiled: of devices that are described or here, or for this machine without one."""
    return current_device(()).serves(platform) if mesh is None else isinstance(mesh, Mesh)


def unheld(platform: str, device: DeviceLimits | None, peak: int) -> Failure | None:
    """The failure of a compiled program that takes more HBM than a GPU has. The GPU compiler doesn't report it, a TPU's does."""
    if platform != "cuda" or device is None or peak <= device.hbm_bytes:
        return None
    return too_much_hbm(peak, device.hbm_bytes)
