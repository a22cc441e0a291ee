"""A step over pages whose sequences have keys already: its caches, meshes and arguments, and each token by the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attnops import ALiBi, Causal, Chunked, KVCache, OperationMetadata, OperationRegistry
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

FIELDS: dict[str, Any] = {
    "layers": 1, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 24, "max_sequences": 4,
    "max_length": 32,
}  # fmt: skip
INTERPRETED = {"paged": {"interpret": True}}  # the TPU kernel
LATENT = {"kind": "latent", "kv_heads": 1, "value_dim": 12}
# (fields of the cache, mesh, arguments of the step)
WAYS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "window_tp": ({}, {"tp": 2}, {"sliding_window": (2, 0)}),
    "dp_tp": ({"pages_axis": "dp"}, {"dp": 2, "tp": 2}, {"mask": Causal() & Chunked(5)}),
    "dp_on_one_device": ({"pages_axis": "dp"}, {}, {"logits_soft_cap": 4.0}),
    "sp": ({"page_sequence_axis": "sp"}, {"sp": 2}, {}),
    "sp_window": ({"page_sequence_axis": "sp"}, {"sp": 2}, {"sliding_window": (2, 0)}),
    "latent_sp_dp": (LATENT | {"page_sequence_axis": "sp", "pages_axis": "dp"}, {"dp": 2, "sp": 2}, {}),
    "kernel": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "sliding_window": (3, 0)}),
    "kernel_dp": ({"layout": "joined", "pages_axis": "dp"}, {"dp": 2}, {"configs": INTERPRETED}),
    "kernel_fused": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "update": "fused"}),
    "score": ({}, {}, {"score": ALiBi(np.array([0.5, 0.25, 0.1, 0.9], np.float32))}),
    "selected": ({}, {}, {"selected": True}),
}


class Place(NamedTuple):
    """A token of a step: its row, its position in the sequence, and the first token of the sequence among the keys."""

    token: int
    row: int
    position: int
    start: int


class ServedRows:
    """Rows of (queries, keys) on one shard of pages, or half of them on each of two. call: the arguments of the step."""

    def __init__(self, way: str, rows: Sequence[tuple[int, int]], tables: Sequence[list[int]]) -> None:
        fields, axes, call = WAYS[way]
        self.call, self.rows, self.tables = dict(call), rows, tables
        cache, mesh = KVCache(**FIELDS | fields), virtual_mesh(axes) if axes else None
        self.plan, rng = cache.plan(mesh), np.random.default_rng(2)
        half = len(rows) // 2
        self.of_shard = [range(half), range(half, len(rows))] if self.plan.shards == 2 else [range(len(rows))]
        self.tokens = max(sum(rows[row][1] for row in some) for some in self.of_shard)
        self.total = self.tokens * self.plan.shards
        heads = (cache.kv_heads, 16), (cache.kv_heads, cache.value_size), (4, 16)
        self.key, self.value, self.query = (rng.standard_normal((self.total, *x)).astype(np.float32) for x in heads)
        if cache.values_in_keys:
            self.value = self.key[..., : cache.value_size]
        configs = self.call.pop("configs", {})
        metadata = OperationMetadata(mesh=mesh, softmax_scale=0.3, operation_configs=configs)
        self.paged = OperationRegistry.create("paged", metadata)
        write = self.key, None if cache.values_in_keys else self.value
        inserted = self.paged(None, *write, state=init(cache, mesh), layer=0, batch=self.batch(True), mode="insert")
        self.state, self.places = inserted.state, tuple(self._places())
        if "selected" in self.call:
            chosen = np.full((self.total, 9), -1, np.int32)
            for place in self.places:
                some = rng.permutation(rows[place.row][1])[: rng.integers(1, 10)]
                chosen[place.token, : len(some)] = some
            self.call["selected"] = chosen

    def batch(self, whole: bool) -> RaggedBatch:
        """The rows with all of their tokens, or with their queries."""
        made = []
        for some in self.of_shard:
            table = [[page % self.plan.local_pages for page in self.tables[row]] for row in some]
            lengths = [self.rows[row][1] for row in some]
            bounds = np.cumsum([0, *(self.rows[row][whole] for row in some)])
            made.append(
                RaggedBatch.make(self.plan, cu_q_lens=bounds, kv_lens=lengths, page_table=table, tokens=self.tokens)
            )
        return made[0] if self.plan.shards == 1 else RaggedBatch.stack(made)

    def _places(self) -> Iterator[Place]:
        for shard, some in enumerate(self.of_shard):
            at = start = shard * self.tokens
            for row in some:
                q, n = self.rows[row]
                yield from (Place(at + i, row, n - q + i, start) for i in range(q))
                at, start = at + q, start + n

    def step(self, **seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(output, lse) of the queries with these traced arrays. The step's own keys are written again, where update writes."""
        update, written = self.call.pop("update", "none"), {}
        if update != "none":
            written = {name: np.zeros_like(x) for name, x in (("key", self.key), ("value", self.value))}
            for place in self.places:
                for name, x in (("key", self.key), ("value", self.value)):
                    written[name][place.token] = x[place.start + place.position]

        def step(state: Any, batch: Any, query: Any, seen: Any) -> Any:
            given = {"batch": batch, "update": update, "return_lse": True, **seen}
            found = self.paged(query, state=state, layer=0, **given, **self.call, **written)
            return found.attention_outputs, found.lse

        output, lse = jax.jit(step)(self.state, self.batch(False), self.query, seen)
        return np.asarray(output), np.asarray(lse)

    def compare(
        self, found: tuple[np.ndarray, np.ndarray], keys_of: Callable[[Place], tuple[np.ndarray, np.ndarray, int]]
    ) -> None:
        """Each token against the reference. keys_of: the positions of its keys, which of them it sees, its place among them."""
        output, lse = found
        logits = {"soft_cap": self.call.get("logits_soft_cap"), "score": self.call.get("score")}
        for place in self.places:
            slots, seen, at = keys_of(place)
            if "selected" in self.call:
                seen = seen & np.isin(slots, self.call["selected"][place.token])
            arrays = self.query[place.token][None], self.key[place.start + slots], self.value[place.start + slots]
            wanted = reference_attention(
                *(x[None].astype(np.float64) for x in arrays), scale=0.3, mask=seen[None, None, None], query_offset=at,
                **logits,
            )  # fmt: skip
            np.testing.assert_allclose(output[place.token], wanted.output[0, 0], rtol=0, atol=5e-6)
            np.testing.assert_allclose(lse[place.token], wanted.lse[0, :, 0], rtol=0, atol=5e-6)

    def by_position(self, position: np.ndarray, at: int) -> np.ndarray:
        """Which positions a query at one sees by the step's window or chunks."""
        seen = position <= at
        if "sliding_window" in self.call:
            seen &= position >= at - self.call["sliding_window"][0]
        return seen & (position // 5 == at // 5) if "mask" in self.call else seen
