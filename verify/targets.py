"""Target: devices that aren't here, by a name such as v5e:2x2 or h100:8; their mesh, with or without the compiler."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, AxisType, Mesh

from ..compat import abstract_device
from ..devices import described_cores, gpu_specs
from ..distribution import with_extras
from ..errors import ConfigError, ShardingError, nearest, shown
from ..planning import METHODS
from ..sharding.mesh import AnyMesh
from .generations import abstract_target, generations, has_libtpu, near_target
from .gpu.gpu_mesh import described_gpus, has_cuda_plugin
from .gpu.gpu_target import gpu_target, is_gpu_target
from .topology import described_mesh

__all__ = ["Target", "cpu_count", "device_names", "devices_named", "gpu_capability", "not_compiled", "target_of"]

_MAX_CPUS = 256
_CPU = re.compile(r"cpu:([1-9]\d{0,2})")


@dataclass(frozen=True)
class Target:
    """A number of devices of a kind. platform and cores are what jax reports for such a device."""

    name: str
    platform: str
    kind: str
    cores: int
    count: int

    @property
    def compiles(self) -> bool:
        """Whether the compiler for it is installed."""
        return has_libtpu() if self.platform == "tpu" else has_cuda_plugin()

    def described(self, sizes: Mapping[str, int] | None) -> Mesh:
        """A mesh of described devices, which programs can be compiled for. Errors: ConfigError if the compiler is missing."""
        make: Callable[..., Mesh] = described_mesh if self.platform == "tpu" else described_gpus
        return make(self.name, sizes)

    def mesh(self, sizes: Mapping[str, int]) -> AnyMesh:
        """The described mesh, or an abstract one if the compiler is missing. Errors: ShardingError for a wrong number."""
        return self.described(sizes) if self.compiles else self.abstract(sizes)

    def abstract(self, sizes: Mapping[str, int]) -> AbstractMesh:
        """A mesh that needs no compiler: enough to plan and to lower. Errors: ShardingError for a wrong number."""
        if math.prod(sizes.values()) != self.count:
            got = ",".join(f"{name}={size}" for name, size in sizes.items())
            raise ShardingError(
                f"mesh {got} has {math.prod(sizes.values())} devices and {self.name} has {self.count}; wanted as many."
            )
        device = abstract_device(self.kind, self.cores, self.platform)
        types = (AxisType.Auto,) * len(sizes)
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def gpu_capability(name: str) -> tuple[int, int] | None:
    """The compute capability of a target's GPUs; None of other targets."""
    return gpu_specs()[gpu_target(name).name].capability if is_gpu_target(name) else None


def target_of(name: str) -> Target:
    """Read the name of a TPU topology or of GPUs. Errors: ConfigError for any other name, also one that only a plan takes."""
    if is_gpu_target(name):
        gpus = gpu_target(name)
        spec = gpu_specs()[gpus.name]
        return Target(name, "gpu", spec.kind, spec.cores, gpus.hosts * gpus.gpus)
    if name.partition(":")[0] in generations():
        kind, count = abstract_target(name)
        return Target(name, "tpu", kind, described_cores(kind), count)
    prefix, names = name.partition(":")[0], (*METHODS, *device_names())
    raise ConfigError(
        f"target {shown(name)}; wanted a TPU generation and a shape, such as v5e:2x2, or a GPU and how many, such as h100:8; "
        f"generations: {', '.join(generations())}; GPUs: {', '.join(gpu_specs())}. `attnops plan` also takes a generation alone, "
        f"{', '.join(METHODS)}, or cpu:8." + (near_target(name) or _near_gpus(name) or nearest(prefix, names))
        if prefix not in METHODS
        else f"target {shown(name)} names no devices to compile for; wanted a TPU topology or GPUs, such as v5e:2x2, h100:8. "
        "Hint: `attnops plan` takes a platform; without a target, this machine's devices are compiled for."
    )


def cpu_count(name: str) -> int | None:
    """The number of virtual CPU devices of a name such as cpu:8; None for any other name. Errors: ConfigError for too many."""
    match = _CPU.fullmatch(name)
    if match is None:
        return None
    if (count := int(match[1])) > _MAX_CPUS:
        raise ConfigError(f"target {name} has {count} virtual devices; wanted at most {_MAX_CPUS}.")
    return count


def _near_gpus(name: str) -> str:
    """A hint for a name such as h100x8 or h100-8."""
    match = re.fullmatch(r"([a-z0-9]+?)[-x]([1-9][0-9]{0,3})", name)
    return f" Did you mean '{match[1]}:{match[2]}'?" if match is not None and match[1] in gpu_specs() else ""


def devices_named(name: str, count: int) -> Target | None:
    """The target with so many devices of a TPU generation or GPU, such as v5e or h100; None for any other name."""
    if name in gpu_specs():
        spec = gpu_specs()[name]
        return Target(name, "gpu", spec.kind, spec.cores, count)
    if name in generations():
        kind = abstract_target(f"{name}:1x1")[0]
        return Target(name, "tpu", kind, described_cores(kind), count)
    return None


def device_names() -> tuple[str, ...]:
    """The names that `devices_named` accepts."""
    return (*generations(), *gpu_specs())


def not_compiled(platform: str, done: str = "this was lowered and not compiled") -> str:
    """Why a program for devices that aren't here wasn't compiled, what was done instead, and what to install."""
    if platform == "tpu" and not has_libtpu():
        return f"libtpu isn't installed, so {done}; pip install '{with_extras('tpu')}' (Linux) compiles it"
    if platform in ("cuda", "gpu") and not has_cuda_plugin():
        return f"jax's CUDA plugin isn't installed, so {done}; pip install '{with_extras('cuda-compile')}' (Linux) compiles it"
    return f"the call has no devices of {platform}, so {done}; with described or real ones it is compiled"
