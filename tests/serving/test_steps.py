"""Steps of a served layer: a pool of pages, a declared cache and attention together, against float64 on whole sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal, Chunked, ConfigError, InputError, OperationMetadata, OperationRegistry
from attnops.operators.paged_cache import CacheState, RaggedBatch, attend, copy, init, insert, scrub, shardings
from attnops.planning.cache.kv_cache import KVCache
from attnops.serving import PagePool
from attnops.verify import reference_attention

HEADS, DIM, TOKENS, ROWS = 8, 16, 24, 8
FIELDS: dict[str, Any] = {
    "layers": 2, "kv_heads": 2, "head_dim": DIM, "value_dim": 8, "dtype": "float32", "page_size": 4, "pages": 48,
    "max_sequences": ROWS, "max_length": 64,
}  # fmt: skip
LATENT = {"kind": "latent", "kv_heads": 1}  # its values are the first 8 numbers of its keys
INTERPRETED = {"paged": {"interpret": True}}  # the TPU kernel
WAYS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "window": ({}, {}, {"sliding_window": (6, 0)}),
    "cap_and_sinks": ({}, {}, {"logits_soft_cap": 5.0, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}),
    "int8": ({"quantised": {"dtype": "int8", "scale": "token_head"}}, {}, {}),
    "tp": ({}, {"tp": 2}, {"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}),
    "tp_beyond_heads": ({}, {"tp": 4}, {"sliding_window": (9, 0)}),
    "tp_int8": ({"quantised": {"dtype": "int8", "scale": "token_head"}}, {"tp": 2}, {}),
    "dp": ({"pages_axis": "dp"}, {"dp": 2}, {}),
    "dp_tp": ({"pages_axis": "dp"}, {"dp": 2, "tp": 2}, {"sliding_window": (9, 0)}),
    "dp_on_one_device": ({"pages_axis": "dp"}, {}, {}),
    "heads": ({"layout": "heads"}, {"tp": 2}, {"sliding_window": (9, 0)}),
    "heads_int8_dp": ({"layout": "heads", "pages_axis": "dp", "quantised": {"dtype": "int8"}}, {"dp": 2}, {}),
    "joined": ({"layout": "joined"}, {"tp": 2}, {"sliding_window": (9, 0)}),
    "joined_int8": ({"layout": "joined", "quantised": {"dtype": "int8"}}, {}, {}),
    "kernel": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "sliding_window": (9, 0)}),
    "kernel_tp_int8": (
        {"layout": "joined", "quantised": {"dtype": "int8"}},
        {"tp": 2},
        {"configs": INTERPRETED, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    ),
    "fused": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "update": "fused", "sliding_window": (9, 0)}),
    "fused_dp_tp": (
        {"layout": "joined", "pages_axis": "dp"},
        {"dp": 2, "tp": 2},
        {"configs": INTERPRETED, "update": "fused"},
    ),
    "fused_tp_beyond_heads_int8": (
        {"layout": "joined", "quantised": {"dtype": "int8"}},
        {"tp": 4},
        {"configs": INTERPRETED, "update": "fused", "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    ),
    "fused_on_xla": ({}, {"tp": 2}, {"update": "fused"}),
    "interleaved": ({"layout": "interleaved", "value_dim": DIM}, {"tp": 2}, {}),
    "interleaved_fp8": ({"layout": "interleaved", "value_dim": DIM, "quantised": {"dtype": "float8_e4m3fn"}}, {}, {}),
    "packed": (
        {"layout": "packed", "value_dim": DIM, "pages_axis": "dp"},
        {"dp": 2, "tp": 2},
        {"sliding_window": (6, 0)},
    ),
    "latent": (LATENT, {}, {"logits_soft_cap": 5.0}),
    "latent_tp_int8": (LATENT | {"quantised": {"dtype": "int8"}}, {"tp": 4}, {"sliding_window": (9, 0)}),
    "latent_dp_tp": (
        LATENT | {"pages_axis": "dp"},
        {"dp": 2, "tp": 2},
        {"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    ),
    "latent_repeated": (LATENT | {"kv_head_axis": None}, {"tp": 2}, {}),
    "latent_kernel": (LATENT, {}, {"configs": INTERPRETED, "sliding_window": (9, 0)}),
    "latent_fused_tp_int8": (
        LATENT | {"quantised": {"dtype": "int8"}},
        {"tp": 2},
        {"configs": INTERPRETED, "update": "fused", "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    ),
    "latent_fp8_head": (LATENT | {"quantised": {"dtype": "float8_e4m3fn", "scale": "head"}}, {"tp": 2}, {}),
    "packed_int8": ({"layout": "packed", "value_dim": DIM, "quantised": {"dtype": "int8"}}, {}, {}),
    "chunked_dp_tp": ({"pages_axis": "dp"}, {"dp": 2, "tp": 2}, {"chunk": 6}),
    "chunked_fused_tp": (
        {"layout": "joined"},
        {"tp": 2},
        {"configs": INTERPRETED, "update": "fused", "chunk": 10, "sliding_window": (7, 0)},
    ),
}


class Served:
    """Sequences that grow, each with all that was ever written of it."""

    def __init__(self, fields: dict[str, Any], axes: dict[str, int], call: dict[str, Any]) -> None:
        self.cache = KVCache(**FIELDS | fields)
        self.mesh = None
        if axes:
            names, sizes = tuple(axes), tuple(axes.values())
            count = int(np.prod(sizes))
            self.mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]).reshape(sizes), names)
        self.plan = self.cache.plan(self.mesh)
        self.shards, self.call = self.plan.shards, call
        along = self.plan.sequence_shards
        self.pools = [
            PagePool(self.plan.local_pages, self.cache.page_size, sequence_shards=along) for _ in range(self.shards)
        ]
        fixed = self.cache.quantised is not None and self.cache.quantised.scale != "token_head"
        state = init(self.cache, self.mesh, **({"key_scale": 0.01} if fixed else {}))
        # What nobody has written must reach nobody.
        junk = lambda dtype: np.nan if jnp.issubdtype(dtype, jnp.floating) else 127  # noqa: E731
        dead = lambda x: x if x.ndim < 3 else jax.device_put(np.full(x.shape, junk(x.dtype), x.dtype), x.sharding)  # noqa: E731
        self.state: CacheState = jax.tree.map(dead, state)
        self.history: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self.random = np.random.default_rng(3)

        configs = call.get("configs", {})
        paged = OperationRegistry.create("paged", OperationMetadata(mesh=self.mesh, operation_configs=configs))
        names = {"sinks": "softmax_aux"}
        options: dict[str, Any] = {"softmax_scale": DIM**-0.5} | {
            names.get(name, name): x for name, x in call.items() if name not in ("configs", "chunk")
        }
        if "chunk" in call:
            options["mask"] = Causal() & Chunked(call["chunk"])

        def step(state: CacheState, batch: RaggedBatch, query: Any, key: Any, value: Any, longest: int | None) -> Any:
            last, own = self.cache.layers - 1, options | {"max_q_len": longest}
            value = None if self.cache.values_in_keys else value
            found = paged(query, key, value, state=state, layer=last, batch=batch, return_lse=True, **own)
            return found.attention_outputs, found.lse, found.state

        self.step = jax.jit(step, donate_argnums=0, static_argnums=5)

    def run(self, chunks: list[dict[str, int]], longest: int | None = None) -> None:
        """One step: for each shard, sequence -> new tokens, at most `longest` each. All that comes back is held against the
        reference."""
        tokens = TOKENS * self.shards
        draw = lambda heads, dim: self.random.standard_normal((tokens, heads, dim), np.float32)  # noqa: E731
        kv_heads = self.cache.kv_heads
        query, key, value = draw(HEADS, DIM), draw(kv_heads, DIM), draw(kv_heads, self.cache.value_size)
        if self.cache.values_in_keys:
            value = key[..., : self.cache.value_size]
        batches = []
        for shard, new in enumerate(chunks):
            pool = self.pools[shard]
            for name, count in new.items():
                if name not in pool:
                    pool.alloc(name, count)
                grown = pool.append_count(name, count)
                assert not grown.copies
            names = list(new)
            starts = np.cumsum([0, *new.values()])
            batches.append(
                RaggedBatch.make(
                    self.plan,
                    cu_q_lens=starts,
                    kv_lens=pool.kv_lens(names),
                    page_table=pool.page_table(names, self.cache.table_width),
                    tokens=TOKENS,
                )
            )
            for name, first, last in zip(names, starts[:-1] + shard * TOKENS, starts[1:] + shard * TOKENS, strict=True):
                before = self.history.get(name, (key[:0], value[:0]))
                self.history[name] = tuple(
                    np.concatenate([a, b[first:last]]) for a, b in zip(before, (key, value), strict=True)
                )
        batch = batches[0] if self.shards == 1 else RaggedBatch.stack(batches)
        arrays = (batch, query, key, value)
        if self.mesh is not None:
            placed = shardings(self.cache, self.mesh)
            arrays = jax.device_put(arrays, (placed.batch, placed.query, placed.key, placed.value))
        output, lse, self.state = self.step(self.state, *arrays, longest)
        output, lse = np.asarray(output, np.float64), np.asarray(lse)
        live = np.zeros(tokens, bool)
        for shard, new in enumerate(chunks):
            first = shard * TOKENS
            for name, count in new.items():
                self.compare(
                    name, query[first : first + count], output[first : first + count], lse[first : first + count]
                )
                live[first : first + count] = True
                first += count
        assert (output[~live] == 0).all()
        assert np.isneginf(lse[~live]).all()

    def serve(self) -> None:
        """Prefill, chunks beside decoding rows, decoding alone, sequences that end and pages that others get."""
        one, more = [{}] * (self.shards - 1), [{"z": 3}] + [{}] * (self.shards - 2)
        for step in ({"a": 9}, {"a": 7, "b": 1}, {"a": 1, "b": 5, "c": 13}, {"a": 1, "b": 1, "c": 1}):
            self.run([step, *(more if self.shards > 1 else one)])
        self.pools[0].free("a")
        del self.history["a"]
        for step in ({"d": 10, "b": 1}, {"b": 1, "c": 1, "d": 1}):
            self.run([step, *one])
        for pool in self.pools:
            pool.check()

    def compare(self, name: str, query: np.ndarray, output: np.ndarray, lse: np.ndarray) -> None:
        key, value = (x[None].astype(np.float64) for x in self.history[name])
        rows = np.arange(len(key[0]) - len(query), len(key[0]))[:, None] - np.arange(len(key[0]))[None]
        seen = rows >= 0
        if "sliding_window" in self.call:
            seen &= rows <= self.call["sliding_window"][0]
        if "chunk" in self.call:
            chunk = np.arange(len(key[0])) // self.call["chunk"]
            seen &= chunk[len(chunk) - len(query) :, None] == chunk
        want = reference_attention(
            query[None].astype(np.float64),
            key,
            value,
            mask=seen[None, None],
            scale=DIM**-0.5,
            soft_cap=self.call.get("logits_soft_cap"),
            sinks=self.call.get("sinks"),
        )
        # int8: a value is off by half a step of its row's largest, and so is a key.
        tolerance = 2e-5
        if self.cache.quantised:  # fp8 has three bits behind the first
            tolerance = 3e-2 if self.cache.stored_dtype == "int8" else 1e-1
        np.testing.assert_allclose(output, want.output[0], rtol=0, atol=tolerance * np.abs(value).max())
        np.testing.assert_allclose(lse, want.lse[0].T, rtol=0, atol=tolerance * 4)


# What others have together.
PARTS = ("int8", "dp", "kernel_tp_int8", "packed_int8", "joined_int8", "chunked_dp_tp", "chunked_fused_tp")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if way in PARTS else []) for way in WAYS])
def test_steps_of_growing_sequences(way: str) -> None:
    Served(*WAYS[way]).serve()


def test_a_shared_prefix_and_a_fork() -> None:
    """A second sequence takes the first one's whole pages; after a fork each writes its own copy of the last page."""
    served = Served({}, {}, {"sliding_window": (7, 0)})
    pool = served.pools[0]
    served.run([{"a": 10}])
    pool.fork("a", "b")
    served.history["b"] = served.history["a"]
    grown = pool.append_count("b", 1)
    assert len(grown.copies) == 1
    served.state = copy(served.state, grown.copies)
    pool.truncate("b", 10)
    served.run([{"b": 2}])
    served.run([{"a": 3, "b": 1}])
    pool.check()


def test_pages_alone_give_the_same() -> None:
    """insert, then attend with update='none', is attend with update='before'; a scrubbed page's keys are zeros."""
    cache = KVCache(**FIELDS)
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((6, n, d), np.float32) for n, d in ((HEADS, DIM), (2, DIM), (2, 8)))
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 6], kv_lens=[6], page_table=[[5, 2]])
    before = jax.jit(lambda *x: attend(x[0], 1, *x[1:]))(init(cache), batch, query, key, value)
    state = jax.jit(insert, static_argnums=1)(init(cache), 1, batch, key, value)
    after = jax.jit(lambda *x: attend(x[0], 1, *x[1:], update="none"))(state, batch, query)
    np.testing.assert_array_equal(before.output, after.output)
    np.testing.assert_array_equal(before.state.layers[1].key, state.layers[1].key)
    assert not np.asarray(scrub(state, [5, 2]).layers[1].key).any()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"update": "after"}, ConfigError, "wanted 'before', 'fused' or 'none'"),
        ({"update": "fused"}, ConfigError, "plain XLA writes no pages while it attends"),
        ({"update": "none"}, InputError, "the pages have them"),
        ({"key": None}, InputError, "key and value, to be written"),
        ({"query": np.zeros((6, 3, DIM), np.float32)}, InputError, "heads a multiple of the 2 kv heads"),
        ({"query": np.zeros((6, HEADS, 7), np.float32)}, InputError, "[tokens, heads, 16]"),
        ({"layer": 2}, InputError, "wanted 0 to 1"),
        ({"max_q_len": 1}, InputError, "a row of the batch has 6 queries"),
        (
            {"update": "none", "key": None, "value": None, "query": np.zeros((4, HEADS, DIM), np.float32)},
            InputError,
            "4 tokens",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], error: type[Exception], said: str) -> None:
    cache = KVCache(**FIELDS)
    call = {
        "state": init(cache), "layer": 0, "query": np.zeros((6, HEADS, DIM), np.float32),
        "batch": RaggedBatch.make(cache.plan(), cu_q_lens=[0, 6], kv_lens=[6], page_table=[[5, 2]]),
        "key": np.zeros((6, 2, DIM), np.float32), "value": np.zeros((6, 2, 8), np.float32),
    }  # fmt: skip
    with pytest.raises(error, match=said.replace("[", r"\[").replace("]", r"\]")):
        attend(**(call | change))


def test_there_is_no_gradient() -> None:
    cache = KVCache(**FIELDS)
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 6], kv_lens=[6], page_table=[[5, 2]])
    query = jnp.ones((6, HEADS, DIM))
    with pytest.raises(InputError, match="no gradient"):
        jax.grad(lambda q: attend(init(cache), 0, batch, q, update="none").output.sum())(query)
