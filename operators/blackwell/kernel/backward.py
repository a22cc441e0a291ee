"""The backward pass: gradients from the weights, which are recomputed from the lse.

One kernel goes by blocks of keys and sums the gradients of key and value over the rows and query heads that see them; one goes by
blocks of rows and sums that of the query. No block adds to what another writes, so results don't depend on the order of blocks.

Sums stay in tensor memory for the whole loop. Logits and the gradients of weights come there too, two warpgroups take them into
registers, half of the columns each, and write weights and gradients of logits back, in 16 bits, as factors of the next products.
One warpgroup only loads, and one only issues products.

A factor for each element leads from the gradient of the logits to that of the products. It is applied to the weights, before
other numbers take registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...mosaic.kernel.block import WARPGROUPS, MosaicBlock
from .backward_sizes import COMPUTING
from .tile import OUTPUT, TILE

__all__ = ["BY_ROWS", "BlackwellGradients"]

# What is loaded by rows, and the numbers of the rows that come with it.
BY_ROWS = {"query": "lse", "d_output": "delta"}
_MULTIPLIES, _LOADS = COMPUTING, COMPUTING + 1  # warpgroups that don't compute
# Registers of a thread: those that compute, the one that multiplies and the one that loads. 512 threads have 128 each at first.
_MANY, _FEW = 208, 48


@dataclass(frozen=True)
class BlackwellGradients(MosaicBlock):
    """What both have in common. 'logits' and 'd_weights' are tiles of products in tensor memory: full when their product has
    ended, read when both warpgroups that compute have them in registers. 'weights' and 'd_logits' are factors: full when both
    have written them, read when the product with them has ended, and at first."""

    @property
    def warpgroups(self) -> int:
        """Those that compute, one that issues products, one that loads."""
        return COMPUTING + 2

    def __call__(self, refs: dict[str, Any]) -> None:
        warpgroup = lax.axis_index(WARPGROUPS)

        @pl.when(warpgroup < COMPUTING)
        def _compute() -> None:
            plgpu.set_max_registers(_MANY, action="increase")
            self.compute(refs, self.place(), warpgroup)  # one program for both

        @pl.when(warpgroup == _MULTIPLIES)
        def _multiply() -> None:
            plgpu.set_max_registers(_FEW, action="decrease")
            self.multiply(refs, self.place())

        @pl.when(warpgroup == _LOADS)
        def _load() -> None:
            plgpu.set_max_registers(_FEW, action="decrease")
            self.load(refs, self.place())

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any) -> None:
        """What a warpgroup does with its half of the columns."""
        raise NotImplementedError

    def multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What the warpgroup does that issues products."""
        raise NotImplementedError

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What the warpgroup does that loads."""
        raise NotImplementedError

    def take(self, refs: dict[str, Any], name: str, columns: Any) -> jax.Array:
        """Columns of a tile of products, once they are there; then the place is free."""
        plgpu.barrier_wait(refs[f"{name}_full"])
        x: jax.Array = plgpu.async_load_tmem(refs[name].at[:, columns], layout=TILE)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(refs[f"{name}_read"])
        return x

    def give(self, refs: dict[str, Any], name: str, x: jax.Array, columns: Any) -> None:
        """A tile's columns for the next product."""
        plgpu.async_store_tmem(refs[name].at[:, columns], x)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(refs[f"{name}_full"])

    def store(self, refs: dict[str, Any], which: Any, some: Any, of: list[tuple[str, float, Any, Any]]) -> None:
        """Sums, each by half of its columns, through shared memory. some: whether there are any. of: for each its name, a factor,
        a place in shared memory and one in an array."""
        for number, (name, scale, held, _) in enumerate(of):
            step, own = _step(held.shape[1]), lax.rem(which + number, COMPUTING)
            for first in range(0, held.shape[1], COMPUTING * step):
                columns = pl.ds(first + own * step, step)
                keep = functools.partial(self._keep, refs[name], scale, some, held, columns)
                pl.when(own == 0)(keep) if first + step == held.shape[1] else keep()  # a last piece has no other
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["stored"])
        plgpu.barrier_wait(refs["stored"])
        for number, (_, _, held, target) in enumerate(of):
            pl.when(which == number)(functools.partial(plgpu.copy_smem_to_gmem, held, target))
        plgpu.wait_smem_to_gmem(0)

    def _keep(self, sums: Any, scale: float, some: Any, held: Any, columns: Any) -> None:
        x = plgpu.async_load_tmem(sums.at[:, columns], layout=OUTPUT) * scale
        x = jnp.where(jnp.broadcast_to(some, x.shape), x, 0.0)  # nothing was written where there are none
        held.at[:, columns][...] = x.astype(held.dtype)

    def products(self, *names: str) -> dict[str, Any]:
        """Barriers of tiles of products."""
        made: dict[str, Any] = {}
        for name in names:
            made[f"{name}_full"] = plgpu.Barrier(orders_tensor_core=True)
            made[f"{name}_read"] = plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True)
        return made


def _step(columns: int) -> int:
    """Of a tile's columns, those of a warpgroup in turn: shared memory swizzles 64 at once, or 32."""
    return 64 if columns % 64 == 0 else 32
