"""Which keys the queries of a step over pages see: by position, in a span, and of the step's own tokens by a tree of drafts."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "BITS",
    "NO_KEY",
    "DraftTree",
    "PagedOptions",
    "QueryRows",
    "Spans",
    "chunk_start",
    "has_bit",
    "joined_spans",
    "packed_bits",
    "packed_tree",
    "sees",
    "tree_words",
]

BITS = 32  # drafts per word
NO_KEY = np.int32(np.iinfo(np.int32).max)  # after any key


@dataclass(frozen=True, kw_only=True)
class PagedOptions:
    """How a call weighs keys, and which of them a row may see: inclusive distances, and chunks of positions that don't see one
    another; None for no limit."""

    scale: float
    causal: bool
    left: int | None
    right: int | None
    chunk: int | None = None
    soft_cap: float | None
    max_q_len: int | None

    @property
    def reach(self) -> int | None:
        """How far to the right of itself a row sees."""
        ends = [n for n in (0 if self.causal else None, self.right) if n is not None]
        return min(ends) if ends else None


class DraftTree(NamedTuple):
    """Of each sequence's first D tokens in the step. words int32 [S, D, n]: which of them each sees, a bit for each; depth int32
    [S, D]; used bool [S]: whether the sequence has a tree, as others' tokens see one another by position."""

    words: jax.Array
    depth: jax.Array
    used: jax.Array


class Spans(NamedTuple):
    """Keys that queries see besides those of the mask: for each token, those from `begin` to before `end`, int32 [tokens];
    NO_KEY and 0 where there are none. least int32 [S]: the first of any token of a sequence."""

    begin: jax.Array
    end: jax.Array
    least: jax.Array


class QueryRows(NamedTuple):
    """Queries of sequences. slots int32 [..., queries]: their places in the sequence, below 0 for none; positions: the same, or
    by their depth in a tree. first_draft [...]: the slot from which on `words` [..., queries, n] decide; None without trees.
    begin, end [..., queries]: of the keys that they see besides; None without spans. scored [..., queries]: the positions by
    which a score knows them, if others than these."""

    slots: jax.Array
    positions: jax.Array
    first_draft: jax.Array | None = None
    words: jax.Array | None = None
    begin: jax.Array | None = None
    end: jax.Array | None = None
    scored: jax.Array | None = None


def chunk_start(positions: Any, size: int) -> Any:
    """The first position of the chunk of each; those below 0 see nothing anyway."""
    size = np.int32(size)  # type: ignore[assignment]
    return lax.div(jnp.maximum(positions, 0), size) * size


def sees(options: PagedOptions, keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Whether queries see keys by their positions, which broadcast."""
    tests = [keys <= positions] if options.causal else []
    if options.left is not None:
        tests.append(keys >= positions - options.left)
    if options.right is not None:
        tests.append(keys <= positions + options.right)
    if options.chunk is not None:
        begin = chunk_start(positions, options.chunk)
        tests += [keys >= begin] if options.causal else [keys >= begin, keys < begin + np.int32(options.chunk)]
    if not tests:
        return jnp.ones(jnp.broadcast_shapes(keys.shape, positions.shape), bool)
    return functools.reduce(operator.and_, tests)


def tree_words(drafts: int) -> int:
    """Words per draft."""
    return -(-drafts // BITS)


def packed_tree(options: PagedOptions, tree: jax.Array, first: jax.Array) -> DraftTree:
    """A boolean tree [S, D, D], whose first tokens are at the positions `first` [S]. The mask by position is in the words."""
    depth = jnp.maximum(tree.sum(axis=2, dtype=np.int32) - 1, 0)
    positions = first[:, None] + depth
    bits = tree & sees(options, positions[:, None, :], positions[:, :, None])
    return DraftTree(packed_bits(bits), depth, tree.any(axis=(1, 2)))


def packed_bits(bits: jax.Array) -> jax.Array:
    """Bool [S, D, n] as int32 [S, D, words]."""
    words = tree_words(bits.shape[2])
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, words * BITS - bits.shape[2]))).reshape(*bits.shape[:2], words, BITS)
    weights = np.uint32(1) << np.arange(BITS, dtype=np.uint32)
    packed = (bits.astype(np.uint32) * weights[None, None, None]).sum(axis=3, dtype=np.uint32)
    return lax.bitcast_convert_type(packed, np.int32)


def joined_spans(
    spans: jax.Array | None, prefix: jax.Array | None, slots: jax.Array, seq: jax.Array, sequences: int
) -> Spans:
    """spans int32 [tokens, 2] and the lengths of prefixes [S], one of which may be None, as one span of each token: if it is in
    both, they have it in common. slots int32 [tokens]: each token's place in its sequence seq, below 0 for none."""
    begin, end = jnp.full(slots.shape, NO_KEY), jnp.zeros_like(slots)
    if spans is not None:
        inside = (slots >= spans[:, 0]) & (slots < spans[:, 1]) & (slots >= 0)
        begin, end = jnp.where(inside, spans[:, 0], begin), jnp.where(inside, spans[:, 1], end)
    if prefix is not None:
        length = prefix.at[seq].get(mode="promise_in_bounds")
        inside = (slots >= 0) & (slots < length)
        begin, end = jnp.where(inside, 0, begin), jnp.where(inside, jnp.maximum(end, length), end)
    mine = seq[None] == jnp.arange(sequences, dtype=np.int32)[:, None]
    least = jnp.where(mine, begin[None], NO_KEY).min(axis=1)
    return Spans(begin, end, least)


def has_bit(words: jax.Array, number: jax.Array) -> jax.Array:
    """Bool [..., queries, keys]: whether `words` [..., queries, n] have the bits `number` [..., 1, keys]; others than theirs are
    0."""
    found: Any = False
    for n in range(words.shape[-1]):
        at = number - np.int32(n * BITS)
        bit = (words[..., n][..., None] >> jnp.clip(at, 0, BITS - 1)) & 1
        found |= (bit == 1) & (at >= 0) & (at < BITS)
    return found
