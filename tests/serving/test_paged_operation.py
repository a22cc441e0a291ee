"""The operation `paged` and its other names: what a plan says of a step, what is refused, and what every field does."""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.escale import PartitionAxis
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from attnops import (
    Causal,
    Chunked,
    ConfigError,
    InputError,
    KVCache,
    OperationMetadata,
    OperationRegistry,
    Prefix,
    RefusedError,
    SlidingWindow,
)
from attnops.compat import abstract_device
from attnops.errors import InputTypeError, RefusedShardingError, ShardingWarning
from attnops.operators.paged_cache import RaggedBatch, init, shardings
from attnops.sharding import virtual_mesh

NAMES = ("paged", "paged_flash_attention", "ragged_page_attention_v2", "ragged_page_attention_v3", "unified_attention")
LAYOUTS = {"ragged_page_attention_v2": "interleaved", "ragged_page_attention_v3": "packed"}
FIELDS: dict[str, Any] = {
    "layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 16, "max_sequences": 4,
    "max_length": 32,
}  # fmt: skip
CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 6, 7], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])


def tokens(count: int = 8, heads: int = 4) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (jax.random.normal(jax.random.key(n), (count, h, 16)) for n, h in enumerate((heads, 2, 2)))
    return q, k, v


def paged(name: str = "paged", config: dict[str, Any] | None = None, **metadata: Any) -> Any:
    configs = {} if config is None else {name: config}
    return OperationRegistry.create(name, OperationMetadata(operation_configs=configs, **metadata))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_paged_with_the_layout_it_stands_for(name: str) -> None:
    layout = LAYOUTS.get(name, "split")
    operation = paged(name, {"pages_per_block": 2})
    assert operation.metadata.get_operation_config(name).pages_per_block == 2
    cache = KVCache(**FIELDS | {"layout": layout})
    found = operation(*tokens(), state=init(cache), layer=0, batch=BATCH)
    want = paged()(*tokens(), state=init(CACHE), layer=0, batch=BATCH)
    np.testing.assert_allclose(found.attention_outputs, want.attention_outputs, atol=2e-6)
    assert found.plan.implementation == f"{name}.forward_native"
    assert found.plan.problem.update == ("fused" if name.endswith("v3") else "before")
    other = KVCache(**FIELDS | {"layout": "heads"})
    plan = operation.plan(*tokens(), cache=other)
    if name == "paged":
        assert plan.implementation == "paged.forward_native"
        return
    assert [reason.code for rejected in plan.rejected for reason in rejected.reasons] == ["paged.layout"]
    with pytest.raises(RefusedError, match=f"stands for pages of layout '{layout}'"):
        operation(*tokens(), state=init(other), layer=0, batch=BATCH)


def test_a_plan_says_where_tokens_live_and_what_is_read() -> None:
    mesh = virtual_mesh({"dp": 2, "tp": 2})
    cache = KVCache(**FIELDS | {"pages_axis": "dp", "quantised": {"dtype": "int8"}})
    plan = paged(mesh=mesh).plan(*tokens(), cache=cache, sliding_window=(3, 0), mode="mixed")
    assert plan.reads is None
    assert {x.tensor: (tuple(x.spec), x.local_shape) for x in plan.tensors} == {
        "query": (("dp", "tp", None), (4, 2, 16)),
        "key": (("dp", "tp", None), (4, 1, 16)),
        "value": (("dp", "tp", None), (4, 1, 16)),
        "output": (("dp", "tp", None), (4, 2, 16)),
    }
    assert plan.problem.local_heads == (2, 1)
    text = plan.explain()
    for part in (
        "runs      paged.forward_native",
        "mask      causal & window(left=3, right=0)",
        "update    before: keys and values are written",
        "  query           P(dp, tp, -)  8x4x16 -> 4x2x16",
        "int8 (a scale per token and head)",
        "  page_table      P(dp, -, -)",
    ):
        assert part in text, text
    data = json.loads(json.dumps(plan.to_dict()))
    assert (data["operation"], data["cache"]["pages"], data["update"]) == ("paged", 16, "before")
    assert plan == paged(mesh=mesh).plan(*tokens(), cache=cache, sliding_window=(3, 0))
    assert hash(plan) == hash(paged(mesh=mesh).plan(*tokens(), cache=cache, sliding_window=(3, 0)))


@pytest.mark.parametrize("window", [None, (3, 0), (0, 0), (5, 2)])
def test_pages_that_are_read_are_those_that_a_query_sees(window: Any) -> None:
    """Counted one query and one key after the other."""
    rows = ((6, 6), (1, 9), (0, 8), (5, 31), (3, 3))
    cache = KVCache(**FIELDS | {"pages": 64, "max_sequences": 8})
    starts = np.cumsum([0, *(q for q, _ in rows)])
    table = [[8 * row + page for page in range(8)] for row in range(len(rows))]
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=starts, kv_lens=[n for _, n in rows], page_table=table)
    plan = paged().plan(*tokens(16), cache=cache, batch=batch, sliding_window=window, causal=True)
    left, right = window or (None, None)
    live = 0
    for q, n in rows:
        seen = {
            key // 4
            for position in range(n - q, n)
            for key in range(position + 1)
            if (left is None or key >= position - left) and (right is None or key <= position + right)
        }
        live += len(seen)
    assert plan.reads.live == live
    assert plan.reads.held == sum(-(-n // 4) for q, n in rows if q)
    assert (plan.reads.sequences, plan.reads.queries) == (4, 15)
    assert plan.reads.device_bytes == live * 2 * 4 * 2 * 16 * 4


def test_a_window_of_1024_over_32k_reads_a_24th() -> None:
    cache = KVCache(**FIELDS | {"pages": 8192, "page_size": 16, "max_length": 32768})
    table = [[2048 * row + page for page in range(2048)] for row in range(4)]
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=range(5), kv_lens=[32768] * 4, page_table=table)
    whole, window = (
        paged().plan(*tokens(4), cache=cache, batch=batch, max_q_len=1, sliding_window=w).reads
        for w in (None, (1023, 0))
    )
    assert whole.live == 8192
    assert window.device_bytes * 24 <= whole.device_bytes


def test_masks_say_what_flags_say() -> None:
    call = {"state": init(CACHE), "layer": 0, "batch": BATCH}
    flags = paged()(*tokens(), **call, sliding_window=(3, 0))
    mask = paged(causal=False)(*tokens(), **call, mask=Causal() & SlidingWindow(3) & SlidingWindow(5))
    np.testing.assert_array_equal(flags.attention_outputs, mask.attention_outputs)
    none = paged(causal=False)(*tokens(), **call)
    assert "the mask is not causal" in none.plan.notes[-2]
    assert np.abs(none.attention_outputs - flags.attention_outputs).max() > 0.1


def test_modes() -> None:
    call: dict[str, Any] = {"state": init(CACHE), "layer": 1, "batch": BATCH}
    q, k, v = tokens()
    mixed = paged()(q, k, v, **call, return_lse=True)
    assert mixed.plan.problem.mode == "mixed"
    written = paged()(None, k, v, **call, mode="insert")
    assert written.attention_outputs is None
    np.testing.assert_array_equal(written.state.layers[1].key, mixed.state.layers[1].key)
    assert not np.asarray(written.state.layers[0].key).any()
    read = paged()(q, state=written.state, layer=1, batch=BATCH, update="none", mode="prefill", return_lse=True)
    np.testing.assert_array_equal(read.attention_outputs, mixed.attention_outputs)
    np.testing.assert_array_equal(read.lse, mixed.lse)
    few = paged()(q, k, v, **call, max_q_len=np.int64(6))
    assert few.plan.problem.mode == "autoregressive"
    np.testing.assert_allclose(few.attention_outputs, mixed.attention_outputs, atol=2e-6)
    one = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 2], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
    lone = paged()(q[:2], k[:2], v[:2], state=mixed.state, layer=1, batch=one, mode="autoregressive")
    assert lone.plan.problem.max_q_len == 1


def test_more_queries_than_said_are_refused_also_while_a_step_runs() -> None:
    call: dict[str, Any] = {"state": init(CACHE), "layer": 0}
    with pytest.raises(InputError, match="max_q_len=1, but a row of the batch has 6 queries"):
        paged()(*tokens(), **call, batch=BATCH, mode="autoregressive")
    step = jax.jit(lambda batch: paged()(*tokens(), **call, batch=batch, max_q_len=2, debug=True).attention_outputs)
    with pytest.raises(Exception, match="max_q_len=2, but a row of the batch has 6 queries"):
        jax.block_until_ready(step(BATCH))


def test_layers_share_a_program_and_a_warm_step_is_not_planned_again() -> None:
    operation, state = paged(), init(CACHE)
    found = [operation(*tokens(), state=state, layer=layer, batch=BATCH).plan for layer in (0, 1, 0)]
    assert found[0] is found[1] is found[2]

    def model(state: Any, batch: Any, q: Any, k: Any, v: Any) -> Any:
        for layer in (0, 1):
            out = paged()(q, k, v, state=state, layer=layer, batch=batch)
            state, q = out.state, out.attention_outputs
        return q, state

    text = jax.jit(model).lower(state, BATCH, *tokens()).as_text()
    assert text.count("func.func private @attention") == 1
    assert text.count("call @attention") == 2


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"kv_lengths": np.array([1])}, InputTypeError, "takes no kv_lengths: the batch's kv_lens"),
        ({"layout": "thd"}, InputTypeError, "takes no layout"),
        ({"bias": np.zeros(1)}, InputTypeError, "takes no bias"),
        ({"slidng_window": 3}, InputTypeError, "'slidng_window' of a step over pages. Did you mean 'sliding_window'"),
        ({"mask": np.ones((1, 1, 1, 1), bool)}, InputTypeError, "mask holds arrays"),
        ({"mask": Chunked(4, offset=0)}, RefusedError, "[paged.mask]"),
        ({"mask": Causal() & Chunked(4) & Chunked(6)}, RefusedError, "[paged.mask]"),
        ({"mask": Causal() | Prefix(3)}, RefusedError, "[paged.mask]"),
        ({"mask": Causal(2)}, RefusedError, "[paged.mask]"),
        ({"mode": "train"}, InputError, "serving has no gradient"),
        ({"mode": "decoding"}, InputError, "one of prefill, autoregressive, insert, mixed"),
        ({"update": "after"}, InputError, "wanted 'before', 'fused' or 'none'"),
        ({"update": "none"}, InputError, "neither: the pages have them"),
        ({"max_q_len": 0}, InputError, "a whole number from 1 on"),
        ({"debug": 1}, InputTypeError, "True or False"),
        ({"softmax_scale": float("inf")}, InputError, "wanted a finite number"),
        ({"logits_soft_cap": -1.0}, InputError, "wanted a positive number"),
        ({"softmax_aux": np.zeros(3, np.float32)}, InputError, "wanted [heads] = (4,)"),
        ({"layer": 2}, InputError, "wanted 0 to 1"),
        ({"state": CACHE}, InputTypeError, "wanted a CacheState"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], error: type[Exception], said: str) -> None:
    call = {"state": init(CACHE), "layer": 0, "batch": BATCH} | change
    with pytest.raises(error) as caught:
        paged()(*tokens(), **call)
    assert said in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"query": np.zeros((8, 3, 16), np.float32)}, InputError, "a multiple of the cache's 2 kv heads"),
        ({"query": np.zeros((8, 4, 15), np.float32)}, InputError, "wanted [tokens, heads, 16]"),
        ({"query": np.zeros((7, 4, 16), np.float32)}, InputError, "8 tokens and the query 7"),
        ({"query": np.zeros((8, 4, 16), np.int32)}, InputTypeError, "query is int32"),
        ({"query": None}, InputError, "query is None in mode 'mixed'"),
        ({"key": np.zeros((8, 3, 16), np.float32)}, InputError, "key has 3 heads; wanted 2"),
        (
            {"key": np.zeros((8, 2, 16), np.float16)},
            InputTypeError,
            "key is float16, but the cache is declared float32",
        ),
        ({"value": None}, InputError, "update='before' with key"),
    ],
)
def test_tokens_are_held_against_the_cache(change: dict[str, Any], error: type[Exception], said: str) -> None:
    given = dict(zip(("query", "key", "value"), tokens(), strict=True)) | change
    for call in (paged(), paged().plan):
        more = {"cache": CACHE} if call != paged() else {"state": init(CACHE), "layer": 0, "batch": BATCH}
        with pytest.raises(error) as caught:
            call(given["query"], given["key"], given["value"], **more)
        assert said in str(caught.value), caught.value


def test_metadata_is_read_or_told() -> None:
    call: dict[str, Any] = {"state": init(CACHE), "layer": 0, "batch": BATCH}
    given = tokens()
    plain = paged()(*given, **call)
    scaled = paged(softmax_scale=0.5)(*given, **call)
    np.testing.assert_array_equal(
        scaled.attention_outputs, paged()(*given, **call, softmax_scale=0.5).attention_outputs
    )
    assert np.abs(scaled.attention_outputs - plain.attention_outputs).max() > 1e-3
    half = paged(runtime_dtype="bfloat16")(*given, **call)
    assert half.attention_outputs.dtype == jnp.bfloat16
    assert "query cast from float32 to bfloat16 (runtime_dtype); key and value are the cache's" in half.plan.notes
    notes = paged(dropout_prob=0.1, sequence_parallel="ring").plan(*given, cache=CACHE).notes
    assert any("dropout_prob=0.1 is off" in note for note in notes)
    assert any("sequence_parallel='ring' is not read" in note for note in notes)
    axes = {"ring_order": "zigzag", "scan_ring_attention": True, "partition_axis": PartitionAxis(head_axis="heads")}
    notes = paged(**axes).plan(*given, cache=CACHE).notes
    assert all(any(note.startswith(name) and "is not read" in note for note in notes) for name in axes)
    for strict in (False, True):
        idle = paged(mesh=virtual_mesh({"sp": 2, "tp": 2}), strict=strict)
        if strict:
            with pytest.raises(RefusedShardingError, match="sp=2 of the mesh split nothing"):
                idle.plan(*given, cache=CACHE)
        else:
            assert idle.plan(*given, cache=CACHE).implementation
    assert paged(mesh=virtual_mesh({"tp": 2}), strict=True).plan(*given, cache=CACHE).implementation
    refused = paged(runtime_softmax_dtype="bfloat16").plan(*given, cache=CACHE)
    assert [r.code for x in refused.rejected for r in x.reasons] == ["paged.softmax_dtype"]
    with pytest.raises(RefusedError, match="kv_heads='error'"):
        paged(mesh=virtual_mesh({"tp": 4}), kv_heads="error")(*given, **call)


def test_a_mesh_axis_that_no_rule_names_is_warned_of() -> None:
    for axis, warns in (("data", True), ("fsdp", False)):
        mesh = virtual_mesh({axis: 2, "tp": 2})
        call: dict[str, Any] = {"state": init(CACHE, mesh), "layer": 0, "batch": BATCH}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            paged(mesh=mesh)(*tokens(), **call)
            paged(mesh=mesh)(*tokens(), **call)
        assert [w.category for w in caught] == [ShardingWarning] * warns
        assert not warns or "data=2 of the mesh split nothing of the cache" in str(caught[0].message)


def test_a_state_of_another_mesh_is_refused() -> None:
    mesh = virtual_mesh({"tp": 4})
    with pytest.raises(InputError, match=r"the state's pages have shape \(16, 4, 2, 16\)"):
        paged(mesh=mesh)(*tokens(), state=init(CACHE), layer=0, batch=BATCH)


FIELD_CHANGES: dict[str, Any] = {"pages_per_block": 1, "queries_per_block": 2}
TOLD = {
    "update": ("fused", "forward_native writes no pages"),
    "vmem_limit_bytes": (2**20, "vmem_limit_bytes"),
    "kernel": ("tpu", "kernel"),
    "kv_splits": (4, "kv_splits"),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_field_changes_the_program_or_is_told(name: str) -> None:
    layout = LAYOUTS.get(name, "split")
    cache = KVCache(**FIELDS | {"layout": layout})

    def lowered(config: dict[str, Any]) -> str:
        call = lambda state, batch, *given: paged(name, config)(*given, state=state, layer=0, batch=batch)  # noqa: E731
        return jax.jit(call).lower(init(cache), BATCH, *tokens()).as_text()

    fields = set(OperationRegistry.get(name).config.model_fields) - {"operation", "schema_version", "interpret"}
    assert fields == {*FIELD_CHANGES, *TOLD}
    plain = lowered({})
    for field, value in FIELD_CHANGES.items():
        assert lowered({field: value}) != plain
        assert lowered({field: value}) == lowered({field: value})
    for field, (value, note) in TOLD.items():
        assert any(note in text for text in paged(name, {field: value}).plan(*tokens(), cache=cache).notes)
    with pytest.raises(ConfigError, match="pages_a_block"):
        paged(name, {"pages_a_block": 1})


def test_what_is_declared_for_paged_counts_for_its_other_names() -> None:
    metadata = OperationMetadata(operation_configs={"paged": {"pages_per_block": 3}})
    plan = OperationRegistry.create("unified_attention", metadata).plan(*tokens(), cache=CACHE)
    assert plan.config.pages_per_block == 3


def test_for_a_platform_that_is_not_here() -> None:
    """Planned, and lowered, for a described device; refused to run here."""
    operation = paged(backend="cuda")
    plan = operation.plan(*tokens(), cache=CACHE)
    assert (plan.problem.platform, plan.kind) == ("cuda", "native")
    with pytest.raises(InputError, match="planned for cuda"):
        operation(*tokens(), state=init(CACHE), layer=0, batch=BATCH)


def on(kind: str, config: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The plan of a decoding step of Llama-3-8B's layer on one device of a kind of TPU."""
    device = abstract_device(kind, 1, "tpu")
    mesh = AbstractMesh((1,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=device)
    cache = KVCache(**{
        "layers": 1, "kv_heads": 8, "head_dim": 128, "page_size": 16, "pages": 4096, "max_sequences": 64, "max_length": 1024,
        "layout": "heads",
    } | fields)  # fmt: skip
    q, k, v = (
        jax.ShapeDtypeStruct((64, h, d), cache.dtype)
        for h, d in (
            (4 * cache.kv_heads, cache.head_dim),
            (cache.kv_heads, cache.head_dim),
            (cache.kv_heads, cache.value_size),
        )
    )
    return paged(config=config, mesh=mesh).plan(q, k, v, cache=cache, max_q_len=1)


def codes(plan: Any) -> list[str]:
    return [reason.code for rejected in plan.rejected for reason in rejected.reasons]


@pytest.mark.parametrize("layout", ["heads", "interleaved", "packed"])
@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_on_a_tpu_the_kernel_runs_with_sizes_that_fit(kind: str, layout: str) -> None:
    plan = on(kind, layout=layout)
    assert plan.implementation == "paged.forward_tpu"
    assert plan.config.pages_per_block >= 1
    assert not plan.rejected


@pytest.mark.parametrize(
    ("fields", "config", "wanted"),
    [
        ({"layout": "packed", "head_dim": 64, "kv_heads": 3}, {}, []),  # padded to whole lanes
        ({"layout": "packed", "kv_heads": 2, "quantised": {"dtype": "float8_e4m3fn", "scale": "head"}}, {}, []),
        ({"layout": "packed", "dtype": "float16"}, {}, ["paged.dtype", "paged.dtype", "paged.dtype"]),
        ({"layout": "interleaved", "head_dim": 64}, {}, ["paged.page_rows"]),
        ({"layout": "split", "kv_heads": 1}, {}, ["paged.page_rows"]),
        ({"layout": "split", "kv_heads": 12}, {}, ["paged.page_rows"]),
        ({"layout": "split", "kv_heads": 24}, {}, []),
        ({"layout": "split", "kv_heads": 2, "quantised": {"dtype": "int8", "scale": "head"}}, {}, ["paged.page_rows"]),
        ({"layout": "interleaved", "kv_heads": 1}, {}, []),
        ({"layout": "interleaved", "kv_heads": 12}, {}, []),
        ({"layout": "interleaved", "kv_heads": 6}, {}, ["paged.page_rows"]),  # 12 rows, of tiles of 8
        ({"layout": "interleaved", "kv_heads": 1, "quantised": {"dtype": "int8"}}, {}, ["paged.page_rows"]),
        ({"head_dim": 64}, {}, ["paged.page_rows"]),
        ({"head_dim": 192, "value_dim": 128}, {}, ["paged.page_rows"]),
        ({"dtype": "float16"}, {}, ["paged.dtype", "paged.dtype", "paged.dtype"]),
        ({}, {"pages_per_block": 64}, ["paged.pages_per_block"]),
        ({}, {"pages_per_block": 32, "vmem_limit_bytes": 2**20}, ["paged.vmem"]),
        ({"head_dim": 64, "layout": "joined"}, {}, []),
        ({"head_dim": 192, "value_dim": 128, "layout": "joined"}, {}, []),
        ({"kv_heads": 3, "head_dim": 64, "layout": "joined", "quantised": {"dtype": "int8"}}, {}, []),
    ],
)
def test_what_the_tpu_kernel_cannot_take_is_told(
    fields: dict[str, Any], config: dict[str, Any], wanted: list[str]
) -> None:
    plan = on("TPU v5 lite", config, **fields)
    assert codes(plan) == wanted
    assert plan.kind == ("fallback" if wanted else "platform")
    assert plan.implementation == ("paged.forward_native" if wanted else "paged.forward_tpu")


def test_what_the_tpu_kernel_takes_slowly_is_noted() -> None:
    assert any(
        "scales of pages of 16 take the memory of 128" in n
        for n in on("TPU v5 lite", quantised={"dtype": "int8"}).notes
    )


@pytest.mark.slow
def test_inside_a_shard_map_over_a_part_of_the_mesh() -> None:
    """The caller has dp for himself; heads are split over tp all the same."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    state, batch = init(CACHE), jax.tree.map(jnp.asarray, BATCH)
    want = paged()(*tokens(), state=state, layer=0, batch=BATCH).attention_outputs

    def body(q: Any, k: Any, v: Any, state: Any, batch: Any) -> Any:
        return paged()(q, k, v, state=state, layer=0, batch=batch).attention_outputs

    with jax.set_mesh(mesh):
        whole = (PartitionSpec(),) * 5
        mapped = jax.shard_map(body, in_specs=whole, out_specs=PartitionSpec(), axis_names={"dp"}, check_vma=False)
        got = jax.jit(mapped)(*tokens(), state, batch)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_inside_a_shard_map_over_the_heads() -> None:
    """The caller splits heads himself: a device's own pages, queries and keys."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    want = paged()(*tokens(), state=init(CACHE), layer=0, batch=BATCH).attention_outputs
    at = shardings(CACHE, mesh)
    specs = jax.tree.map(lambda x: x.spec, (at.query, at.key, at.value, at.state, at.batch))

    def body(q: Any, k: Any, v: Any, state: Any, batch: Any) -> Any:
        return paged()(q, k, v, state=state, layer=0, batch=batch).attention_outputs

    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=at.query.spec, check_vma=False)
    got = jax.jit(mapped)(*tokens(), init(CACHE, mesh), jax.tree.map(jnp.asarray, BATCH))
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.slow
def test_fused_inside_a_shard_map_whose_devices_share_the_pages() -> None:
    """Queries differ by device, pages don't: they are written first, and stay the same on all devices."""
    cache = KVCache(**FIELDS | {"kv_heads": 1, "head_dim": 128, "layout": "heads", "max_sequences": 2})
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    batch = RaggedBatch.make(
        cache.plan(), cu_q_lens=[0, 1, 2], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]], tokens=2
    )
    q, k, v = (jax.random.normal(jax.random.key(n), (2, heads, 128)) for n, heads in enumerate((4, 1, 1)))
    state, batch = init(cache), jax.tree.map(jnp.asarray, batch)

    def body(q: Any, k: Any, v: Any, state: Any, batch: Any, update: str = "fused") -> Any:
        operation = paged(config={"interpret": True})
        found = operation(q, k, v, state=state, layer=0, batch=batch, max_q_len=1, update=update)
        return found.attention_outputs, found.state

    heads, whole = PartitionSpec(None, "tp"), PartitionSpec()
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (heads, *(whole,) * 4), "out_specs": (heads, whole)}
    jax.eval_shape(jax.shard_map(body, **specs), q, k, v, state, batch)  # the interpreter can't be run with the check
    got, after = jax.jit(jax.shard_map(body, **specs, check_vma=False))(q, k, v, state, batch)
    want, wanted = jax.jit(functools.partial(body, update="before"))(q, k, v, state, batch)
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_array_equal(after.layers[0].key, wanted.layers[0].key)


@pytest.mark.slow
def test_fused_does_not_write_what_max_q_len_leaves_out() -> None:
    """As docs/serving.md says of a traced batch with a longer row; a known one is refused."""
    cache = KVCache(**FIELDS | {"layout": "joined"})
    q, k, v = tokens(4)
    batch = RaggedBatch.make(
        cache.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]], tokens=4
    )
    operation = paged(config={"interpret": True})

    def step(state: Any, batch: Any, update: str) -> Any:
        return operation(q, k, v, state=state, layer=0, batch=batch, max_q_len=1, update=update)

    traced = jax.jit(step, static_argnums=2)
    before, fused = (traced(init(cache), jax.tree.map(jnp.asarray, batch), update) for update in ("before", "fused"))
    np.testing.assert_allclose(fused.attention_outputs, before.attention_outputs, atol=2e-6)
    assert not np.asarray(fused.attention_outputs[2:]).any()
    pages, written = np.asarray(fused.state.layers[0].key), np.asarray(before.state.layers[0].key)
    at = [(2, 1), (4, 2)]  # of the two single or first tokens, at positions 5 and 6
    assert all((pages[page, :, row] == written[page, :, row]).all() for page, row in at)
    assert (pages != 0).any(axis=(1, 3)).sum() == len(at)
    with pytest.raises(InputError, match="max_q_len=1, but a row of the batch has 3 queries"):
        step(init(cache), batch, "fused")


def test_a_plan_knows_how_often_a_head_is_stored() -> None:
    """Three kv heads over two devices are stored as six, of which nine query heads are no multiple."""
    cache = KVCache(**FIELDS | {"kv_heads": 3})
    shapes = [jax.ShapeDtypeStruct((8, heads, 16), jnp.float32) for heads in (9, 3, 3)]
    assert paged().plan(*shapes, cache=cache).implementation
    with pytest.raises(InputError, match="3 kv heads, each stored 2 times"):
        paged(mesh=virtual_mesh({"tp": 2})).plan(*shapes, cache=cache)


def test_64_bits_are_part_of_what_was_planned() -> None:
    wide = [np.asarray(x, np.float64) for x in tokens()]
    call: dict[str, Any] = {"state": init(CACHE), "layer": 0, "batch": BATCH}
    assert paged()(*wide, **call).attention_outputs.dtype == jnp.float32  # jax has no wider one
    with jax.enable_x64(True), pytest.raises(InputTypeError, match="float64"):
        paged()(*wide, **call)


def test_a_plan_without_a_cache() -> None:
    """Whatever else is missing, the message says all that a plan takes, and that a call's state goes there as cache."""
    for make in (paged().plan, paged().explain):
        for arguments, keywords in (((), {}), (tokens(), {}), (tokens(), {"state": init(CACHE), "layer": 0})):
            with pytest.raises(InputTypeError, match=r"cache is missing.*query, key and value.*state="):
                make(*arguments, **keywords)
        with pytest.raises(InputError, match="wanted key and value"):
            make(cache=CACHE)
        with pytest.raises(InputTypeError, match="cache is an int; wanted a KVCache"):
            make(cache=3)


def test_the_output_of_a_step_is_no_tuple() -> None:
    output = paged()(*tokens(), state=init(CACHE), layer=0, batch=BATCH)
    with pytest.raises(InputTypeError, match=r"isn't a tuple.*\.attention_outputs"):
        output[0]
