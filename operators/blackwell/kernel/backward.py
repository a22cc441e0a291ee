"""The backward pass: gradients from the weights, which are recomputed from the lse.

One kernel goes by blocks of keys and sums the gradients of key and value over the rows and query heads that see them; one goes by
blocks of rows and sums that of the query. No block adds to what another writes, so results don't depend on the order of blocks.

Sums stay in tensor memory for the whole loop. Logits and the gradients of weights come there too, two warpgroups take them into
registers, half of the columns each, and write weights and gradients of logits back, in 16 bits, as factors of the next products.
One warpgroup only loads, and one only issues products.

A factor for each element leads from the gradient of the logits to that of the products. It is applied to the weights, before
other numbers take registers.

Where tensor memory can't hold all sums, a block goes through its tiles several times, and has a part of the sums each time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...mosaic.kernel.block import WARPGROUPS, MosaicBlock, one_of
from ...mosaic.kernel.linker import registers_move
from ...mosaic.kernel.mosaic_sizes import DIM_STEP, Sums
from ...mosaic.kernel.seen_parts import ALL_SEEN, SeenParts
from .backward_sizes import COMPUTING, FEW, PIECE, STEPS, gradient_turns
from .blackwell_sizes import ROWS
from .tile import OUTPUT, TILE, BlackwellTile

__all__ = ["BY_ROWS", "BlackwellGradients"]

# What is loaded by rows, and the numbers of the rows that come with it.
BY_ROWS = {"query": "lse", "d_output": "delta"}
_MULTIPLIES, _LOADS = COMPUTING, COMPUTING + 1  # warpgroups that don't compute
# Registers of a thread: those that compute, the one that multiplies and the one that loads. 512 threads have 128 each at first.
_REGISTERS, _BESIDE_DROPOUT = (216, 40), (224, 32)
_OF_LATENTS = (176, 80)  # of tiles of 64 rows or keys, or fewer: products of many columns have more descriptors


@dataclass(frozen=True)
class BlackwellGradients(MosaicBlock):
    """What both have in common. 'logits' and 'd_weights' are tiles of products in tensor memory: full when their product has
    ended, read when both warpgroups that compute have them in registers. 'weights' and 'd_logits' are factors: full when both
    have written them, read when the product with them has ended, and at first."""

    which: ClassVar[str]  # as in a MosaicTiles

    @property
    def turns(self) -> tuple[tuple[Sums, ...], ...]:
        """What is summed each time that the block goes through its tiles."""
        return gradient_turns(self.which, *self.dims, in_key=self.in_key)

    @property
    def summed(self) -> int:
        """Columns of the sums of a turn."""
        return max(sum(one.columns for one in turn) for turn in self.turns)

    @property
    def in_pieces(self) -> bool:
        """Whether sums aren't stored through the place of what they are of, which a later turn reads."""
        return self.in_key and len(self.turns) > 1

    def swizzled(self, lines: int) -> int | None:
        """The columns of a tile that are swizzled together: a product goes through as many lines of a tile at once, and each part
        of a latent's columns begins with such a step."""
        return DIM_STEP if self.in_key or lines == FEW else None

    @property
    def warpgroups(self) -> int:
        """Those that compute, one that issues products, one that loads."""
        return COMPUTING + 2

    def __call__(self, refs: dict[str, Any]) -> None:
        warpgroup = lax.axis_index(WARPGROUPS)
        tile = self.sizes.block_q if self.which == "dkv" else self.sizes.block_kv
        others = _BESIDE_DROPOUT if "dropout" in refs else _REGISTERS
        many, few = _OF_LATENTS if self.in_key and tile <= STEPS[0] else others

        def compute() -> None:
            plgpu.set_max_registers(many, action="increase")
            self.compute(refs, self.place(), warpgroup)  # one program for both

        def multiply() -> None:
            plgpu.set_max_registers(few, action="decrease")
            self.multiply(refs, self.place())

        def load() -> None:
            plgpu.set_max_registers(few, action="decrease")
            self.load(refs, self.place())

        one_of(warpgroup, [(_MULTIPLIES, multiply), (_LOADS, load)], compute)

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any) -> None:
        """What a warpgroup does with its half of the columns."""
        raise NotImplementedError

    def multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What the warpgroup does that issues products."""
        raise NotImplementedError

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What the warpgroup does that loads."""
        raise NotImplementedError

    def seen(self, refs: dict[str, Any], tile: BlackwellTile, masked: Masked) -> SeenParts:
        """What a warp's rows see of a tile, if a warp passes over what they don't see: beside other numbers than a mask's it has
        no registers for that."""
        others = "bias" in refs or "dropout" in refs or self.logits.static_args.score is not None
        few = others or self.logits.soft_cap is not None or self.in_key or not registers_move()
        return tile.seen_parts(1) if masked is Masked.YES and not few else ALL_SEEN

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

    def store(self, refs: dict[str, Any], which: Any, some: Any, of: list[tuple[Any, float, Any, Any]]) -> None:
        """Sums, each by half of its columns, through shared memory. some: whether there are any. of: for each these, a factor, a
        place in shared memory and one in an array."""
        for number, (sums, scale, held, _) in enumerate(of):
            step, own = _step(held.shape[1]), lax.rem(which + number, COMPUTING)
            for first in range(0, held.shape[1], COMPUTING * step):
                columns = pl.ds(first + own * step, step)
                keep = functools.partial(self._keep, sums, scale, some, held, columns, columns)
                pl.when(own == 0)(keep) if first + step == held.shape[1] else keep()  # a last piece has no other
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["stored"])
        plgpu.barrier_wait(refs["stored"])
        for number, (_, _, held, target) in enumerate(of):
            pl.when(which == number)(functools.partial(plgpu.copy_smem_to_gmem, held, target))
        plgpu.wait_smem_to_gmem(0)

    def store_pieces(self, refs: dict[str, Any], which: Any, some: Any, sums: Any, scale: float, target: Any) -> None:
        """The same of one array, a few columns at a time; each of the warpgroups has a place for its own."""
        held = refs["pieces"].at[which]

        @pl.loop(0, sums.shape[1] // (COMPUTING * PIECE))
        def _piece(number: Any) -> None:
            columns = pl.ds((COMPUTING * number + which) * PIECE, PIECE)
            self._keep(sums, scale, some, held, columns, pl.ds(0, PIECE))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(held, target.at[:, columns])
            plgpu.wait_smem_to_gmem(0)

        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(refs["stored"])

    def _keep(self, sums: Any, scale: float, some: Any, held: Any, columns: Any, place: Any) -> None:
        x = plgpu.async_load_tmem(sums.at[:, columns], layout=OUTPUT) * scale
        x = jnp.where(jnp.broadcast_to(some, x.shape), x, 0.0)  # nothing was written where there are none
        held.at[:, place][...] = x.astype(held.dtype)

    def piece_places(self, dtype: Any) -> dict[str, Any]:
        """Where `store_pieces` has them."""
        return {"pieces": self.tiles(dtype, COMPUTING, ROWS, PIECE, step=PIECE)} if self.in_pieces else {}

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
