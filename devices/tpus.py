"""Tpu: a jax device of a TPU by its published figures, and the table of known kinds."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "KINDS", "MIN_VMEM_BYTES", "SCALAR_BYTES", "DescribedTpu", "Topology", "Tpu", "Vmem", "described_cores", "described_tpus",
    "tpu_of", "vmem_of",
]  # fmt: skip

_MIB = 1 << 20
SCALAR_BYTES = _MIB
"""Scalar memory of a core, on every generation from v4 on."""


class Vmem(NamedTuple):
    """Bytes of a core's VMEM that a kernel gets by default, and the most that it can have; larger requests are clamped."""

    default: int
    maximum: int


class Tpu(NamedTuple):
    """One jax device: its kind, its cores, and bytes of HBM, operations on bfloat16 and HBM bytes per second of all of them.
    vmem_bytes, scalar_bytes and vmem are of one core, which is what a kernel has.
    """

    kind: str
    cores: int
    hbm_bytes: int
    bytes_per_second: float
    flops_per_second: float
    vmem_bytes: int
    scalar_bytes: int
    vmem: Vmem


class Topology(NamedTuple):
    """How chips of a kind are described and joined. name: a topology's prefix, as in v5e:2x2. devices: per chip. small: a small
    topology. clock: cycles per second. products: bfloat16 multiply-adds per cycle of a core's matrix units. depth: columns that a
    matrix unit sums over at once. link: bytes per second of one link between chips, one way. ring: a physical axis is a ring
    where its size is a multiple of this; cube: only if all axes are."""

    name: str
    devices: int
    small: str
    clock: float
    products: int
    depth: int
    link: float
    ring: int
    cube: bool = False


class DescribedTpu(NamedTuple):
    """A kind of TPU, and how its chips are described."""

    kind: str
    topology: Topology


class _Kind(NamedTuple):
    """A kind of TPU. joined: the cores of a device where jax runs by default, 2 where it joins a chip's cores ("megacore").
    described: those of a device in a topology that libtpu describes. topology: None if it describes none. All else is of one
    core.
    """

    joined: int
    described: int
    hbm_bytes: int
    bytes_per_second: float
    flops_per_second: float
    vmem_bytes: int
    scalar_bytes: int
    vmem: Vmem
    topology: Topology | None = None


# By jax's device kind. HBM, rates and capacities: as Pallas describes a core (jax 0.10), which a test compares. Cores: on a
# machine jax joins the two of a v4 or v5p; of a v4 libtpu 0.0.51 describes each by itself, unless it is asked for a megacore.
# VMEM of a kernel: found by compiling with libtpu 0.0.51; not tried for v2 and v3.
# Topologies: as libtpu 0.0.51 describes them. Clocks: the published bfloat16 rate over the operations per cycle of a chip's
# matrix units; of tpu7x, fitted to tokamax's published times beside a term for the bytes that XLA moves around the kernel
# (benchmarks/results/static_clock.txt). Products: four units of 128 x 128; from v6e on two of 256 x 256, which take 16 rows in 8
# cycles, as the published rate requires.
# Links: docs.cloud.google.com/tpu/docs, "bidirectional inter-chip interconnect (ICI) bandwidth per chip" of v5e (400 GB/s), v5p
# (1200), v6e (800) and tpu7x (1200), of v4 "2400 Gbps": halved, and divided by the chip's links (4 in a plane, 6 in space).
# Rings: the same source, of v5p: "all 4x4x4 and larger slices have full 3D torus connectivity", smaller ones none; v4 and
# tpu7x are built of the same cubes; of v5e and v6e jax-ml.github.io/scaling-book/tpus: only an axis of 16 chips.
_UNTRIED = Vmem(16 * _MIB, 16 * _MIB)
KINDS = {
    "TPU v2": _Kind(1, 1, 8_000_000_000, 358e9, 23e12, 16 * _MIB, 1 << 14, _UNTRIED),
    "TPU v3": _Kind(1, 1, 17_200_000_000, 412.5e9, 70e12, 16 * _MIB, 1 << 14, _UNTRIED),
    "TPU v4": _Kind(
        2, 1, 17_200_000_000, 615e9, 137.5e12, 16 * _MIB, SCALAR_BYTES, Vmem(16 * _MIB, 16 * _MIB),
        Topology("v4", 2, "v4:2x2x1", 1.05e9, 65536, 128, 50e9, 4, cube=True),
    ),
    "TPU v5 lite": _Kind(
        1, 1, 17_200_000_000, 820e9, 197e12, 128 * _MIB, SCALAR_BYTES, Vmem(16 * _MIB, 128 * _MIB),
        Topology("v5e", 1, "v5e:2x2", 1.5e9, 65536, 128, 50e9, 16),
    ),
    "TPU v5": _Kind(
        2, 2, 51_500_000_000, 1230e9, 229.5e12, 64 * _MIB, SCALAR_BYTES, Vmem(16 * _MIB, int(63.94 * _MIB)),
        Topology("v5p", 1, "v5p:2x2x1", 1.75e9, 65536, 128, 100e9, 4, cube=True),
    ),
    "TPU v6 lite": _Kind(
        1, 1, 34_400_000_000, 1640e9, 920e12, 128 * _MIB, SCALAR_BYTES, Vmem(32 * _MIB, int(127.94 * _MIB)),
        Topology("v6e", 1, "v6e:2x2", 1.75e9, 262144, 256, 100e9, 16),
    ),
    "TPU7x": _Kind(
        1, 1, 103_000_000_000, 3700e9, 1155e12, 64 * _MIB, SCALAR_BYTES, Vmem(32 * _MIB, int(63.94 * _MIB)),
        Topology("tpu7x", 2, "tpu7x:2x2x1", 2.0e9, 262144, 256, 100e9, 4, cube=True),
    ),
}  # fmt: skip
_OTHER_NAMES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite", "TPU7": "TPU7x"}
MIN_VMEM_BYTES = min(kind.vmem.default for kind in KINDS.values())
"""What a kernel gets by default on every kind."""


def tpu_of(kind: str, cores: int | None = None) -> Tpu | None:
    """A device of a kind; None for one that isn't in the table. cores: those that jax reports for it, `num_cores`; None: those
    of a device where jax runs by default.
    """
    row = _kind_of(kind)
    if row is None:
        return None
    count = row.joined if cores is None else cores
    rates = row.bytes_per_second * count, row.flops_per_second * count
    return Tpu(kind, count, row.hbm_bytes * count, *rates, row.vmem_bytes, row.scalar_bytes, row.vmem)


def described_cores(kind: str) -> int:
    """The cores of a device in a topology that libtpu describes. Errors: KeyError for an unknown kind."""
    return KINDS[_OTHER_NAMES.get(kind, kind)].described


def described_tpus() -> dict[str, DescribedTpu]:
    """The kinds whose topologies have names, by the names' prefix."""
    return {row.topology.name: DescribedTpu(kind, row.topology) for kind, row in KINDS.items() if row.topology}


def vmem_of(device_kind: str) -> Vmem:
    """The VMEM that a kernel may take on a kind of TPU; for an unknown one, the least of all."""
    row = _kind_of(device_kind)
    return _UNTRIED if row is None else row.vmem


def _kind_of(kind: str) -> _Kind | None:
    return KINDS.get(_OTHER_NAMES.get(kind, kind))
