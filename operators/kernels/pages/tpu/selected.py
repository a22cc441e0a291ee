"""Keys that each token names: which pieces of pages hold them, made by XLA, and what the kernel for single rows reads of it.

A piece is a few tokens of a page, as many as a copy can begin and end at. Each token's list has the pieces that hold its keys,
each once, and a bit for each token of a piece.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..paged_selected import places_of, seen_places
from ..paged_step import Batch, PagedOperands, PagedStatic, Tiles
from .geometry import LANES, Geometry, Options, row_places
from .softmax import divided
from .work_items import FIELDS, WorkItem, compact

__all__ = ["MAX_PIECES", "Chosen", "by_pieces", "chosen_items", "piece_of", "row_words", "rows_of_items"]

BITS, _SHIFT = 32, 5
MAX_PIECES = 128  # in a block: each is a copy of its own in the program
# Fewer tokens mean more copies, of 4 to 7 cycles each: on a v5e a block of 128 pieces of latents takes 5901 cycles with 16
# tokens a piece, 3744 with 8, 3273 with 4.
_TOKENS = 8
_NONE = np.int32(np.iinfo(np.int32).max)


def by_pieces(geometry: Geometry, options: Options) -> tuple[Geometry, Options]:
    """The call as its kernel sees it: a row for each token, whose pages are pieces of the stored ones. A block has as many keys
    as one of `pages_per_block` pages, if these aren't more than MAX_PIECES pieces."""
    size = piece_tokens(geometry)
    pieces = max(1, min(options.pages_per_block * geometry.page // size, MAX_PIECES, geometry.selected))
    walked = replace(geometry, page=size, stored_page=geometry.page, sequences=geometry.tokens, width=geometry.selected)
    seen: dict[str, Any] = {"causal": False, "left": None, "right": None, "chunk": None, "max_q_len": 1, "stride": 1}
    return walked, replace(options, **seen, pages_per_block=pieces, writes=False, drafts=0, spans=False)


def piece_tokens(geometry: Geometry) -> int:
    """Tokens of a piece: one where a page has all rows of a token together, unless scales by token are read beside them; else
    so many as a copy of rows of any dtype can begin and end at. A page that isn't a whole number of these is one piece."""
    alone = geometry.tokens_first and 3 not in (geometry.key_scale, geometry.value_scale)
    size = 1 if alone else _TOKENS
    return geometry.page if geometry.page % size else size


def piece_of(geometry: Geometry, number: Any) -> tuple[Any, Any]:
    """(page, its place among the pieces of this) of a piece by its number among all."""
    pieces = geometry.pieces
    if pieces & (pieces - 1):
        page = lax.div(number, np.int32(pieces))
    else:
        page = lax.shift_right_logical(number, np.int32(pieces.bit_length() - 1))
    return page, number - page * np.int32(pieces)


def row_words(geometry: Geometry) -> int:
    """Words of a token's row: its pieces, then the bits of their tokens, to whole rows of 128 words."""
    size = geometry.page
    # The last block may end after the last piece; the bits that it reads there are none's.
    bits = 0 if size == 1 else -(-geometry.selected * size // BITS) + MAX_PIECES * size // BITS + 2
    return -(-(geometry.selected + bits) // LANES) * LANES


class _Pieces(NamedTuple):
    """Of each token. rows int32 [tokens, 1, row_words]; counts [tokens]: its pieces; keys [tokens]: up to where they hold numbers
    of its sequence, if one of them has the sequence's end inside, else 0."""

    rows: jax.Array
    counts: jax.Array
    keys: jax.Array


def chosen_items(
    geometry: Geometry,
    static: PagedStatic,
    operands: PagedOperands,
    batch: Batch,
    seq: jax.Array,
    row: jax.Array,
    real: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(words, count, bool [tokens] whether in the list, rows) of the tokens that see a key among those that they name; geometry
    as of `by_pieces`; seq, row, real: each token's sequence, its place there, and whether it has one."""
    pieces = _pieces(geometry, static, operands, batch, seq, row)
    attends = real if static.max_q_len is None else real & (row < static.max_q_len)
    listed = attends & (pieces.counts > 0)
    token, zeros = jnp.arange(geometry.tokens, dtype=np.int32), jnp.zeros(geometry.tokens, np.int32)
    item = WorkItem(token, token, zeros, zeros, pieces.counts, pieces.keys, jnp.ones_like(zeros))
    words, count, _ = compact(listed, item)
    return words, count, listed, pieces.rows


def _pieces(
    geometry: Geometry, static: PagedStatic, operands: PagedOperands, batch: Batch, seq: jax.Array, row: jax.Array
) -> _Pieces:
    assert operands.selected is not None
    tiles, size = Tiles(static, operands, few_rows=None), np.int32(geometry.page)
    ids, slot, seen, _ = seen_places(tiles, batch, seq, row, operands.selected)
    page, parts = np.int32(geometry.stored_page), np.int32(geometry.pieces)
    # Sorted, the tokens of a piece are neighbours, and what is there twice too.
    place = lax.sort(jnp.where(seen, ids * page + slot, _NONE), dimension=1)
    piece, inside = lax.div(place, size), lax.rem(place, size)
    first = place != _shifted(place, -1, np.int32(-1))
    last = (place != _NONE) & (piece != lax.div(_shifted(place, 1, _NONE), size))
    number, bit = lax.div(inside, np.int32(BITS)), lax.shift_left(np.int32(1), lax.rem(inside, np.int32(BITS)))
    sums = [
        jnp.cumsum(jnp.where(first & (number == n), bit, 0), axis=1, dtype=np.int32)
        for n in range(-(-geometry.page // BITS))
    ]
    found, *sums = lax.sort((jnp.where(last, piece, _NONE), *sums), dimension=1, num_keys=1)
    there = found != _NONE
    # The bits of a piece, each set once, are what a sum over all tokens grew by; it may wrap around.
    bits = [jnp.where(there, x - _shifted(x, -1, np.int32(0)), 0) for x in sums]
    rows = jnp.concatenate(
        [jnp.where(there, found, 0), *([_words(geometry, bits)] if geometry.page > 1 else [])], axis=1
    )
    rows = jnp.pad(rows, ((0, 0), (0, row_words(geometry) - rows.shape[1])))

    lengths = batch.kv_lens.at[seq].get(mode="promise_in_bounds")
    end_id, end_slot, end_there = (x[:, 0] for x in places_of(tiles, seq, lengths[:, None] - 1))
    at_end = there & end_there[:, None] & (found == (end_id * parts + lax.div(end_slot, size))[:, None])
    tail = lax.rem(end_slot, size) + 1
    which = jnp.argmax(at_end, axis=1).astype(np.int32)
    keys = jnp.where(at_end.any(axis=1) & (tail < size), which * size + tail, 0)
    return _Pieces(rows[:, None], there.sum(axis=1, dtype=np.int32), keys)


def _shifted(x: jax.Array, by: int, fill: Any) -> jax.Array:
    """Along the second axis, by 1 to the left or by -1 to the right."""
    edge = jnp.full((x.shape[0], 1), fill, x.dtype)
    return jnp.concatenate([x[:, 1:], edge] if by > 0 else [edge, x[:, :-1]], axis=1)


def _words(geometry: Geometry, bits: list[jax.Array]) -> jax.Array:
    """Bits of each piece's tokens, in `bits` 32 of each piece, as bits of all pieces' tokens one after the other."""
    size, (tokens, count) = geometry.page, bits[0].shape
    if size % BITS == 0:
        return jnp.stack(bits, axis=2).reshape(tokens, -1)
    each = BITS // size if BITS % size == 0 else BITS
    bits = [jnp.pad(x, ((0, 0), (0, -count % each))) for x in bits]
    if BITS % size == 0:
        parts = (lax.shift_left(bits[0][:, n::each], np.int32(n * size)) for n in range(each))
        return functools.reduce(operator.or_, parts)
    at = jnp.arange(size, dtype=np.int32)[None, None]
    each_bit = [lax.shift_right_logical(x[:, :, None], at[..., : size - BITS * n]) & 1 for n, x in enumerate(bits)]
    every = jnp.concatenate([x[..., :BITS] for x in each_bit], axis=2).reshape(tokens, -1, BITS)
    return lax.shift_left(every, jnp.arange(BITS, dtype=np.int32)[None, None]).sum(axis=2, dtype=np.int32)


def rows_of_items(rows: jax.Array) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """The row of each work item's token, and that of the next one, whose pieces are fetched meanwhile: in scalar memory."""
    block = (None, *rows.shape[1:])

    def row(number: Any, words: Any, *_: Any) -> Any:
        return words[number * FIELDS + 1], 0, 0

    def next_row(number: Any, words: Any, count: Any, *_: Any) -> Any:
        return row(jnp.minimum(number + 1, jnp.maximum(count[0] - 1, 0)), words)

    inputs = {"chosen": row, "chosen_next": next_row}
    memory = pltpu.MemorySpace.SMEM
    return {name: (rows, pl.BlockSpec(block, at, memory_space=memory)) for name, at in inputs.items()}


class Chosen:
    """What the kernel reads of the rows of its work item and of the next one."""

    def __init__(self, geometry: Geometry, refs: dict[str, Any]) -> None:
        self.geometry, self.here, self.next = geometry, refs["chosen"], refs["chosen_next"]
        self.number = pl.program_id(0)
        self.known = self.number + 2  # one past the last item whose pieces are known here

    def id(self, number: Any, at: Any) -> Any:
        """The number of an item's piece `at` among all pieces; the item is this one or the next."""
        return jnp.where(number == self.number, self.here[0, at], self.next[0, at])

    def offset(self, at: Any) -> Any:
        """The place in its page of the first token of this item's piece `at`."""
        _, piece = piece_of(self.geometry, self.here[0, jnp.minimum(at, self.geometry.width - 1)])
        return piece * np.int32(self.geometry.page)

    def keys(
        self, block: int, first: Any, end: Any, lanes: int = 1, order: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(places of the keys of the block of pieces from `first` on, which of them are chosen), as of `live_keys`."""
        size = self.geometry.page
        shape = (1, block * size * lanes)
        place = divided(lax.broadcasted_iota(jnp.int32, shape, 1) if order is None else order, lanes)
        if size == 1:
            return place, place + first < end
        return place, self._bits(place, block * size, first)

    def _bits(self, place: jax.Array, keys: int, first: Any) -> jax.Array:
        """Whether the keys at `place`, of so many from piece `first` on, are chosen."""
        start = first * np.int32(self.geometry.page)
        place, begin = place + start, lax.shift_right_logical(start, np.int32(_SHIFT))
        number, word = lax.shift_right_logical(place, np.int32(_SHIFT)), jnp.zeros_like(place)
        aligned = keys % BITS == 0  # so is the first key of each block
        for n in range(keys // BITS + (0 if aligned else 2)):
            word = jnp.where(number == begin + n, self.here[0, self.geometry.width + begin + n], word)
        return (lax.shift_right_logical(word, place & np.int32(BITS - 1)) & 1) == 1

    def clear_others(self, name: str, buffer: Any, first: Any) -> None:
        """Set the numbers of a block's tokens that aren't chosen to 0, in its buffer [pieces, ...]."""
        geometry = self.geometry
        axis = 0 if geometry.tokens_first else 1

        def clear(i: Any, _: None) -> None:
            wide = buffer[i]
            wide = wide if wide.dtype == jnp.float32 else wide.astype(jnp.float32)
            inside = row_places(wide.shape, axis, in_tiles=geometry.in_tiles(name))
            chosen = self._bits(inside, geometry.page + 1, first + i)
            buffer[i] = jnp.where(chosen, wide, 0.0).astype(buffer.dtype)

        lax.fori_loop(np.int32(0), np.int32(buffer.shape[0]), clear, None)
