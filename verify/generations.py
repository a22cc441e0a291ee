"""TPU generations: what one device computes and moves per second, and what it holds."""

from __future__ import annotations

import importlib.util
import math
import re
from typing import NamedTuple

from ..devices import tpu_of
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


class _Generation(NamedTuple):
    kind: str
    devices: int  # per chip
    topology: str  # a small topology
    clock: float  # cycles per second
    products: int  # bfloat16 multiply-adds per cycle of a core's matrix units
    depth: int  # columns that a matrix unit sums over at once
    link: float  # bytes per second of one link between chips, one way
    ring: int  # a physical axis is a ring where its size is a multiple of this
    cube: bool  # all axes have to be such multiples
    vector: tuple[float, float, float, float]  # cycles per weight besides products: see vector_cycles
    row: int  # cost of a row of a tile, in weights of a large tile; forward, and half of it backward
    pipelined: tuple[float, float] | None = None  # like vector, forward and backward, for pipelined tiles


# By a topology's prefix, as libtpu 0.0.51 describes them. Clocks: the published bfloat16 rate over the operations per cycle of a
# chip's matrix units; of tpu7x, fitted to tokamax's published times beside a term for the bytes that XLA
# moves around the kernel (benchmarks/results/static_clock.txt). Products: four units of 128 x 128; from v6e on two
# of 256 x 256, which take 16 rows in 8 cycles, as the published rate requires.
# Links: docs.cloud.google.com/tpu/docs, "bidirectional inter-chip interconnect (ICI) bandwidth per chip" of v5e (400 GB/s), v5p
# (1200), v6e (800) and tpu7x (1200), of v4 "2400 Gbps": halved, and divided by the chip's links (4 in a plane, 6 in space).
# Rings: the same source, of v5p: "all 4x4x4 and larger slices have full 3D torus connectivity", smaller ones none; v4 and
# tpu7x are built of the same cubes; of v5e and v6e jax-ml.github.io/scaling-book/tpus: only an axis of 16 chips.
# Vector: static cycles of attnops' own kernels, tiles of 1024 x 1024 at head dims 64 and 128, where they exceed those of the
# matrix units (benchmarks/results/tpu_static.json); a row: from tiles of 512 x 512 in comparison; pipelined ones: 2048 x 2048.
# v4 and v5p, whose schedules weren't read, use v5e's.
_OF_V5E = (0.00395, 0.0063, 0.0056, 0.0025)
_GENERATIONS = {
    "v4": _Generation("TPU v4", 2, "v4:2x2x1", 1.05e9, 65536, 128, 50e9, 4, True, _OF_V5E, 0),
    "v5e": _Generation("TPU v5 lite", 1, "v5e:2x2", 1.5e9, 65536, 128, 50e9, 16, False, _OF_V5E, 0),
    "v5p": _Generation("TPU v5", 1, "v5p:2x2x1", 1.75e9, 65536, 128, 100e9, 4, True, _OF_V5E, 0),
    "v6e": _Generation(
        "TPU v6 lite",
        1,
        "v6e:2x2",
        1.75e9,
        262144,
        256,
        100e9,
        16,
        False,
        (0.0024, 0.0043, 0.0037, 0.0015),
        500,
        (0.0016, 0.0034),
    ),
    "tpu7x": _Generation(
        "TPU7x",
        2,
        "tpu7x:2x2x1",
        2.0e9,
        262144,
        256,
        100e9,
        4,
        True,
        (0.0026, 0.0043, 0.0037, 0.0015),
        500,
        (0.0016, 0.0034),
    ),
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
    return tuple(_GENERATIONS)


def has_libtpu() -> bool:
    """Whether programs can be compiled for described TPUs."""
    return importlib.util.find_spec("libtpu") is not None


def topology_of(kind: str) -> str:
    """A small topology of a kind of device. Errors: ConfigError for a kind that libtpu doesn't describe."""
    return _of_kind(kind).topology


def clock_rate(kind: str) -> float:
    """Cycles per second of a kind of device. Errors: ConfigError for an unknown kind."""
    return _of_kind(kind).clock


def products_a_cycle(kind: str) -> int:
    """Multiply-adds of bfloat16 per cycle of one core. Errors: ConfigError for an unknown kind."""
    return _of_kind(kind).products


def vector_cycles(kind: str, products: str, block_kv: int, pipelined: bool = False) -> float:
    """Cycles per weight that one core spends on work other than products: exponentials, sums, masks and what waits for them;
    with the share of each row's cost in tiles of so many keys.

    products: 'forward', 'backward' (fused), 'dkv' or 'dq'. pipelined: products run ahead of exponentials.
    Errors: ConfigError for an unknown kind.
    """
    generation = _of_kind(kind)
    if pipelined and generation.pipelined is not None and products in _PASSES[:2]:
        return generation.pipelined[_PASSES.index(products)]
    row = generation.row if products == "forward" else generation.row / 2
    return generation.vector[_PASSES.index(products)] * (1 + row / block_kv) / (1 + row / _LARGE_TILE)


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
    generation = _GENERATIONS[name]
    shape = tuple(int(n) for n in text.split("x"))
    rings = tuple(size % generation.ring == 0 for size in shape)
    if generation.cube and not all(rings):
        rings = (False,) * len(shape)
    return Torus(shape, rings, generation.link, generation.devices, _DIE_LINKS * generation.link)


def matrix_depth(kind: str) -> int:
    """How many columns a matrix unit sums over at once. Errors: ConfigError for an unknown kind."""
    return _of_kind(kind).depth


def _of_kind(kind: str) -> _Generation:
    generation = next((g for g in _GENERATIONS.values() if g.kind == kind), None)
    if generation is None:
        kinds = ", ".join(g.kind for g in _GENERATIONS.values())
        raise ConfigError(f"device kind {shown(kind)} is no TPU that can be described; known: {kinds}.")
    return generation


def near_target(target: str) -> str:
    """A hint for a name such as v5e, v5e-8 or v5e:8: a shape of so many devices. '' for any other name."""
    match = re.fullmatch(r"([a-z0-9]+?)[-:x]?([1-9][0-9]{0,3})?", target)
    names = [name for name in _GENERATIONS if match is not None and target.startswith(name)]
    if not names:
        return ""
    generation, rest = _GENERATIONS[names[0]], target[len(names[0]) :]
    if not rest:
        return f" Did you mean {generation.topology!r}?"
    count = re.fullmatch(r"[-:x]([1-9][0-9]{0,3})", rest)
    # Cloud names of generations with a torus of three dimensions count cores.
    if count is None or generation.topology.count("x") == 2:
        return f" A name that works is {generation.topology!r}."
    chips = int(count[1])
    short = 2 ** (math.isqrt(chips).bit_length() - 1)
    if chips & (chips - 1):
        return f" A name that works is {generation.topology!r}."
    return f" Did you mean '{names[0]}:{short}x{chips // short}'?"


def _meant(target: str) -> str:
    return near_target(target) or nearest(target.partition(":")[0], _GENERATIONS)


def abstract_target(target: str) -> tuple[str, int]:
    """(device kind, number of devices) of a topology's name, without libtpu. Errors: ConfigError for any other form."""
    match = re.fullmatch(r"([a-z0-9]+):([1-9][0-9]*(?:x[1-9][0-9]*)+)", target)
    if match is None or match[1] not in _GENERATIONS or len(match[2]) > _LONGEST_SHAPE:
        raise ConfigError(
            f"target {shown(target)}; wanted a generation and a shape, such as v5e:2x2; generations: "
            f"{', '.join(_GENERATIONS)}.{_meant(target)}"
        )
    generation = _GENERATIONS[match[1]]
    return generation.kind, math.prod(int(n) for n in match[2].split("x")) * generation.devices
