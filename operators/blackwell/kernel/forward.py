"""The forward pass of a call whose keys are arrays, in the roles of `roles`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...kernels.lse import LOG2E
from ...mosaic.kernel.block import LOWEST, MosaicBlock
from ...mosaic.kernel.mosaic_sizes import MosaicSizes, column_parts
from ...mosaic.kernel.seen_parts import SeenParts
from ...mosaic.kernel.spans import all_spans
from .blackwell_sizes import PART, ROWS, asks
from .roles import BlackwellRoles
from .tile import BY_ROW, BlackwellTile, by_row

__all__ = ["BlackwellForward"]

# See by_products: of tiles with a mask, of those without one, and of those beside arrays of a mask. With others the compiler
# spills registers.
_MASKED, _WHOLE, _BESIDE_ARRAYS = (32, 64), (44, 64), (28, 128)
_CHUNK = 128  # see chunk
_IN_REGISTERS = ("bias", "dropout", "key_scale")  # arrays whose numbers take a tile's registers
_OF_MASK = ("leaf", "words")  # the same, unless they become spans


@dataclass(frozen=True)
class BlackwellForward(BlackwellRoles, MosaicBlock):
    """`block_q` rows of a query head, or of the query heads of a kv head, against one part of the keys or all.

    Where tensor memory can't hold the sums of a row's output, several blocks of threads have the same rows: each computes the
    logits, and has a part of the output's columns.
    """

    @staticmethod
    def asks(sizes: MosaicSizes) -> bool:
        """See `tile_schedule`."""
        return asks(sizes)

    def step(self, stream: str) -> int:
        """See BlockOfThreads. Mosaic takes no product with fewer keys than are swizzled together."""
        return min(super().step(stream), self.sizes.block_kv)

    @property
    def column_blocks(self) -> int:
        """See MosaicBlock."""
        return column_parts(self.dims[1])

    @property
    def columns(self) -> int:
        """See BlackwellRoles."""
        return self.dims[1] // self.column_blocks

    def part_of_columns(self, run: Callable[[int], None]) -> None:
        """See BlackwellRoles. Where a product's factor lies is known to the compiler."""
        if self.column_blocks == 1:
            return run(0)
        for number in range(self.column_blocks):
            pl.when(self.columns_block() == number)(functools.partial(run, number))
        return None

    def work(self, refs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """(batch row, head, block of rows)."""
        del refs
        return self.place()

    def load(self, refs: dict[str, Any], work: tuple[Any, Any, Any]) -> None:
        """See BlackwellRoles."""
        batch, head, _ = work
        for group in range(self.groups):
            rows = self.rows(refs["query"], batch, head, self._first_row(work, group), ROWS)
            plgpu.copy_gmem_to_smem(rows, refs["query_tile"].at[group], refs["query_full"].at[group])
        self.load_keys(refs, work)

    @property
    def chunk(self) -> int:
        """See BlackwellRoles. Beside one warpgroup for softmaxes registers are many."""
        return math.gcd(_CHUNK, self.columns) if self.groups == 1 and not self.stored else super().chunk

    @property
    def wideners(self) -> tuple[tuple[str, ...], ...]:
        """See BlackwellRoles. One: a second one would leave fewer registers to those that compute."""
        return (tuple(name for name, _ in self.stored),) if self.stored else ()

    def widen_tiles(self, refs: dict[str, Any], work: tuple[Any, Any, Any], names: tuple[str, ...]) -> None:
        """See BlackwellRoles."""
        self.widen(refs, work, names)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See MosaicBlock."""
        return super().scratch(dtype) | self.raw_places()

    def count(self, refs: dict[str, Any], work: tuple[Any, Any, Any]) -> Any:
        """See BlackwellRoles."""
        return self.count_tiles(refs, work)

    def visit_tiles(
        self, refs: dict[str, Any], work: tuple[Any, Any, Any], visit: Callable[[Any, Any, Any], Any], carry: Any
    ) -> Any:
        """See BlackwellRoles."""
        return self.fold_tiles(refs, work, visit, carry)

    def of_rows(self, refs: dict[str, Any], work: tuple[Any, Any, Any], group: Any) -> Any:
        """The number of the first, and the references with what a mask tells of them."""
        first_row = self._first_row(work, group)
        return first_row, BlackwellTile.with_numbers(refs, self.logits.static_args.mask, work[0], first_row)

    def parts(
        self,
        refs: dict[str, Any],
        work: tuple[Any, Any, Any],
        group: Any,
        tile: Any,
        count: Any,
        masked: Any,
        of_rows: Any,
    ) -> list[BlackwellTile]:
        """See BlackwellRoles."""
        del group, count
        first_row, refs_of_rows = of_rows
        block_kv = self.sizes.block_kv
        keys = self._keys_at_once(refs, masked)
        return [
            BlackwellTile(
                self.logits,
                refs_of_rows,
                work[:2],
                first_row,
                tile * block_kv + first,
                self.sizes,
                None,
                keys=keys,
                period=self.period,
                group=self.group,
                by_ids=masked is Masked.BY_IDS,
            )
            for first in range(0, block_kv, keys)
        ]

    def _keys_at_once(self, refs: dict[str, Any], masked: Any) -> int:
        """Of a part of a tile. Where few tiles have a mask, to look at their parts isn't worth a fifth of the time to lower the
        program; but what takes registers is computed for few keys at once, the fewer the more warpgroups share them."""
        crowded, most = self._crowded(refs), self.sizes.block_kv
        if (masked and self.table.many_partial) or (crowded and self.groups > 1 and not self.stored):
            return PART
        return min(2 * PART, most) if crowded and not masked else most

    def seen_parts(self, tiles: Sequence[BlackwellTile]) -> SeenParts:
        """See BlackwellRoles."""
        return tiles[0].cut(words=False) if self.table.asked else super().seen_parts(tiles)

    def start(self, refs: dict[str, Any], work: tuple[Any, Any, Any], group: Any) -> tuple[jax.Array, jax.Array]:
        """See BlackwellRoles."""
        if "sinks" not in refs:
            return by_row(LOWEST), by_row(0.0)
        if self.period is None:
            sinks = by_row(refs["sinks"][work[1]])
        else:
            of_rows = refs["sinks"].at[work[1], pl.ds(self._first_row(work, group), ROWS)]
            sinks = plgpu.load(of_rows, layout=BY_ROW, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        sinks = sinks * LOG2E
        if self.splits > 1:  # seen once
            sinks = sinks + jnp.where(self.split() == 0, 0.0, -jnp.inf)
        return jnp.maximum(sinks, LOWEST), jnp.where(sinks == -jnp.inf, 0.0, 1.0)

    def by_products(self, refs: dict[str, Any], masked: Any) -> tuple[int, int]:
        """See BlackwellRoles. Some where nothing else takes the registers that they need."""
        spans = all_spans(self.logits.static_args, refs, self.sizes.block_kv)
        arrays = any(name.startswith(_OF_MASK) for name in refs)
        # Of few tiles with a mask, where products take longer than softmaxes: a shorter program is worth more.
        few = masked and self.groups == 1 and self.table.some_full and not self.table.many_partial
        if few or self._crowded(refs) or masked is Masked.BY_IDS or (arrays and not spans):
            return super().by_products(refs, masked)
        many, written = _MASKED if masked and not self.table.asked else _BESIDE_ARRAYS if arrays else _WHOLE
        return many, written if self.groups > 1 else self.sizes.block_kv

    def _crowded(self, refs: dict[str, Any]) -> bool:
        """Whether more than a mask takes registers."""
        more = self.logits.soft_cap is not None or self.logits.static_args.score is not None
        return more or any(name.startswith(_IN_REGISTERS) for name in refs)

    def store(self, refs: dict[str, Any], work: tuple[Any, Any, Any], group: Any, name: str, held: Any) -> None:
        """See BlackwellRoles."""
        (batch, head, _), rows = work, pl.ds(self._first_row(work, group), ROWS)
        if name == "lse":
            target = refs["lse"].at[self.of_split(batch, refs["lse"]), head, rows]
            pl.when(self.columns_block() == 0)(lambda: plgpu.copy_smem_to_gmem(held, target))
        else:
            target = self.rows(refs[name], batch, head, self._first_row(work, group), ROWS)
            plgpu.copy_smem_to_gmem(held, self._own_columns(target))

    def unrounded(self, refs: dict[str, Any], work: tuple[Any, Any, Any], group: Any) -> Any:
        """See BlackwellRoles. A part's, to be merged with the others'."""
        if self.splits == 1:
            return None
        rows = pl.ds(self._first_row(work, group), ROWS)
        return self._own_columns(refs["output"].at[self.of_split(work[0], refs["output"]), work[1], rows])

    def _own_columns(self, rows: Any) -> Any:
        return rows.at[:, pl.ds(self.columns_block() * self.columns, self.columns)]

    def _first_row(self, work: tuple[Any, Any, Any], group: Any) -> Any:
        return work[2] * self.sizes.block_q + group * ROWS
