"""PagedProblem: one step over a cache's pages, without its arrays; frozen, hashable, and all that its plan depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ...sharding import MeshAxis, describe_mesh
from ...sharding.mesh import unused_axes
from ..cache.cache_checks import axis_names
from ..cache.cache_plan import CachePlan
from ..problem import KeyedProblem, heads_text, platform_text

__all__ = ["STEP_MODES", "Merge", "PagedProblem"]

STEP_MODES = ("prefill", "autoregressive", "insert", "mixed")
"""Chunks of prompts; one or a few tokens of each sequence; writes only; chunks and single tokens together."""


class Merge(NamedTuple):
    """What devices with pages of the same sequences send to each other in a layer: the kind of collective, what it is of, its
    bytes, and those that each device sends."""

    kind: str
    what: str
    size: int
    sent: float


@dataclass(frozen=True, kw_only=True)
class PagedProblem(KeyedProblem):
    """What a step requests: the cache, tokens and heads (of all devices), dtypes, mask, features, mode, mesh and platform.

    tokens: the length of the token arrays, including padding. max_q_len: the maximum number of queries per sequence; None: any.
    update: when the step's own keys are written: 'before', 'fused', or 'none'. key_dtype, value_dtype: of the step's own keys
    and values, the cache's or that of quantised pages. top_k: for a step that selects keys and doesn't attend, how many; its
    query and keys are those of an indexer. None: it attends. reads_layer: the layer whose keys and values the step's layer reads;
    None: its own.
    """

    cache: CachePlan
    tokens: int
    update: str
    max_q_len: int | None
    top_k: int | None = None
    reads_layer: int | None = None

    @property
    def contiguous_positions(self) -> bool:
        """Not over pages: the rows of a step have positions of their own sequences."""
        return False

    @property
    def kv_heads(self) -> int:
        """KV heads as declared. The cache may store each several times."""
        return self.cache.cache.kv_heads

    @property
    def head_dim(self) -> int:
        return self.cache.cache.head_dim

    @property
    def value_dim(self) -> int:
        return self.cache.cache.value_size

    @property
    def layout(self) -> str:
        """The layout of the cache's pages."""
        return self.cache.cache.layout

    @property
    def stored_dtype(self) -> str:
        return self.cache.cache.stored_dtype

    @property
    def page_size(self) -> int:
        return self.cache.cache.page_size

    @property
    def sequence_shards(self) -> int:
        """The number of devices over which the pages of one sequence are distributed round-robin; 1 if they aren't split."""
        return self.cache.sequence_shards

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The mesh axes of these devices."""
        named = axis_names(self.cache.cache.page_sequence_axis)
        return tuple(a.name for a in self.mesh if a.name in named and a.splits)

    @property
    def repeated_axes(self) -> tuple[MeshAxis, ...]:
        """Of a step that selects, the mesh axes along which all devices do the same work: index heads aren't split."""
        if self.top_k is None:
            return ()
        fitted = self.cache.pages_array.fitted
        split = {*fitted.axes(0), *self.sequence_axes}
        return unused_axes(self.mesh, split)

    @property
    def merges(self) -> tuple[Merge, ...]:
        """What merges these devices' results: sums of float32 outputs and two numbers for each; or the positions and scores that
        each selected, merged by each device for a share of the tokens, and then the positions that remain."""
        n = self.sequence_shards
        if n == 1 or self.mode == "insert":
            return ()
        if self.top_k is not None:
            size = 4 * -(-self.local_tokens // n) * n * self.top_k
            parts = Merge("all-to-all", "selections of parts", 2 * size, 2 * size * (n - 1) / n)
            return parts, Merge("all-gather", "positions", size, size * (n - 1) / n)
        size = 4 * self.local_tokens * self.local_heads[0] * (self.value_dim + 2)
        return (Merge("all-reduce", "output, lse", size, 2 * size * (n - 1) / n),)

    @property
    def local_tokens(self) -> int:
        """Tokens per shard."""
        return self.tokens // self.cache.shards

    @property
    def local_heads(self) -> tuple[int, int]:
        """(query heads, kv heads) per device. If heads are split over a Manual axis, the query's heads are already split."""
        if self.top_k is not None:  # each device has all index heads
            return self.q_heads, 1
        fitted, declared = self.cache.pages_array.fitted, axis_names(self.cache.cache.kv_head_axis)
        shards, manual = 1, 1
        for axis in self.mesh:
            shards *= axis.size if axis.name in fitted.axes(self.cache.heads_at) else 1
            manual *= axis.size if axis.kind == "manual" and axis.name in declared else 1
        return self.q_heads // shards, max(1, self.cache.stored_heads // (shards * manual))

    def tensor(self, name: str) -> tuple[tuple[int, ...], int] | None:
        """(shape, bytes of an element) of an operand or a result, for all devices; None if the step doesn't have it."""
        if (operand := self.operand(name)) is not None:
            return operand.shape, jnp.dtype(operand.dtype).itemsize
        writes, attends = self.update != "none", self.mode != "insert"
        q, kv = (self.tokens, self.q_heads), (self.tokens, self.kv_heads)
        top_k = self.top_k or 0
        every = {
            "index_query": ((*q, self.head_dim), self.input_dtype, attends),
            "index_key": ((self.tokens, self.head_dim), self.key_dtype, writes),
            "positions": ((self.tokens, top_k), "int32", attends),
            "counts": ((self.tokens,), "int32", attends),
            "query": ((*q, self.head_dim), self.input_dtype, True),
            "key": ((*kv, self.head_dim), self.key_dtype, writes),
            "value": ((*kv, self.value_dim), self.value_dtype, writes and not self.cache.cache.values_in_keys),
            "output": ((*q, self.value_dim), self.runtime_dtype, attends),
            "lse": (q, "float32", attends and "return_lse" in self.features),
        }
        if name not in every or not every[name][2]:
            return None
        shape, dtype, _ = every[name]
        return shape, jnp.dtype(dtype).itemsize

    def describe(self) -> str:
        """What is computed, and where, in one line."""
        cache = self.cache.cache
        heads = heads_text(self.q_heads, self.kv_heads, self.head_dim, self.value_dim)
        stored = "" if cache.quantised is None else f" in {cache.quantised.dtype}"
        limit = "" if self.max_q_len is None else f" of at most {self.max_q_len} per sequence"
        if self.top_k is not None:
            heads = f"the {self.top_k} best keys by {self.q_heads} index heads of {self.head_dim}"
        return (
            f"{platform_text(self)}: {self.tokens} tokens{limit}, up to {cache.max_sequences} sequences, {heads}, "
            f"{self.runtime_dtype}, pages of {cache.page_size}{stored}, mode {self.mode}, mesh {describe_mesh(self.mesh)}"
        )
