"""Attention: what a file declares and what a call gives, as one."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, Causal, ConfigError, Declaration, InputError, SlidingWindow
from attnops.errors import InputTypeError
from attnops.verify import reference_attention

_draw = np.random.default_rng(0)
QUERY, KEY, VALUE = (_draw.standard_normal((2, 6, 4, 8)).astype(np.float32) for _ in range(3))
TRIANGLE = np.tril(np.ones((1, 1, 6, 6), bool))
NEAR = np.tril(np.triu(np.ones((1, 1, 6, 6), bool), -2), 1)


def _attention(metadata: dict[str, Any] | None = None, **call: Any) -> Attention:
    return Attention({"operation": "vanilla", "metadata": metadata or {}, "call": call})


def _wanted(**call: Any) -> np.ndarray:
    return reference_attention(QUERY, KEY, VALUE, **({"scale": 8**-0.5} | call)).output


def _got(attention: Attention, **call: Any) -> np.ndarray:
    return np.asarray(attention(QUERY, KEY, VALUE, **call).attention_outputs)


@pytest.mark.parametrize(
    ("declared", "call", "wanted"),
    [
        ({}, {}, {"mask": TRIANGLE}),  # the metadata's default
        ({"causal": False}, {}, {}),
        ({"causal": False, "softmax_scale": 0.5, "logits_soft_cap": 2.0}, {}, {"scale": 0.5, "soft_cap": 2.0}),
        ({"causal": False, "sliding_window": [2, 1]}, {}, {"mask": NEAR}),
        ({"mask": "causal"}, {"mask": SlidingWindow(2, 1)}, {"mask": NEAR & TRIANGLE}),
        ({"mask": {"kind": "sliding_window", "left": 2, "right": 1}}, {"mask": TRIANGLE}, {"mask": NEAR & TRIANGLE}),
        ({"mask": "full", "query_offset": 2}, {"causal": True}, {"mask": np.tril(np.ones((6, 6), bool), 2)}),
    ],
)
def test_the_file_and_the_call_are_one(declared: dict[str, Any], call: dict[str, Any], wanted: dict[str, Any]) -> None:
    np.testing.assert_allclose(_got(_attention(**declared), **call), _wanted(**wanted), atol=2e-6)


@pytest.mark.parametrize(
    ("name", "said", "given", "same"),
    [
        ("causal", True, False, True),
        ("sliding_window", [2, 2], 3, 2),
        ("sliding_window", 2, (2, 1), (2, 2)),
        ("query_offset", 2, 1, 2),
        ("softmax_scale", 0.5, 0.25, 0.5),
        ("logits_soft_cap", 2.0, 3.0, 2),
        ("dropout_prob", 0.5, 0.0, 0.5),
        ("deterministic", False, True, False),
        ("return_weights", True, False, True),
        ("return_lse", False, True, False),
        ("mode", "prefill", "train", "__prefill__"),
        ("layout", "bhtd", "bthd", "bhtd"),
    ],
)
def test_an_option_that_both_say(name: str, said: Any, given: Any, same: Any) -> None:
    attention = _attention(**{name: said})
    with pytest.raises(ConfigError, match=rf"{name}: the declaration says .*, the call says .*; leave one of them out"):
        attention.options(QUERY, KEY, VALUE, **{name: given})
    agreed = attention.options(QUERY, KEY, VALUE, **{name: same})
    assert agreed == attention.options(QUERY, KEY, VALUE) == attention.options(QUERY, KEY, VALUE, **{name: None})


def test_an_offset_that_is_an_array_beside_a_declared_one() -> None:
    with pytest.raises(ConfigError, match="query_offset: the declaration says 2, the call says"):
        _attention(query_offset=2).options(QUERY, KEY, VALUE, query_offset=np.array([2, 2]))


@pytest.mark.parametrize(
    ("declared", "argument"),
    [
        ({"segment_ids": 2}, "q_segment_ids"),
        ({"kv_lengths": True}, "kv_lengths"),
        ({"bias": [1, 1, 6, 6]}, "bias"),
        ({"softmax_aux": [4]}, "softmax_aux"),
        ({"dense_mask": [1, 1, 6, 6]}, "mask"),
        ({"kv_dtype": "int8", "kv_scales": "head"}, "key_scale"),
    ],
)
def test_declared_arrays_have_to_come(declared: dict[str, Any], argument: str) -> None:
    (name, *_) = (n for n in declared if n != "kv_dtype")
    with pytest.raises(InputError, match=f"call.{name} is declared, but the call has no {argument}; pass it, or leave"):
        _attention(**declared)(QUERY, KEY, VALUE)


def test_declared_arrays_that_come() -> None:
    bias = _draw.standard_normal((1, 4, 6, 6)).astype(np.float32)
    got = _got(_attention(bias=[1, 4, 6, 6], dense_mask=[1, 1, 6, 6], causal=False), bias=bias, mask=NEAR)
    np.testing.assert_allclose(got, _wanted(bias=bias, mask=NEAR), atol=2e-6)


@pytest.mark.parametrize(
    ("field", "name"), [("q_heads", "query"), ("kv_heads", "key"), ("head_dim", "query"), ("value_dim", "value")]
)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_heads_and_dims_are_checked(field: str, name: str, layout: str) -> None:
    right = {"q_heads": 4, "kv_heads": 4, "head_dim": 8, "value_dim": 8}[field]
    arrays = [x if layout == "bthd" else x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE)]
    # The batch and the lengths of a file are those that are planned for; a model's own come with each call.
    sizes = {"layout": layout, "batch": 7, "q_len": 9, "kv_len": 11}
    _attention(**sizes, **{field: right}).plan(*arrays)
    with pytest.raises(InputError, match=rf"{name} .* has {right} in .*; the file declares {field}={right + 1}"):
        _attention(**sizes, **{field: right + 1}).plan(*arrays)


def test_dtypes_are_checked() -> None:
    with pytest.raises(
        InputError, match=r"query is float32; the file declares call.dtype='bfloat16'. Cast it, or leave"
    ):
        _attention(dtype="bfloat16")(QUERY, KEY, VALUE)
    with pytest.raises(InputError, match=r"key is float32; the file declares call.kv_dtype='float8_e5m2'"):
        _attention(kv_dtype="float8_e5m2", kv_scales=None)(QUERY, KEY, VALUE)
    assert _attention(dtype="float32").plan(QUERY.astype(np.float64), KEY, VALUE).problem.input_dtype == "float32"


def test_what_is_no_array_is_refused_as_by_the_operation() -> None:
    with pytest.raises(InputTypeError, match="query is a list; wanted a jax or numpy array"):
        _attention(q_heads=4, dtype="float32")([1.0], KEY, VALUE)
    with pytest.raises(TypeError, match="casual"):
        _attention()(QUERY, KEY, VALUE, casual=True)


@pytest.mark.parametrize("how", ["path", "text path", "dict", "declaration"])
def test_where_a_declaration_comes_from(how: str, tmp_path: Path) -> None:
    path, data = tmp_path / "attention.json", {"operation": "sdpa", "call": {"causal": False}}
    path.write_text(json.dumps(data))
    declared = {"path": path, "text path": str(path), "dict": data, "declaration": Declaration.load(path)}[how]
    attention = Attention(declared)
    assert attention == Attention(data)
    np.testing.assert_allclose(_got(attention), _wanted(), atol=2e-6)
    with pytest.raises(ConfigError, match=r"nowhere.json: No such file"):
        Attention(tmp_path / "nowhere.json")


def test_metadata_of_the_program_takes_the_place_of_the_files() -> None:
    attention = Attention({"operation": "vanilla", "metadata": {"causal": True, "softmax_scale": 1.0}}, causal=False)
    np.testing.assert_allclose(_got(attention), _wanted(scale=1.0), atol=2e-6)
    assert attention.states("causal")
    assert not attention.states("dropout_prob")


def test_plans_are_kept_once_each() -> None:
    attention = _attention(causal=False)
    assert attention.plans == ()
    for _ in range(2):
        attention(QUERY, KEY, VALUE)
    jax.jit(lambda x: attention(x, x, x).attention_outputs)(QUERY[:, :3])
    assert [plan.problem.q_len for plan in attention.plans] == [6, 3]
    assert attention.plan(QUERY, KEY, VALUE) == attention.plans[0]
    assert attention.explain(QUERY, KEY, VALUE).startswith("vanilla on cpu: batch 2, q 6, kv 6, 4 heads")


def test_a_disabled_one_does_not_run() -> None:
    attention = Attention({"operation": "vanilla", "enabled": False})
    assert not attention.enabled
    for call in (attention, attention.plan, attention.explain):
        with pytest.raises(ConfigError, match=r"has enabled=false.*there is none here"):
            call(QUERY, KEY, VALUE)
    with pytest.raises(ConfigError, match="declaration: enabled='no'"):
        Attention({"operation": "vanilla", "enabled": "no"})


def test_equality_and_hash() -> None:
    assert _attention(causal=True) == _attention(causal=True)
    assert hash(_attention(causal=True)) == hash(_attention(causal=True))
    others = [
        _attention(),
        _attention({"causal": True}),  # stated: behind an adapter it is more than a default
        _attention({"runtime_dtype": "bfloat16"}),
        Attention({"operation": "sdpa"}),
        Attention({"operation": "vanilla", "enabled": False}),
    ]
    assert len({_attention(causal=True), *others}) == 6
    assert _attention() != "vanilla"
    traced = []
    run = jax.jit(lambda a, x: traced.append(1) or a(x, x, x).attention_outputs, static_argnums=0)
    for _ in range(2):
        run(_attention(causal=True), jnp.asarray(QUERY))
    assert len(traced) == 1


@pytest.mark.parametrize("by", [lambda a: pickle.loads(pickle.dumps(a)), copy.deepcopy])
def test_copies_are_equal(by: Any) -> None:
    for metadata in (
        {},
        {"causal": True, "dropout_prob": 0.0},
        {"mesh": {"fsdp": 2}, "operation_configs": {"vanilla": {}}},
    ):
        attention = Attention(
            {"operation": "vanilla", "metadata": metadata, "call": {"mask": "causal"}}, runtime_dtype="bfloat16"
        )
        again = by(attention)
        assert again == attention
        assert hash(again) == hash(attention)
        assert [again.states(n) for n in ("causal", "dropout_prob")] == [
            n in metadata for n in ("causal", "dropout_prob")
        ]
        assert again.plan(QUERY, KEY, VALUE) == attention.plan(QUERY, KEY, VALUE)


def test_masks_of_the_file_and_the_call_intersect_in_the_plan() -> None:
    plan = _attention(mask="causal").plan(QUERY, KEY, VALUE, mask=SlidingWindow(2) & Causal())
    assert plan.problem.mask.describe() == "causal(offset=0) & window(left=2, right=0, offset=0)"
