"""PagedCall: a device's own part of a step over pages, as passed to an implementation; and the implementation on plain XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from ...errors import ConfigError
from ...scores.steps import Steps
from ..kernels.lse import combine_by_lse, combine_over_devices
from ..kernels.pages.paged import paged_attention
from .batch import RaggedBatch
from .layer_arrays import LayerPages

__all__ = ["Attended", "PagedCall", "PagedMethod", "PagedSizes", "on_xla"]


class PagedSizes(NamedTuple):
    """What a kernel processes at once, None where it chooses; for the TPU's also its memory, for Hopper's the parts of all keys;
    whether it is interpreted."""

    pages_per_block: int | None = None
    queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None
    interpret: bool = False
    kv_splits: int | None = None


class PagedCall(NamedTuple):
    """query [tokens, heads, dim]; the pages in `layout`; a batch without a leading dimension; sinks float [heads].

    The mask is that of `causal`, `sliding_window`, inclusive distances to the left and to the right, and `chunk_size`, of the
    chunks of positions that don't see one another. `max_q_len`: the most queries of any sequence.
    `sequence_shards`: the devices that share the sequences' pages in turn; `shard_index`: this device. The table has every
    sequence_shards-th page from number shard_index on, and output and lse cover only those keys.
    `rows`: for update 'fused', each token as the pages store it. What rows of several tokens write is in the pages already; a
    row of one token is written by the method. score: steps by place, and the arrays that they read; head_start: this device's
    first query head. selected [tokens, n]: the positions of the keys that each token attends to; None: all that it sees.
    index_weights [tokens, heads], top_k: of a step that selects; None for one that attends.
    draft_tree [rows, drafts, drafts]: which of its sequence's tokens in this step each token sees; None: by position.
    spans [tokens, 2], prefix_lengths [rows]: keys that tokens see whatever the mask, as in `paged_attention`.
    q_positions [tokens]: those of queries for a score that reads no key's.
    """

    query: jax.Array
    pages: LayerPages
    batch: RaggedBatch
    sinks: jax.Array | None
    layout: str
    value_dim: int
    softmax_scale: float
    causal: bool
    sliding_window: tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    max_q_len: int | None
    platform: str | None = None
    sizes: PagedSizes = PagedSizes()
    sequence_shards: int = 1
    shard_index: jax.Array | int = 0
    rows: LayerPages | None = None
    score: Steps | None = None
    captures: tuple[jax.Array, ...] = ()
    head_start: jax.Array | int = 0
    selected: jax.Array | None = None
    index_weights: jax.Array | None = None
    top_k: int | None = None
    chunk_size: int | None = None
    draft_tree: jax.Array | None = None
    spans: jax.Array | None = None
    prefix_lengths: jax.Array | None = None
    q_positions: jax.Array | None = None

    def kernel_arguments(self) -> dict[str, Any]:
        """The pages, the batch and what is declared of the logits, by the names that kernels of every platform take them by."""
        pages, batch = self.pages, self.batch
        return {
            "key_pages": pages.key,
            "value_pages": pages.value,
            "rope_pages": pages.rope,
            "key_scale": pages.key_scale,
            "value_scale": pages.value_scale,
            "cu_q_lens": batch.cu_q_lens,
            "kv_lens": batch.kv_lens,
            "page_table": batch.page_table,
            "num_seqs": batch.num_seqs,
            "value_dim": self.value_dim,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "chunk_size": self.chunk_size,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": self.sinks,
            "max_q_len": self.max_q_len,
            "draft_tree": self.draft_tree,
            "spans": self.spans,
            "prefix_lengths": self.prefix_lengths,
        }


class Attended(NamedTuple):
    """output [tokens, heads, value_dim] in the query's dtype, lse float32 [tokens, heads]. pages: those after, if the method
    wrote the call's rows."""

    output: Any
    lse: Any
    pages: LayerPages | None = None

    @classmethod
    def specs(cls, tokens: Any, heads: Any, pages: Any) -> Attended:
        """The specs of a result whose tokens and query heads are split over these axes."""
        return cls(PartitionSpec(tokens, heads, None), PartitionSpec(tokens, heads), pages)

    @classmethod
    def merged(cls, parts: Sequence[Attended]) -> Attended:
        """The result over all keys from those over parts of them."""
        return cls(*combine_by_lse([(x.output, x.lse) for x in parts]))

    def merged_over(self, axes: tuple[str, ...]) -> Attended:
        """The same inside a shard_map, from the devices along some axes."""
        return Attended(*combine_over_devices(self.output, self.lse, axes))


PagedMethod: TypeAlias = Callable[[PagedCall], Any]
"""Returns an Attended, or for a step that selects another class with its methods."""


def on_xla(call: PagedCall) -> Attended:
    """Attend with plain XLA; see kernels/pages/paged.py."""
    if call.rows is not None:
        raise ConfigError("update='fused': plain XLA writes no pages while it attends; wanted 'before'.")
    output, lse = paged_attention(
        call.query,
        **call.kernel_arguments(),
        layout=call.layout,
        platform=call.platform,
        pages_a_block=call.sizes.pages_per_block,
        block_q=call.sizes.queries_per_block,
        page_stride=call.sequence_shards,
        page_shard=call.shard_index,
        score=call.score,
        captures=call.captures,
        head_start=call.head_start,
        selected=call.selected,
        q_positions=call.q_positions,
    )
    return Attended(output, lse)
