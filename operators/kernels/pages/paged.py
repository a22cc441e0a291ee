"""Attention of a ragged batch, prefill chunks and decoding rows, against keys and values in pages; on plain XLA.

Only live pages are read: those with keys of a sequence that some of its rows can see. Decoding rows take the decode
route, chunks go block by block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from ....errors import InputError
from ....page_layouts import LAYOUTS
from ....scores.steps import Steps
from ..varying import alike
from .page_layout import page_shape
from .paged_checks import check_numbers, check_operands, check_spans, check_tree, int32, options_of, refuse_gradient
from .paged_chunks import attend_chunks
from .paged_decode import attend_decode
from .paged_mask import joined_spans, packed_tree
from .paged_selected import attend_selected
from .paged_step import Batch, PagedOperands, PagedStatic, ScoreArrays, batch_of

__all__ = ["paged_attention", "places", "with_spans"]

_KEYS = 256  # per block of pages
_STEP_BYTES = 2**20  # of keys, in float32, per decode step: still in a CPU cache when they are multiplied
_ROWS = 256  # per kv head in a block of queries
_MAX_PAIRS = 8
_LARGE_KEYS = 1024  # per block of most of a single sequence


def paged_attention(
    query: Float[Array, "tokens heads dim"],
    key_pages: Shaped[Array, "pages page kv_heads dim"],
    value_pages: Shaped[Array, "pages page kv_heads value_dim"] | None,
    *,
    layout: str = "split",
    value_dim: int | None = None,
    cu_q_lens: Int[Array, " sequences_and_one"],
    kv_lens: Int[Array, " sequences"],
    page_table: Int[Array, "sequences width"],
    num_seqs: Int[Array, ...] | int,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    key_scale: Float[Array, ...] | float | None = None,
    value_scale: Float[Array, ...] | float | None = None,
    rope_pages: Float[Array, "pages kv_heads page rope_dim"] | None = None,
    max_q_len: int | None = None,
    platform: str | None = None,
    pages_a_block: int | None = None,
    pairs: int | None = None,
    block_q: int | None = None,
    page_stride: int = 1,
    page_shard: Int[Array, ""] | int = 0,
    score: Steps | None = None,
    captures: tuple[Array, ...] = (),
    head_start: Int[Array, ""] | int = 0,
    selected: Int[Array, "tokens n"] | None = None,
    draft_tree: Bool[Array, "sequences drafts drafts"] | None = None,
    spans: Int[Array, "tokens 2"] | None = None,
    prefix_lengths: Int[Array, " sequences"] | None = None,
    q_positions: Int[Array, " tokens"] | None = None,
) -> tuple[Array, Array]:
    """Return (output [tokens, heads, value_dim] in the query's dtype, lse float32 [tokens, heads]).

    Rows cu_q_lens[s] to cu_q_lens[s + 1] of the query belong to sequence s, for s < num_seqs. kv_lens counts a sequence's keys
    including those of this step: its row i is at position kv_lens[s] - q_len + i, and key j is in page
    page_table[s, j // page] at j % page. Ids outside 0 to pages - 1, and lengths in kv_lens beyond the table's width, give
    no keys: they aren't seen, and nothing is read for them. A row that belongs to no sequence or sees nothing is 0 and its
    lse -inf; with sinks, if it belongs to a sequence, the lse is that of its sinks.

    sliding_window: inclusive distances (left, right), None for no limit; chunk_size n: queries at positions i * n to
    (i + 1) * n - 1 see only keys at these; `causal` intersects. Scales of int8 or fp8 pages:
    one number, [kv_heads], or one per token and head, in the pages' order. `layout`: see page_layout; if it joins keys and
    values, `key_pages` has both and `value_pages` is None; `value_dim` is then the values' dim, None: the query's. Values
    that are a part of their keys have their scale. rope_pages: the rest of such keys, which has no scale; `key_pages` has the
    values alone then.

    `page_stride` n, `page_shard` s: the table has every n-th page of each sequence from number s on, and only these are seen: key
    j is in page_table[row, j // page // n] if j // page % n == s. Output and lse then cover only these keys.

    score: the steps of a score by place, applied after the cap; captures: the arrays that they read; head_start: the first query
    head in the whole problem, for a function.

    selected: for each token the positions of the keys that it attends to, of those that it sees, each at most once; others, such
    as -1, are no keys. Only these are gathered.

    draft_tree: of each sequence's first tokens in this step, which of them each sees: lower triangular, with the diagonal. A
    token's position is then that of the first plus its depth, the number of others that it sees, for the mask and a score; stored
    keys are seen by position. A sequence whose matrix has no True has no tree: its tokens see one another by position.

    spans: for each token the first position of the span that it is in, and one past the last: it sees all keys there too,
    whatever the mask; a token outside of its span has none. prefix_lengths: for each sequence how many of its first tokens are
    such a span.

    q_positions: each query's position for a score that reads no key's; the mask is by their places in the sequences.

    `max_q_len`: the most queries of any sequence in this batch; rows beyond it are skipped and give 0. None: any. The sizes
    at the end are for tuning; `platform` defaults to jax's default backend.
    """
    sizes = {"max_q_len": max_q_len, "pages_a_block": pages_a_block, "pairs": pairs, "block_q": block_q}
    sizes |= {"page_stride": page_stride, "chunk_size": chunk_size}
    check_numbers(softmax_scale, logits_soft_cap, sizes)
    starts, lengths, table, count = (
        int32(name, x)
        for name, x in (
            ("cu_q_lens", cu_q_lens),
            ("kv_lens", kv_lens),
            ("page_table", page_table),
            ("num_seqs", num_seqs),
        )
    )
    given = (None if x is None else jnp.asarray(x) for x in (value_pages, sinks, key_scale, value_scale))
    values, sinks, key_scale, value_scale = given
    operands = PagedOperands(
        jnp.asarray(query), jnp.asarray(key_pages), values, starts, lengths, table, count, sinks, key_scale, value_scale
    )
    if isinstance(page_shard, int) and not 0 <= page_shard < page_stride:
        raise InputError(f"page_shard={page_shard}; wanted 0 to {page_stride - 1}, below the page_stride.")
    if page_stride > 1:
        operands = operands._replace(shard=int32("page_shard", page_shard))
    if score is not None:
        operands = operands._replace(of_score=ScoreArrays(captures, int32("head_start", head_start)))
    if LAYOUTS[layout].values_in_keys:  # and so is their scale
        operands = operands._replace(value_scale=operands.key_scale)
    if rope_pages is not None:
        operands = operands._replace(rope_pages=jnp.asarray(rope_pages))
    if selected is not None:
        operands = operands._replace(selected=int32("selected", selected))
    check_operands(operands, layout)
    if q_positions is not None:
        operands = operands._replace(q_positions=int32("q_positions", q_positions))
    check_tree(operands, draft_tree)
    check_spans(operands, spans, prefix_lengths)
    operands = operands._replace(num_seqs=operands.num_seqs.reshape(()))
    platform = jax.default_backend() if platform is None else platform
    chosen = _sizes(operands, layout)
    static = PagedStatic(
        **options_of(softmax_scale, causal, sliding_window, logits_soft_cap, max_q_len, chunk_size),
        platform=platform,
        pages_a_block=pages_a_block or chosen[0],
        pairs=pairs or chosen[1],
        large_blocks=0 if pages_a_block or pairs or platform != "cpu" else _large_blocks(operands, layout, chosen[0]),
        block_q=block_q or chosen[2],
        layout=layout,
        stride=page_stride,
        value_dim=value_dim,
        score=score,
    )
    if draft_tree is not None:
        batch = batch_of(operands)
        tree = packed_tree(static, jnp.asarray(draft_tree), batch.kv_lens - batch.q_lens)
        operands = operands._replace(draft_tree=tree)
    return _attend(static, with_spans(operands, spans, prefix_lengths))


def with_spans(operands: PagedOperands, spans: Any, prefix: Any) -> PagedOperands:
    """The operands with the spans of tokens and prefixes of sequences, as in `paged_attention`."""
    if spans is None and prefix is None:
        return operands
    batch = batch_of(operands)
    seq, row, real = places(operands, batch)
    begin = (batch.kv_lens - batch.q_lens).at[seq].get(mode="promise_in_bounds")
    slots = jnp.where(real, begin + row, -1)
    own, of_prefix = (None if x is None else int32(n, x) for n, x in (("spans", spans), ("prefix_lengths", prefix)))
    return operands._replace(spans=joined_spans(own, of_prefix, slots, seq, len(operands.kv_lens)))


def _sizes(operands: PagedOperands, layout: str) -> tuple[int, int, int]:
    """(pages per block, pairs per decode step, rows per block of queries) by rule."""
    _, page, kv_heads, dim, _ = page_shape(layout, operands.key_pages, operands.value_pages, operands.query.shape[2])
    sequences, width = operands.page_table.shape
    pages = min(max(1, _KEYS // page), width)
    step = 4 * pages * page * kv_heads * dim
    pairs = min(_power_of_two(max(1, _STEP_BYTES // step)), sequences, _MAX_PAIRS)
    rows = _power_of_two(max(8, _ROWS * kv_heads // operands.query.shape[1]))
    return pages, pairs, min(rows, operands.query.shape[0])


def _large_blocks(operands: PagedOperands, layout: str, pages: int) -> int:
    """Pages in the larger blocks of a single sequence on a CPU; 0 where its table or the CPU's cache is too small for them."""
    _, page, kv_heads, dim, _ = page_shape(layout, operands.key_pages, operands.value_pages, operands.query.shape[2])
    sequences, width = operands.page_table.shape
    fit = _STEP_BYTES // (4 * pages * page * kv_heads * dim)
    large = pages * min(_power_of_two(max(1, fit)), _LARGE_KEYS // _KEYS)
    return large if sequences == 1 and pages < large <= width else 0


def _power_of_two(n: int) -> int:
    """The greatest power of two up to n: batches are often powers of two, and then divide by it."""
    return 1 << (n.bit_length() - 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(static: PagedStatic, operands: PagedOperands) -> tuple[jax.Array, jax.Array]:
    operands = alike(operands)
    batch = batch_of(operands)
    seq, row, real = places(operands, batch)
    pick = lambda x, at: x.at[seq, jnp.minimum(row, at - 1)].get(mode="promise_in_bounds")  # noqa: E731
    if operands.selected is not None:
        output, lse = attend_selected(static, operands, batch, seq, row)
        attended = real if static.max_q_len is None else real & (row < static.max_q_len)
    elif static.max_q_len is not None:
        mine = batch.q_lens > 0
        output, lse = (
            pick(x, static.max_q_len) for x in attend_decode(static, operands, batch, mine, static.max_q_len)
        )
        attended = real & (row < static.max_q_len)
    else:
        decoding = batch.q_lens == 1
        lone = attend_decode(static, operands, batch, decoding, 1)
        chunks = attend_chunks(static, operands, batch, batch.q_lens > 1)
        alone = decoding.at[seq].get(mode="promise_in_bounds")
        output, lse = (
            jnp.where(alone.reshape(-1, *[1] * (b.ndim - 1)), pick(a, 1), b) for a, b in zip(lone, chunks, strict=True)
        )
        attended = real
    return jnp.where(attended[:, None, None], output, 0), jnp.where(attended[:, None], lse, -jnp.inf)


_attend.defjvp(refuse_gradient)


def places(operands: PagedOperands, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row of the query: (its sequence, its place there, whether it has one)."""
    tokens, sequences = operands.query.shape[0], operands.kv_lens.shape[0]
    token = jnp.arange(tokens, dtype=np.int32)
    ends = jnp.where(
        jnp.arange(sequences, dtype=np.int32) < operands.num_seqs, batch.starts + batch.q_lens, np.int32(tokens)
    )
    seq = jnp.minimum(jnp.sum(ends[None, :] <= token[:, None], axis=1, dtype=np.int32), sequences - 1)
    row = token - batch.starts.at[seq].get(mode="promise_in_bounds")
    real = (row >= 0) & (row < batch.q_lens.at[seq].get(mode="promise_in_bounds"))
    return seq, jnp.maximum(row, 0), real
