"""A few queries against a cache that is split along its length: it stays where it lies, whatever the call asks, and the answer
and the gradients are the reference's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from attnops import OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.planning.notes import has_note
from attnops.planning.text import bytes_text
from attnops.sharding import virtual_mesh
from attnops.verify.collectives import collectives, sent_bytes

from . import cases, harness

ROWS = 8
SIZES = cases.Sizes(batch=4, heads=8, kv_heads=4, length=160)
MESHES = {"fsdp2_tp2_sp2": {"fsdp": 2, "tp": 2, "sp": 2}, "sp8": {"sp": 8}}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
PATHS = ("vanilla.forward_native", *harness.PATHS)
SPLIT_QUERIES = {"partition_axis": {"decode_query_sequence_axis": "sp"}}

# Their masks count from the row's index, so that a cut would mean another thing; or they have few queries already.
WHOLE = {"everything", "lower_triangle"}
FEW = ("cache", "one_query")
GATHERED = {"weights": "no support for the attention weights"}


def _built(name: str, layout: str) -> cases.Case:
    case = cases.build(name, layout, SIZES)
    case = case if name in FEW else cases.last_rows(case, ROWS)
    case.call["mode"] = "autoregressive" if name == "one_query" else "insert"
    return case


def _product() -> list[Any]:
    names = [n for n in cases.names() if cases.build(n, "bthd", SIZES).q_len == SIZES.length and n not in WHOLE]
    keys = [(n, w, "fsdp2_tp2_sp2", "bthd", "auto", "whole") for n in (*names, *FEW) for w in PATHS]
    keys += [(n, PATHS[0], "sp8", "bhtd", "auto", "whole") for n in (*names, *FEW)]
    keys += [(n, PATHS[0], "fsdp2_tp2_sp2", "thd", "auto", "whole") for n in (*names, *FEW)]
    keys += [(n, PATHS[0], "fsdp2_tp2_sp2", "bthd", kind, "split") for n in names for kind in KINDS]
    return keys


PRODUCT = _product()
OFTEN = {
    ("cache", "auto", "whole", PATHS[0], "bthd"),
    ("segment_ids", "auto", "split", PATHS[0], "bthd"),
    ("int8_kv", "auto", "whole", "vanilla.forward_native decode", "bthd"),
    ("sinks_per_kv_head", "auto", "whole", "vanilla.forward_native blockwise", "bthd"),
    ("bias", "explicit", "split", PATHS[0], "bthd"),
    ("dense_mask", "auto", "whole", "vanilla.forward_native decode", "bthd"),
    ("causal_window", "auto", "whole", "vanilla.forward_native blockwise", "bthd"),
    ("lse", "auto", "whole", PATHS[0], "thd"),
    ("relative_bias", "auto", "whole", PATHS[0], "bthd"),
    ("forgetting", "auto", "split", PATHS[0], "bthd"),
    ("score_function", "auto", "whole", "vanilla.forward_native decode", "bthd"),
}


def _marks(key: tuple[str, ...]) -> list[Any]:
    name, which, _, layout, kind, queries = key
    return [] if (name, kind, queries, which, layout) in OFTEN else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "which", "mesh", "layout", "kind", "queries"),
    [pytest.param(*key, id="-".join(key).replace(" ", "-"), marks=_marks(key)) for key in PRODUCT],
)
def test_a_cache_stays_where_it_lies(name: str, which: str, mesh: str, layout: str, kind: str, queries: str) -> None:
    case, sizes = _built(name, layout), MESHES[mesh]
    on = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(KINDS[kind],) * len(sizes))
    attend = harness.RUNNABLE[which].make("float32", on, **(SPLIT_QUERIES if queries == "split" else {}))
    tensors = harness.draw(case, "float32")
    plan = attend.plan(*harness.handed_over(case, tensors, "float32", layout), layout=layout, **case.call)
    if "return_weights" in case.features and which != PATHS[0]:
        assert plan.kind == "refused"  # by the path, whatever is split
        return
    split, said = plan.placement.sequence, [line for line in plan.placement.changes if "'auto'" in line]
    assert split.strategy == ("gather" if name in GATHERED else "split_kv")
    assert len(said) == 1
    assert GATHERED.get(name, "outputs are merged: merging sends") in said[0]
    assert split.gathered_queries == (("sp",) if queries == "split" and name not in GATHERED else ())
    published = harness.RUNNABLE[which].capability.tolerance["float32"]
    got = harness.run(attend, case, tensors, "float32", layout)
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward, shards=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_are_within_their_tolerance(dtype: str) -> None:
    """A part's output is rounded before it is merged."""
    case, which = _built("cache", "bthd"), PATHS[0]
    tensors = harness.draw(case, dtype)
    attend = harness.RUNNABLE[which].make(dtype, virtual_mesh({"sp": 8}))
    published = harness.RUNNABLE[which].capability.tolerance[dtype]
    got = harness.run(attend, case, tensors, dtype, "bthd")
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward, shards=True)


def test_dropout_is_that_of_one_device() -> None:
    case = _built("gqa", "bthd")
    q, k, v = (jnp.asarray(x) for x in harness.draw(case, "float32")[:3])
    call = {"dropout_prob": 0.4, "deterministic": False, "dropout_rng": jax.random.key(3), **case.call}

    def attended(mesh: Any) -> Any:
        attend = harness.RUNNABLE[PATHS[0]].make("float32", mesh)
        assert mesh is None or attend.plan(q, k, v, **call).placement.sequence.strategy == "split_kv"
        return attend(q, k, v, **call).attention_outputs

    np.testing.assert_allclose(attended(virtual_mesh(MESHES["fsdp2_tp2_sp2"])), attended(None), atol=2e-6)


def test_an_output_has_the_split_that_is_declared_for_it() -> None:
    mesh = virtual_mesh({"sp": 8})
    x = jnp.ones((1, 8, 2, 16))
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, **SPLIT_QUERIES))
    cache = jnp.ones((1, 512, 2, 16))
    result = jax.jit(lambda q, k: attend(q, k, k, mode="insert"))(x, cache)
    assert attend.plan(x, cache, cache, mode="insert").placement.sequence.gathered_queries == ("sp",)
    assert result.attention_outputs.sharding.shard_shape(x.shape) == (1, 1, 2, 16)


def _insert(q_len: int, **fields: Any) -> tuple[Any, Any]:
    """(plan, how the call is compiled) of queries with 8 heads against 512 keys with 2 heads, all of 16."""
    mesh = virtual_mesh({"sp": 8})
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, **fields))
    shapes = [jax.ShapeDtypeStruct((1, n, h, 16), jnp.float32) for n, h in ((q_len, 8), (512, 2), (512, 2))]
    plan = attend.plan(*shapes, mode="insert")
    specs = [plan.placement.call_spec(n, x.shape) for n, x in zip(("query", "key", "value"), shapes, strict=True)]
    laid = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for x, spec in zip(shapes, specs, strict=True)
    ]
    call = jax.jit(lambda q, k, v: attend(q, k, v, mode="insert").attention_outputs)
    return plan, lambda: collectives(call.lower(*laid).compile().as_text())


@pytest.mark.parametrize("q_len", [1, 112, 115])
def test_the_choice_is_what_sends_less(q_len: int) -> None:
    """Held against compiled programs: 2 * 8 * (16 + 2) numbers a query, or 2 * 2 * 16 numbers a key."""
    sent = {}
    for strategy, means in (("ring", "split_kv"), ("gather", "gather")):  # a ring with whole queries is a merge
        plan, compiled = _insert(q_len, sequence_parallel=strategy)
        assert plan.placement.sequence.strategy == means
        found = compiled()
        assert {c.kind for c in found} == {"all-reduce" if means == "split_kv" else "all-gather"}
        sent[means] = sent_bytes(found)
    chosen = _insert(q_len)[0].placement
    assert chosen.sequence.strategy == min(sent, key=sent.__getitem__)
    merging, gathering = (bytes_text(sent[means]) for means in ("split_kv", "gather"))
    assert f"merging sends {merging} per device, gathering the keys {gathering}" in chosen.changes[-1]


@pytest.mark.parametrize(("q_len", "strategy"), [(72, "split_kv"), (80, "gather")])
def test_queries_that_are_split_have_to_be_gathered_too(q_len: int, strategy: str) -> None:
    """8 * 16 numbers more a query."""
    assert _insert(q_len, **SPLIT_QUERIES)[0].placement.sequence.strategy == strategy


def test_each_method_is_asked_by_itself() -> None:
    """jax's kernel can't work on parts; where it can't run at all, the native path can."""
    mesh = AbstractMesh((4,), ("sp",), abstract_device=abstract_device("TPU v5 lite", 1, "tpu"))
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.bfloat16) for n in (8, 4096))
    configs = {"splash": {"kernel": "jax"}}
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, operation_configs=configs, tuning="off"))
    plan = attend.plan(q, k, k, mode="insert")
    assert (plan.implementation, plan.placement.sequence.strategy) == ("splash.forward_tpu", "gather")
    assert "can't work on parts of the keys" in plan.explain()
    plan = attend.plan(q, k, k, mode="insert", bias=jax.ShapeDtypeStruct((1, 1, 8, 4096), jnp.float32))
    assert (plan.implementation, plan.placement.sequence.strategy) == ("splash.forward_native", "split_kv")


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_in_other_modes_keys_are_gathered(mode: str) -> None:
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.bfloat16) for n in (8, 4096))
    metadata = OperationMetadata(mesh={"sp": 8}, partition_axis={"query_sequence_axis": None})
    plan = OperationRegistry.create("vanilla", metadata).plan(q, k, k, mode=mode, causal=False)
    assert plan.placement.sequence.strategy == "gather"


def test_keys_that_the_caller_has_split_count_as_all_keys_and_the_plan_says_so() -> None:
    mesh = virtual_mesh({"sp": 8})
    whole, split = PartitionSpec(), PartitionSpec(None, "sp")
    notes = {}

    def local(q: jax.Array, k: jax.Array) -> jax.Array:
        for strategy in ("auto", "gather", "ring"):
            metadata = OperationMetadata(mesh=mesh, sequence_parallel=strategy)
            plan = OperationRegistry.create("vanilla", metadata).plan(q, k, k, causal=False, mode="insert")
            notes[strategy] = plan.problem.kv_len, has_note(plan.notes, "mesh.manual_keys")
        return q

    run = jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=whole)
    jax.eval_shape(run, *(jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32) for n in (8, 512)))
    assert notes == {"auto": (64, True), "gather": (64, False), "ring": (512, False)}
