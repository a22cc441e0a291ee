"""What both routes of paged attention share: the batch's numbers, fetching pages, logits of a step, finishing sums.

Logits are in base 2 (times log2 e), and the softmax is in float32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....masks.int_arrays import same_rank
from ....page_layouts import LAYOUTS
from ....scores.steps import Steps
from ...vanilla.kernel.cpu_tuning import compute_dtype, exp2, few_rows_product, product
from ..default_promotion import wider
from ..lse import LN2, LOG2E, divisor_and_lse, subtracted
from ..primitives import counted, where
from ..scores import apply_steps
from .page_layout import fetch, fetch_joint_heads, page_shape
from .page_scores import PageScores
from .paged_mask import NO_KEY, DraftTree, PagedOptions, QueryRows, Spans, chunk_start, has_bit, sees

__all__ = [
    "Batch",
    "KeyPlaces",
    "PagedOperands",
    "PagedOptions",
    "PagedStatic",
    "ScoreArrays",
    "Sums",
    "Tiles",
    "batch_of",
    "chunk_start",
    "finish",
]

# Key heads, and rows over all of them, up to which a CPU is faster with one block-diagonal product than per head.
_JOINT_HEADS = 4
_JOINT_ROWS = 32


@dataclass(frozen=True)
class PagedStatic(PagedOptions):
    """Everything known at trace time. large_blocks: pages in the larger blocks of a single decoding sequence, 0 for none. stride:
    how many shards share the pages of a sequence in turn."""

    platform: str
    pages_a_block: int
    pairs: int
    large_blocks: int
    block_q: int
    layout: str = "split"
    stride: int = 1
    value_dim: int | None = None
    score: Steps | None = None


class ScoreArrays(NamedTuple):
    """captures: those that the score's steps read. head_start: this device's first query head, int32."""

    captures: tuple[jax.Array, ...]
    head_start: jax.Array


class PagedOperands(NamedTuple):
    """The arrays of a call; shapes as in `paged_attention`. `shard` is None if the stride is 1."""

    query: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array | None
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    page_table: jax.Array
    num_seqs: jax.Array
    sinks: jax.Array | None
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    shard: jax.Array | None = None
    of_score: ScoreArrays | None = None
    selected: jax.Array | None = None
    draft_tree: DraftTree | None = None
    spans: Spans | None = None
    q_positions: jax.Array | None = None
    rope_pages: jax.Array | None = None


class KeyPlaces(NamedTuple):
    """Positions of queries [..., queries] and keys [..., keys]."""

    queries: jax.Array
    keys: jax.Array


class Batch(NamedTuple):
    """The sequences in use, int32 [S] each; 0 for those that aren't."""

    starts: jax.Array  # of a sequence's first row in the query
    q_lens: jax.Array
    kv_lens: jax.Array
    tokens: jax.Array  # int32 scalar: rows of the query that belong to a sequence


class Sums(NamedTuple):
    """Sums of rows: values times weights [..., rows, value_dim], greatest logit [..., rows], weights [..., rows]."""

    acc: jax.Array
    peak: jax.Array
    total: jax.Array


def batch_of(operands: PagedOperands) -> Batch:
    """Read the lengths; entries beyond num_seqs are ignored."""
    size = operands.kv_lens.shape[0]
    counts = jnp.arange(size, dtype=np.int32) < operands.num_seqs
    starts, ends = operands.cu_q_lens[:-1], operands.cu_q_lens[1:]
    q_lens = jnp.where(counts, ends - starts, 0)
    return Batch(
        jnp.where(counts, starts, 0),
        q_lens,
        jnp.where(counts, operands.kv_lens, 0),
        jnp.sum(q_lens, dtype=np.int32),
    )


class Tiles:
    """Logits and weighted values of some rows against some pages of their sequence.

    Rows have the shape [..., kv heads, queries * group, dim]; leading dimensions are those of the ids.
    """

    def __init__(self, static: PagedStatic, operands: PagedOperands, *, few_rows: int | None) -> None:
        """`few_rows`: queries of a sequence on the decode route, None for blocks of many."""
        self.static, self.operands, self.few_rows = static, operands, few_rows is not None
        shape = page_shape(
            static.layout, operands.key_pages, operands.value_pages, operands.query.shape[2], static.value_dim
        )
        self.pages, self.page, self.kv_heads, self.dim, self.value_dim = shape
        self.group = operands.query.shape[1] // self.kv_heads
        self.width = operands.page_table.shape[1]
        self.block = static.pages_a_block * self.page
        wide = operands.query.dtype
        self.rope_dim = 0 if operands.rope_pages is None else self.dim - self.value_dim
        for pages in (operands.key_pages, operands.value_pages, operands.rope_pages):
            if pages is not None and pages.dtype.itemsize > 1:
                wide = wider(wide, pages.dtype)
        self.dtype = compute_dtype(wide, np.dtype(np.float32), static.platform)
        self.joint_heads = False
        if few_rows is not None and static.platform == "cpu":
            self.dtype = np.dtype(np.float32)  # products of few rows, of which bfloat16 ones take longer
            few = self.kv_heads <= _JOINT_HEADS and few_rows * operands.query.shape[1] <= _JOINT_ROWS
            self.joint_heads = few and LAYOUTS[static.layout].whole_pages

    def rows_of(self, query: jax.Array) -> jax.Array:
        """[..., queries, heads, dim] as rows."""
        *lead, q_len, _, dim = query.shape
        query = query.reshape(*lead, q_len, self.kv_heads, self.group, dim)
        at = len(lead)
        query = query.transpose(*range(at), at + 1, at, at + 2, at + 3)
        return query.reshape(*lead, self.kv_heads, q_len * self.group, dim).astype(self.dtype)

    def heads_of(self, rows: jax.Array, q_len: int) -> jax.Array:
        """Undo `rows_of`: [..., kv heads, queries * group, x] as [..., queries, heads, x]."""
        *lead, _, _, dim = rows.shape
        at = len(lead)
        rows = rows.reshape(*lead, self.kv_heads, q_len, self.group, dim)
        rows = rows.transpose(*range(at), at + 1, at, at + 2, at + 3)
        return rows.reshape(*lead, q_len, self.kv_heads * self.group, dim)

    def visible(self, keys: jax.Array, there: jax.Array, rows: QueryRows, kv_len: jax.Array) -> jax.Array:
        """Bool [..., queries, keys]: keys and whether they are there [..., keys]."""
        there = (there & (keys < kv_len[..., None]))[..., None, :]
        at = keys[..., None, :]
        seen = sees(self.static, at, rows.positions[..., None])
        if rows.words is not None:
            assert rows.first_draft is not None
            number = at - rows.first_draft[..., None, None]
            seen = jnp.where(number >= 0, has_bit(rows.words, number), seen)
        if rows.begin is not None:
            assert rows.end is not None
            seen |= (at >= rows.begin[..., None]) & (at < rows.end[..., None])
        return there & seen & (rows.slots >= 0)[..., None]

    def queries(self, batch: Batch, seq: jax.Array, row: jax.Array) -> QueryRows:
        """Rows `row` [..., queries] of the sequences `seq` [...]; those that a sequence doesn't have have slots below 0."""
        of = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
        q_len = of(batch.q_lens)
        first = of(batch.kv_lens) - q_len
        slots = jnp.where(row < q_len[..., None], first[..., None] + row, -1)
        tree, spans = self.operands.draft_tree, self.operands.spans
        begin = end = scored = None
        token = of(batch.starts)[..., None] + jnp.minimum(row, jnp.maximum(q_len - 1, 0)[..., None])
        if self.operands.q_positions is not None:
            scored = self.operands.q_positions.at[token].get(mode="promise_in_bounds")
        if spans is not None:
            begin, end = (x.at[token].get(mode="promise_in_bounds") for x in (spans.begin, spans.end))
            begin, end = jnp.where(slots >= 0, begin, NO_KEY), jnp.where(slots >= 0, end, 0)
        if tree is None:
            return QueryRows(slots, slots, begin=begin, end=end, scored=scored)
        drafts, used = tree.depth.shape[1], of(tree.used)
        index = seq[..., None], jnp.minimum(row, np.int32(drafts - 1))
        drafted = used[..., None] & (row < drafts)
        depth, words = (x.at[index].get(mode="promise_in_bounds") for x in (tree.depth, tree.words))
        positions = jnp.where(drafted & (slots >= 0), first[..., None] + depth, slots)
        words = jnp.where(drafted[..., None], words, 0)
        return QueryRows(slots, positions, jnp.where(used, first, NO_KEY), words, begin, end, scored)

    def places(self, rows: QueryRows, keys: jax.Array, seq: jax.Array) -> KeyPlaces:
        """The positions of rows and keys, for a score: of a tree's tokens by their depth."""
        tree = self.operands.draft_tree
        positions = rows.positions if rows.scored is None else rows.scored
        if tree is None or self.static.score is None:
            return KeyPlaces(positions, keys)
        assert rows.first_draft is not None
        first = rows.first_draft[..., None]
        number = jnp.clip(keys - first, 0, np.int32(tree.depth.shape[1] - 1))
        depth = tree.depth.at[seq[..., None], number].get(mode="promise_in_bounds")
        return KeyPlaces(positions, jnp.where(keys >= first, first + depth, keys))

    def range_of(self, first: Any, last: Any, kv_len: Any, least: Any = None, most: Any = None) -> tuple[Any, Any]:
        """(first page, one past the last page) that queries at positions first to last can see, besides keys from `least` to
        before `most` in spans; pages as counted by the table."""
        static = self.static
        begin = jnp.zeros_like(kv_len) if static.left is None else jnp.maximum(first - static.left, 0)
        end = jnp.minimum(kv_len, self.width * static.stride * self.page)
        if static.reach is not None:
            end = jnp.minimum(end, last + static.reach + 1)
        if static.chunk is not None:
            begin = jnp.maximum(begin, chunk_start(first, static.chunk))
            end = jnp.minimum(end, chunk_start(last, static.chunk) + np.int32(static.chunk))
        if least is not None:
            begin = jnp.minimum(begin, jnp.maximum(least, 0))
        if most is not None:
            end = jnp.maximum(end, jnp.minimum(most, jnp.minimum(kv_len, self.width * static.stride * self.page)))
        begin_page = lax.div(begin, np.int32(self.page))
        end_page = lax.div(jnp.maximum(end, 0) + np.int32(self.page - 1), np.int32(self.page))
        end_page = jnp.where(end > begin, end_page, begin_page)
        return self._own(begin_page), self._own(end_page)

    def pages_of(self, queries: QueryRows, kv_len: jax.Array) -> tuple[Any, Any]:
        """`range_of` some queries of one sequence, the first of which it has. One of a tree may be before it by its depth."""
        first = queries.positions[0]
        if queries.words is not None:
            first = jnp.where(queries.slots >= 0, queries.positions, first).min()
        if queries.begin is None or queries.end is None:
            return self.range_of(first, queries.slots.max(), kv_len)
        return self.range_of(first, queries.slots.max(), kv_len, queries.begin.min(), queries.end.max())

    def _own(self, page: jax.Array) -> jax.Array:
        """How many of a sequence's first pages are this shard's: its table's first page at or after `page`."""
        stride, shard = np.int32(self.static.stride), self.operands.shard
        return page if shard is None else lax.div(page - shard + (stride - 1), stride)

    def slots(self, seq: jax.Array, first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(ids, mapped), both [..., n], of n pages of sequences `seq` from `first` on.

        A slot that isn't mapped, beyond `end` or with an id out of range, gets the id of one that is, so that nothing else is
        read for it.
        """
        at = counted(first, self.static.pages_a_block)
        table = self.operands.page_table
        ids = table.at[seq[..., None], jnp.minimum(at, self.width - 1)].get(mode="promise_in_bounds")
        mapped = (at < end[..., None]) & (ids >= 0) & (ids < self.pages)
        fallback_id = jnp.where(mapped, ids, 0).max(axis=-1, keepdims=True)
        return jnp.where(mapped, ids, fallback_id), mapped

    def keys(self, first: jax.Array) -> jax.Array:
        """The positions of the keys in a block of pages from `first` on, [..., keys]."""
        keys = counted(first * np.int32(self.page), self.block)
        if self.operands.shard is None:
            return keys
        page = np.int32(self.page)  # page j of the table is page number j * stride + shard
        page_index = lax.div(keys, page)
        return keys + (page_index * np.int32(self.static.stride - 1) + self.operands.shard) * page

    def seen(self, keys: jax.Array, mapped: jax.Array, rows: QueryRows, kv_len: jax.Array) -> jax.Array:
        """Bool [..., queries, keys] of a block's keys."""
        return self.visible(keys, jnp.repeat(mapped, self.page, axis=-1), rows, kv_len)

    def stored_keys(self, ids: jax.Array) -> jax.Array:
        """Keys of pages as `logits` takes them: [..., kv heads, keys, dim]; where heads are joint [..., keys, kv heads * dim]."""
        static, pages = self.static, self.operands.key_pages
        if self.joint_heads:
            return fetch_joint_heads(pages, ids, self.dtype)
        keys = fetch(static.layout, pages, ids, static.platform, self.dtype, 0, self.dim - self.rope_dim)
        if (rope_pages := self.operands.rope_pages) is None:
            return keys
        rope = fetch(static.layout, rope_pages, ids, static.platform, self.dtype, 0, self.rope_dim)
        return jnp.concatenate([keys, rope], -1)

    def logits(
        self, rows: jax.Array, keys: jax.Array, scale: jax.Array | None, seen: jax.Array, seq: jax.Array, at: KeyPlaces
    ) -> jax.Array:
        """Float32 [..., kv heads, rows, keys] in base 2, -inf where not seen. keys: `stored_keys`; scale: theirs, or None; at:
        positions of rows and keys, for a score."""
        static, operands = self.static, self.operands
        first = self.dim - self.rope_dim  # numbers after it have no scale
        x = self._products(rows[..., :first], keys[..., :first]) if self.rope_dim else self._products(rows, keys)
        if scale is not None:
            x = operator.mul(*same_rank(x, scale))
        if self.rope_dim:
            x = x + self._products(rows[..., first:], keys[..., first:])
        unit = LOG2E if static.score is None else 1.0
        if static.soft_cap is None:
            x = x * np.float32(static.scale * unit)
        else:
            x = np.float32(static.soft_cap * unit) * jnp.tanh(x * np.float32(static.scale / static.soft_cap))
        if static.score is not None:
            assert operands.of_score is not None
            x = self._scored(static.score, operands.of_score, x, seq, at)
        return where(self._each_row(seen), x, -jnp.inf)

    def _products(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """Products of rows and keys in float32."""
        if self.joint_heads:
            return self._joint_logits(rows, keys)
        if self.few_rows:
            return few_rows_product(rows, keys, np.dtype(np.float32), self.static.platform)
        return product("...nx,...sx->...ns", rows, keys, np.dtype(np.float32))

    def _scored(self, score: Steps, arrays: ScoreArrays, x: jax.Array, seq: jax.Array, at: KeyPlaces) -> jax.Array:
        tile = PageScores(score, arrays.captures, (self.kv_heads, self.group), seq, *at, arrays.head_start)
        *lead, _, _, width = x.shape
        by_query = x.reshape(*lead, self.kv_heads, -1, self.group, width)
        scored = apply_steps(score, by_query, 1.0, LOG2E, tile)
        rest = scored.factor * (1.0 if scored.absorbed else LOG2E)
        return (scored.x if rest == 1.0 else scored.x * np.float32(rest)).reshape(x.shape)

    def key_scale(self, ids: jax.Array) -> jax.Array | None:
        """The scale of pages' keys in the shape that multiplies logits; None without."""
        scale = self.operands.key_scale
        return None if scale is None else self._scale(scale, ids)

    def values(self, weights: jax.Array, keys: jax.Array, ids: jax.Array, seen: jax.Array) -> jax.Array:
        """Weights [..., kv heads, rows, keys] times values, which for latents are a part of `keys`. A row of V that nobody
        sees is treated as 0: a freed page may hold NaN."""
        static, operands = self.static, self.operands
        pages = operands.key_pages if operands.value_pages is None else operands.value_pages
        alive = seen.any(axis=-2)[..., None, :]
        if operands.value_scale is not None:
            weights = self.scaled(weights, self._scale(operands.value_scale, ids), alive)
        weights = weights.astype(self.dtype)
        if self.joint_heads:
            return self._joint_values(weights, pages, ids, alive[..., 0, :])
        if LAYOUTS[static.layout].values_in_keys:
            values = keys[..., : self.value_dim]
        else:
            values = fetch(static.layout, pages, ids, static.platform, self.dtype, 1, self.value_dim, self.dim)
        return self.weighted(weights, values, alive)

    def scaled(self, weights: jax.Array, scale: jax.Array, alive: jax.Array) -> jax.Array:
        """Weights times the scale of their values; one by token may be NaN where no row sees it."""
        by_token = self.operands.value_scale is not None and self.operands.value_scale.ndim == 3
        scale = jnp.where(alive[..., None, :], scale, 0) if by_token else scale
        return operator.mul(*same_rank(weights, scale))

    def weighted(self, weights: jax.Array, values: jax.Array, alive: jax.Array) -> jax.Array:
        """The sums of values [..., kv heads, keys, dim]; those that no row sees, not alive [..., 1, keys], are 0."""
        values = jnp.where(alive[..., None], values, 0)
        return product("...ns,...sx->...nx", weights, values, np.dtype(np.float32))

    def _joint_logits(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """Rows as a block-diagonal factor times the untransposed keys: kv_heads times the arithmetic, but no copy per head."""
        same_head = np.eye(self.kv_heads, dtype=bool)[:, None, :, None]
        same_head, spread = same_rank(same_head, rows[..., None, :])
        by_head = jnp.where(same_head, spread, 0).reshape(*keys.shape[:-2], -1, keys.shape[-1])
        x = few_rows_product(by_head, keys, np.dtype(np.float32), self.static.platform)
        return x.reshape(*rows.shape[:-1], -1)

    def _joint_values(self, weights: jax.Array, pages: jax.Array, ids: jax.Array, alive: jax.Array) -> jax.Array:
        """Every row's weights with the values of all heads; only its own head's are kept."""
        values = jnp.where(alive[..., None], fetch_joint_heads(pages, ids, self.dtype), 0)
        flat = weights.reshape(*ids.shape[:-1], -1, weights.shape[-1])
        sums = product("...ns,...sx->...nx", flat, values, np.dtype(np.float32))
        sums = sums.reshape(*weights.shape[:-1], self.kv_heads, self.value_dim)
        return jnp.stack([sums[..., head, :, head, :] for head in range(self.kv_heads)], axis=-3)

    def exp2(self, x: jax.Array) -> jax.Array:
        return exp2(x, self.static.platform, accurate=self.operands.query.dtype.itemsize >= 4)

    def _scale(self, scale: jax.Array, ids: jax.Array) -> jax.Array:
        """The scale in the shape that multiplies logits: [kv heads, 1, 1] or [..., kv heads, 1, keys]."""
        if scale.ndim < 3:
            return jnp.broadcast_to(scale.astype(np.float32), (self.kv_heads,))[:, None, None]
        layout = "heads" if LAYOUTS[self.static.layout].heads_first else "split"
        return fetch(layout, scale[..., None], ids, self.static.platform, np.float32)[..., 0][..., None, :]

    def _each_row(self, seen: jax.Array) -> jax.Array:
        """[..., queries, keys] as [..., kv heads, queries * group, keys]."""
        *lead, q_len, keys = seen.shape
        shape = (*lead, self.kv_heads, q_len, self.group, keys)
        return jnp.broadcast_to(seen[..., None, :, None, :], shape).reshape(*lead, self.kv_heads, -1, keys)


def finish(sums: Sums, sinks: jax.Array | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(output, lse) of sums over all keys. A sink is a key without a value; `sinks` broadcasts to the rows."""
    acc, peak, total = sums
    if sinks is not None:
        _, sink = same_rank(peak, sinks.astype(np.float32) * np.float32(LOG2E))
        new_peak = jnp.maximum(peak, sink)
        shift = subtracted(new_peak)
        shrink = jnp.exp2(peak - shift)
        acc, peak, total = acc * shrink[..., None], new_peak, total * shrink + jnp.exp2(sink - shift)
    safe, lse = divisor_and_lse(total, peak * np.float32(LN2))
    return (acc / safe[..., None]).astype(dtype), lse
