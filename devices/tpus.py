"""Tpu: a jax device of a TPU by its published figures, and the table of known kinds."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "MIN_VMEM_BYTES", "SCALAR_BYTES", "Tpu", "Vmem", "described_cores", "tpu_of", "vmem_of"]

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


class _Kind(NamedTuple):
    """A kind of TPU. joined: the cores of a device where jax runs by default, 2 where it joins a chip's cores ("megacore").
    described: those of a device in a topology that libtpu describes. All else is of one core.
    """

    joined: int
    described: int
    hbm_bytes: int
    bytes_per_second: float
    flops_per_second: float
    vmem_bytes: int
    scalar_bytes: int
    vmem: Vmem


# By jax's device kind. HBM, rates and capacities: as Pallas describes a core (jax 0.10), which a test compares. Cores: on a
# machine jax joins the two of a v4 or v5p; of a v4 libtpu 0.0.51 describes each by itself, unless it is asked for a megacore.
# VMEM of a kernel: found by compiling with libtpu 0.0.51; not tried for v2 and v3.
_UNTRIED = Vmem(16 * _MIB, 16 * _MIB)
KINDS = {
    "TPU v2": _Kind(1, 1, 8_000_000_000, 358e9, 23e12, 16 * _MIB, 1 << 14, _UNTRIED),
    "TPU v3": _Kind(1, 1, 17_200_000_000, 412.5e9, 70e12, 16 * _MIB, 1 << 14, _UNTRIED),
    "TPU v4": _Kind(2, 1, 17_200_000_000, 615e9, 137.5e12, 16 * _MIB, SCALAR_BYTES, Vmem(16 * _MIB, 16 * _MIB)),
    "TPU v5 lite": _Kind(1, 1, 17_200_000_000, 820e9, 197e12, 128 * _MIB, SCALAR_BYTES, Vmem(16 * _MIB, 128 * _MIB)),
    "TPU v5": _Kind(
        2, 2, 51_500_000_000, 1230e9, 229.5e12, 64 * _MIB, SCALAR_BYTES, Vmem(16 * _MIB, int(63.94 * _MIB))
    ),
    "TPU v6 lite": _Kind(
        1, 1, 34_400_000_000, 1640e9, 920e12, 128 * _MIB, SCALAR_BYTES, Vmem(32 * _MIB, int(127.94 * _MIB))
    ),
    "TPU7x": _Kind(1, 1, 103_000_000_000, 3700e9, 1155e12, 64 * _MIB, SCALAR_BYTES, Vmem(32 * _MIB, int(63.94 * _MIB))),
}
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


def vmem_of(device_kind: str) -> Vmem:
    """The VMEM that a kernel may take on a kind of TPU; for an unknown one, the least of all."""
    row = _kind_of(device_kind)
    return _UNTRIED if row is None else row.vmem


def _kind_of(kind: str) -> _Kind | None:
    return KINDS.get(_OTHER_NAMES.get(kind, kind))
