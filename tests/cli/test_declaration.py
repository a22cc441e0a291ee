"""Declaration: exact in JSON both ways, and every mistake named."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops import ConfigError, OperationMetadata, OperationRegistry
from attnops.registry.declaration import Declaration
from attnops.registry.declaration_schema import config_json_schema, declaration_json_schema

SIZE = st.integers(1, 64)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)
MASKS = st.sampled_from(
    [None, "causal", "full", {"kind": "chunked", "size": 4}, {"kind": "not", "mask": {"kind": "prefix", "length": 3}}]
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "batch": SIZE,
        "q_len": SIZE,
        "kv_len": SIZE | st.none(),
        "q_heads": SIZE,
        "kv_heads": SIZE | st.none(),
        "head_dim": SIZE,
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "kv_dtype": st.sampled_from(["float8_e4m3fn", "float8_e5m2"]) | st.none(),
        "layout": st.sampled_from(["bthd", "bhtd", "thd"]),
        "mode": st.sampled_from([None, "train", "__prefill__", "decode"]),
        "mask": MASKS,
        "causal": st.booleans() | st.none(),
        "sliding_window": st.integers(0, 9) | st.lists(st.integers(0, 9) | st.none(), min_size=2, max_size=2),
        "query_offset": st.integers(-5, 5),
        "softmax_scale": FINITE,
        "logits_soft_cap": st.floats(1e-3, 1e3),
        "dropout_prob": st.floats(0, 0.99),
        "deterministic": st.booleans(),
        "segment_ids": SIZE | st.none(),
        "kv_lengths": st.just(True) | st.none() | st.lists(st.integers(0, 9)),
        "bias": st.lists(SIZE, min_size=4, max_size=4) | st.none(),
        "softmax_aux": st.lists(SIZE, min_size=1, max_size=2),
    },
)


@given(CALLS)
def test_round_trip_is_exact(call: dict[str, Any]) -> None:
    """Unset and null stay apart, and every number comes back bit for bit."""
    made = Declaration.from_dict({"operation": "splash", "metadata": {"causal": False}, "call": call})
    again = Declaration.from_json(made.to_json())
    assert again == made
    assert again.call.model_fields_set == made.call.model_fields_set == set(call)
    assert again.to_json() == made.to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"operation": "splash", "call": {"q_lenn": 8}}', ["file.json", "'call.q_lenn'", "Did you mean 'q_len'"]),
        ('{"operation": "splash", "calls": {}}', ["'calls'", "Did you mean 'call'"]),
        ('{"operation": "splash",\n "call": {"q_len": 8,}}', ["file.json", "line 2", "column 2"]),
        ('{"operation": "splash", "call": {"q_len"', ["not JSON", "line 1"]),
        ("", ["not JSON"]),
        ("[1]", ["list", "wanted an object"]),
        ("[" * 50_000, ["nested too deep"]),
        ('{"call": {}}', ["operation is missing"]),
        ('{"operation": "splash", "operation": "sdpa"}', ["'operation' appears twice"]),
        ('{"operation": "splash", "call": {"softmax_scale": NaN}}', ["NaN", "finite"]),
        ('{"operation": "splash", "call": {"softmax_scale": 1e999}}', ["1e999", "finite"]),
        ('{"operation": "splash", "metadata": {"softmax_scale": -Infinity}}', ["-Infinity"]),
        ('{"operation": "splash", "call": {"q_len": true}}', ["call.q_len=True", "integer"]),
        ('{"operation": "splash", "call": {"q_len": 0}}', ["call.q_len=0", "greater than or equal to 1"]),
        ('{"operation": "splash", "call": {"q_len": 8.0}}', ["call.q_len=8.0"]),
        ('{"operation": "splash", "call": {"q_len": 99999999999}}', ["call.q_len=99999999999"]),
        ('{"operation": "splash", "call": {"causal": 1}}', ["call.causal=1"]),
        ('{"operation": "splash", "call": {"mode": "trian"}}', ["'trian'", "Did you mean 'train'"]),
        ('{"operation": "splash", "call": {"layout": "tbhd"}}', ["call.layout='tbhd'"]),
        ('{"operation": "splash", "call": {"mask": {"kind": "causl"}}}', ["'causl'", "Did you mean 'causal'"]),
        ('{"operation": "splash", "call": {"sliding_window": [1, 2, 3]}}', ["call.sliding_window", "[left, right]"]),
        ('{"operation": "splash", "call": {"kv_lengths": 4}}', ["call.kv_lengths=4", "list of lengths"]),
        ('{"operation": "splash", "call": {"bias": [4, 4]}}', ["call.bias", "4 positive integers"]),
        ('{"operation": "splash", "call": {"kv_dtype": "int4"}}', ["call.kv_dtype='int4'", "'int8'"]),
        ('{"operation": "splash", "call": {"kv_scales": "head"}}', ["call.kv_scales='head'", "without call.kv_dtype"]),
        ('{"operation": "splash", "call": {"kv_dtype": "int8", "kv_scales": null}}', ["int8", "needs scales"]),
        ('{"operation": "splash", "call": {"kv_dtype": "int8", "kv_scales": "row"}}', ["call.kv_scales='row'"]),
        ('{"operation": "splash", "schema_version": 2}', ["schema_version=2"]),
    ],
)
def test_mistakes_are_named(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Declaration.from_json(text, "file.json")
    for part in ("file.json", *says):
        assert part in str(caught.value)


def test_schema_key_is_kept() -> None:
    made = Declaration.from_json('{"$schema": "./attnops.json", "operation": "sdpa"}')
    assert json.loads(made.to_json())["$schema"] == "./attnops.json"


def test_python_values_are_refused_where_json_has_none() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(ConfigError, match=r"metadata\.softmax_scale"):
            Declaration.from_dict({"operation": "sdpa", "metadata": {"softmax_scale": value}})


def test_drawn_arrays_have_the_planned_shapes() -> None:
    call = {
        "batch": 3, "q_len": 6, "kv_len": 20, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 5,
        "dtype": "bfloat16", "layout": "bhtd", "segment_ids": 3, "kv_lengths": True, "bias": [1, 4, 6, 20],
        "softmax_aux": [4], "dense_mask": [3, 1, 1, 20], "deterministic": False,
    }  # fmt: skip
    made = Declaration.from_dict({"operation": "vanilla", "call": call})
    arrays, shapes = made.draw(7), made.shapes()
    assert {n: (x.shape, x.dtype) for n, x in arrays.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    assert arrays["value"].shape == (3, 2, 20, 5)
    assert all(len(np.unique(row)) == 3 and (np.diff(row) >= 0).all() for row in arrays["kv_segment_ids"])
    assert ((arrays["kv_lengths"] >= 6) & (arrays["kv_lengths"] <= 20)).all()
    again = made.draw(7)
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)
    assert np.array_equal(jax.random.key_data(jax.random.key(7)), arrays["dropout_rng"])


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
@pytest.mark.parametrize("kv_scales", ["tensor", "head", "token", "token_head", None])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_drawn_keys_and_values_are_quantised(kv_dtype: str, kv_scales: str | None, layout: str) -> None:
    """Near to what is drawn unquantised from the same seed, and nothing else is changed."""
    if (kv_dtype, kv_scales) == ("int8", None):
        return
    call = {"q_len": 12, "kv_len": 20, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "layout": layout}
    call |= {"segment_ids": 2, "causal": False}
    call |= {} if layout == "thd" else {"batch": 3}
    plain = Declaration.from_dict({"operation": "vanilla", "call": call}).draw(5)
    made = Declaration.from_dict(
        {"operation": "vanilla", "call": call | {"kv_dtype": kv_dtype, "kv_scales": kv_scales}}
    )
    arrays, shapes = made.draw(5), made.shapes()
    assert {n: (x.shape, x.dtype) for n, x in arrays.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    assert set(arrays) == set(plain) | ({"key_scale", "value_scale"} if kv_scales else set())
    assert all(np.array_equal(arrays[n], plain[n]) for n in ("query", "q_segment_ids", "kv_segment_ids"))
    nearness = {"int8": 0.02, "float8_e4m3fn": 0.13, "float8_e5m2": 0.26}[kv_dtype]  # half a step of numbers up to 4
    for name in ("key", "value"):
        back = arrays[name].astype(np.float32) * arrays.get(f"{name}_scale", 1)
        assert np.abs(back - plain[name]).max() <= nearness
    assert OperationRegistry.create("vanilla").plan(**made.call_arguments(arrays)).require()


def test_packed_self_attention_has_one_set_of_ids() -> None:
    call = {"q_len": 12, "q_heads": 1, "head_dim": 4, "layout": "thd", "segment_ids": 4}
    arrays = Declaration.from_dict({"operation": "vanilla", "call": call}).draw(0)
    assert np.array_equal(arrays["q_segment_ids"], arrays["kv_segment_ids"])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"q_len": 4}, "call.q_heads, call.head_dim missing"),
        ({"q_len": 4, "q_heads": 1, "head_dim": 4, "batch": 2, "layout": "thd"}, "no batch"),
        ({"q_len": 4, "q_heads": 1, "head_dim": 4, "segment_ids": 5}, "at most one per token"),
        ({"q_len": 4, "q_heads": 1, "head_dim": 4, "kv_lengths": [1, 2]}, "one per batch row"),
    ],
)
def test_sizes_that_make_no_call(call: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Declaration.from_dict({"operation": "vanilla", "call": call}).shapes()


def test_call_arguments_are_those_of_a_call() -> None:
    """No argument of Operation.__call__ is out of a declaration's reach."""
    made = Declaration.from_dict({"operation": "vanilla", "call": {"q_len": 4, "q_heads": 1, "head_dim": 4}})
    arguments = made.call_arguments(made.shapes())
    operation = OperationRegistry.get("vanilla")
    for method in (operation.__call__, operation.plan):
        assert set(arguments) == set(inspect.signature(method).parameters) - {"self"}


def test_schema_speaks_of_every_field() -> None:
    schema = declaration_json_schema()
    metadata = schema["$defs"]["metadata"]["properties"]
    known = set(inspect.signature(OperationMetadata).parameters) - {"base_config", "partition_manager"}
    assert set(metadata) == known | {"schema_version"}
    assert set(metadata["operation_configs"]["properties"]) == set(OperationRegistry.names())
    assert "block_q" in schema["$defs"]["config.splash"]["properties"]
    assert set(schema["properties"]) == {
        "$schema",
        "schema_version",
        "operation",
        "enabled",
        "metadata",
        "call",
        "latent",
        "cache",
        "step",
    }
    assert config_json_schema("splash")["properties"]["block_q"]
    text = json.dumps(schema)
    for reference in {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}:
        assert reference in schema["$defs"]


def test_examples_are_declarations(examples: Path) -> None:
    found = sorted(examples.glob("*.json"))
    assert found
    for path in found:
        made = Declaration.load(path)
        assert Declaration.from_json(made.to_json()) == made
        OperationRegistry.get(made.operation)(made.operation_metadata())


def test_inputs_have_the_dtype_of_the_computation_unless_declared() -> None:
    call = {"q_len": 8, "q_heads": 2, "head_dim": 4}

    def drawn(metadata: dict[str, Any], **more: Any) -> str:
        made = Declaration.from_dict({"operation": "vanilla", "metadata": metadata, "call": call | more})
        (shape,) = {made.shapes()["query"].dtype.name, made.draw(0)["query"].dtype.name}
        return str(shape)

    assert drawn({}) == "float32"
    assert drawn({"runtime_dtype": "bfloat16"}) == drawn({"runtime_dtype": "bfloat16"}, dtype=None) == "bfloat16"
    assert drawn({"runtime_dtype": "bfloat16"}, dtype="float32") == "float32"
    assert drawn({"runtime_dtype": "float64"}) == "float32"
