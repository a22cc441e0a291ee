"""TPU generations: what one device computes and moves per second, and what it holds."""

from __future__ import annotations

import importlib.util
import math
import re
from typing import NamedTuple

from ..devices import DescribedTpu, described_tpus, tpu_of
from ..errors import ConfigError, nearest, shown

__all__ = [
    "Device",
    "Torus",
    "abstract_target",
    "clock_rate",
    "device_of",
    "generations",
    "has_libtpu",
    "matrix_depth",
    "near_target",
    "products_a_cycle",
    "topology_of",
    "torus_of",
    "vector_cycles",
]


class _Measured(NamedTuple):
    """Static cycles besides products. vector: per weight of the forward pass, of the fused backward pass, and of those for key
    and value and for the query. row: what a row of a tile costs, in weights of a large tile; backward half of it. pipelined: like
    vector, forward and backward, for pipelined tiles."""

    vector: tuple[float, float, float, float]
    row: int = 0
    pipelined: tuple[float, float] | None = None


# By jax's device kind: static cycles of attnops' own kernels, tiles of 1024 x 1024 at head dims 64 and 128, where they exceed
# those of the matrix units (benchmarks/results/tpu_static.json); a row: from tiles of 512 x 512 in comparison; pipelined ones:
# 2048 x 2048. Kinds whose schedules weren't read count as v5e.
_UNREAD = _Measured((0.00395, 0.0063, 0.0056, 0.0025))
_MEASURED = {
    "TPU v6 lite": _Measured((0.0024, 0.0043, 0.0037, 0.0015), 500, (0.0016, 0.0034)),
    "TPU7x": _Measured((0.0026, 0.0043, 0.0037, 0.0015), 500, (0.0016, 0.0034)),
}
_LONGEST_SHAPE = 40
_LARGE_TILE = 1024
_PASSES = ("forward", "backward", "dkv", "dq")
# docs.cloud.google.com/tpu/docs/tpu7x: the link between a chip's dies is six times as fast as one between chips. For v4 no
# figure is published; its two cores share the chip's HBM, which is about as fast.
_DIE_LINKS = 6


class Device(NamedTuple):
    """One device: its kind and cores, bytes of HBM, bytes of VMEM per core, bfloat16 operations and HBM bytes per second."""

    kind: str
    cores: int
    hbm_bytes: int
    vmem_bytes: int
    flops_per_second: float
    bytes_per_second: float

    def roofline(self, flops: float, moved: float, dtype: str, exact: bool) -> tuple[float, float]:
        """(seconds of arithmetic, seconds of HBM traffic) at the published rates. An exact float32 product takes six bfloat16
        passes, a product of any other dtype one."""
        rate = self.flops_per_second / (6 if exact else 1)
        return flops / rate, moved / self.bytes_per_second


def device_of(kind: str, cores: int | None = None) -> Device | None:
    """The device of a kind, with the cores that jax reports for it; None: as on a machine. None for an unknown kind."""
    limits = tpu_of(kind, cores)
    if limits is None:
        return None
    rates = limits.flops_per_second, limits.bytes_per_second
    return Device(kind, limits.cores, limits.hbm_bytes, limits.vmem_bytes, *rates)


def generations() -> tuple[str, ...]:
    """The generations whose topologies have names."""
    return tuple(described_tpus())


def has_libtpu() -> bool:
    """Whether programs can be compiled for described TPUs."""
    return importlib.util.find_spec("libtpu") is not None


def topology_of(kind: str) -> str:
    """A small topology of a kind of device. Errors: ConfigError for a kind that libtpu doesn't describe."""
    return _of_kind(kind).topology.small


def clock_rate(kind: str) -> float:
    """Cycles per second of a kind of device. Errors: ConfigError for an unknown kind."""
    return _of_kind(kind).topology.clock


def products_a_cycle(kind: str) -> int:
    """Multiply-adds of bfloat16 per cycle of one core. Errors: ConfigError for an unknown kind."""
    return _of_kind(kind).topology.products


def vector_cycles(kind: str, products: str, block_kv: int, pipelined: bool = False) -> float:
    """Cycles per weight that one core spends on work other than products: exponentials, sums, masks and what waits for them;
    with the share of each row's cost in tiles of so many keys.

    products: 'forward', 'backward' (fused), 'dkv' or 'dq'. pipelined: products run ahead of exponentials.
    Errors: ConfigError for an unknown kind.
    """
    measured = _MEASURED.get(_of_kind(kind).kind, _UNREAD)
    if pipelined and measured.pipelined is not None and products in _PASSES[:2]:
        return measured.pipelined[_PASSES.index(products)]
    row = measured.row if products == "forward" else measured.row / 2
    return measured.vector[_PASSES.index(products)] * (1 + row / block_kv) / (1 + row / _LARGE_TILE)


class Torus(NamedTuple):
    """The chips of a topology: the sizes of the physical axes, which of them are rings, bytes per second of a link, one way.

    devices: per chip; they share its links and are joined by `die_link`.
    """

    shape: tuple[int, ...]
    rings: tuple[bool, ...]
    link: float
    devices: int
    die_link: float


def torus_of(target: str) -> Torus:
    """The links of a topology's name, such as v5p:4x4x4. Errors: ConfigError for any other form."""
    abstract_target(target)
    name, _, text = target.partition(":")
    generation = described_tpus()[name]
    shape = tuple(int(n) for n in text.split("x"))
    rings = tuple(size % generation.topology.ring == 0 for size in shape)
    if generation.topology.cube and not all(rings):
        rings = (False,) * len(shape)
    return Torus(
        shape, rings, generation.topology.link, generation.topology.devices, _DIE_LINKS * generation.topology.link
    )


def matrix_depth(kind: str) -> int:
    """How many columns a matrix unit sums over at once. Errors: ConfigError for an unknown kind."""
    return _of_kind(kind).topology.depth


def _of_kind(kind: str) -> DescribedTpu:
    generation = next((g for g in described_tpus().values() if g.kind == kind), None)
    if generation is None:
        kinds = ", ".join(g.kind for g in described_tpus().values())
        raise ConfigError(f"device kind {shown(kind)} is no TPU that can be described; known: {kinds}.")
    return generation


def near_target(target: str) -> str:
    """A hint for a name such as v5e, v5e-8 or v5e:8: a shape of so many devices. '' for any other name."""
    match = re.fullmatch(r"([a-z0-9]+?)[-:x]?([1-9][0-9]{0,3})?", target)
    names = [name for name in described_tpus() if match is not None and target.startswith(name)]
    if not names:
        return ""
    generation, rest = described_tpus()[names[0]], target[len(names[0]) :]
    if not rest:
        return f" Did you mean {generation.topology.small!r}?"
    count = re.fullmatch(r"[-:x]([1-9][0-9]{0,3})", rest)
    # Cloud names of generations with a torus of three dimensions count cores.
    if count is None or generation.topology.small.count("x") == 2:
        return f" A name that works is {generation.topology.small!r}."
    chips = int(count[1])
    short = 2 ** (math.isqrt(chips).bit_length() - 1)
    if chips & (chips - 1):
        return f" A name that works is {generation.topology.small!r}."
    return f" Did you mean '{names[0]}:{short}x{chips // short}'?"


def _meant(target: str) -> str:
    return near_target(target) or nearest(target.partition(":")[0], described_tpus())


def abstract_target(target: str) -> tuple[str, int]:
    """(device kind, number of devices) of a topology's name, without libtpu. Errors: ConfigError for any other form."""
    match = re.fullmatch(r"([a-z0-9]+):([1-9][0-9]*(?:x[1-9][0-9]*)+)", target)
    if match is None or match[1] not in described_tpus() or len(match[2]) > _LONGEST_SHAPE:
        raise ConfigError(
            f"target {shown(target)}; wanted a generation and a shape, such as v5e:2x2; generations: "
            f"{', '.join(described_tpus())}.{_meant(target)}"
        )
    generation = described_tpus()[match[1]]
    return generation.kind, math.prod(int(n) for n in match[2].split("x")) * generation.topology.devices
