"""The keys that an indexer selects: for each query the k visible ones with the greatest scores.

The scores of a block of queries stand in memory, never those of all. Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ....errors import InputError, is_whole, shown
from ...kernels.local_mask import LocalMask
from ...kernels.primitives import loop, split_index
from ...kernels.varying import vary, varying
from .best_places import best_places
from .index_scores import check_index, head_scores, index_scores
from .ordering import WORD, ordered
from .row_blocks import block_of, long_enough, put_block
from .visibility import VisibleBlocks, Window, local_mask

__all__ = ["Selection", "top_k_keys"]

_ROW_BYTES = 8 << 20  # the scores of a block of queries
_TILE_BYTES = 8 << 20  # those of each head, of a block of queries and a block of keys
_MOST_ROWS, _MOST_KEYS = 64, 2048


class Selection(NamedTuple):
    """The keys that each query selects: positions int32 [batch, q_len, k], ascending, then -1 for unused slots; counts int32
    [batch, q_len], how many are used."""

    positions: Int[Array, "batch q_len k"]
    counts: Int[Array, "batch q_len"]


def top_k_keys(
    index_query: Shaped[Array, "batch q_len index_heads dim"],
    index_key: Shaped[Array, "batch kv_len dim"],
    weights: Float[Array, "batch q_len index_heads"],
    *,
    k: int,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: Window | None = None,
    query_offset: int | Int[Array, " batch"] = 0,
    q_positions: Int[Array, "batch q_len"] | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    q_segment_ids: Int[Array, "batch q_len"] | None = None,
    kv_segment_ids: Int[Array, "batch kv_len"] | None = None,
    key_scale: Float[Array, "batch kv_len"] | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Selection:
    """Of each query's visible keys exactly the k with the greatest scores, sum over heads of weight * relu(scale * query . key).

    At equal scores the lower position is selected. A score of NaN is less than any number. A query with fewer than k visible keys
    selects them all. Which keys are visible: see `local_mask`. index_key may be int8 or fp8, with key_scale as its unit; so may
    index_query, whose unit belongs in `weights`. Scores are float32. A selection is a constant: it has no gradient.

    block_q, block_kv: queries and keys that are worked on together; block_kv is a multiple of 32.

    Errors: InputError for shapes or sizes that don't fit, InputTypeError for dtypes.
    """
    check_index(index_query, index_key, weights, key_scale)
    batch, q_len, _, _ = index_query.shape
    kv_len = index_key.shape[1]
    if not is_whole(k, 1):
        raise InputError(f"k is {shown(k)}; wanted an int of at least 1, the number of keys to select.")
    mask = local_mask(
        batch,
        q_len,
        kv_len,
        causal=causal,
        sliding_window=sliding_window,
        query_offset=query_offset,
        q_positions=q_positions,
        kv_lengths=kv_lengths,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
    )
    block_q, block_kv = _blocks(index_query.shape[2], q_len, kv_len, block_q, block_kv)
    arrays = lax.stop_gradient((index_query, index_key, weights, key_scale))
    if 0 in (batch, q_len, kv_len):
        return Selection(jnp.full((batch, q_len, k), -1, jnp.int32), jnp.zeros((batch, q_len), jnp.int32))
    return _selected(arrays, mask, k, softmax_scale, block_q, block_kv)


def _blocks(heads: int, q_len: int, kv_len: int, block_q: int | None, block_kv: int | None) -> tuple[int, int]:
    for name, size, unit in (("block_q", block_q, 1), ("block_kv", block_kv, WORD)):
        if size is not None and (not is_whole(size, unit) or size % unit):
            raise InputError(f"{name} is {shown(size)}; wanted a positive multiple of {unit}, or None to choose it.")
    if block_q is None:
        block_q = max(1, min(q_len, _MOST_ROWS, _ROW_BYTES // (4 * max(kv_len, 1))))
    if block_kv is None:
        keys = min(_MOST_KEYS, max(128, _TILE_BYTES // (4 * heads * block_q)), kv_len)
        block_kv = max(WORD, -(-keys // WORD) * WORD)
    return block_q, block_kv


def _selected(
    arrays: tuple[Any, ...], mask: LocalMask, k: int, softmax_scale: float, block_q: int, block_kv: int
) -> Selection:
    query, key, weights, key_scale = arrays
    batch, q_len = query.shape[:2]
    q_blocks, kv_blocks = -(-q_len // block_q), -(-key.shape[1] // block_kv)
    visible = VisibleBlocks(mask, block_q, block_kv)
    axes = varying(arrays)
    query, weights = (long_enough(x, block_q) for x in (query, weights))
    key = long_enough(key, block_kv)
    key_scale = None if key_scale is None else long_enough(key_scale, block_kv)

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return vary(jnp.zeros(shape, dtype), axes)

    def rows(n: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        row, q_block = split_index(n, q_blocks, batch)
        q, w = (block_of(x, row, q_block, block_q) for x in (query, weights))

        def score(block: Any) -> Array:
            scale = None if key_scale is None else block_of(key_scale, row, block, block_kv)
            per_head = head_scores(q, block_of(key, row, block, block_kv), softmax_scale, scale)
            return ordered(index_scores(per_head, w), visible.seen(row, q_block, block))

        found, chosen, _ = best_places(
            partial(visible.fold, row, q_block), score, k, (kv_blocks, block_q, block_kv), zeros
        )
        return put_block(carry[0], found, row, q_block), put_block(carry[1], chosen, row, q_block)

    shape = batch, max(q_len, block_q)
    positions, counts = loop(0, batch * q_blocks, rows, (zeros((*shape, k), jnp.int32), zeros(shape, jnp.int32)))
    return Selection(positions[:, :q_len], counts[:, :q_len])
