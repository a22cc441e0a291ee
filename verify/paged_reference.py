"""The definition of paged attention in float64 NumPy: gathers keys and values from their pages, then calls `reference`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..masks.page_mask import PageMask
from ..scores import Score
from .closeness import output_size
from .reference import reference_attention

__all__ = ["PagedReference", "paged_reference", "tokens_of"]


class PagedReference(NamedTuple):
    """output [tokens, heads, value_dim], lse [tokens, heads]; `sizes` of the output's rows, for verify.closeness."""

    output: np.ndarray
    lse: np.ndarray
    sizes: np.ndarray


def paged_reference(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    *,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    score: Score | None = None,
    captures: Mapping[str, Any] | None = None,
    key_scale: np.ndarray | float | None = None,
    value_scale: np.ndarray | float | None = None,
    selected: np.ndarray | None = None,
    draft_tree: np.ndarray | None = None,
    spans: np.ndarray | None = None,
    prefix_lengths: np.ndarray | None = None,
    q_positions: np.ndarray | None = None,
) -> PagedReference:
    """Attend sequence by sequence. Shapes and meaning as in `operators.kernels.pages.paged.paged_attention`.

    Only pages with a key inside the window and the chunk of the sequence's first query are read; an out-of-range id among them
    raises IndexError. A token of a tree of drafts attends as the last token of the sequence that its path is.
    Tokens of one span, and those of a prefix, see one another whatever the mask. q_positions: of queries, for a score that reads
    no others; default: their places.
    """
    tokens, heads, _ = query.shape
    output = np.zeros((tokens, heads, value_pages.shape[-1]))
    sizes, lse = np.zeros_like(output), np.full((tokens, heads), -np.inf)
    mask = PageMask(causal, *(sliding_window or (None, None)), chunk_size)
    for s in range(int(num_seqs)):
        rows, length = slice(int(cu_q_lens[s]), int(cu_q_lens[s + 1])), int(kv_lens[s])
        q_len = rows.stop - rows.start
        if not q_len:
            continue
        first = length - q_len
        own_spans = np.zeros((q_len, 0, 2), np.int64) if spans is None else np.asarray(spans)[rows, None]
        if prefix_lengths is not None:
            prefix = np.broadcast_to([0, int(prefix_lengths[s])], (q_len, 1, 2))
            own_spans = np.concatenate([own_spans, prefix], axis=1)
        place = np.arange(first, length)[:, None]
        inside = (own_spans[..., 0] <= place) & (place < own_spans[..., 1])
        own_spans = np.where(inside[..., None], own_spans, length)  # none
        begin = min(_first_key(mask, first), own_spans[..., 0].min(initial=length))
        paths = [(rows, np.arange(begin, length))]
        if draft_tree is not None and np.any(draft_tree[s]):
            stored, tree = np.arange(begin, first), np.asarray(draft_tree[s])
            paths = [
                (slice(rows.start + i, rows.start + i + 1), np.append(stored, first + np.flatnonzero(tree[i])))
                for i in range(q_len)
            ]
        for own, slots in paths:
            key = _tokens_at(key_pages, key_scale, page_table[s], slots)
            value = _tokens_at(value_pages, value_scale, page_table[s], slots)
            end = begin + len(slots)
            visible = _visible(mask, np.arange(end - (own.stop - own.start), end), np.arange(begin, end))
            of_rows = own_spans[own.start - rows.start : own.stop - rows.start]
            visible |= ((slots >= of_rows[..., :1]) & (slots < of_rows[..., 1:])).any(axis=1)
            if selected is not None:
                visible &= np.stack([np.isin(slots, chosen) for chosen in selected[own]])
            parts = [(own, end - (own.stop - own.start))]
            if q_positions is not None:  # a score has one offset for all rows that follow one another
                parts = [(slice(n, n + 1), int(q_positions[n])) for n in range(own.start, own.stop)]
            for part, position in parts:
                result = reference_attention(
                    query[None, part],
                    key[None],
                    value[None],
                    scale=softmax_scale,
                    mask=visible[part.start - own.start : part.stop - own.start],
                    soft_cap=logits_soft_cap,
                    sinks=sinks,
                    score=score,
                    captures=captures,
                    query_offset=position,
                    key_offset=begin,
                )
                output[part], lse[part] = result.output[0], result.lse[0].T
                sizes[part] = output_size(result.weights, value[None])[0]
    return PagedReference(output, lse, sizes)


def _first_key(mask: PageMask, position: int) -> int:
    """The first key that a query at a position, or a later one, sees."""
    begin = 0 if mask.left is None else max(0, position - mask.left)
    return begin if mask.chunk is None else max(begin, position // mask.chunk * mask.chunk)


def _visible(mask: PageMask, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which keys the rows see, by positions: bool [rows, keys]."""
    row, col = rows[:, None], keys[None, :]
    seen = np.ones((len(rows), len(keys)), bool)
    if mask.causal:
        seen &= col <= row
    if mask.left is not None:
        seen &= col >= row - mask.left
    if mask.right is not None:
        seen &= col <= row + mask.right
    if mask.chunk is not None:
        seen &= col // mask.chunk == row // mask.chunk
    return seen


def tokens_of(
    pages: np.ndarray, scale: np.ndarray | float | None, table: np.ndarray, begin: int, end: int
) -> np.ndarray:
    """The keys (or values) of a sequence's tokens, [end - begin, kv_heads, dim], times their scale."""
    return _tokens_at(pages, scale, table, np.arange(begin, end))


def _tokens_at(
    pages: np.ndarray, scale: np.ndarray | float | None, table: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """The same of those at some places."""
    page = pages.shape[1]
    ids = np.asarray(table)[places // page]
    if len(ids) and not (ids.min() >= 0 and ids.max() < len(pages)):
        raise IndexError(f"page ids {ids.min()} to {ids.max()} among the sequence's keys; wanted 0 to {len(pages) - 1}")
    wide = np.asarray(pages)[ids, places % page].astype(np.float64)
    if scale is None:
        return wide
    scale = np.asarray(scale, np.float64)
    return (
        wide * (scale[ids, places % page] if scale.ndim == 3 else np.broadcast_to(scale, pages.shape[2:3]))[..., None]
    )
