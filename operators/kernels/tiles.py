"""Tiles: the blocks that a pass visits, and the mask, bias and dropout of one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...masks import Full, Mask
from ...symbolic import surely
from .block_words import BlockWords, block_words, is_blocks
from .evaluated_leaf import EvaluatedLeaf
from .local_mask import Dropout, LocalMask
from .primitives import cut, cut_along, length, numbers, shifted

__all__ = ["TilePosition", "TileSource", "TileTable", "is_arithmetic", "tile_table"]


class TileTable(NamedTuple):
    """Which kv blocks each query block visits: a row of `table` [batch | 1, tables | 1, q blocks, 2 + most kv blocks].

    From the third entry on it holds the partial ones, then the full ones; its first two numbers are the place after the
    partial ones, and that after both. It is one row, because each slice of a table is a part of every program. If all are of one
    kind and neighbours in every row, the table [.., q blocks, 2] holds only the first and the one after the last. If heads have
    different blocks, each of several groups of heads has its own table.

    `some_partial` and `some_full` are False if the host knows that there are no such blocks.
    """

    table: jax.Array | np.ndarray
    some_partial: bool
    some_full: bool
    neighbours: bool

    def tile_range(self, batch: Any, group: Any, q_block: Any) -> tuple[Any, tuple[Any, Any], Callable[[Any], Any]]:
        """The kv blocks of a query block: n of the first, n after the partial ones and after all, and the block for each n."""
        table = self.table
        begin: Any
        end: Any
        if isinstance(table, np.ndarray) and (table == table[:1, :1, :1]).all():
            row = jnp.asarray(table[0, 0, 0])  # all query blocks see the same: only the kv block is looked up
            begin, end = (int(n) for n in table[0, 0, 0, :2])
        else:
            place = (batch if table.shape[0] != 1 else 0, group if table.shape[1] > 1 else 0, q_block, 0)
            row = cut(jnp.asarray(table), place, (1, 1, 1, table.shape[3])).reshape(-1)
            begin, end = (lax.index_in_dim(row, n, keepdims=False) for n in (0, 1))
        if self.neighbours:
            known = isinstance(table, np.ndarray) and (table[..., 0] == table[0, 0, 0, 0]).all()
            return int(table[0, 0, 0, 0]) if known else begin, (end, end), lambda n: n
        return 2, (begin, end), lambda n: lax.squeeze(cut_along(row, n, 1), (0,))


# Leaves whose test is a few operations on numbers of rows and of keys, which are fused into the work on a logit anyway.
_ARITHMETIC = frozenset({"causal", "sliding_window", "chunked", "prefix", "segment_ids", "kv_lengths", "positions"})
_MAX_LEAVES = 4


def is_arithmetic(mask: Mask) -> bool:
    """Whether a tile's mask costs next to nothing: no user function, no plane to read, few parts."""
    atoms = list(mask.leaves())
    return len(atoms) <= _MAX_LEAVES and all(atom.kind in _ARITHMETIC for atom in atoms)


def tile_table(
    mask: LocalMask, block_q: int, block_kv: int, *, tables: int = 1, separate_full: bool = True
) -> TileTable:
    """Sort each query block's kv blocks by kind, for each of `tables` groups of heads. A padded last block is partial.

    separate_full=False counts full blocks as partial too: there is then one loop, half of the program. A mask that costs next
    to nothing does the same if few blocks are full.
    """
    kinds = mask.kinds_of_heads(block_q, block_kv, tables)
    if not isinstance(kinds, np.ndarray):
        return _table_at_run_time(kinds, mask.kv_len % block_kv != 0, separate_full)
    if mask.kv_len % block_kv:
        kinds = kinds.copy()
        kinds[..., -1] = np.minimum(kinds[..., -1], 1)
    partial, full = (kinds == 1).sum(), (kinds == 2).sum()
    if partial and (not separate_full or (2 * full <= partial and is_arithmetic(mask.mask))):
        kinds = np.minimum(kinds, 1)
    some_partial, some_full = bool((kinds == 1).any()), bool((kinds == 2).any())
    first, last = (kinds > 0).argmax(-1), kinds.shape[-1] - (kinds[..., ::-1] > 0).argmax(-1)
    visible = (kinds > 0).sum(-1)
    last = np.where(visible, last, first)
    if not (some_partial and some_full) and (last - first == visible).all():
        return TileTable(np.stack([first, last], -1).astype(np.int32), some_partial, some_full, True)
    table = _sorted_by_kind(kinds, np)
    max_tiles = int(table[..., 1].max())  # in a window a row sees few blocks: the program can leave out the others
    return TileTable(table[..., :max_tiles], some_partial, some_full, False)


def _table_at_run_time(kinds: jax.Array, padded: bool, separate_full: bool) -> TileTable:
    """The same for traced kinds."""
    if not separate_full:
        kinds = jnp.minimum(kinds, 1)
    if padded:
        last = numbers((1, 1, 1, kinds.shape[-1]), 3) == length(kinds.shape[-1] - 1)
        kinds = jnp.where(last, jnp.minimum(kinds, 1), kinds)
    return TileTable(_sorted_by_kind(kinds, jnp), True, separate_full, False)


def _sorted_by_kind(kinds: Any, xp: Any) -> Any:
    is_partial, is_full = kinds == 1, kinds == 2
    rank = xp.where(is_partial, 0, xp.where(is_full, 1, 2))
    order = xp.argsort(rank, axis=-1, stable=True).astype(np.int32)
    partial = 2 + is_partial.sum(-1, keepdims=True).astype(np.int32)
    both = partial + is_full.sum(-1, keepdims=True).astype(np.int32)
    return xp.concatenate([partial, both, order], -1)


class TilePosition(NamedTuple):
    """A tile's position: batch row, first head and number of heads, query block, kv block."""

    batch: Any
    head: Any
    heads: int
    q_block: Any
    kv_block: Any


class TileSource:
    """Cuts the mask, the bias and the dropout of one tile out of the whole.

    in_place: nothing is padded along the keys. The last tile ends where they do, and nothing is visible of what it has in common
    with the tile before it.
    """

    def __init__(
        self,
        mask: LocalMask,
        dropout: Dropout | None,
        block_q: int,
        block_kv: int,
        *,
        tables: int = 1,
        every_tile: bool = False,  # also those without visible keys are cut
        in_place: bool = False,
    ) -> None:
        self.mask, self.dropout, self.block_q, self.block_kv = mask, dropout, block_q, block_kv
        self.in_place = in_place
        rows = -(-mask.q_len // block_q) * block_q
        # For a single block the mask is enough: it is visited whatever it sees.
        settle = not every_tile and not surely(lambda: mask.kv_len <= block_kv)
        words = iter(block_words(mask, block_q, block_kv, rows, tables, settle=settle))

        def padded(atom: Mask) -> Mask:
            if not is_blocks(atom):
                return self._pad_atom(atom)
            leaf_words = next(words)
            return Full() if leaf_words is None else _Words(leaf_words)

        self._padded = mask.mask.map_leaves(padded)

    def seen(self, tile: TilePosition) -> jax.Array | None:
        """Which weights of the tile are visible: bool [1 | heads, block_q, block_kv]; None for all."""
        mask = self._padded.map_leaves(lambda atom: self._cut_atom(atom, tile))
        rows, cols = self._indices(tile)
        seen = None
        if not isinstance(mask, Full):
            offset = 0 if self.mask.query_offset is None else self.mask.query_offset
            if not isinstance(offset, int):
                offset = lax.squeeze(cut_along(offset, tile.batch, 1), (0,))
            rows = shifted(rows, self.mask.q_start)
            seen = mask.test(rows, shifted(rows, offset), shifted(cols, self.mask.k_start))
            seen = seen[0] if seen.ndim == 4 else seen[None]
        if self.mask.kv_len % self.block_kv != 0:
            inside = cols >= tile.kv_block * self.block_kv if self.in_place else cols < length(self.mask.kv_len)
            inside = inside[None]
            seen = inside if seen is None else seen & inside
        return seen

    def first_key(self, kv_block: Any) -> Any:
        """The first key of a tile."""
        first = kv_block * self.block_kv
        if not self.in_place or self.mask.kv_len % self.block_kv == 0:
            return first
        last = self.mask.kv_len - self.block_kv
        return min(first, last) if isinstance(first, int) else jnp.minimum(first, np.int32(last))

    def places(self, tile: TilePosition) -> tuple[jax.Array, jax.Array]:
        """The positions of the tile's queries, int32 [block_q, 1], and of its keys [1, block_kv]."""
        rows, cols = self._indices(tile)
        offset = 0 if self.mask.query_offset is None else self.mask.query_offset
        if not isinstance(offset, int):
            offset = lax.squeeze(cut_along(offset, tile.batch, 1), (0,))
        return shifted(shifted(rows, self.mask.q_start), offset), shifted(cols, self.mask.k_start)

    def positions(self, tile: TilePosition) -> tuple[jax.Array, jax.Array]:
        """The same from the mask's Positions: [1, block_q] and [1, block_kv]."""
        (leaf,) = (leaf for leaf in self._padded.conjuncts() if leaf.kind == "positions")
        return self._cut_atom(leaf, tile).arrays()

    def keep(self, tile: TilePosition) -> jax.Array | None:
        """Which weights dropout keeps: bool [heads, block_q, block_kv]; None without dropout."""
        if self.dropout is None:
            return None
        rows, cols = self._indices(tile)
        heads = numbers((tile.heads, 1, 1), 0, tile.head)
        return self.dropout.keep(tile.batch, heads, rows[None], cols[None])

    def pad(self, array: jax.Array) -> jax.Array:
        """Pad [batch, heads, q, kv] to whole blocks; dimensions of 1 are kept, because they apply to all."""
        return self._pad(array, ("batch", "heads", "q", "kv"), broadcasts=True)

    def cut(self, array: jax.Array, tile: TilePosition) -> jax.Array:
        """The tile of a padded [batch, heads, q, kv]: [1 | heads, 1 | block_q, 1 | block_kv]."""
        return self._cut(array, ("batch", "heads", "q", "kv"), tile, broadcasts=True)[0]

    def start(self, array: jax.Array, tile: TilePosition) -> tuple[Any, ...]:
        """Where that tile begins."""
        return self._place(array, ("batch", "heads", "q", "kv"), tile, broadcasts=True)[0]

    def _indices(self, tile: TilePosition) -> tuple[jax.Array, jax.Array]:
        rows = numbers((self.block_q, 1), 0, tile.q_block * self.block_q)
        cols = numbers((1, self.block_kv), 1, self.first_key(tile.kv_block))
        return rows, cols

    def _pad_atom(self, atom: Mask) -> Mask:
        arrays = [
            self._pad(jnp.asarray(x), dims, atom.kind == "dense_mask")
            for x, (_, _, dims) in zip(atom.arrays(), atom.parts, strict=True)
        ]
        return _refill(atom, arrays)

    def _cut_atom(self, atom: Mask, tile: TilePosition) -> Mask:
        if isinstance(atom, _Words):
            return EvaluatedLeaf(self._seen_blocks(atom.block_words, tile))
        arrays = [
            self._cut(x, dims, tile, atom.kind == "dense_mask")
            for x, (_, _, dims) in zip(atom.arrays(), atom.parts, strict=True)
        ]
        return _refill(atom, arrays)

    def _seen_blocks(self, block_words: BlockWords, tile: TilePosition) -> jax.Array:
        """A leaf of blocks evaluated on the tile: bool [1, heads | 1, block_q, block_kv | 1]."""
        batch, heads, _, words, _ = block_words.words.shape
        starts = (tile.batch if batch != 1 else 0, tile.head if heads > 1 else 0, tile.kv_block, 0)
        sizes = (1, tile.heads if heads > 1 else 1, 1, words, self.block_q)
        part = cut(block_words.words, (*starts, tile.q_block * self.block_q), sizes)
        rows = [lax.index_in_dim(part, n, axis=3, keepdims=False)[:, :, 0, :, None] for n in range(words)]
        _, cols = self._indices(tile)
        first = shifted(tile.kv_block * self.block_kv, self.mask.k_start)
        return block_words.seen(rows, shifted(cols, self.mask.k_start)[None, None], first)

    def _pad(self, array: jax.Array, dims: tuple[str, ...], broadcasts: bool) -> jax.Array:
        blocks = {"q": self.block_q, "kv": 1 if self.in_place else self.block_kv}
        short = [
            0 if broadcasts and size == 1 else -(-size // (block := blocks.get(dim, 1))) * block - size
            for dim, size in zip(dims, array.shape, strict=True)
        ]
        return jnp.pad(array, [(0, n) for n in short]) if any(short) else array

    def _cut(self, array: jax.Array, dims: tuple[str, ...], tile: TilePosition, broadcasts: bool) -> jax.Array:
        starts, sizes = self._place(array, dims, tile, broadcasts)
        return cut(array, starts, sizes)

    def _place(
        self, array: jax.Array, dims: tuple[str, ...], tile: TilePosition, broadcasts: bool
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        where = {
            "batch": (tile.batch, 1),
            "heads": (tile.head, tile.heads),
            "q": (tile.q_block * self.block_q, self.block_q),
            "kv": (self.first_key(tile.kv_block), self.block_kv),
        }
        static_args = [
            (0, 1) if broadcasts and size == 1 else where[dim] for dim, size in zip(dims, array.shape, strict=True)
        ]
        return tuple(start for start, _ in static_args), tuple(size for _, size in static_args)


class _Words(Mask):
    """Replaces a leaf of blocks: its words."""

    kind = "words"

    def __init__(self, block_words: BlockWords) -> None:
        self.block_words = block_words


def _refill(atom: Mask, arrays: list[jax.Array]) -> Mask:
    """The same leaf over other arrays; a leaf without arrays is unchanged."""
    return atom.slot().fill(arrays) if arrays else atom
