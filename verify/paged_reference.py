"""The definition of paged attention in float64 NumPy: gathers keys and values from their pages, then calls `reference`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

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
) -> PagedReference:
    """Attend sequence by sequence. Shapes and meaning as in `operators.kernels.pages.paged.paged_attention`.

    Only pages with a key inside the window and the chunk of the sequence's first query are read; an out-of-range id among them
    raises IndexError.
    """
    tokens, heads, _ = query.shape
    output = np.zeros((tokens, heads, value_pages.shape[-1]))
    sizes, lse = np.zeros_like(output), np.full((tokens, heads), -np.inf)
    left, right = sliding_window or (None, None)
    for s in range(int(num_seqs)):
        rows, length = slice(int(cu_q_lens[s]), int(cu_q_lens[s + 1])), int(kv_lens[s])
        q_len = rows.stop - rows.start
        if not q_len:
            continue
        begin = 0 if left is None else max(0, length - q_len - left)
        begin = begin if chunk_size is None else max(begin, (length - q_len) // chunk_size * chunk_size)
        key = tokens_of(key_pages, key_scale, page_table[s], begin, length)
        value = tokens_of(value_pages, value_scale, page_table[s], begin, length)
        row, col = np.arange(length - q_len, length)[:, None], np.arange(begin, length)[None, :]
        mask = np.ones((q_len, length - begin), bool)
        if causal:
            mask &= col <= row
        if left is not None:
            mask &= col >= row - left
        if right is not None:
            mask &= col <= row + right
        if chunk_size is not None:
            mask &= col // chunk_size == row // chunk_size
        if selected is not None:
            mask &= np.stack([np.isin(np.arange(begin, length), chosen) for chosen in selected[rows]])
        result = reference_attention(
            query[None, rows],
            key[None],
            value[None],
            scale=softmax_scale,
            mask=mask,
            soft_cap=logits_soft_cap,
            sinks=sinks,
            score=score,
            captures=captures,
            query_offset=length - q_len,
            key_offset=begin,
        )
        output[rows], lse[rows] = result.output[0], result.lse[0].T
        sizes[rows] = output_size(result.weights, value[None])[0]
    return PagedReference(output, lse, sizes)


def tokens_of(
    pages: np.ndarray, scale: np.ndarray | float | None, table: np.ndarray, begin: int, end: int
) -> np.ndarray:
    """The keys (or values) of a sequence's tokens, [end - begin, kv_heads, dim], times their scale."""
    page = pages.shape[1]
    places = np.arange(begin, end)
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
