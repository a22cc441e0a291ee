"""Layers that read another layer's keys: no pages, steps against float64, plans, files, models, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, ConfigError, InputError, KVCache, ModelDeclaration
from attnops.cli.app import main
from attnops.errors import RefusedError
from attnops.operators.paged_cache import (
    RaggedBatch,
    attend,
    copy,
    extract,
    init,
    insert,
    restore,
    scrub,
    shardings,
)
from attnops.operators.paged_cache.state import abstract
from attnops.verify import reference_attention

# Layers 0 and 3 see a window, 1 and 2 all; 4 and 5 read those of 3 and 2, and so does 6.
GROUPED: dict[str, Any] = {
    "layers": [{"layers": [0, 3, 4], "window_tokens": 6, "pages": 8}, {"layers": [1, 2, 5, 6], "pages": 8, "head_dim": 12}],
    "reads_layer": {4: 3, 5: 2, 6: 2},
    "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 4, "max_sequences": 2, "max_length": 24, "max_tokens": 8,
}  # fmt: skip
PLAIN: dict[str, Any] = {**GROUPED, "layers": 3, "pages": 8, "reads_layer": [[2, 0]]}
RNG = np.random.default_rng(7)


def _draw(count: int, heads: int, dim: int) -> np.ndarray:
    return RNG.standard_normal((count, heads, dim)).astype(np.float32)


@pytest.mark.parametrize("axes", [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_layers_attend_to_the_keys_that_another_wrote(axes: dict[str, int]) -> None:
    mesh = None if not axes else jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = KVCache(**GROUPED)
    plan, paged = cache.plan(mesh), Attention("paged", **({} if mesh is None else {"mesh": mesh}))
    state = init(cache, mesh)
    assert len(state.layers) == 4
    history: dict[int, Any] = {}

    def run(state: Any, batches: Any, tokens: Any) -> Any:
        outputs = {}
        for layer, (query, key, value) in tokens.items():
            window = (5, 0) if layer in (0, 3, 4) else None
            made = paged(
                query, key, value, state=state, layer=layer, batch=batches[cache.group_of(layer)], sliding_window=window
            )
            outputs[layer], state = made.attention_outputs, made.state
        return outputs, state

    run = jax.jit(run, donate_argnums=0)
    length = 0
    for count in (7, 1):
        length += count
        tokens: dict[int, Any] = {}
        for layer in range(7):
            dim, own = (8 if layer in (0, 3, 4) else 12), layer < 4
            both = [_draw(8, 2, dim) for _ in range(2)] if own else [None, None]  # the same program for both steps
            tokens[layer] = (_draw(8, 4, dim), *both)
            if own:
                new, old = [x[:count] for x in both], history.get(layer)
                history[layer] = new if old is None else [np.concatenate(x) for x in zip(old, new, strict=True)]
        table = [[3, 5][: -(-length // 4)]]
        batches = [
            RaggedBatch.make(part, cu_q_lens=[0, count], kv_lens=[length], page_table=table, tokens=8)
            for part in plan.groups
        ]
        outputs, state = run(state, batches, tokens)
        for layer, (query, _, _) in tokens.items():
            key, value = history[{4: 3, 5: 2, 6: 2}.get(layer, layer)]
            behind = np.arange(length - count, length)[:, None] - np.arange(length)
            seen = (behind >= 0) & ((behind <= 5) | (layer not in (0, 3, 4)))
            arrays = (x.astype(np.float64)[None] for x in (query[:count], key, value))
            wanted = reference_attention(*arrays, mask=seen[None, None], scale=query.shape[-1] ** -0.5).output[0]
            np.testing.assert_allclose(outputs[layer][:count], wanted, rtol=0, atol=1e-5, err_msg=str(layer))


def test_the_cache_plan_has_no_pages_for_them() -> None:
    cache, whole = KVCache(**GROUPED), KVCache(**GROUPED | {"reads_layer": None})
    plan = cache.plan()
    # Keys and values of 2 heads in float32, 8 pages of 4 tokens: 2 and 2 layers of 3 and 4.
    of_groups = [2 * 2 * 4 * 32 * dim * count for dim, count in ((8, 2), (12, 2))]
    assert [part.bytes_of("key_pages", "value_pages") for part in plan.groups] == of_groups
    assert whole.plan().groups[1].bytes_of("key_pages") == 2 * plan.groups[1].bytes_of("key_pages")
    assert [group["stored_layers"] for group in plan.to_dict()["groups"]] == [[0, 3], [1, 2]]
    assert "layers 5-6 read the keys and values of layer 2" in plan.explain()
    assert KVCache.from_json(cache.to_json()) == cache
    assert KVCache(**GROUPED | {"reads_layer": {"4": 3, "5": 2, "6": 2}}) == cache
    assert cache.to_dict()["reads_layer"] == [[4, 3], [5, 2], [6, 2]]
    assert len(abstract(plan).layers) == 4
    # As many pages as fit in the bytes of two layers instead of three.
    fields = {name: x for name, x in PLAIN.items() if name != "pages"} | {"bytes_per_device": 2**16}
    sizes = [KVCache(**fields | {"reads_layer": reads}).plan().pages for reads in ([[2, 0]], None)]
    assert sizes[0] > 1.4 * sizes[1]


@pytest.mark.slow
def test_what_is_made_of_all_layers_is_of_those_with_pages() -> None:
    cache = KVCache(**GROUPED)
    plan, state = cache.plan(), init(cache)
    batches = [RaggedBatch.make(part, cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]]) for part in plan.groups]
    state = insert(state, 3, batches[0], _draw(5, 2, 8), _draw(5, 2, 8))
    query = _draw(5, 4, 8)
    call: dict[str, Any] = {"update": "none", "sliding_window": (5, 0)}
    want = attend(state, 4, batches[0], query, **call).output
    np.testing.assert_array_equal(want, attend(state, 3, batches[0], query, **call).output)
    moved = copy(state, jnp.asarray([[1, 6], [2, 7]]), group=0)
    moved = scrub(moved, jnp.asarray([1, 2]), group=0)
    there = RaggedBatch.make(plan.groups[0], cu_q_lens=[0, 5], kv_lens=[5], page_table=[[6, 7]])
    np.testing.assert_array_equal(attend(moved, 4, there, query, **call).output, want)
    saved = extract(state, batches, 0)
    assert len(saved.layers) == 4
    back = restore(init(cache), saved, [there, batches[1]], 0)
    np.testing.assert_array_equal(attend(back, 4, there, query, **call).output, want)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    assert jax.tree.structure(shardings(cache, mesh).state) == jax.tree.structure(state)
    fixed = KVCache(**PLAIN | {"quantised": {"dtype": "int8", "scale": "tensor"}})
    scaled = init(fixed, key_scale=[0.1, 0.2], value_scale=0.1)
    assert [float(pages.key_scale) for pages in scaled.layers] == [np.float32(0.1), np.float32(0.2)]


def test_a_step_that_would_write_is_refused() -> None:
    cache = KVCache(**PLAIN)
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
    query, key, value = _draw(5, 4, 8), _draw(5, 2, 8), _draw(5, 2, 8)
    state, paged = init(cache), Attention("paged")
    call: dict[str, Any] = {"state": state, "layer": 2, "batch": batch}
    plan = paged.plan(query, key, value, cache=cache, layer=2)
    assert {reason.code for rejected in plan.rejected for reason in rejected.reasons} == {"paged.reads_layer"}
    for options in ({}, {"update": "before"}, {"update": "fused"}):
        with pytest.raises(RefusedError, match=r"paged\.reads_layer"):
            paged(query, key, value, **call, **options)
    with pytest.raises(RefusedError, match=r"paged\.reads_layer"):
        paged(None, key, value, **call, mode="insert")
    with pytest.raises(InputError, match="layer 2 reads the keys and values of layer 0"):
        insert(state, 2, batch, key, value)
    with pytest.raises(InputError, match="layer 2 reads the keys and values of layer 0"):
        attend(state, 2, batch, query, key, value)
    with pytest.raises(InputError, match="wanted 0 to 2"):
        attend(state, 3, batch, query, update="none")
    reading = paged.plan(query, cache=cache, layer=2)
    assert (reading.problem.update, reading.problem.reads_layer) == ("none", 0)
    assert reading.to_dict()["reads_layer"] == 0
    assert "those of layer 0" in reading.explain()
    assert paged.plan(query, key, value, cache=cache, layer=1).problem.reads_layer is None


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ({2: 2}, "layer 2 reads layer 2"),
        ({1: 2}, "an earlier layer with keys of its own"),
        ({1: 0, 2: 1}, "an earlier layer with keys of its own"),
        ({3: 0}, "layer 3; wanted 0 to 2"),
        ([[2, 0], [2, 1]], "given twice"),
        ([], "wanted the layer that each"),
        ([[1]], "wanted the layer that each"),
        ({"a": 0}, "wanted the layer that each"),
        ({1: True}, "wanted the layer that each"),
    ],
)
def test_declarations_that_are_refused(reads: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCache(**PLAIN | {"reads_layer": reads})


def test_both_layers_are_in_one_group() -> None:
    with pytest.raises(ConfigError, match="they are in groups 1 and 0"):
        KVCache(**GROUPED | {"reads_layer": {5: 3}})


# -- files and models --------------------------------------------------------------------------------------------------

GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip


def test_a_file_declares_a_step_of_such_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    step = {"layer": 5, "q_lens": [1], "kv_lens": [9], "q_heads": 4}
    cache = {**GROUPED, "reads_layer": [[4, 3], [5, 2], [6, 2]]}
    path.write_text(json.dumps({"operation": "paged", "cache": cache, "step": step | {"update": "none"}}))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reads_layer"] == 2
    assert main(["run", str(path), "--check", "--json"]) == 0
    assert [check["passed"] for check in json.loads(capsys.readouterr().out)["checks"]] == [True, True]
    path.write_text(json.dumps({"operation": "paged", "cache": cache, "step": step | {"update": "before"}}))
    assert main(["plan", str(path)]) == 1
    assert "paged.reads_layer" in capsys.readouterr().out


def test_a_model_says_which_layer_reads_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelDeclaration.from_config(GEMMA4)
    assert model.reads_layer == {4: 2, 5: 3}
    assert [layer.reads_layer for layer in model.layers] == [None] * 4 + [2, 3]
    cache = KVCache(
        layers=[group.model_dump() | {"pages": 8} for group in model.layer_groups], reads_layer=model.reads_layer, kv_heads=2,
        head_dim=16, page_size=4, max_sequences=2, max_length=24, max_tokens=8,
    )  # fmt: skip
    assert cache.stored_layers == (0, 1, 2, 3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA4))
    assert main(["plan", "--model", str(path), "--q-len", "16", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert {layer["layers"][0]: layer["reads_layer"] for layer in layers} == {0: None, 1: None, 4: 2, 5: 3}
    assert main(["plan", "--model", str(path), "--q-len", "16"]) == 0
    assert "of layer 2" in capsys.readouterr().out
