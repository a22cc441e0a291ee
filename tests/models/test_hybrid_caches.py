"""Caches of models whose layers have states: every array is what transformers keeps, for all families and published models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hybrid_models import HYBRIDS
from hybrid_probe import LENGTH, TRUTH

from attnops import KVCache, ModelDeclaration
from attnops.models.families import FAMILIES
from attnops.operators.paged_cache import LayerPages
from attnops.operators.paged_cache.state import abstract

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
RECORD = json.loads(TRUTH.read_text())["cases"]
IDS = [f"{number}-{case['config']['model_type']}" for number, case in enumerate(RECORD)]


def cache_of(model: ModelDeclaration, **fields: Any) -> KVCache:
    """A cache of the model's layers, with the heads of its attention."""
    found: dict[str, Any] = {"layers": [group.model_dump() for group in model.layer_groups]}
    if stateless := model.stateless_layers:
        found["stateless_layers"] = stateless
    attending = [layer.declaration.call for layer in model.layers if layer.declaration is not None]
    if attending:
        call = attending[0]
        found |= {
            "kv_heads": call.kv_heads or call.q_heads,
            "head_dim": call.head_dim,
            "value_dim": call.value_dim,
            "pages": 1024,
        }
    return KVCache.from_dict(found | {"max_sequences": 4, "max_length": 1024} | fields)


def as_transformers(operation: str, name: str, shape: list[int]) -> list[int]:
    """transformers keeps one token more before a convolution, channels first, and Mamba-2's state the other way around."""
    if name == "convolution":
        return [shape[1], shape[0] + 1]
    return [shape[0], shape[2], shape[1]] if operation == "mamba2" else shape


def test_all_families_with_states_are_recorded() -> None:
    families = {
        name for name, family in FAMILIES.items() if family.recurrence is not None or "conv" in family.own_kinds
    }
    assert len(families) >= 13
    assert families <= {case["config"]["model_type"] for case in RECORD} | {"minimax_m1"}


@pytest.mark.parametrize("case", RECORD, ids=IDS)
def test_each_layer_has_the_arrays_that_transformers_keeps(case: dict[str, Any]) -> None:
    model = ModelDeclaration.from_config(case["config"], q_len=LENGTH, dtype="float32")
    cache = cache_of(model, dtype="float32")
    assert KVCache.from_json(cache.to_json()) == cache
    state = abstract(cache.plan(device_kind="cpu").require())
    for number, wanted in enumerate(case["layers"]):
        states = {name: shape for name, shape in wanted["keeps"].items() if name in ("state", "convolution")}
        if not states:
            assert number not in cache.state_layers
        else:
            recurrence = model.layer(number).recurrence
            operation = "" if recurrence is None else recurrence.operation
            found = state.states(number).arrays
            shapes = {name: as_transformers(operation, name, list(x.shape[1:])) for name, x in found.items()}
            assert shapes == states
        keys = set(wanted["keeps"]) - {"state", "convolution"}
        assert (number in cache.stored_layers) == bool(keys)
        assert (number in (cache.stateless_layers or ())) == (not wanted["keeps"])
        if keys:
            assert isinstance(state.layers[cache.place_of(number)], LayerPages)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_published_models_bytes(name: str) -> None:
    model = ModelDeclaration.from_config(MODELS / f"{name}.json", q_len=LENGTH)
    wanted = sum(
        len(layer.layers) * math.prod(x.shape) * x.dtype.itemsize
        for layer in model.distinct
        for kind, x in layer.cache(1).items()
        if kind in ("state", "convolution")
    )
    cache = cache_of(model, dtype="bfloat16")
    plan = cache.plan(device_kind="cpu").require()
    assert plan.sequence_bytes == wanted
    kinds = HYBRIDS[name]
    assert cache.stored_layers == tuple(sorted(kinds.get("global", [])))
    with_states = {n for kind, layers in kinds.items() if kind not in ("global", "mlp") for n in layers}
    assert cache.state_layers == tuple(sorted(with_states))
    assert (cache.stateless_layers or ()) == tuple(kinds.get("mlp", ()))


def test_what_qwen3_next_keeps() -> None:
    """36 layers with 32 heads of 128 x 128 in float32 and 3 tokens of 8192 channels; 12 with 2 heads of 256, twice."""
    cache = cache_of(
        ModelDeclaration.from_config(MODELS / "qwen3-next-80b-a3b.json"), dtype="bfloat16", max_length=32768, pages=8192
    )
    plan = cache.plan(device_kind="cpu").require()
    fixed, token = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), 12 * 2 * 2 * 256 * 2
    assert plan.sequence_bytes == fixed
    assert plan.bytes_per_token == token
    pages = fixed // (16 * token) + 1
    assert plan.larger_from == (pages - 1) * 16 + 1
    assert len(plan.state_groups) == len(plan.page_groups) == 1
