"""The backward pass: gradients from the weights, which are recomputed from the lse.

One kernel goes by blocks of keys and sums the gradients of key and value over the rows and query heads that see them; one goes by
blocks of rows and sums that of the query. No block adds to what another writes, so results don't depend on the order of blocks.

A factor for each element leads from the gradient of the logits to that of the products. It is applied to the weights, before
other numbers take registers.

Where a warpgroup can't hold the sums of key and value both, one sums those of the keys and another those of the values, for the
same 64 keys: the weights are then computed twice. Where values are the first columns of their keys, these have one gradient, of
which each of two warpgroups sums half of the columns; so it is with the query's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import in_ring
from ...mosaic.kernel.mosaic_sizes import DIM_STEP
from ...mosaic.kernel.within import Span
from .block import HopperBlock
from .hopper_sizes import ROWS
from .tile import HopperTile

__all__ = ["BY_ROWS", "SUMS_BESIDE_BOTH", "HopperGradients", "meet"]

SUMS_BESIDE_BOTH = 128  # columns of sums beside which a warpgroup holds two products at once; of 32 keys always
_SUMS_BESIDE_OTHERS = 192  # columns of sums beside which the numbers of a mask and of dropout have registers
_COLUMNS_LATE = 64  # of a tile whose weights are replaced, not its logits

BY_ROWS = {"query": "lse", "d_output": "delta"}  # what is loaded by rows, and the numbers of the rows that come with it


class HopperGradients(HopperBlock):
    """What both kernels do where values are the first columns of their keys, and where registers are few."""

    sums_beside_dropout: ClassVar[int] = _SUMS_BESIDE_OTHERS

    @property
    def most_sums(self) -> int:
        """Columns of the sums of a warpgroup."""
        raise NotImplementedError

    def crowded(self, refs: dict[str, Any], masked: Masked) -> bool:
        """Whether the tiles of a loop have no registers to spare for descriptors that are the same in every turn: with latents,
        beside dropout, and beside a mask with a score or a soft cap."""
        steps = self.logits.static_args.score, self.logits.soft_cap
        scored = self.many_sums(masked) and any(step is not None for step in steps)
        return self.in_key or scored or ("dropout" in refs and self.most_sums > self.sums_beside_dropout)

    def many_sums(self, masked: Masked) -> bool:
        """Whether a tile with a mask has few registers beside its sums."""
        return bool(masked) and self.most_sums > _SUMS_BESIDE_OTHERS

    def spans_early(self, refs: dict[str, Any], masked: Masked) -> bool:
        """Whether a tile's spans are computed beside its products, which takes registers. Ids that are compared are beside many
        sums too."""
        few = masked is Masked.YES and (self.many_sums(masked) or "dropout" in refs)
        return bool(masked) and not few and not self.crowded(refs, masked)

    def held(self, refs: dict[str, Any], names: Sequence[str], number: Any, turn: Any, masked: Masked) -> list[Any]:
        """These of a block's own tiles, each the number-th of its name. Beside many sums, the first is `in_loop`."""
        hidden = len(names) if self.crowded(refs, masked) or self.query_in_loop else int(self.many_sums(masked))
        tiles = [refs[f"{name}_tile"] for name in names]
        return [
            self.in_loop(tile, number, turn) if place < hidden else tile.at[number] for place, tile in enumerate(tiles)
        ]

    def weights(
        self, tile: HopperTile, x: jax.Array, factor: float, shifts: jax.Array, masked: Masked, span: Span | None
    ) -> jax.Array:
        """2**(x * factor - shifts) of a tile, 0 outside of its spans. Of few columns these are set while other exponentials are
        computed; of many, for which there are no registers, before."""
        late = masked and x.shape[1] <= _COLUMNS_LATE
        x = tile.within(x, span) if masked and not late else x
        x = without_padded_rows(self.logits.static_args.score, x, shifts)
        weights = jnp.exp2(x * factor - shifts)
        return tile.within(weights, span, 0.0) if late else weights

    def loaded(self, count: Any, turn: Any, masked: Masked) -> Any:
        """The place of the count-th tile that is loaded. A single place is the same in every turn: see `in_loop`."""
        return (
            in_ring(count, self.sizes.stages, from_zero=not masked) if self.sizes.stages > 1 else jnp.minimum(turn, 0)
        )

    def swizzled(self, lines: int) -> int | None:
        """The columns of a tile that are swizzled together: a product goes through as many lines of a tile at once, and of two
        warpgroups with half of the columns each has a number of such steps."""
        return DIM_STEP if self.in_key or lines < ROWS else None


def meet(barrier: Any) -> None:
    """Wait until all warpgroups that compute are here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
