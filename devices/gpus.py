"""GpuSpec: a kind of GPU by its public figures, and the table of known kinds. GpuVariant: what sizes depend on, of more kinds."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["GpuSpec", "GpuVariant", "gpu_specs", "gpu_variant", "gpu_variants", "spec_of_kind"]

REGISTERS = 65536  # per multiprocessor, and the most per block; the same for every architecture of the table
THREADS = 2048  # the most per multiprocessor
THREADS_A_BLOCK = 1024


@dataclass(frozen=True)
class GpuSpec:
    """A kind of GPU. A core is a multiprocessor; rates are of dense products, and `*_a_cycle` are per core.

    kind: jax's device kind. clock: the maximum cycles per second. shared_bytes_a_core: the driver reserves 1 KiB of it per block.
    shared_bytes_a_block: what one block may request. flops_float16 is the rate of bfloat16 too. tensor_flops_a_cycle: of the
    tensor cores on 16-bit factors; a multiplication and an addition count as two. issued_a_cycle: warp instructions.
    nvlink_bytes_per_second: from one GPU to the others of its host, one way; network_bytes_per_second: to other hosts.
    sources: where each group of figures is published.
    """

    name: str
    kind: str
    capability: tuple[int, int]
    cores: int
    clock: float
    l2_bytes: int
    hbm_bytes: int
    bytes_per_second: float
    flops_float16: float
    flops_tf32: float
    flops_float32: float
    nvlink_bytes_per_second: float
    network_bytes_per_second: float
    shared_bytes_a_core: int
    shared_bytes_a_block: int
    blocks_a_core: int
    fp32_a_cycle: int
    ex2_a_cycle: int
    issued_a_cycle: int
    tensor_flops_a_cycle: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class GpuVariant:
    """GPUs whose kind begins with `prefix`: architecture ('ampere', 'hopper' or 'blackwell'), multiprocessors, and the bytes of
    shared memory that one block of threads may request.
    """

    prefix: str
    architecture: str
    cores: int
    shared_bytes_a_block: int


@functools.cache
def gpu_specs() -> Mapping[str, GpuSpec]:
    """The GPUs that can be described, by their name in a target."""
    return {name: _spec(name, gpu, _table()["architecture"]) for name, gpu in _table()["gpu"].items()}


def spec_of_kind(kind: str) -> GpuSpec | None:
    """The GPU of jax's device kind; None if it isn't in the table."""
    return next((spec for spec in gpu_specs().values() if spec.kind == kind), None)


@functools.cache
def gpu_variants() -> Mapping[str, GpuVariant]:
    """The GPUs for which sizes are known, those that can be described and others, by the first words of jax's device kind."""
    program = {name: groups["program"] for name, groups in _table()["architecture"].items()}
    described = {gpu["kind"]: (gpu["architecture"], gpu["runtime"]["cores"]) for gpu in _table()["gpu"].values()}
    others = {prefix: (row["architecture"], row["cores"]) for prefix, row in _table()["variant"].items()}
    return {
        prefix: GpuVariant(prefix, architecture, cores, program[architecture]["shared_bytes_a_block"])
        for prefix, (architecture, cores) in (described | others).items()
    }


@functools.cache
def gpu_variant(kind: str) -> GpuVariant | None:
    """The variant of jax's device kind: the longest prefix that fits; None for an unknown GPU."""
    fitting = [variant for prefix, variant in gpu_variants().items() if kind.startswith(prefix)]
    return max(fitting, key=lambda variant: len(variant.prefix), default=None)


@functools.cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8"))


def _spec(name: str, gpu: Mapping[str, Any], architectures: Mapping[str, Any]) -> GpuSpec:
    groups = [*architectures[gpu["architecture"]].values(), *(x for x in gpu.values() if isinstance(x, dict))]
    numbers = {key: value for group in groups for key, value in group.items() if key != "source"}
    numbers["capability"] = tuple(numbers["capability"])
    return GpuSpec(name=name, kind=gpu["kind"], sources=tuple(group["source"] for group in groups), **numbers)
