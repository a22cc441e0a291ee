"""Machine: what an estimate needs to know of a target (TPUs, GPUs or CPUs of this kind); its links, from verify's tables."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..devices import gpu_specs
from ..errors import ConfigError, shown
from ..verify.devices import DeviceLimits, device_limits
from ..verify.generations import torus_of
from ..verify.gpu.gpu_target import gpu_target, is_gpu_target
from ..verify.targets import Target, cpu_count, target_of
from .axis_segments import PhysicalAxis
from .cpu_rates import CpuRates

__all__ = ["Machine", "machine_of", "with_devices"]

_HOP_SECONDS = 1e-6  # between two chips: jax-ml.github.io/scaling-book/sharding, a note on ICI latency


@dataclass(frozen=True)
class Machine:
    """A number of devices, how they are connected, and what one does per second.

    hop_seconds: for a message to a neighbour, whatever its size; 0 where no public figure is known. overlaps: a ring can send
    while it works. cpu: the rates of virtual devices, which share one machine's cores; else None.
    """

    target: str
    platform: str
    kind: str
    cores: int
    count: int
    limits: DeviceLimits | None
    physical: tuple[PhysicalAxis, ...]
    hop_seconds: float
    overlaps: bool
    cpu: CpuRates | None = None

    @property
    def hbm_bytes(self) -> int | None:
        """HBM of one device; None where the devices share a machine's memory."""
        return None if self.limits is None else self.limits.hbm_bytes

    @property
    def described(self) -> Target | None:
        """The same target in verify; None for CPUs."""
        return None if self.cpu is not None else target_of(self.target)


@functools.lru_cache(maxsize=256)
def machine_of(target: str) -> Machine:
    """Read a target's name: a TPU topology, GPUs, or virtual CPU devices, `cpu:8`. Errors: ConfigError for any other name."""
    if (count := cpu_count(target)) is not None:
        return cpu_machine(count, CpuRates())
    if target.partition(":")[0] == "cpu":
        raise ConfigError(f"target {shown(target)}; wanted virtual CPU devices and how many, such as cpu:8.")
    described = target_of(target)
    if is_gpu_target(target):
        gpus = gpu_target(target)
        spec = gpu_specs()[gpus.name]
        joined = (
            PhysicalAxis(gpus.hosts, spec.network_bytes_per_second, switched=True),
            PhysicalAxis(gpus.gpus, spec.nvlink_bytes_per_second, switched=True),
        )
        limits = device_limits("cuda", described.kind)
        return Machine(target, "cuda", described.kind, described.cores, described.count, limits, joined, 0.0, True)
    torus = torus_of(target)
    # The devices of a chip send at the same time, over the same links.
    chips = [
        PhysicalAxis(n, torus.link / torus.devices, ring) for n, ring in zip(torus.shape, torus.rings, strict=True)
    ]
    physical = (*chips, PhysicalAxis(torus.devices, torus.die_link))
    limits = device_limits("tpu", described.kind, described.cores)
    return Machine(
        target, "tpu", described.kind, described.cores, described.count, limits, physical, _HOP_SECONDS, True
    )


def cpu_machine(count: int, rates: CpuRates) -> Machine:
    """Virtual devices of one machine: what one sends is copied in memory, and all share its cores."""
    physical = (PhysicalAxis(count, rates.bytes_per_second, switched=True),)
    return Machine(f"cpu:{count}", "cpu", "cpu", 1, count, None, physical, 0.0, False, rates)


def with_devices(target: str, count: int) -> str | None:
    """The name of a part of a target with so many devices: its shape divided by primes, the longest axis first; None
    if it has no such part."""
    machine = machine_of(target)
    if count == machine.count:
        return target
    if machine.cpu is not None:
        return f"cpu:{count}" if machine.count % count == 0 else None
    if is_gpu_target(target):
        gpus = gpu_target(target)
        if count <= gpus.gpus:
            return f"{gpus.name}:{count}" if gpus.gpus % count == 0 else None
        hosts, rest = divmod(count, gpus.gpus)
        return None if rest or gpus.hosts % hosts else f"{gpus.name}:{hosts}x{gpus.gpus}"
    torus = torus_of(target)
    shape, left = list(torus.shape), machine.count // count if machine.count % count == 0 else 0
    while left > 1:
        prime = next(n for n in range(2, left + 1) if left % n == 0)
        longest = max((i for i, n in enumerate(shape) if n % prime == 0), key=lambda i: shape[i], default=None)
        if longest is None:
            return None
        shape[longest] //= prime
        left //= prime
    if not left or math.prod(shape) * torus.devices != count:
        return None
    return f"{target.partition(':')[0]}:{'x'.join(map(str, shape))}"
