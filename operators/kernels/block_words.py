"""Blocks in a tile: which of the mask's blocks a row sees, as the bits of a word for each block of the kernel's keys.

A kernel's tile may cover several of the mask's blocks, or begin in the middle of one. One word per row and the number of the
tile's first block are enough: a weight is one shift and one bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...masks import Blocks, ChosenBlocks, Mask
from .local_mask import LocalMask

__all__ = ["BlockWords", "block_words", "is_blocks", "seen_by_words"]

_BITS = 32


class BlockWords(NamedTuple):
    """words: int32 [batch | 1, heads | 1, kv blocks of the kernel, words, rows]; size: keys of a block of the mask.

    bits: the most blocks of the mask that a block of the kernel's keys touches.
    """

    words: jax.Array
    size: int
    bits: int

    def seen(self, words: list[Any], keys: Any, first_key: Any) -> Any:
        """Whether rows see keys, from the rows' words. first_key: the tile's first key, numbered in the whole problem, like the
        keys."""
        return (words[0] & 1) != 0 if self.bits == 1 else seen_by_words(words, keys, first_key, self.size)


def is_blocks(atom: Mask) -> bool:
    """Whether a leaf, or its replacement, is one of blocks."""
    return atom.kind in (Blocks.kind, ChosenBlocks.kind)


def seen_by_words(words: list[Any], keys: Any, first_key: Any, size: int) -> Any:
    """See BlockWords.seen; also used inside kernels."""
    block = _divided(keys, size) - _divided(first_key, size)
    word = words[0]
    for number in range(1, len(words)):
        word = jnp.where(block >= number * _BITS, words[number], word)
    return ((word >> (block & (_BITS - 1))) & 1) != 0


def block_words(
    mask: LocalMask, block_q: int, block_kv: int, rows: int, tables: int, *, settle: bool = True
) -> tuple[BlockWords | None, ...]:
    """The words of each leaf of blocks, in the mask's order; None where every visited tile is fully visible to that leaf.

    rows: the queries, padded. tables: groups of heads whose tiles are visited separately. settle: False if tiles
    without visible keys are visited as well.
    """
    leaves = [atom for atom in mask.mask.leaves() if is_blocks(atom)]
    settled = [
        atom
        for atom in mask.mask.conjuncts()
        if settle and is_blocks(atom) and _whole_tiles(atom, mask, block_q, block_kv) and atom.heads in (1, tables)  # type: ignore[attr-defined]
    ]
    return tuple(
        None if any(leaf is settled_leaf for settled_leaf in settled) else _words(leaf, mask, block_kv, rows)
        for leaf in leaves
    )


def _whole_tiles(leaf: Any, mask: LocalMask, block_q: int, block_kv: int) -> bool:
    """Whether each tile lies in one block of the mask."""
    places = (mask.q_start, leaf.block_q, block_q), (mask.k_start, leaf.block_kv, block_kv)
    return all(isinstance(start, int) and size % tile == 0 and start % tile == 0 for start, size, tile in places)


def _words(leaf: Any, mask: LocalMask, block_kv: int, rows: int) -> BlockWords:
    size = leaf.block_kv
    tiles = -(-mask.kv_len // block_kv)
    starts = np.arange(tiles, dtype=np.int32) * block_kv
    base: Any = (starts + mask.k_start) // size
    if isinstance(mask.k_start, int):
        last = (np.minimum(starts + block_kv, mask.kv_len) - 1 + mask.k_start) // size
        bits, count = int((last - base).max()) + 1, int(last[-1] - base[0]) + 1
    else:  # if the first key is traced, its block may be cut anywhere
        bits, count = (block_kv + size - 2) // size + 1, (tiles * block_kv + size - 2) // size + 1
    table = jnp.asarray(leaf.table(base[0] if not isinstance(base, np.ndarray) else int(base[0]), count + bits))
    numbers = jnp.arange(rows, dtype=jnp.int32) + mask.q_start
    table = jnp.take(table, jnp.minimum(numbers // leaf.block_q, table.shape[2] - 1), axis=2)
    number = math.ceil(bits / _BITS)
    words_of_tiles = []
    for word in range(number):
        packed = jnp.zeros((*table.shape[:3], tiles), jnp.uint32)
        for bit in range(min(_BITS, bits - word * _BITS)):
            cells = jnp.take(table, base - base[0] + word * _BITS + bit, axis=3)
            packed = packed | (cells.astype(jnp.uint32) << bit)
        words_of_tiles.append(packed)
    words = lax.bitcast_convert_type(
        jnp.stack(words_of_tiles, axis=-1), jnp.int32
    )  # [batch, heads, rows, tiles, words]
    return BlockWords(words.transpose(0, 1, 3, 4, 2), size, bits)


def _divided(x: Any, size: int) -> Any:
    """x // size for numbers that aren't negative."""
    if size & (size - 1) == 0:
        return x >> (size.bit_length() - 1)
    return lax.div(x, jnp.full_like(x, size)) if isinstance(x, jax.Array) else x // size
