"""The k greatest of each row, exactly and in an order of their own: by score, then by position.

Scores become unsigned integers in the same order (`ordered`). The k-th greatest is found bit by bit, by counting; a row is never
sorted. What is chosen is kept as bits, and positions are read from these, so that they ascend.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

__all__ = ["WORD", "greatest", "least_chosen", "nth_bit", "ordered", "packed", "positions_of", "without_later_bits"]

WORD = 32
_HIGHEST = 0x80000000
_NAN = 1


def ordered(scores: Float[Array, "*shape"], visible: Bool[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Float32 scores as integers in the same order, 0 where not visible. -0 equals 0, and NaN is less than any number."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, jnp.zeros_like(scores), scores), jnp.uint32)
    order = jnp.where(bits >= jnp.uint32(_HIGHEST), ~bits, bits | jnp.uint32(_HIGHEST))
    order = jnp.where(jnp.isnan(scores), jnp.uint32(_NAN), order)
    return jnp.where(visible, order, jnp.uint32(0))


def least_chosen(
    count: Callable[[UInt32[Array, " rows"]], Int[Array, " rows"]], wanted: int, visible: Int[Array, " rows"]
) -> tuple[UInt32[Array, " rows"], Int[Array, " rows"]]:
    """(the greatest number that at least that many of a row's reach, how many of a row are chosen).

    count: how many numbers of each row are at least this. visible: how many are visible; if these are no more than `wanted`, all
    are chosen.
    """
    chosen = jnp.minimum(visible, wanted)
    few = visible <= wanted
    Carry = tuple[Array, Array, Array]

    def unfinished(carry: Carry) -> Array:
        bit, _, reached = carry
        return (bit != 0) & (reached != chosen).any()

    def step(carry: Carry) -> Carry:
        bit, least, reached = carry
        tried = least | bit
        new = count(tried)
        kept = (new >= chosen) & (reached != chosen)
        return bit >> jnp.uint32(1), jnp.where(kept, tried, least), jnp.where(kept, new, reached)

    least = jnp.where(few, jnp.uint32(1), jnp.uint32(0))
    reached = jnp.where(few, chosen, jnp.int32(jnp.iinfo(jnp.int32).max))
    first = (jnp.zeros_like(least[0]) + jnp.uint32(_HIGHEST), least, reached)
    return lax.while_loop(unfinished, step, first)[1], chosen


def packed(x: Bool[Array, "*rows n"]) -> UInt32[Array, "*rows words"]:
    """Bits, 32 to a word, the first one lowest; n is a multiple of 32."""
    words = x.reshape(*x.shape[:-1], x.shape[-1] // WORD, WORD)
    shifts = lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
    return jnp.where(words, jnp.uint32(1) << shifts, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)


def nth_bit(words: UInt32[Array, "*shape"], n: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The place of the n-th bit that is set, from 1; 31 if there are fewer."""
    place = jnp.zeros_like(n)
    for width in (16, 8, 4, 2, 1):
        part = (words >> place.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        below = lax.population_count(part).astype(jnp.int32)
        further = below < n
        place = jnp.where(further, place + width, place)
        n = jnp.where(further, n - below, n)
    return place


def without_later_bits(words: UInt32[Array, "rows words"], most: Int[Array, " rows"]) -> UInt32[Array, "rows words"]:
    """The first bits of each row: no more than `most` stay set."""
    counts = lax.population_count(words).astype(jnp.int32)
    left = jnp.clip(most[:, None] - (jnp.cumsum(counts, 1) - counts), 0, counts)
    last = nth_bit(words, left).astype(jnp.uint32)
    upto = jnp.uint32(0xFFFFFFFF) >> (jnp.uint32(WORD - 1) - last)
    return jnp.where(left == 0, jnp.uint32(0), words & upto)


def positions_of(words: UInt32[Array, "rows words"], slots: int) -> Int[Array, "rows slots"]:
    """The places of the bits that are set, ascending; -1 in the slots that are left."""
    counts = jnp.cumsum(lax.population_count(words).astype(jnp.int32), 1)
    number = lax.broadcasted_iota(jnp.int32, (words.shape[0], slots), 1) + 1
    # The first word up to which there are that many, by bisection.
    word = jnp.zeros_like(number)
    width = 1 << (words.shape[1] - 1).bit_length() >> 1
    while width:
        before = jnp.minimum(word + (width - 1), words.shape[1] - 1)
        word = jnp.where(_at(counts, before) < number, word + width, word)
        width >>= 1
    word = jnp.minimum(word, words.shape[1] - 1)
    before = jnp.where(word == 0, 0, _at(counts, jnp.maximum(word - 1, 0)))
    place = word * WORD + nth_bit(_at(words, word), number - before)
    return jnp.where(number <= counts[:, -1:], place, -1)


def greatest(order: UInt32[Array, "*rows n"], k: int) -> Bool[Array, "*rows n"]:
    """The k greatest of `ordered` numbers, of equal ones the first; never one that isn't visible."""
    n = order.shape[-1]
    rows = order.reshape(-1, n)

    def count(least: Array) -> Array:
        return (rows >= least[:, None]).sum(1, dtype=jnp.int32)

    least, chosen = least_chosen(count, k, (rows > 0).sum(1, dtype=jnp.int32))
    more, equal = rows > least[:, None], rows == least[:, None]
    left = chosen - more.sum(1, dtype=jnp.int32)
    equal = equal & (jnp.cumsum(equal.astype(jnp.int32), 1) <= left[:, None])
    return ((more | equal) & (rows > 0)).reshape(order.shape)


def _at(x: jax.Array, place: Int[Array, "rows slots"]) -> jax.Array:
    return jnp.take_along_axis(x, place, axis=1, mode="promise_in_bounds")
