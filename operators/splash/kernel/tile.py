"""What a kernel asks of its tile: the mask, the bias, the dropout, arrays and places.

A tile is held as [query rows, keys] or, transposed, as [keys, query rows]. Transposed, the numbers that belong to a row
(log-sum-exp, delta) lie along the lanes, as they are stored. The forward pass supports both, the backward passes are transposed.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ....masks import Slot
from ...kernels.block_words import BlockWords
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.lse import LOG2E
from ...kernels.seen_keys import Seen
from ...kernels.tile_mask import TileLogits, TileMask, traced_numbers
from .band import EVERYTHING, band_of
from .grid import Input, KernelGrid, Step, padded
from .schedule import variant_of
from .subtiles import SubTile, rows_of
from .variants import KernelVariant

__all__ = ["HeadKey", "Logits", "Tile", "add_to_grid", "columns", "transpose"]

_LANES = 128  # of a register

# Two words; None without dropout.
HeadKey = tuple[jax.Array, jax.Array] | None


@dataclass(frozen=True)
class Logits(TileLogits):
    """base2: logits are multiplied by log2 e, and exponentials are powers of two."""

    base2: bool

    @property
    def exp_factor(self) -> float:
        return LOG2E if self.base2 else 1.0

    def exp(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(x) if self.base2 else jnp.exp(x)


def add_to_grid(
    grid: KernelGrid,
    mask: LocalMask,
    words: tuple[BlockWords | None, ...],
    bias: jax.Array | None,
    dropout: Dropout | None,
    seen: Seen | None,
) -> None:
    """Add what a tile needs of the mask, the bias and the dropout to the kernel's operands.

    words: those of the mask's blocks; seen: keys by a query.
    """
    grid.scalars |= traced_numbers(mask, dropout, seen)
    for number, leaf in enumerate(mask.mask.split()[1]):
        array = jnp.asarray(leaf.array)
        if "q_blocks" in leaf.dims:
            continue  # in words
        if leaf.dims == ("batch",):
            grid.scalars[f"leaf{number}"] = array.astype(jnp.int32)
        elif len(leaf.dims) == 2:
            along = leaf.dims[1]
            size = grid.block_q if along == "q" else grid.block_kv
            array = padded(array.astype(jnp.int32), {1: size})[:, None]
            spec = grid.leaf_block(array.shape[0], along)  # type: ignore[arg-type]
            grid.inputs[f"leaf{number}"] = Input(array, spec, along)
        else:
            # As bytes: a bool array would take four bytes per weight.
            grid.add_dense(f"leaf{number}", array.astype(jnp.int8))
    for number, leaf_words in enumerate(words):
        if leaf_words is not None:
            batch, heads, *rest = leaf_words.words.shape
            split = (1, 1) if heads == 1 else (grid.heads.kv_heads, grid.heads.group)
            array = leaf_words.words.reshape(batch, *split, *rest)
            grid.inputs[f"words{number}"] = Input(array, grid.words_block(array.shape), "both")
    if bias is not None:
        grid.add_dense("bias", bias if bias.dtype in (jnp.float32, jnp.bfloat16) else bias.astype(jnp.float32))
    if seen is not None:
        _add_seen(grid, seen)


def _add_seen(grid: KernelGrid, seen: Seen) -> None:
    rows = padded(seen.keys.astype(jnp.int32), {2: grid.block_kv})
    if rows.shape[1] == 1:
        grid.inputs["seen"] = Input(rows, grid.leaf_block(rows.shape[0], "kv"), "kv")
        return
    rows = jnp.broadcast_to(rows, (grid.batch, *rows.shape[1:]))[:, :, None]
    grid.inputs["seen"] = Input(rows, grid.key_block(1, "seq_minor"), "kv")


class Tile(TileMask):
    """A kernel's current tile, asked for in sub-tiles. `transposed`: keys are rows and queries are lanes."""

    def __init__(self, grid: KernelGrid, logits: Logits, refs: dict[str, Any], transposed: bool) -> None:
        self.grid, self.logits, self.transposed = grid, logits, transposed
        self.step: Step = grid.here(refs)
        super().__init__(logits.static_args, refs, self.step.batch)
        self._seen: dict[Any, Any] = {}
        self._scales: dict[Any, jax.Array] = {}
        self._clean: dict[Any, jax.Array] = {}
        self.squares: dict[Any, jax.Array] = {}  # of the score, made once per visit
        self._distance: int | None = None
        self._band, self._others = EVERYTHING, logits.static_args.mask

    def has_flag(self, flag: int) -> Any:
        """Whether the schedule's entry has a flag."""
        return (self.step.entry & flag) != 0

    def enter(self, number: int) -> KernelVariant:
        """Start a variant, by its number: one variant's values don't exist in the next."""
        self._seen.clear()
        self._scales.clear()
        self._clean.clear()
        self.squares.clear()
        static_args = self.static_args
        self._distance = self.grid.schedule.distances[number - 1]
        self._band, self._others = EVERYTHING, static_args.mask
        if self._distance is not None:
            self._band, self._others = band_of(static_args.mask)
        return self.grid.schedule.variants[number - 1]

    @property
    def variant(self) -> Any:
        """The number of the tile's variant."""
        return variant_of(self.step.entry)

    def hide(self, x: jax.Array, subtile: SubTile) -> jax.Array:
        """-inf where keys aren't visible."""
        seen = self._visible(subtile)
        if seen is not None:
            x = jnp.where(seen, x, -jnp.inf)
        if self._distance is None:
            return x
        return self._band.hide(x, self._distance + subtile.queries.start - subtile.keys.start, self.transposed)

    def key_scale(self, subtile: SubTile) -> jax.Array:
        """The scales of a sub-tile's keys: a row or, transposed, a square of columns, as wide as the sub-tile's queries."""
        scale = self.refs["key_scale"][subtile.head[0], :, subtile.keys]
        if not self.transposed:
            return scale
        at = subtile.head[0], subtile.keys.start
        if at not in self._scales:  # otherwise each use would spread a single column over the lanes
            self._scales[at] = jnp.broadcast_to(scale, (128, scale.shape[1])).T
        return jnp.tile(self._scales[at], (1, subtile.shape[0] // 128))

    def zero_hidden(self, variant: KernelVariant, names: dict[str, int]) -> None:
        """Make zeros, in the tile's own copies, of the keys that no query sees, if there is anything but numbers in the tensors.

        names: 'key' and 'value' -> the axis of their keys. A weight of 0 wouldn't remove a NaN.
        """
        if "clean" not in self.refs or not variant.masked:
            return

        @pl.when(self.refs["clean"][0] == 0)
        def _zero() -> None:
            for name, seq_minor in names.items():
                if self._in_place(name):
                    self._zero_in_place(self.refs[name], seq_minor)

    def _in_place(self, name: str) -> bool:
        """Whether `zero_hidden` does it: where it is seldom needed. Not in fp8, which not every TPU selects from."""
        return "clean" in self.refs and self.refs[name].dtype.itemsize > 1

    def _zero_in_place(self, ref: Any, seq_minor: int) -> None:
        size = self.grid.block_kv
        step = _LANES if size % _LANES == 0 else size

        def part(number: Any, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(lax.rem(number, np.int32(size // step)) * np.int32(step), step), step)
            head = lax.div(number, np.int32(size // step))
            at = (head, slice(None), rows) if seq_minor else (head, rows, slice(None))
            ref[at] = self._zero_unseen(ref[at], head, rows, seq_minor)

        lax.fori_loop(np.int32(0), np.int32(ref.shape[0] * (size // step)), part, None)

    def _zero_unseen(self, x: jax.Array, head: Any, keys: Any, seq_minor: int) -> jax.Array:
        """A head's keys or values, with zeros for those that no query sees."""
        row = self._seen_row(head, keys)
        seen = row if seq_minor else columns(row, x.shape[1])
        return jnp.where(seen != 0, x, jnp.zeros((), x.dtype))

    def _seen_row(self, head: Any, keys: Any) -> jax.Array:
        """Which keys a query sees, int32 [1, keys]."""
        ref = self.refs["seen"]
        return ref[:, keys] if len(ref.shape) == 2 else ref[head, :, keys]

    def clean(self, name: str, subtile: SubTile, seq_minor: int) -> Any:
        """A sub-tile's keys or values as they are stored, with zeros for keys that no query sees; these are made once per
        visit.
        """
        at = name, subtile.head[0], subtile.keys.start, subtile.keys.stop
        if at in self._clean:
            return self._clean[at]
        x = rows_of(self.refs[name], subtile.head[:1], subtile.keys, seq_minor)
        if "seen" not in self.refs or not subtile.masked or self._in_place(name) or x.dtype == jnp.int8:
            return x
        self._clean[at] = self._zero_unseen(x, subtile.head[0], subtile.keys, seq_minor)
        return self._clean[at]

    def value_scale(self, subtile: SubTile) -> jax.Array:
        """The scales of a sub-tile's values, [1, keys], 0 for keys that no query sees."""
        scale = self.refs["value_scale"][subtile.head[0], :, subtile.keys]
        if "seen" not in self.refs or not subtile.masked:
            return scale
        return jnp.where(self._seen_row(subtile.head[0], subtile.keys) != 0, scale, 0.0)

    def dropout_keys(self) -> list[HeadKey]:
        """Dropout's key of each head of the tile, computed once per visit."""
        if "dropout" not in self.refs:
            return [None] * len(self.grid.heads.in_tile)
        return [self._dropout_key(self.head(head)) for head in self.grid.heads.in_tile]

    def keep(self, key: HeadKey, subtile: SubTile) -> jax.Array | None:
        """Which weights dropout keeps; None without dropout."""
        if key is None:
            return None
        rows, cols = self._indices(subtile)
        return Dropout.keep_mask(*key, self._global_rows(rows), self._global_keys(cols), self.static_args.dropout)

    def head(self, head: tuple[int, int]) -> Any:
        """The query head's number."""
        heads = self.grid.heads
        kv_head = self.step.kv_tile * heads.kv_tile + head[0]
        return kv_head * heads.group + self.step.group_tile * heads.group_tile + head[1]

    # -- places for a score ------------------------------------------------------------------------------------------

    @property
    def padded_queries(self) -> int:
        """The queries of this device, in whole blocks."""
        return -(-self.static_args.q_len // self.grid.block_q) * self.grid.block_q

    def local_keys_ahead(self) -> Any:
        """The tile's first key less its first query, of this device."""
        return self.step.kv_block * self.grid.block_kv - self.step.q_block * self.grid.block_q

    def keys_ahead(self) -> Any:
        """The position of the tile's first key less that of its first query."""
        first_row = self._global_rows(self.step.q_block * self.grid.block_q)
        return self._global_keys(self.step.kv_block * self.grid.block_kv) - self.position(first_row)

    def positions(self, subtile: SubTile) -> tuple[Any, Any]:
        """Positions of queries and keys, in shapes that broadcast to a sub-tile."""
        leaf = self.positions_leaf()
        if leaf is not None:
            return self._along(f"leaf{leaf}", "q", subtile), self._along(f"leaf{leaf + 1}", "kv", subtile)
        rows, keys = self._indices(subtile)
        return self.position(self._global_rows(rows)), self._global_keys(keys)

    def key_row(self, subtile: SubTile) -> jax.Array:
        """The positions of a sub-tile's keys, int32 [1, keys]."""
        leaf = self.positions_leaf()
        if leaf is not None:
            row: jax.Array = self.refs[f"leaf{leaf + 1}"][:, subtile.keys]
            return row
        first = self.step.kv_block * self.grid.block_kv + subtile.keys.start
        return self._global_keys(lax.broadcasted_iota(jnp.int32, (1, subtile.shape[1]), 1) + first)

    def row_and_head(self, head: tuple[int, int]) -> tuple[Any, Any]:
        """The batch row and the query head in the whole problem."""
        return self.global_row_and_head(self.step.batch, self.head(head))

    def _indices(self, subtile: SubTile) -> tuple[jax.Array, jax.Array]:
        """Local rows and keys, both in the sub-tile's shape."""
        shape = subtile.shape[::-1] if self.transposed else subtile.shape
        first_row = self.step.q_block * self.grid.block_q + subtile.queries.start
        first_key = self.step.kv_block * self.grid.block_kv + subtile.keys.start
        rows = lax.broadcasted_iota(jnp.int32, shape, 1 if self.transposed else 0) + first_row
        cols = lax.broadcasted_iota(jnp.int32, shape, 0 if self.transposed else 1) + first_key
        return rows, cols

    def _visible(self, subtile: SubTile) -> Any:
        """Which weights are visible; None for all. Computed once for all heads, unless a mask has a plane for each."""
        key = (subtile.queries.start, subtile.keys.start, subtile.shape, subtile.head if self._by_head() else None)
        if key not in self._seen:
            self._seen[key] = self._test(subtile)
        return self._seen[key]

    def _by_head(self) -> bool:
        words = (ref for name, ref in self.refs.items() if name.startswith("words"))
        return any(ref.shape[0] > 1 or ref.shape[1] > 1 for ref in words) or any(
            isinstance(atom, Slot) and atom.broadcast and not atom.broadcast[1]
            for atom in self.static_args.mask.leaves()
        )

    def _test(self, subtile: SubTile) -> Any:
        rows, cols = self._indices(subtile)
        seen = self._tests(self._others, rows, self._global_keys(cols), subtile)
        if subtile.keys.stop > (self.static_args.kv_len % self.grid.block_kv or self.grid.block_kv):
            seen.append(cols < self.static_args.kv_len)
        return functools.reduce(operator.and_, seen) if seen else None

    def _words(self, ref: Any, *where: Any) -> tuple[list[jax.Array], Any]:
        """See TileMask."""
        (subtile,) = where
        kv_head, of_group = (i if n > 1 else 0 for i, n in zip(subtile.head, ref.shape[:2], strict=True))
        rows = [ref[kv_head, of_group, word : word + 1, subtile.queries] for word in range(ref.shape[2])]
        return rows if self.transposed else [transpose(row) for row in rows], self.step.kv_block * self.grid.block_kv

    def _along(self, name: str, dim: str, *where: Any) -> jax.Array:
        """See TileMask."""
        (subtile,) = where
        return self.turned(self.refs[name][:, subtile.queries if dim == "q" else subtile.keys], dim)

    def turned(self, row: jax.Array, dim: str) -> jax.Array:
        """Numbers of a sub-tile's queries or keys [1, n], in a shape that broadcasts to it."""
        return transpose(row) if (dim == "q") != self.transposed else row

    def _dense(self, name: str, *where: Any) -> jax.Array:
        """See TileMask."""
        return self.dense(name, *where)

    def dense(self, name: str, subtile: SubTile) -> jax.Array:
        """[queries | 1, keys | 1], or transposed."""
        ref = self.refs[name]
        kv_head, of_group = (i if n > 1 else 0 for i, n in zip(subtile.head, ref.shape[:2], strict=True))
        rows, keys = (
            slice(None) if n == 1 else at for n, at in zip(ref.shape[2:], (subtile.queries, subtile.keys), strict=True)
        )
        part = ref[kv_head, of_group, rows, keys]
        if not self.transposed:
            return part
        return transpose(part.astype(jnp.int32) if part.dtype == jnp.int8 else part.astype(jnp.float32))


def columns(row: jax.Array, width: int) -> jax.Array:
    """A row of numbers [1, n] as columns, [n, width]: by a whole square, as spreading a single column over the lanes costs
    three times as much."""
    square = jnp.broadcast_to(row, (_LANES, row.shape[1])).T
    return jnp.tile(square, (1, -(-width // _LANES)))[:, :width]


def transpose(x: jax.Array) -> jax.Array:
    """The transpose. A single row or column is repeated first, because Mosaic transposes whole registers."""
    rows, lanes = x.shape
    x = jnp.broadcast_to(x, (8 if rows == 1 else rows, 128 if lanes == 1 else lanes))
    return x.T[: 1 if lanes == 1 else lanes, : 1 if rows == 1 else rows]
