"""Positions of queries that aren't their places in the sequences, for a score by them alone; and what is refused beside them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ALiBi, Causal, Chunked, KVCache, OperationMetadata, OperationRegistry, SoftCap
from attnops.errors import AttnOpsError
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.scores import PositionTemperature
from attnops.sharding import virtual_mesh

FIELDS: dict[str, Any] = {
    "layers": 1, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 16, "max_sequences": 4,
    "max_length": 16,
}  # fmt: skip
ROWS = ((5, 11), (1, 6))  # (queries, keys) of each row
SCORE = SoftCap(4.0) >> PositionTemperature(4.0, 0.3)
WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {}),
    "dp_tp": ({"pages_axis": "dp"}, {"dp": 2, "tp": 2}),
    "sp": ({"page_sequence_axis": "sp"}, {"sp": 2}),
}


def _served(fields: dict[str, Any], axes: dict[str, int], **call: Any) -> tuple[Any, ...]:
    """(query, key, value, positions, output) of both rows, on each shard of the pages."""
    cache = KVCache(**FIELDS | fields)
    mesh = virtual_mesh(axes) if axes else None
    plan, rng = cache.plan(mesh), np.random.default_rng(4)
    tokens = sum(n for _, n in ROWS)
    total = tokens * plan.shards
    query, key, value = (rng.standard_normal((total, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    positions = rng.integers(0, 60, total).astype(np.int32)

    def batch_of(at: int) -> RaggedBatch:
        one = RaggedBatch.make(
            plan, cu_q_lens=np.cumsum([0, *(row[at] for row in ROWS)]), kv_lens=[n for _, n in ROWS],
            page_table=[[0, 5, 2], [4, 3]], tokens=tokens,
        )  # fmt: skip
        return one if plan.shards == 1 else RaggedBatch.stack([one] * plan.shards)

    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, softmax_scale=0.3))
    state = paged(None, key, value, state=init(cache, mesh), layer=0, batch=batch_of(1), mode="insert").state

    def step(state: Any, batch: Any, query: Any, positions: Any) -> Any:
        given = {"batch": batch, "q_positions": positions, "score": SCORE, "update": "none"}
        return paged(query, state=state, layer=0, **given, **call).attention_outputs

    output = np.asarray(jax.jit(step)(state, batch_of(0), query, positions))
    return tokens, plan.shards, query, key, value, positions, output


@pytest.mark.parametrize("way", ["dp_tp", *(pytest.param(way, marks=pytest.mark.slow) for way in ("plain", "sp"))])
def test_a_score_by_positions_that_are_given(way: str) -> None:
    tokens, shards, query, key, value, positions, output = _served(*WAYS[way])
    for shard in range(shards):
        at = start = shard * tokens
        for q, n in ROWS:
            for token in range(at, at + q):
                slots = start + np.arange(n - q + token - at + 1)  # causal by the places in the sequence
                for head in range(4):
                    logits = 0.3 * key[slots, head // 2].astype(np.float64) @ query[token, head]
                    logits = 4 * np.tanh(logits / 4) * (1 + 0.3 * np.log(1 + np.floor((positions[token] + 1) / 4)))
                    weights = np.exp(logits - logits.max())
                    wanted = weights / weights.sum() @ value[slots, head // 2]
                    np.testing.assert_allclose(output[token, head], wanted, rtol=0, atol=5e-6)
            at, start = at + q, start + n


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
AT = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"q_positions": AT.astype(np.float32), "score": SCORE}, "float32"),
        ({"q_positions": AT[:3], "score": SCORE}, r"\(3,\)"),
        ({"q_positions": AT - 2, "score": SCORE}, r"q_positions\[0\] is -2"),
        ({"q_positions": AT}, r"\[paged.positions\]"),
        ({"q_positions": AT, "score": ALiBi()}, r"\[paged.positions\]"),
        ({"q_positions": AT, "score": SCORE >> ALiBi()}, r"\[paged.positions\]"),
        ({"q_positions": AT, "score": SCORE, "sliding_window": (3, 0)}, r"\[paged.positions\]"),
        ({"q_positions": AT, "score": SCORE, "mask": Causal() & Chunked(4)}, r"\[paged.positions\]"),
        ({"q_positions": AT, "score": SCORE, "mode": "insert"}, "insert"),
    ],
)
def test_positions_that_are_refused(call: dict[str, Any], named: str) -> None:
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    with pytest.raises(AttnOpsError, match=named):
        OperationRegistry.create("paged")(q, k, v, state=init(CACHE), layer=0, batch=BATCH, **call)


def test_the_kernel_has_no_positions_and_traced_ones_are_checked_with_debug() -> None:
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    plan = OperationRegistry.create("paged", OperationMetadata(backend="tpu", fallback="allow")).plan(
        *(shape(4, heads, 16) for heads in (4, 2, 2)), cache=KVCache(**FIELDS | {"layout": "joined"}), score=SCORE,
        q_positions=jax.ShapeDtypeStruct((4,), jnp.int32),
    )  # fmt: skip
    assert plan.implementation == "paged.forward_native"
    codes = {reason.code for rejected in plan.rejected for reason in rejected.reasons}
    assert codes == {"feature.positions", "feature.score"}
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    paged = OperationRegistry.create("paged")

    def step(positions: Any) -> Any:
        given = {"batch": BATCH, "q_positions": positions, "score": SCORE, "debug": True}
        return paged(q, k, v, state=init(CACHE), layer=0, **given).attention_outputs

    with pytest.raises(Exception, match=r"q_positions\[1\] is -1"):
        jax.block_until_ready(jax.jit(step)(jnp.array([0, -1, 2, 3])))
