"""What the Hopper kernels share: a block of threads in which one warpgroup copies by TMA and the others compute."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...mosaic.kernel.block import WARPGROUPS, MosaicBlock, one_of
from .hopper_sizes import ROWS, conversions
from .tile import BY_COLUMN, BY_ROW, TILE

__all__ = ["HopperBlock", "filled", "zeros"]

# Registers per thread of a warpgroup that loads and of those that compute, by the number of the latter. A block of so many
# warpgroups begins with an equal share of the multiprocessor's registers in units of 8, and what some give up is all that others
# can take: they wait forever for more.
_REGISTERS = {1: (40, 240), 2: (24, 240)}
# The same, and of those that convert, by the number of those that compute and of those.
_CONVERTING = {(1, 1): (24, 240, 72), (1, 2): (24, 240, 72), (2, 1): (24, 208, 72), (2, 2): (24, 168, 56)}

_KEPT = 128  # columns of a query whose descriptors the compiler may keep throughout a loop


@dataclass(frozen=True)
class HopperBlock(MosaicBlock):
    """A place in shared memory is free when all warpgroups that compute have read it."""

    def __call__(self, refs: dict[str, Any]) -> None:
        warpgroup = lax.axis_index(WARPGROUPS)
        loads, computes, *converts = (
            _CONVERTING[self.consumers, len(self.conversions)] if self.stored else _REGISTERS[self.consumers]
        )

        def compute(which: Any) -> None:
            plgpu.set_max_registers(computes, action="increase")
            self.compute(refs, self.place(), which)

        def load() -> None:
            plgpu.set_max_registers(loads, action="decrease")
            place = self.place()
            self.load(refs, place)
            self.store(refs, place)

        def convert(names: tuple[str, ...]) -> None:
            plgpu.set_max_registers(*converts, action="decrease")
            self.widen(refs, self.place(), names)

        roles = [(self.consumers, load)]
        for number, names in enumerate(self.conversions):
            roles.append((self.consumers + 1 + number, functools.partial(convert, names)))
        if self.apart:
            roles += [(number, functools.partial(compute, number)) for number in range(1, self.consumers)]
        one_of(warpgroup, roles, functools.partial(compute, 0 if self.apart else warpgroup))

    @property
    def warpgroups(self) -> int:
        """Those that compute, one that loads, and those that convert."""
        return self.consumers + 1 + len(self.conversions)

    @property
    def conversions(self) -> tuple[tuple[str, ...], ...]:
        """See `conversions`."""
        return conversions(tuple(name for name, _ in self.stored), self.dims[1])

    @property
    def apart(self) -> bool:
        """Whether each warpgroup that computes has a program of its own, which takes twice as long to compile."""
        raise NotImplementedError

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.sizes.block_q // ROWS

    @property
    def query_in_loop(self) -> bool:
        """Whether a query is a tile of `in_loop`: one of many columns, whose place isn't known when the kernel is compiled."""
        return self.dims[0] > _KEPT and not self.apart

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What the warpgroup does that loads."""
        raise NotImplementedError

    def store(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What it does after that: copies of what the others write to shared memory. Theirs would take registers for who issues
        them, and for where to."""
        raise NotImplementedError

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """What the others do."""
        raise NotImplementedError

    def columns(self, refs: dict[str, Any], warpgroup: Any) -> Any:
        """A warpgroup's reference to the numbers of a tile's columns, from 0 on."""
        ref = refs["columns"].at[warpgroup]
        ref[...] = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=BY_COLUMN)
        plgpu.commit_smem()
        return ref


def zeros(columns: int) -> jax.Array:
    """Sums of a warpgroup's rows."""
    sums: jax.Array = plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), TILE)
    return sums


def filled(x: Any) -> jax.Array:
    """A number for each row."""
    rows: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)
    return rows
