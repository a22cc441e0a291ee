"""Spans of tokens and prefixes that see one another, in steps over pages; and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ALiBi, Causal, Chunked, InputError, KVCache, OperationMetadata, OperationRegistry, Prefix
from attnops.errors import AttnOpsError, RefusedError
from attnops.operators.paged_cache import RaggedBatch, init
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
    "sp": ({"page_sequence_axis": "sp"}, {"sp": 2}, {"sliding_window": (2, 0)}),
    "latent_sp_dp": (LATENT | {"page_sequence_axis": "sp", "pages_axis": "dp"}, {"dp": 2, "sp": 2}, {}),
    "kernel": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "sliding_window": (3, 0)}),
    "kernel_dp": ({"layout": "joined", "pages_axis": "dp"}, {"dp": 2}, {"configs": INTERPRETED}),
    "kernel_fused": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "update": "fused"}),
    "score": ({}, {}, {"score": ALiBi(np.array([0.5, 0.25, 0.1, 0.9], np.float32))}),
    "selected": ({}, {}, {"selected": True}),
}
QUICK = ("window_tp", "dp_tp", "latent_sp_dp", "kernel", "selected")
# (queries, keys, prefix, spans) of each row. The last row's only token ends a span that is stored.
ROWS = ((6, 11, 0, ((2, 4), (6, 9))), (9, 13, 7, ((9, 11),)), (3, 3, 2, ()), (1, 10, 0, ((5, 10),)))
TABLES = ([0, 3, 6], [8, 1, 4, 9], [2], [10, 7, 12])


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS])
def test_a_step_of_spans_and_prefixes(way: str) -> None:
    fields, axes, call = WAYS[way]
    call, cache, mesh = dict(call), KVCache(**FIELDS | fields), None
    if axes:
        count = int(np.prod([*axes.values()]))
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    plan, rng = cache.plan(mesh), np.random.default_rng(2)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    of_shard = [range(2), range(2, 4)] if plan.shards == 2 else [range(4)]
    tokens = max(sum(ROWS[row][1] for row in rows) for rows in of_shard)

    def batch_of(whole: bool) -> RaggedBatch:
        made = []
        for rows in of_shard:
            new = [ROWS[row][whole] for row in rows]
            table = [[page % plan.local_pages for page in TABLES[row]] for row in rows]
            lengths = [ROWS[row][1] for row in rows]
            made.append(
                RaggedBatch.make(plan, cu_q_lens=np.cumsum([0, *new]), kv_lens=lengths, page_table=table, tokens=tokens)
            )
        return made[0] if plan.shards == 1 else RaggedBatch.stack(made)

    total = tokens * plan.shards
    key, value = draw(total, cache.kv_heads, 16), draw(total, cache.kv_heads, cache.value_size)
    if cache.values_in_keys:
        value = key[..., : cache.value_size]
    paged = OperationRegistry.create(
        "paged", OperationMetadata(mesh=mesh, softmax_scale=0.3, operation_configs=call.pop("configs", {}))
    )
    write = (key, None if cache.values_in_keys else value)
    state = paged(None, *write, state=init(cache, mesh), layer=0, batch=batch_of(True), mode="insert").state
    query, again = draw(total, 4, 16), [np.zeros_like(x) for x in (key, value)]
    places, spans = [], np.full((total, 2), 7, np.int32)  # two equal numbers are no span
    for shard, rows in enumerate(of_shard):
        at = start = shard * tokens
        for row in rows:
            q, n, _, own = ROWS[row]
            for place in range(n - q, n):
                token = at + place - (n - q)
                places.append((token, row, place, start))
                for span in own:
                    if span[0] <= place < span[1]:
                        spans[token] = span
            for new, old in zip(again, (key, value), strict=True):
                new[at : at + q] = old[start + n - q : start + n]
            at, start = at + q, start + n
    prefix = np.array([row[2] for row in ROWS], np.int32)
    if "selected" in call:
        chosen = np.full((total, 9), -1, np.int32)
        for token, row, _, _ in places:
            some = rng.permutation(ROWS[row][1])[: rng.integers(1, 10)]
            chosen[token, : len(some)] = some
        call["selected"] = chosen
    update = call.pop("update", "none")
    written = {"key": again[0], "value": again[1]} if update != "none" else {}

    def step(state: Any, batch: Any, query: Any, spans: Any, prefix: Any) -> Any:
        given = {"batch": batch, "spans": spans, "prefix_lengths": prefix, "update": update, "return_lse": True}
        found = paged(query, state=state, layer=0, **given, **call, **written)
        return found.attention_outputs, found.lse

    output, lse = (np.asarray(x) for x in jax.jit(step)(state, batch_of(False), query, spans, prefix))
    for token, row, place, start in places:
        _, n, length, _ = ROWS[row]
        keys = np.arange(n)
        seen = keys <= place
        if "sliding_window" in call:
            seen &= keys >= place - call["sliding_window"][0]
        if "mask" in call:
            seen &= keys // 5 == place // 5
        seen |= (spans[token, 0] <= keys) & (keys < spans[token, 1])
        seen |= (place < length) & (keys < length)
        if "selected" in call:
            seen &= np.isin(keys, call["selected"][token])
        logits = {"soft_cap": call.get("logits_soft_cap"), "score": call.get("score")}
        wanted = reference_attention(
            *(x[None].astype(np.float64) for x in (query[token][None], key[start : start + n], value[start : start + n])),
            scale=0.3, mask=seen[None, None, None], query_offset=place, **logits,
        )  # fmt: skip
        np.testing.assert_allclose(output[token], wanted.output[0, 0], rtol=0, atol=5e-6)
        np.testing.assert_allclose(lse[token], wanted.lse[0, :, 0], rtol=0, atol=5e-6)


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
GROUP = KVCache(**FIELDS | {"layers": [{"layers": 1, "window_tokens": 4}], "max_tokens": 4})


def _step(batch: Any = BATCH, cache: KVCache = CACHE, **call: Any) -> Any:
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    return OperationRegistry.create("paged")(q, k, v, state=init(cache), layer=0, batch=batch, **call)


def _spans(*own: tuple[int, int]) -> np.ndarray:
    """Of the tokens of the second row, at positions 6, 7 and 8."""
    return np.array([(0, 0), *own], np.int32)


NONE = (0, 0)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"spans": np.zeros((4, 2), np.float32)}, "float32"),
        ({"spans": np.zeros((3, 2), np.int32)}, r"\(3, 2\)"),
        ({"spans": _spans((3, 6), NONE, NONE)}, r"spans\[1\] is \(3, 6\), of row 1: it doesn't contain .* position 6"),
        ({"spans": _spans((-1, 7), NONE, NONE)}, "begins before the sequence"),
        ({"spans": _spans(NONE, NONE, (8, 10))}, r"spans\[3\] is \(8, 10\), of row 1: it ends after the 9 tokens"),
        ({"spans": _spans((6, 8), NONE, NONE)}, r"spans\[1\] is \(6, 8\), of row 1: it differs from that of a neighbour"),
        ({"spans": _spans(NONE, (6, 8), NONE)}, r"spans\[2\] .* differs from that of a neighbour"),
        ({"prefix_lengths": np.zeros(4, np.float32)}, "float32"),
        ({"prefix_lengths": np.zeros((4, 1), np.int32)}, r"\(4, 1\)"),
        ({"prefix_lengths": np.zeros(3, np.int32)}, "3 numbers; wanted 4"),
        ({"prefix_lengths": np.array([0, 10, 0, 0], np.int32)}, r"prefix_lengths\[1\] is 10, but the row has 9 tokens"),
        ({"prefix_lengths": np.array([0, -1, 0, 0], np.int32)}, r"prefix_lengths\[1\] is -1"),
    ],
)  # fmt: skip
def test_spans_that_are_refused(call: dict[str, Any], named: str) -> None:
    with pytest.raises(AttnOpsError, match=named):
        _step(**call)


def test_a_windows_pages_and_drafts_have_no_spans_that_they_do_not_hold() -> None:
    batch = RaggedBatch.make(GROUP.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
    kept = {"cache": GROUP, "batch": batch, "sliding_window": (3, 0)}
    assert _step(**kept, spans=_spans((3, 7), NONE, NONE)).attention_outputs.shape == (4, 4, 16)
    with pytest.raises(InputError, match=r"spans\[1\] .* begins before 3, of which the layer's pages keep nothing"):
        _step(**kept, spans=_spans((2, 7), NONE, NONE))
    with pytest.raises(InputError, match="keep only a window of 4 tokens"):
        _step(**kept, prefix_lengths=np.array([0, 7, 0, 0], np.int32))
    tree = np.zeros((4, 3, 3), bool)
    tree[1] = np.tri(3, dtype=bool)
    with pytest.raises(InputError, match="whose tokens are a tree of drafts"):
        _step(spans=_spans((3, 7), NONE, NONE), draft_tree=tree)


def test_traced_ones_are_checked_with_debug() -> None:
    wrong = jnp.asarray(_spans(NONE, NONE, (8, 10)))
    with pytest.raises(Exception, match="ends after the 9 tokens"):
        jax.block_until_ready(jax.jit(lambda spans: _step(spans=spans, debug=True).attention_outputs)(wrong))


def test_what_a_plan_says_and_refuses() -> None:
    with pytest.raises(InputError, match="insert"):
        _step(spans=np.zeros((4, 2), np.int32), mode="insert")
    with pytest.raises(RefusedError, match="prefix_lengths"):
        _step(mask=Causal() | Prefix(3))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    integers = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, backend="tpu"))
    cache = KVCache(**FIELDS | {"pages_axis": "dp", "layout": "joined"})
    plan = paged.plan(
        *(shape(8, heads, 16) for heads in (4, 2, 2)), cache=cache, update="fused", spans=integers(8, 2),
        prefix_lengths=integers(4),
    )  # fmt: skip
    assert plan.implementation == "paged.forward_tpu"
    specs = {x.tensor: (tuple(x.spec), x.local_shape) for x in plan.tensors}
    assert specs["spans"] == (("dp", None), (4, 2))
    assert specs["prefix_lengths"] == (("dp",), (2,))
    assert [note.code for note in plan.notes if note.field == "update"] == ["paged.fused_spans"]
    batch = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
    tokens = [shape(4, heads, 16) for heads in (4, 2, 2)]
    alone = OperationRegistry.create("paged")
    assert alone.plan(*tokens, cache=CACHE, batch=batch, spans=integers(4, 2)).reads is None  # they depend on the spans
    assert alone.plan(*tokens, cache=CACHE, batch=batch).reads is not None
