"""Attention over pages that somebody else owns, with the signatures of JAX's, vLLM's and SGLang's TPU kernels. Requires only jax.

`ragged_paged_attention_v2`, `_v3` and `_sglang` take and return what these take and return.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from ..operators.api.read_option import read_flag, read_number
from ..operators.paged import Paged
from ..planning.notes import note
from .foreign_arguments import (
    check_debug,
    check_flat,
    check_lengths,
    check_mask_value,
    check_uncarried,
    flat_table,
    heads_of,
    sequences,
    soft_cap_of,
    softmax_scale,
    table_by_starts,
    unread,
    window,
)
from .foreign_pages import PagedFunction
from .foreign_step import ForeignBatch, ForeignStep

__all__ = ["ragged_paged_attention_sglang", "ragged_paged_attention_v2", "ragged_paged_attention_v3"]

_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
_SPLIT = note("foreign.distribution")
_Sizes = tuple[int, int, int, int]


def _v2(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = _MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> ForeignStep:
    """Attend to pages that have the step's keys already, as jax.experimental.pallas.ops.tpu.ragged_paged_attention does.

    Shapes: q [tokens, heads, dim], kv_pages [pages, page_size, 2 * kv_heads, dim], kv_lens int32 [rows], page_indices int32
    [rows, width], cu_q_lens int32 [rows + 1], num_seqs int32 [1]. Returns the output, [tokens, heads, dim] in q's dtype; 0 for a
    token that belongs to no sequence. Errors: ConfigError names what can't be carried; InputError, InputTypeError, RefusedError.
    """
    check_lengths(kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs)
    if len(page_indices.shape) != 2:
        raise InputError(f"page_indices has shape {tuple(page_indices.shape)}; wanted [rows, pages of a sequence].")
    check_mask_value(mask_value)
    sizes = {
        "num_kv_pages_per_block": num_kv_pages_per_block,
        "num_queries_per_block": num_queries_per_block,
        "vmem_limit_bytes": vmem_limit_bytes,
    }
    return ForeignStep(
        q,
        None,
        None,
        kv_pages,
        "interleaved",
        *page_indices.shape,
        arrays=(kv_lens, page_indices, cu_q_lens, num_seqs),
        batch=lambda: ForeignBatch(kv_lens, page_indices, cu_q_lens, num_seqs.reshape(())),
        softmax_scale=softmax_scale(sm_scale),
        sliding_window=window(sliding_window, causal=True),
        soft_cap=soft_cap_of(soft_cap),
        k_scale=read_number("k_scale", k_scale),
        v_scale=read_number("v_scale", v_scale),
        remarks=unread(**sizes),
    )


def _v3(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_mask: bool = False,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: _Sizes | None = None,
    p_block_sizes: _Sizes | None = None,
    m_block_sizes: _Sizes | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
) -> ForeignStep:
    """Write the step's keys and values into their pages and attend, as vLLM's tpu-inference (v3) does.

    Shapes: queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim] in the cache's dtype, kv_cache [pages,
    page_size, words, pack, lanes], layout packed; kv_lens int32 [rows], page_indices int32 [rows * width], cu_q_lens int32
    [rows + 1], distribution int32 [3]. Returns (output, kv_cache): the output in out_dtype or else the queries', 0 for a token
    that belongs to no sequence. Donate kv_cache in the jit around it. Errors: ConfigError names what can't be carried;
    InputError, InputTypeError, RefusedError.
    """
    check_lengths(kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, distribution=distribution)
    rows, width = flat_table(kv_lens, page_indices)
    causal, writes = read_flag("use_causal_mask", use_causal_mask), read_flag("update_kv_cache", update_kv_cache)
    if read_flag("skip_kv_mask", skip_kv_mask) and causal:
        raise InputError(
            "skip_kv_mask=True with use_causal_mask=True; wanted only one of them: the causal mask is needed."
        )
    check_mask_value(mask_value)
    check_debug(debug_mode)
    notes = unread(
        skip_kv_mask=skip_kv_mask or None,
        chunk_prefill_size=chunk_prefill_size,
        d_block_sizes=d_block_sizes,
        p_block_sizes=p_block_sizes,
        m_block_sizes=m_block_sizes,
        vmem_limit_bytes=vmem_limit_bytes,
        disable_bounds_checks=None if disable_bounds_checks else False,
        disable_semaphore_checks=None if disable_semaphore_checks else False,
    )
    if not writes:
        notes += (note("foreign.no_update"),)
    return ForeignStep(
        queries,
        keys if writes else None,
        values if writes else None,
        kv_cache,
        "packed",
        rows,
        width,
        arrays=(kv_lens, page_indices, cu_q_lens, distribution),
        batch=lambda: ForeignBatch(kv_lens, page_indices.reshape(rows, width), cu_q_lens, sequences(distribution)),
        softmax_scale=softmax_scale(sm_scale),
        causal=causal,
        sliding_window=window(sliding_window, causal),
        soft_cap=soft_cap_of(soft_cap),
        q_scale=read_number("q_scale", q_scale),
        k_scale=read_number("k_scale", k_scale),
        v_scale=read_number("v_scale", v_scale),
        out_dtype=out_dtype,
        kv_heads=heads_of(keys),
        remarks=(*notes, _SPLIT),
    )


def _sglang(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache_fused: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: jax.Array | None,
    attention_sink: jax.Array | float | None = None,
    *,
    causal: int = 1,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = _MASK_VALUE,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    xai_temperature_len: float | None = None,
    softmax_dtype: Any = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: _Sizes | None = None,
    p_block_sizes: _Sizes | None = None,
    m_block_sizes: _Sizes | None = None,
    vmem_limit_bytes: int | None = None,
    out_dtype: Any = None,
    skip_kv_mask: bool = False,
    disable_semaphore_checks: bool = True,
    debug_mode: bool = False,
    mask_aligned_to_cu_kv: bool = False,
) -> ForeignStep:
    """Write the step's keys and values into their pages and attend, as SGLang's JAX backend does.

    Shapes: queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim] in the cache's dtype, kv_cache_fused [pages,
    page_size, words, pack, lanes], layout packed, or [pages, page_size, 2 * kv_heads, dim], layout interleaved; kv_lens int32
    [rows], page_indices int32 [n], in which a sequence's pages begin at cu_kv_lens // page_size, cu_q_lens and cu_kv_lens
    int32 [rows + 1], distribution int32 [3], attention_sink [heads] or a number. Returns (output, kv_cache_fused): the output
    in out_dtype or else the queries', 0 for a token that belongs to no sequence. Donate kv_cache_fused in the jit around it.
    Errors: ConfigError names what can't be carried; InputError, InputTypeError, RefusedError.
    """
    check_lengths(
        kv_lens=kv_lens,
        page_indices=page_indices,
        cu_q_lens=cu_q_lens,
        cu_kv_lens=cu_kv_lens,
        distribution=distribution,
    )
    check_flat(kv_lens, page_indices)
    check_uncarried(causal, custom_mask, xai_temperature_len, softmax_dtype)
    check_mask_value(mask_value)
    check_debug(debug_mode)
    notes = unread(
        custom_mask=None if custom_mask is None else "given, with causal=1",
        skip_kv_mask=skip_kv_mask or None,
        chunk_prefill_size=chunk_prefill_size,
        d_block_sizes=d_block_sizes,
        p_block_sizes=p_block_sizes,
        m_block_sizes=m_block_sizes,
        vmem_limit_bytes=vmem_limit_bytes,
        disable_semaphore_checks=None if disable_semaphore_checks else False,
        mask_aligned_to_cu_kv=mask_aligned_to_cu_kv or None,
    )
    rows, width = kv_lens.shape[0], page_indices.shape[0]
    pages, page = kv_cache_fused.shape[:2]

    def batch() -> ForeignBatch:
        table = table_by_starts(page_indices, cu_kv_lens, page, min(width, pages))
        return ForeignBatch(kv_lens, table, cu_q_lens, sequences(distribution))

    sinks = attention_sink
    if sinks is not None and np.ndim(sinks) == 0:
        sinks = jnp.full((queries.shape[1],), sinks, jnp.float32)
    return ForeignStep(
        queries,
        keys,
        values,
        kv_cache_fused,
        "interleaved" if len(kv_cache_fused.shape) == 4 else "packed",
        rows,
        width,
        arrays=(kv_lens, page_indices, cu_q_lens, cu_kv_lens, distribution),
        batch=batch,
        softmax_scale=softmax_scale(sm_scale),
        causal=bool(causal),
        sliding_window=window(sliding_window, bool(causal)),
        soft_cap=soft_cap_of(soft_cap),
        sinks=sinks,
        q_scale=read_number("q_scale", q_scale),
        k_scale=read_number("k_scale", k_scale),
        v_scale=read_number("v_scale", v_scale),
        out_dtype=out_dtype,
        kv_heads=heads_of(keys),
        remarks=(*notes, _SPLIT),
    )


def _output(output: jax.Array, pages: jax.Array) -> jax.Array:
    del pages  # the step writes nothing
    return output


def _both(output: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    return output, pages


ragged_paged_attention_v2 = PagedFunction(_v2, _output, Paged())
"""The signature of JAX's own kernel, `jax.experimental.pallas.ops.tpu.ragged_paged_attention`: the pages have the step's keys."""

ragged_paged_attention_v3 = PagedFunction(_v3, _both, Paged())
"""The signature of vLLM's tpu-inference, kernels/ragged_paged_attention/v3: returns the output and the updated cache."""

ragged_paged_attention_sglang = PagedFunction(_sglang, _both, Paged())
"""The signature of SGLang's JAX backend: returns the output and the updated cache."""
