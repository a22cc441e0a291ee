"""Arrays of a declared step that depend on its batch: which keys, drafts and span tokens its tokens see, and their positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..paged_cache.batch import RaggedBatch

__all__ = ["drawn_positions", "drawn_selection", "drawn_tree", "spans_of_tokens"]

_FURTHER = 4  # how far a drawn position may be from the token's place


class _Row(NamedTuple):
    """A sequence of a step: its number among the rows of all shards, its first token in the arrays, the position of that token,
    and its tokens."""

    number: int
    token: int
    position: int
    tokens: int


def _rows(batch: RaggedBatch, tokens: int) -> Iterator[_Row]:
    """tokens: the length of the token arrays."""
    shards = batch.shards or 1
    starts, lengths, counts = (
        np.asarray(x).reshape(shards, -1) for x in (batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    )
    for shard in range(shards):
        for row in range(int(counts[shard, 0])):
            first, last = (int(n) for n in starts[shard, row : row + 2])
            place = int(lengths[shard, row]) - (last - first)
            yield _Row(shard * lengths.shape[1] + row, shard * (tokens // shards) + first, place, last - first)


def drawn_selection(random: np.random.Generator, shape: tuple[int, ...], batch: RaggedBatch) -> np.ndarray:
    """int32 [tokens, n]: positions of each token's sequence up to its own, each once, then -1."""
    selected = np.full(shape, -1, np.int32)
    for row in _rows(batch, shape[0]):
        for n in range(row.tokens):
            seen = row.position + n + 1
            chosen = random.choice(seen, min(seen, shape[1]), replace=False)
            selected[row.token + n, : len(chosen)] = chosen
    return selected


def drawn_positions(random: np.random.Generator, shape: tuple[int, ...], batch: RaggedBatch) -> np.ndarray:
    """int32 [tokens]: each token's place in its sequence, or a few further."""
    positions = random.integers(0, _FURTHER, shape, dtype=np.int32)
    for row in _rows(batch, shape[0]):
        positions[row.token : row.token + row.tokens] += row.position + np.arange(row.tokens, dtype=np.int32)
    return positions


def drawn_tree(random: np.random.Generator, shape: tuple[int, ...], batch: RaggedBatch, tokens: int) -> np.ndarray:
    """bool [rows, drafts, drafts]: each draft sees itself, a parent before it and what that sees. Rows with more tokens have no
    tree, and no True. tokens: the length of the token arrays."""
    tree = np.zeros(shape, bool)
    for row in _rows(batch, tokens):
        if row.tokens > shape[1]:
            continue
        matrix = tree[row.number]
        for draft in range(row.tokens):
            if draft:
                matrix[draft] = matrix[random.integers(draft)]
            matrix[draft, draft] = True
    return tree


def spans_of_tokens(shape: tuple[int, ...], batch: RaggedBatch, length: int) -> np.ndarray:
    """int32 [tokens, 2]: spans of so many tokens, one after the other from a sequence's first token in the step on."""
    spans = np.zeros(shape, np.int32)
    for row in _rows(batch, shape[0]):
        begin: Any = row.position + np.arange(row.tokens) // length * length
        end = np.minimum(begin + length, row.position + row.tokens)
        spans[row.token : row.token + row.tokens] = np.stack([begin, end], -1)
    return spans
