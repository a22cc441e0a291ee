"""Trees of drafts in a step over pages: each token attends as the last of the sequence that its path is; and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ALiBi, Causal, Chunked, InputError, KVCache, OperationMetadata, OperationRegistry
from attnops.errors import AttnOpsError
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
    "sp": ({"page_sequence_axis": "sp"}, {"sp": 2}, {}),
    "latent_sp_dp": (LATENT | {"page_sequence_axis": "sp", "pages_axis": "dp"}, {"dp": 2, "sp": 2}, {}),
    "kernel": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "sliding_window": (3, 0)}),
    "kernel_dp": ({"layout": "joined", "pages_axis": "dp"}, {"dp": 2}, {"configs": INTERPRETED}),
    "kernel_fused": ({"layout": "joined"}, {}, {"configs": INTERPRETED, "update": "fused"}),
    "score": ({}, {}, {"score": ALiBi(np.array([0.5, 0.25, 0.1, 0.9], np.float32))}),
    "selected": ({}, {}, {"selected": True}),
}
# (queries, keys) of each row: a tree, a prompt without one, another tree, a single token.
ROWS = ((6, 11), (9, 13), (3, 7), (1, 10))
TREE = np.zeros((4, 6, 6), bool)
for _row, _parents in ((0, (-1, 0, 0, 1, 1, 2)), (2, (-1, -1, 0)), (3, (-1,))):
    for _draft, _parent in enumerate(_parents):
        TREE[_row, _draft] = TREE[_row, _parent] if _parent >= 0 else False
        TREE[_row, _draft, _draft] = True
TABLES = ([0, 3, 6], [9, 4, 1, 8], [2, 5], [10, 7, 12])


QUICK = ("plain", "dp_tp", "latent_sp_dp", "kernel", "score", "selected")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS])
def test_a_step_of_trees(way: str) -> None:
    fields, axes, call = WAYS[way]
    call, cache, mesh = dict(call), KVCache(**FIELDS | fields), None
    if axes:
        count = int(np.prod([*axes.values()]))
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    if cache.page_sequence_axis:  # ids lie on the device of their page number
        tables: Any = ([0, 3, 6], [8, 1, 4, 9], [2, 5], [10, 7, 12])
    else:
        tables = TABLES
    plan, rng = cache.plan(mesh), np.random.default_rng(2)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    of_shard = [ROWS[:2], ROWS[2:]] if plan.shards == 2 else [ROWS]
    tokens = max(sum(n for _, n in rows) for rows in of_shard)

    def batch_of(whole: bool) -> RaggedBatch:
        made = []
        for shard, rows in enumerate(of_shard):
            new = [n if whole else q for q, n in rows]
            table = tables[2 * shard : 2 * shard + 2] if plan.shards == 2 else tables
            table = [[page % (plan.local_pages) for page in ids] for ids in table]
            made.append(
                RaggedBatch.make(
                    plan, cu_q_lens=np.cumsum([0, *new]), kv_lens=[n for _, n in rows], page_table=table, tokens=tokens
                )
            )
        return made[0] if plan.shards == 1 else RaggedBatch.stack(made)

    total = tokens * plan.shards
    key, value = draw(total, cache.kv_heads, 16), draw(total, cache.kv_heads, cache.value_size)
    if cache.values_in_keys:
        value = key[..., : cache.value_size]
    configs = call.pop("configs", {})
    paged = OperationRegistry.create(
        "paged", OperationMetadata(mesh=mesh, softmax_scale=0.3, operation_configs=configs)
    )
    write = (key, None if cache.values_in_keys else value)
    state = paged(None, *write, state=init(cache, mesh), layer=0, batch=batch_of(True), mode="insert").state
    query = draw(total, 4, 16)
    # The step's own keys are written again, where update writes.
    again = [np.zeros_like(x) for x in (key, value)]
    places = []  # (token of the step, row, number in the step, first token of the row's sequence)
    for shard, rows in enumerate(of_shard):
        at = start = shard * tokens
        for number, (q, n) in enumerate(rows):
            places += [(at + i, 2 * shard + number, i, start) for i in range(q)]
            for new, old in zip(again, (key, value), strict=True):
                new[at : at + q] = old[start + n - q : start + n]
            at, start = at + q, start + n
    if "selected" in call:
        chosen = np.full((total, 9), -1, np.int32)
        for token, row, _, _ in places:
            some = rng.permutation(ROWS[row][1])[: rng.integers(1, 10)]
            chosen[token, : len(some)] = some
        call["selected"] = chosen
    update = call.pop("update", "none")
    written = {"key": again[0], "value": again[1]} if update != "none" else {}

    def step(state: Any, batch: Any, query: Any, tree: Any) -> Any:
        found = paged(
            query, state=state, layer=0, batch=batch, draft_tree=tree, update=update, return_lse=True, **call, **written
        )
        return found.attention_outputs, found.lse

    output, lse = (np.asarray(x) for x in jax.jit(step)(state, batch_of(False), query, TREE))
    for token, row, number, start in places:
        q, n = ROWS[row]
        own = np.flatnonzero(TREE[row, number]) if TREE[row].any() else np.arange(number + 1)
        slots = np.append(np.arange(n - q), n - q + own)  # of a sequence whose last token this is
        position = np.arange(len(slots))
        seen = position >= (len(slots) - 1 - call["sliding_window"][0] if "sliding_window" in call else 0)
        if "mask" in call:
            seen &= position // 5 == (len(slots) - 1) // 5
        if "selected" in call:
            seen &= np.isin(slots, call["selected"][token])
        logits = {"soft_cap": call.get("logits_soft_cap"), "score": call.get("score")}
        wanted = reference_attention(
            *(x[None].astype(np.float64) for x in (query[token][None], key[start + slots], value[start + slots])),
            scale=0.3, mask=seen[None, None, None], query_offset=len(slots) - 1, **logits,
        )  # fmt: skip
        np.testing.assert_allclose(output[token], wanted.output[0, 0], rtol=0, atol=5e-6)
        np.testing.assert_allclose(lse[token], wanted.lse[0, :, 0], rtol=0, atol=5e-6)


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])


def _step(tree: Any, batch: Any = BATCH, **call: Any) -> Any:
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    return OperationRegistry.create("paged")(q, k, v, state=init(CACHE), layer=0, batch=batch, draft_tree=tree, **call)


def _tree(*rows: str) -> np.ndarray:
    """Of the batch's second row; the others have none."""
    made = np.zeros((4, len(rows), len(rows)), bool)
    made[1] = [[mark == "x" for mark in row] for row in rows]
    return made


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (np.ones((4, 3, 3), np.int32), "int32"),
        (np.zeros((4, 3, 2), bool), r"\(4, 3, 2\)"),
        (np.zeros((3, 3, 3), bool), "3 matrices; wanted 4"),
        (_tree("x..", "x..", "..x"), r"draft_tree\[1\]: draft 1 doesn't see itself"),
        (_tree("xx.", ".x.", "..x"), "draft 0 sees draft 1, which comes after it"),
        (_tree("x..", "xx.", ".xx"), "draft 2 doesn't see draft 0, unlike its parent 1"),
        (_tree("x..", ".x.", "xxx"), "draft 2 sees draft 0, unlike its parent 1"),
        (_tree("x.", ".x"), "a tree of 2 drafts, but the row has 3 tokens"),
    ],
)
def test_trees_that_are_refused(tree: Any, named: str) -> None:
    with pytest.raises(AttnOpsError, match=named):
        _step(tree)


def test_what_lies_beyond_a_rows_tokens_is_not_checked_and_a_traced_tree_is_with_debug() -> None:
    tree = _tree("x...", "xx..", "x.x.", "xxxx")
    tree[2:] = True  # rows that aren't in use
    assert _step(tree).attention_outputs.shape == (4, 4, 16)
    wrong = jnp.asarray(_tree("x..", "x..", "..x"))
    with pytest.raises(Exception, match="draft 1 doesn't see itself"):
        jax.block_until_ready(jax.jit(lambda tree: _step(tree, debug=True).attention_outputs)(wrong))


def test_what_a_plan_says_and_where_it_is_refused() -> None:
    with pytest.raises(InputError, match="insert"):
        _step(np.zeros((4, 2, 2), bool), mode="insert")
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    tokens = [shape(8, heads, 16) for heads in (4, 2, 2)]
    tree = jax.ShapeDtypeStruct((4, 6, 6), jnp.bool_)
    fields = FIELDS | {"pages_axis": "dp", "layout": "joined"}
    mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, backend="tpu"))
    plan = paged.plan(*tokens, cache=KVCache(**fields), draft_tree=tree)
    assert plan.implementation == "paged.forward_tpu"
    assert "draft_tree" in plan.problem.features
    (spec,) = (x for x in plan.tensors if x.tensor == "draft_tree")
    assert (tuple(spec.spec), spec.local_shape) == (("dp", None, None), (2, 6, 6))
    many = jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bool_)
    paged = OperationRegistry.create("paged", OperationMetadata(backend="tpu", fallback="allow"))
    plan = paged.plan(*tokens, cache=KVCache(**FIELDS | {"layout": "joined"}), draft_tree=many)
    assert [reason.code for rejected in plan.rejected for reason in rejected.reasons] == ["paged.draft_tree"]
