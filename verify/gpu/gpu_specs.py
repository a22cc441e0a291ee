"""GpuSpec: a kind of GPU by its public figures, and the table of those that are known."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["GpuSpec", "gpu_specs", "spec_of_kind"]

REGISTERS = 65536  # of a multiprocessor, and the most of a block; as many for every architecture of the table
THREADS = 2048  # the most of a multiprocessor
THREADS_A_BLOCK = 1024


@dataclass(frozen=True)
class GpuSpec:
    """A kind of GPU. A core is a multiprocessor; rates are of dense products, and `*_a_cycle` of one core.

    kind: jax's device kind. clock: cycles a second at most. shared_bytes_a_core: of which the driver keeps 1 KiB of each block;
    shared_bytes_a_block: what one block may ask for. flops_float16 is the rate of bfloat16 too. tensor_flops_a_cycle: of the
    tensor cores on 16-bit factors, a multiplication and an addition being two. issued_a_cycle: instructions of a warp.
    nvlink_bytes_per_second: of one GPU to the others of its host, one way; network_bytes_per_second: to other hosts.
    sources: where each group of figures stands.
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


@functools.cache
def gpu_specs() -> Mapping[str, GpuSpec]:
    """The GPUs that can be described, by the name that a target has."""
    table = tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8"))
    return {name: _spec(name, gpu, table["architecture"]) for name, gpu in table["gpu"].items()}


def spec_of_kind(kind: str) -> GpuSpec | None:
    """The GPU of jax's device kind; None for one that isn't in the table."""
    return next((spec for spec in gpu_specs().values() if spec.kind == kind), None)


def _spec(name: str, gpu: Mapping[str, Any], architectures: Mapping[str, Any]) -> GpuSpec:
    groups = [*architectures[gpu["architecture"]].values(), *(x for x in gpu.values() if isinstance(x, dict))]
    numbers = {key: value for group in groups for key, value in group.items() if key != "source"}
    numbers["capability"] = tuple(numbers["capability"])
    return GpuSpec(name=name, kind=gpu["kind"], sources=tuple(group["source"] for group in groups), **numbers)
