"""What kernels in Mosaic GPU share: a block of threads whose warpgroups have roles, and tiles that TMA loads.

All roles go through the same tiles in the same order, from the same table. A place in shared memory has two barriers: one says
that TMA has filled it, the other that all who read it have done so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked, Overlapped, TileSchedule
from .mosaic_sizes import MosaicSizes, Sums, swizzled_columns
from .tile import MosaicLogits
from .widen import widen_tile

__all__ = [
    "BLOCKS",
    "LOWEST",
    "WARPGROUPS",
    "BlockOfThreads",
    "Copies",
    "MosaicBlock",
    "along_columns",
    "along_rows",
    "in_ring",
    "one_of",
    "part_of",
]

# The highest logit of a row that has seen no key. It is finite: -inf less it is -inf, not NaN.
LOWEST = float(np.finfo(np.float32).min)
BLOCKS, WARPGROUPS = "block", "warpgroup"  # names of the grid's and the threads' axes
Copies = list[tuple[Any, str]]  # (what is loaded, the name of the tiles that it is loaded into)


class BlockOfThreads:
    """A block of threads whose warpgroups have roles. in_key: values are the first columns of their keys, whose tiles are loaded
    once."""

    sizes: Any  # of its tiles; stages: tiles that shared memory holds
    logits: MosaicLogits
    dims: tuple[int, int]  # of keys and of values, padded
    in_key: bool
    interpret: bool

    def __call__(self, refs: dict[str, Any]) -> None:
        """What each warpgroup does."""
        raise NotImplementedError

    @property
    def warpgroups(self) -> int:
        """Of a block of threads."""
        raise NotImplementedError

    @property
    def across_warps(self) -> int:
        """Bytes of shared memory for numbers that are reduced across warps: as many as Mosaic takes by default."""
        return 2048

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Places in memory, and barriers, by name; those that share a place by their names with a blank between."""
        raise NotImplementedError

    @property
    def streams(self) -> tuple[str, ...]:
        """What is loaded for a tile of keys; the last has the values."""
        return ("key",) if self.in_key else ("key", "value")

    def columns_of(self, name: str, ref: Any) -> Any:
        """Of a tile of keys, what is multiplied as keys or as values."""
        return ref.at[:, pl.ds(0, self.dims[1])] if self.in_key and name == "value" else ref

    def in_loop(self, held: Any, number: Any, turn: Any) -> Any:
        """One of the tiles in shared memory, for the products of a turn. Those of many columns have dozens of descriptors,
        which the compiler would keep in registers if they were the same in every turn. turn: a number of which it doesn't know
        that it is never negative."""
        return held.at[number + jnp.minimum(turn, 0)]

    def drain(self, refs: dict[str, Any], count: Any, names: tuple[str, ...]) -> None:
        """A block ends only when its places have been read."""
        stages = self.sizes.stages

        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _drain(number: Any) -> None:
            for name in names:
                plgpu.barrier_wait(refs[f"{name}_free"].at[lax.rem(number, stages)])

    @property
    def copies(self) -> int:
        """That fill a place of keys or values."""
        return 1

    def step(self, stream: str) -> int:
        """Columns of a tile of this that are swizzled together."""
        return swizzled_columns(self.dims[stream == "value"])

    def tiles(self, dtype: Any, *shape: int, step: int | None = None) -> Any:
        """Places for tiles of numbers of 16 bits, or of 8. step: columns that are swizzled together; None: as many as can be."""
        step = step or swizzled_columns(shape[-1])
        swizzled = plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(jnp.dtype(dtype).itemsize * step)
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    def barriers(self, copies: dict[str, int], readers: int, **free: Any) -> dict[str, Any]:
        """Those of tiles by name; copies: how many fill a place. readers: who say that it is free. free: more of these
        barriers."""
        stages, made = self.sizes.stages, dict[str, Any]()
        for name, arrivals in copies.items():
            made[f"{name}_full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
            made[f"{name}_free"] = plgpu.Barrier(num_arrivals=readers, num_barriers=stages, **free)
        return made


@dataclass(frozen=True)
class MosaicBlock(BlockOfThreads):
    """One over dense arrays. Blocks are numbered (batch, part of the keys, block of rows or of keys, head), the head fastest.

    heads: of that grid; group: query heads of a kv head; blocks: how many of rows, or of keys. splits: parts of the keys.
    period: rows have the queries of a kv head's heads, each with that many (see FoldedRows); the grid's heads are then kv heads.
    in_key: values are the first columns of their keys, whose tiles are loaded once. stored: 'key', 'value' and their dtypes,
    where these have one byte a number: such tiles are loaded as `<name>_raw`.

    Where several blocks have the same rows, with a part of the output's columns each, they are neighbours.
    """

    sizes: MosaicSizes
    logits: MosaicLogits
    table: TileSchedule
    layout: str
    heads: int
    group: int
    blocks: int
    dims: tuple[int, int]  # of keys and of values, padded
    interpret: bool
    splits: int = 1
    period: int | None = None
    in_key: bool = False
    stored: tuple[tuple[str, str], ...] = ()
    # Under a causal mask the last rows have the most keys, and the first keys the most rows: these blocks start first.
    last_first: ClassVar[bool] = True

    @staticmethod
    def asks(sizes: MosaicSizes) -> bool:
        """See `tile_schedule`."""
        del sizes
        return False

    @property
    def column_blocks(self) -> int:
        """Blocks of threads among which the columns of an output are divided."""
        return 1

    def columns_block(self) -> Any:
        """Which of these."""
        return 0 if self.column_blocks == 1 else lax.rem(lax.axis_index(BLOCKS), self.column_blocks)

    def _number(self) -> Any:
        """Of a block of threads, the same for those with other columns."""
        block = lax.axis_index(BLOCKS)
        return block if self.column_blocks == 1 else lax.div(block, self.column_blocks)

    def place(self) -> tuple[Any, Any, Any]:
        """(batch row, head, block of rows or keys)."""
        block = self._number()
        head, rest = lax.rem(block, self.heads), lax.div(block, self.heads)
        number, batch = lax.rem(rest, self.blocks), lax.div(rest, self.blocks)
        batch = batch if self.splits == 1 else lax.div(batch, self.splits)
        return batch, head, self.blocks - 1 - number if self.last_first else number

    def split(self) -> Any:
        """Which part of the keys."""
        return 0 if self.splits == 1 else lax.rem(lax.div(self._number(), self.heads * self.blocks), self.splits)

    def kv_head(self, head: Any) -> Any:
        """Of one of the grid's heads."""
        return head if self.period is not None else lax.div(head, self.group)

    def fold_tiles(
        self,
        refs: dict[str, Any],
        row: tuple[Any, Any, Any],
        visit: Any,
        carry: Any,
        overlapped: Overlapped | None = None,
        times: int = 1,
    ) -> Any:
        """visit(tile, carry, masked) for the tiles of a (batch row, head, block) that this block of threads goes through. See
        TileSchedule."""
        places, instead = (*self._row(row), self.split(), self.splits), None
        if "unordered" in refs:
            unordered = refs["unordered"].at[row[0] if refs["unordered"].shape[0] > 1 else 0][...] > 0
            instead = unordered, lambda tile, carry, _: visit(tile, carry, Masked.BY_IDS)
        return self.table.fold_tiles(refs["schedule"], *places, visit, carry, instead, overlapped, times)

    def each_tile(self, refs: dict[str, Any], row: tuple[Any, Any, Any], visit: Any, carry: Any, times: int = 1) -> Any:
        """visit(tile, carry) for the same tiles, for roles that don't ask what kind of mask they have."""
        return self.table.each_tile(refs["schedule"], *self._row(row), self.split(), self.splits, visit, carry, times)

    def _by_kind(self, refs: dict[str, Any], row: tuple[Any, Any, Any], visit: Any, carry: Any, times: int = 1) -> Any:
        """visit(tile, carry, masked) for them, whether or not ids are in order."""
        places = *self._row(row), self.split(), self.splits
        return self.table.fold_tiles(refs["schedule"], *places, visit, carry, times=times)

    def count_tiles(self, refs: dict[str, Any], row: tuple[Any, Any, Any]) -> Any:
        """How many these are."""
        return self.table.count(refs["schedule"], *self._row(row), self.split(), self.splits)

    def _row(self, row: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Of the table."""
        batch, head, block = row
        # To the mask, rows of several heads are one block.
        return batch, head, block if self.period is None else 0

    def of_split(self, batch: Any, results: Any) -> Any:
        """The place of a batch row among results of all parts of the keys."""
        return batch if self.splits == 1 else self.split() * (results.shape[0] // self.splits) + batch

    # -- who widens --------------------------------------------------------------------------------------------------

    def widen(self, refs: dict[str, Any], row: tuple[Any, Any, Any], names: tuple[str, ...]) -> None:
        """Every tile of numbers of 8 bits in the query's dtype, exactly; values times their scales, rounded once. names: of keys
        and values."""
        batch, head, _ = row
        stages, size = self.sizes.stages, self.sizes.block_kv
        scales = {"value": refs["value_scale"].at[batch, self.kv_head(head)]} if "value_scale" in refs else {}

        def visit(tile: Any, count: Any, masked: bool) -> Any:
            del masked
            slot = lax.rem(count, stages)
            for name in names:

                @pl.when(count >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(refs[f"{name}_free"].at[slot])

                plgpu.barrier_wait(refs[f"{name}_raw_full"].at[slot])
                stored, wide = (refs[f"{of}_tiles"].at[slot] for of in (f"{name}_raw", name))
                widen_tile(stored, wide, scales[name].at[pl.ds(tile * size, size)] if name in scales else None)
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs[f"{name}_raw_free"].at[slot])
                plgpu.barrier_arrive(refs[f"{name}_full"].at[slot])
            return count + 1

        self.drain(refs, self._by_kind(refs, row, visit, jnp.int32(0)), names)

    def raw_places(self) -> dict[str, Any]:
        """Places for tiles of numbers of 8 bits, and their barriers."""
        sizes, columns = self.sizes, dict(zip(self.streams, self.dims, strict=False))
        tiles = {
            f"{name}_raw_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, columns[name])
            for name, dtype in self.stored
        }
        return tiles | self.barriers({f"{name}_raw": 1 for name, _ in self.stored}, 1)

    # -- who loads ---------------------------------------------------------------------------------------------------

    def load_keys(self, refs: dict[str, Any], place: tuple[Any, Any, Any], times: int = 1) -> None:
        """The tiles of keys and values that a block of rows sees, so many times."""
        batch, head, block = place

        def copies(tile: Any) -> dict[str, Copies]:
            first, kv_head = tile * self.sizes.block_kv, self.kv_head(head)
            rows = {name: self.rows(refs[name], batch, kv_head, first, self.sizes.block_kv) for name in self.streams}
            return {loaded[name]: [(some, f"{loaded[name]}_tiles")] for name, some in rows.items()}

        loaded = {name: f"{name}_raw" if name in dict(self.stored) else name for name in self.streams}
        count = jnp.int32(0)
        for _ in range(times):
            count = self.fill(refs, (batch, head, block), copies, count)
        self.drain(refs, count, tuple(loaded.values()))

    def fill(
        self,
        refs: dict[str, Any],
        row: tuple[Any, Any, Any],
        copies: Callable[[Any], dict[str, Copies]],
        count: Any,
        fold: Callable[..., Any] | None = None,
    ) -> Any:
        """Every tile of a row of the table into the next place, once that is free. copies: of a tile, by the name of their
        barriers. count: the tiles before; returns them with these. fold: as each_tile, what goes through them."""
        stages = self.sizes.stages

        def load(tile: Any, count: Any) -> Any:
            slot = lax.rem(count, stages)  # not in_ring: with it Hopper's gradients at 128 columns spill
            for name, some in copies(tile).items():

                @pl.when(count >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(refs[f"{name}_free"].at[slot])

                for source, target in some:
                    plgpu.copy_gmem_to_smem(source, refs[target].at[slot], refs[f"{name}_full"].at[slot])
            return count + 1

        return (fold or self.each_tile)(refs, row, load, count)

    def rows(self, ref: Any, batch: Any, head: Any, first: Any, count: int) -> Any:
        """Rows of a head in an array of the call's layout."""
        rows = pl.ds(first, count)
        return ref.at[(batch, rows, head) if self.layout == "bthd" else (batch, head, rows)]


def one_of(
    number: Any, roles: Sequence[tuple[int, Callable[[], None]]], other: Callable[[], None] | None = None
) -> None:
    """Play the role of a warpgroup's or warp's number, else the other one if there is one. Each is a branch within the one
    before: one after the other, a role would hold in registers what the next ones begin with, such as phases of barriers."""
    (of_role, role), *rest = roles
    others = functools.partial(one_of, number, rest, other) if rest else other
    if others is None:
        pl.when(number == of_role)(role)
    else:
        # Mosaic lowers what comes for False twice, once to learn its types. So that is the role, never a further choice.
        lax.cond(number != of_role, others, role)


def in_ring(count: Any, places: int, *, from_zero: bool = False) -> Any:
    """The place of the count-th tile, where so many are used in turn. The rest of a division takes five operations, one after the
    other, of a number that may be negative. from_zero: the loop begins at 0, so that the compiler knows it isn't."""
    power_of_two = places & (places - 1) == 0
    return count & jnp.int32(places - 1) if power_of_two and not from_zero else lax.rem(count, jnp.int32(places))


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, along it."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each column, along it."""
    return lax.broadcast_in_dim(x, shape, (1,))


def part_of(ref: Any, sums: Sums) -> Any:
    """The columns of these sums."""
    return ref if ref.shape[1] == sums.columns else ref.at[:, pl.ds(sums.first, sums.columns)]
