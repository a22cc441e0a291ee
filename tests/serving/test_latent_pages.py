"""Latent attention over pages: steps against the formula in float64, plans, files, refusals; and groups of layers that differ in
kind, heads and dims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import (
    Attention,
    ConfigError,
    Declaration,
    InputError,
    KVCache,
    LatentAttention,
    OperationMetadata,
    OperationRegistry,
)
from attnops.errors import AttnOpsError
from attnops.operators.paged_cache import RaggedBatch, attend, extract, init, insert, restore, shardings
from attnops.planning.notes import has_note
from attnops.serving import PagePools
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 16, 8, 12, 32
SIZES = {"heads": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "latent_dim": LATENT}
FIELDS: dict[str, Any] = {
    "layers": 1, "kind": "latent", "head_dim": LATENT + ROPE, "value_dim": LATENT, "dtype": "float32", "page_size": 4,
    "pages": 16, "max_sequences": 2, "max_length": 32,
}  # fmt: skip
RNG = np.random.default_rng(5)
W_UK, W_UV = (RNG.standard_normal((LATENT, HEADS, dim)).astype(np.float32) / LATENT**0.5 for dim in (NOPE, VALUE))


def _tokens(count: int) -> tuple[np.ndarray, ...]:
    """q_nope, q_rope, latent, rope_key."""
    shapes = ((count, HEADS, NOPE), (count, HEADS, ROPE), (count, LATENT), (count, ROPE))
    return tuple(RNG.standard_normal(shape).astype(np.float32) for shape in shapes)


def _formula(q_nope: Any, q_rope: Any, latent: Any, rope_key: Any) -> np.ndarray:
    """The last queries of a sequence, with keys and values for each head; float64."""
    q_nope, q_rope, latent, rope_key, w_uk, w_uv = (
        np.asarray(x, np.float64) for x in (q_nope, q_rope, latent, rope_key, W_UK, W_UV)
    )
    key = np.concatenate([np.einsum("tc,chn->thn", latent, w_uk), np.repeat(rope_key[:, None], HEADS, 1)], -1)
    value, query = np.einsum("tc,chv->thv", latent, w_uv), np.concatenate([q_nope, q_rope], -1)
    seen = np.arange(len(latent) - len(query), len(latent))[:, None] >= np.arange(len(latent))
    return reference_attention(query[None], key[None], value[None], mask=seen[None, None], scale=24**-0.5).output[0]


def _mesh(axes: dict[str, int]) -> jax.sharding.Mesh | None:
    if not axes:
        return None
    sizes = tuple(axes.values())
    return jax.sharding.Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), tuple(axes))


@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        ({}, {}),
        ({"tp": 4}, {}),
        ({"tp": 2}, {"kv_head_axis": None, "page_sequence_axis": "tp"}),
        ({"tp": 2, "sp": 2}, {"page_sequence_axis": "sp"}),
    ],
)
def test_a_prompt_in_chunks_tokens_one_by_one_and_drafts(axes: dict[str, int], fields: dict[str, Any]) -> None:
    mesh, cache = _mesh(axes), KVCache(**FIELDS | fields)
    served = LatentAttention("paged", **SIZES, **({} if mesh is None else {"mesh": mesh}))
    plan, state = cache.plan(mesh), init(cache, mesh)

    def step(state: Any, batch: RaggedBatch, *arrays: Any) -> Any:
        made = served(*arrays, W_UK, W_UV, state=state, layer=0, batch=batch)
        return made.attention_outputs, made.state

    run, history = jax.jit(step, donate_argnums=0), _tokens(0)
    for count in (7, 6, 1, 1, 3):
        new = _tokens(count)
        history = tuple(np.concatenate(pair) for pair in zip(history, new, strict=True))
        length = len(history[0])
        table = [[6, 3, 2, 9, 4][: -(-length // 4)]]
        batch = RaggedBatch.make(plan, cu_q_lens=[0, count], kv_lens=[length], page_table=table)
        output, state = run(state, batch, *new)
        wanted = _formula(*(x[length - count :] for x in history[:2]), *history[2:])
        np.testing.assert_allclose(output, wanted, rtol=0, atol=5e-6)


def test_writing_and_reading_apart() -> None:
    """insert writes without a query, update='none' reads without latents; both give what a step gives."""
    cache, served = KVCache(**FIELDS), LatentAttention("paged", **SIZES)
    arrays, state = _tokens(5), init(cache)
    call: dict[str, Any] = {
        "layer": 0,
        "batch": RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]]),
    }
    whole = served(*arrays, W_UK, W_UV, state=state, **call, return_lse=True)
    written = served(None, None, *arrays[2:], W_UK, W_UV, state=state, **call, mode="insert")
    assert written.attention_outputs is None
    np.testing.assert_array_equal(written.state.layers[0].key, whole.state.layers[0].key)
    read = served(*arrays[:2], None, None, W_UK, W_UV, state=written.state, **call, update="none", return_lse=True)
    np.testing.assert_allclose(read.attention_outputs, whole.attention_outputs, atol=1e-6)
    np.testing.assert_allclose(read.lse, whole.lse, atol=1e-6)
    saved = extract(whole.state, call["batch"], 0)
    assert saved.layers[0].value is None
    other = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[7, 0]])
    back = restore(init(cache), saved, other, 0)
    again = served(*arrays[:2], None, None, W_UK, W_UV, state=back, layer=0, batch=other, update="none")
    np.testing.assert_allclose(again.attention_outputs, whole.attention_outputs, atol=1e-6)


def test_the_plan_has_no_value_and_says_what_latents_take() -> None:
    """DeepSeek V3 over eight devices: 640 of 576 numbers in bfloat16, against 128 heads of 192 and 128."""
    dims = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512}
    cache = KVCache(**FIELDS | {"head_dim": 576, "value_dim": 512, "dtype": "bfloat16", "page_size": 16, "layers": 61})
    mesh = virtual_mesh({"tp": 8})
    served = LatentAttention("paged", **dims, mesh=mesh)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    tokens = shape(2, 128, 128), shape(2, 128, 64), shape(2, 512), shape(2, 64)
    plan = served.plan(*tokens, shape(512, 128, 128), shape(512, 128, 128), cache=cache, max_q_len=1)
    assert [x.tensor for x in plan.tensors] == ["query", "key", "output"]
    assert plan.problem.softmax_scale == pytest.approx(192**-0.5)
    assert "latent_values" in plan.problem.features
    (found,) = (note.values for note in plan.notes if note.code == "latent.pages")
    assert found == {"cached": 1280, "expanded": 128 * (192 + 128) * 2}
    pages = 61 * 16 * 16 * 1280  # layers, pages of 16 tokens
    (repeated,) = (note.values for note in plan.cache.notes if note.code == "cache.repeated_latents")
    assert (repeated["times"], repeated["size"], repeated["split"]) == (8, pages, pages // 8)
    assert plan.cache.bytes_of("kv_pages") == pages
    for axis in ("pages_axis", "page_sequence_axis"):
        fields = {"kv_head_axis": None, axis: "tp", "max_sequences": 8}
        split = KVCache(**cache.to_dict() | fields).plan(mesh)
        assert split.bytes_of("kv_pages") == pages // 8
        assert not has_note(split.notes, "cache.repeated_latents")


@pytest.mark.parametrize("name", ["multi_latent_ragged_page_attention_v1", "multi_latent_ragged_page_attention_v2"])
def test_other_names(name: str) -> None:
    cache = KVCache(**FIELDS)
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
    arrays = _tokens(5)
    found = LatentAttention(name, **SIZES)(*arrays, W_UK, W_UV, state=init(cache), layer=0, batch=batch)
    np.testing.assert_allclose(found.attention_outputs, _formula(*arrays), rtol=0, atol=5e-6)
    assert found.plan.problem.update == "fused"
    heads = KVCache(**FIELDS | {"kind": "kv", "kv_heads": 1})
    query = jnp.zeros((5, HEADS, LATENT + ROPE))
    plan = OperationRegistry.create(name).plan(query, query[:, :1], jnp.zeros((5, 1, LATENT)), cache=heads)
    assert [reason.code for rejected in plan.rejected for reason in rejected.reasons] == ["paged.layout"]


# -- files -------------------------------------------------------------------------------------------------------------


def _file() -> dict[str, Any]:
    cache = {"layers": 2, "kind": "latent", "head_dim": 40, "value_dim": 32, "dtype": "float32", "page_size": 4}
    cache |= {"pages": 16, "max_sequences": 2, "max_length": 32}
    return {"operation": "paged", "latent": SIZES, "cache": cache, "step": {"q_lens": [1, 3], "kv_lens": [9, 20]}}


def test_a_file_declares_the_step(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(_file()))
    declaration = Declaration.load(path)
    inner = declaration.of_form("absorbed")
    assert inner.latent is None
    assert inner.step is not None
    assert (inner.step.q_heads, inner.step.softmax_scale) == (HEADS, pytest.approx(24**-0.5))
    served = LatentAttention(path)
    assert LatentAttention(served.declared()) == served
    assert served.declared().cache == declaration.cache
    arrays, cache = _tokens(5), declaration.cache
    assert cache is not None
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
    output = served(*arrays, W_UK, W_UV, state=init(cache), layer=1, batch=batch).attention_outputs
    np.testing.assert_allclose(output, _formula(*arrays), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"latent": SIZES | {"form": "expanded"}}, "latent.form"),
        ({"step": {"q_heads": 3}}, "step.q_heads"),
        ({"cache": _file()["cache"] | {"value_dim": 24}}, "value_dim=24"),
        ({"cache": {**_file()["cache"], "kind": "kv", "kv_heads": 1}}, "kind 'latent'"),
    ],
)
def test_files_that_disagree_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Declaration.from_dict(_file() | change)


def test_another_group_may_hold_other_latents() -> None:
    """Index keys beside the latents; the step's own layer decides."""
    groups = [{"layers": 1, "pages": 8}, {"layers": 1, "pages": 8, "head_dim": 16, "value_dim": 16}]
    cache = {name: x for name, x in _file()["cache"].items() if name != "pages"} | {"layers": groups}
    step = _file()["step"] | {"q_lens": [1], "kv_lens": [9]}
    declaration = Declaration.from_dict(_file() | {"cache": cache, "step": step})
    served, tokens = LatentAttention(declaration), (*_tokens(5), W_UK, W_UV)
    state = init(declaration.cache)  # type: ignore[arg-type]
    for layer in (0, 1):
        part = declaration.cache.plan().groups[layer]  # type: ignore[union-attr]
        batch = RaggedBatch.make(part, cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
        if layer == 0:
            output = served(*tokens, state=state, layer=0, batch=batch).attention_outputs
            np.testing.assert_allclose(output, _formula(*tokens[:4]), rtol=0, atol=5e-6)
            continue
        with pytest.raises(InputError, match="head_dim=16"):
            served(*tokens, state=state, layer=1, batch=batch)
        with pytest.raises(InputError, match="head_dim=16"):
            served.plan(*tokens, layer=1)
    with pytest.raises(ConfigError, match="head_dim=16"):
        Declaration.from_dict(_file() | {"cache": cache, "step": step | {"layer": 1}})


def test_keys_and_values_are_no_latents() -> None:
    cache = KVCache(**FIELDS | {"kind": "kv", "kv_heads": 1})
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
    call = {"state": init(cache), "layer": 0, "batch": batch, "update": "none"}
    with pytest.raises(InputError, match="kind 'latent'"):
        LatentAttention("paged", **SIZES)(*_tokens(5)[:2], None, None, W_UK, W_UV, **call)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_heads": 2},
        {"value_dim": None},
        {"value_dim": 41},
        {"layout": "split"},
        {"kind": "kv", "layout": "latent"},
        {"kind": "mla"},
    ],
)
def test_caches_that_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KVCache.from_dict(FIELDS | fields)


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
STEP: dict[str, Any] = {"state": init(CACHE), "layer": 0, "batch": BATCH}
KEY = jnp.zeros((5, 1, LATENT + ROPE))
INT8 = KVCache(**FIELDS, quantised={"dtype": "int8", "scale": "head"})


@pytest.mark.parametrize(
    "call",
    [
        lambda: LatentAttention("paged", **SIZES)(*_tokens(5)[:3], None, W_UK, W_UV, **STEP),
        lambda: LatentAttention("paged", **SIZES)(None, *_tokens(5)[1:], W_UK, W_UV, **STEP),
        lambda: LatentAttention("paged", **SIZES)(*_tokens(5), W_UK[:, :3], W_UV, **STEP),
        lambda: Attention("paged")(jnp.zeros((5, HEADS, 40)), KEY, None, **STEP),  # no scale
        lambda: attend(STEP["state"], 0, BATCH, jnp.zeros((5, HEADS, 40)), KEY),
        lambda: Attention("paged", softmax_scale=1.0)(jnp.zeros((5, HEADS, 40)), KEY, KEY[..., :32], **STEP),
        lambda: insert(STEP["state"], 0, BATCH, KEY, KEY[..., :32]),
        lambda: insert(STEP["state"], 0, BATCH, KEY, None, value_scale=jnp.ones((5, 1))),
        lambda: insert(STEP["state"], 0, BATCH, KEY[..., :32], None),
        lambda: init(INT8),
        lambda: init(INT8, key_scale=1.0, value_scale=1.0),
    ],
)
def test_steps_that_are_refused(call: Any) -> None:
    with pytest.raises(InputError):
        call()


# -- groups of layers --------------------------------------------------------------------------------------------------

# A window of keys with few wide heads, wider heads that see all, values narrower than keys, and latents.
GROUPS = KVCache(
    layers=[
        {"layers": [0, 2], "window_tokens": 6, "pages": 12},
        {"layers": [1], "pages": 12, "kv_heads": 1, "head_dim": 32},
        {"layers": [3], "pages": 12, "kv_heads": 4, "head_dim": 12, "value_dim": 8, "dtype": "float32"},
        {"layers": [4], "pages": 12, "kind": "latent", "head_dim": 40, "value_dim": 32},
    ],
    kv_heads=2, head_dim=16, dtype="float32", page_size=4, max_sequences=2, max_length=24, max_tokens=16, pages_axis="dp",
)  # fmt: skip
OF_GROUP = ((2, 16, 16), (1, 32, 32), (4, 12, 8), (1, 40, 32))  # kv heads, dims of keys and values


def test_a_group_has_the_geometry_that_it_declares() -> None:
    assert KVCache.from_json(GROUPS.to_json()) == GROUPS
    plan = GROUPS.plan(virtual_mesh({"tp": 2}))
    found = [(part.cache.kv_heads, part.cache.head_dim, part.cache.value_size) for part in plan.groups]
    assert found == list(OF_GROUP)
    assert [part.kv_repeat for part in plan.groups] == [1, 2, 1, 2]
    names = [[array.name for array in part.arrays if "pages" in array.name] for part in plan.groups]
    assert names == [["key_pages", "value_pages"]] * 3 + [["kv_pages"]]
    # Per device: layers, pages of 4 tokens, heads of a device, dims of keys and values or 128 lanes; 4 bytes.
    sizes = [2 * 1 * 32, 1 * 1 * 64, 1 * 2 * 20, 1 * 1 * 128]
    assert [part.bytes_of("key_pages", "value_pages", "kv_pages") for part in plan.groups] == [
        12 * 4 * 4 * n for n in sizes
    ]
    state = init(GROUPS)
    assert [x.value is None for x in state.layers] == [False, False, False, False, True]
    listed = plan.to_dict()["groups"]
    assert [(x["kind"], x["kv_heads"], x["head_dim"]) for x in listed] == [
        ("kv", 2, 16), ("kv", 1, 32), ("kv", 4, 12), ("latent", 1, 40),
    ]  # fmt: skip


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp": 2, "tp": 2}])
def test_layers_of_every_group_in_one_program(axes: dict[str, int]) -> None:
    """A prompt, then tokens one by one; every layer against float64, with the pages of one pool for each group."""
    mesh = _mesh(axes)
    cache = GROUPS if "dp" in axes else KVCache.from_dict(GROUPS.to_dict() | {"pages_axis": None})
    plan = cache.plan(mesh).require()
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
    rng, shards = np.random.default_rng(2), plan.shards
    pools = [PagePools.of(plan) for _ in range(shards)]
    state, history = init(cache, mesh), [[None] * 5 for _ in range(shards)]

    def run(state: Any, batches: Any, tokens: Any) -> Any:
        outputs = []
        for layer in range(5):
            group = cache.group_of(layer)
            options: dict[str, Any] = {"softmax_scale": 0.3, "sliding_window": (5, 0) if group == 0 else None}
            made = paged(*tokens[layer], state=state, layer=layer, batch=batches[group], **options)
            outputs.append(made.attention_outputs)
            state = made.state
        return outputs, state

    run = jax.jit(run)
    for count in (5, 1, 1, 2):
        tokens: list[Any] = []
        for layer in range(5):
            kv_heads, dim, value_dim = OF_GROUP[cache.group_of(layer)]
            shapes = (4, dim), (kv_heads, dim), (kv_heads, value_dim)
            q, k, v = (rng.standard_normal((8 * shards, *shape)).astype(np.float32) for shape in shapes)
            v = k[..., :value_dim] if layer == 4 else v
            tokens.append((q, k, v))
            for n in range(shards):
                new = (k[8 * n : 8 * n + count], v[8 * n : 8 * n + count])
                old = history[n][layer]
                history[n][layer] = new if old is None else tuple(np.concatenate(x) for x in zip(old, new, strict=True))
        made = []
        for pool in pools:
            pool.alloc("a", count) if "a" not in pool else None
            pool.append_count("a", count)
            made.append([
                RaggedBatch.make(part, cu_q_lens=[0, count], kv_lens=pool.kv_lens(["a"]), page_table=table, tokens=8)
                for part, table in zip(plan.groups, pool.page_tables(["a"]), strict=True)
            ])  # fmt: skip
        batches = [x[0] if shards == 1 else RaggedBatch.stack(list(x)) for x in zip(*made, strict=True)]
        given = [(q, k, None if layer == 4 else v) for layer, (q, k, v) in enumerate(tokens)]
        outputs, state = run(state, batches, given)
        for layer, (q, _, _) in enumerate(tokens):
            for n in range(shards):
                key, value = history[n][layer]
                at = np.arange(len(key) - count, len(key))[:, None] - np.arange(len(key))
                seen = (at >= 0) & ((at <= 5) | (cache.group_of(layer) != 0))
                query = q[8 * n : 8 * n + count].astype(np.float64)
                wanted = reference_attention(
                    query[None],
                    key[None].astype(np.float64),
                    value[None].astype(np.float64),
                    mask=seen[None, None],
                    scale=0.3,
                ).output[0]
                np.testing.assert_allclose(outputs[layer][8 * n : 8 * n + count], wanted, rtol=0, atol=1e-5)
    for pool in pools:
        pool.check()
    if mesh is not None:
        places = shardings(cache, mesh)
        assert jax.tree.structure(places.state) == jax.tree.structure(state)


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        ([{"layers": 2, "head_dim": 64, "pages": 4}], "layers[0].head_dim"),
        ([{"layers": 1, "pages": 4}, {"layers": 1, "pages": 4, "kind": "latent"}], "layers[1]"),
        ([{"layers": 1, "pages": 4}, {"layers": 1, "pages": 4, "kv_heads": 0}], "kv_heads"),
        ([{"layers": 1, "pages": 4}, {"layers": 1, "pages": 4, "dtype": "int4"}], "dtype"),
    ],
)
def test_geometry_that_is_wrong_names_its_group(layers: Any, error: str) -> None:
    fields = {name: x for name, x in FIELDS.items() if name not in ("layers", "kind", "pages", "value_dim")} | {
        "kv_heads": 2
    }
    with pytest.raises(AttnOpsError) as found:
        KVCache.from_dict(fields | {"layers": layers})
    assert error in str(found.value)
