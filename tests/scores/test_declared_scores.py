"""Scores in declarations: read, written, refused with the place; and the float64 reference with them."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import ALiBi, Attention, Clip, ConfigError, Forgetting, InputError, RelativeBias, SoftCap, Temperature
from attnops.errors import InputTypeError
from attnops.registry.call_declaration import CallDeclaration
from attnops.registry.declaration import Declaration
from attnops.registry.declaration_schema import declaration_json_schema
from attnops.scores import score_from_dict
from attnops.verify import reference_attention, reference_gradients

Q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 4, 8)), jnp.float32)
SIZES = {"batch": 2, "q_len": 6, "q_heads": 4, "head_dim": 8}


@attnops.register_score_function("tests.declared.root")
def _root(distance: jax.Array) -> jax.Array:
    return -jnp.sqrt(jnp.abs(distance).astype(jnp.float32))


@attnops.register_score_function("tests.declared.gain")
def _gain(x: Any, batch: Any, head: Any, q: Any, kv: Any, gain: Any) -> Any:
    return x * gain


FORMS: dict[str, Any] = {
    "alibi": "alibi",
    "slopes": {"kind": "alibi", "slopes": [0.5, 0.25, 0.0, -1.0]},
    "t5": {
        "kind": "relative_bias",
        "buckets": {"kind": "t5", "buckets": 8, "max_distance": 20, "bidirectional": False},
    },
    "clip": {"kind": "relative_bias", "buckets": {"kind": "clip", "left": 3, "right": 0}},
    "grid": {"kind": "relative_bias_2d", "grid": [2, 3], "decomposed": False},
    "class_token": {"kind": "relative_bias_2d", "grid": [1, 5], "class_token": True},
    "decomposed": {"kind": "relative_bias_2d", "grid": [2, 3], "decomposed": True},
    "forgetting": "forgetting",
    "temperature": {"kind": "temperature", "temperature": [1.0, 2.0, 3.0, 4.0]},
    "positions": {"kind": "position_temperature", "floor": 4.0, "scale": 0.2},
    "distance": {"kind": "distance", "name": "tests.declared.root"},
    "function": {"kind": "score_function", "name": "tests.declared.gain", "captures": {"gain": ["batch", "q_len"]}},
    "list": [{"kind": "soft_cap", "cap": 2.0}, "alibi", "forgetting"],
}


@pytest.mark.parametrize("name", FORMS)
def test_a_declared_score_comes_back_from_json_and_runs_as_the_object_does(name: str) -> None:
    declaration = Declaration.from_dict({"operation": "vanilla", "call": {**SIZES, "score": FORMS[name]}})
    again = Declaration.from_json(declaration.to_json())
    assert again == declaration
    score = score_from_dict(FORMS[name])
    assert declaration.call.score == score
    drawn = declaration.draw(1)
    arrays = {name: x for name, x in drawn.items() if name not in ("query", "key", "value")}
    by_file = Attention(declaration)(Q, Q, Q, **arrays).attention_outputs
    by_call = Attention("vanilla")(Q, Q, Q, score=score, **arrays).attention_outputs
    np.testing.assert_array_equal(by_file, by_call)
    assert not np.allclose(by_file, Attention("vanilla")(Q, Q, Q).attention_outputs)


def test_the_arrays_of_a_declared_score_have_the_shapes_of_its_table() -> None:
    score = ["forgetting", {"kind": "relative_bias", "buckets": {"kind": "clip", "left": 3}}, "temperature", "alibi"]
    call = {**SIZES, "kv_len": 9, "query_offset": 3, "score": score, "operands": {"temperature": [4, 1]}}
    shapes = CallDeclaration(**call).shapes()
    found = {name: x.shape for name, x in shapes.items() if name not in ("query", "key", "value")}
    assert found == {"log_gate": (2, 4, 9), "table": (4, 4), "temperature": (4, 1)}
    assert {x.dtype.name for x in shapes.values()} == {"float32"}
    plan = Attention("vanilla", mesh={"dp": 2, "tp": 2}, score=score).plan(
        *(jax.ShapeDtypeStruct((2, 9, 4, 8), jnp.float32),) * 3,
        table=jax.ShapeDtypeStruct((4, 4), jnp.float32),
        log_gate=jax.ShapeDtypeStruct((2, 4, 9), jnp.float32),
        temperature=jax.ShapeDtypeStruct((4, 1), jnp.float32),
    )
    fitted = {name: x["fitted"] for name, x in plan.to_dict()["tensors"].items()}
    text = plan.explain()
    specs = {"log_gate": "P(dp, tp, -)", "table": "P(-, tp)", "temperature": "P(tp, -)", "slopes": "P(tp)"}
    for name, spec in specs.items():
        assert f"{name}: {spec}" in " ".join(text.split()), fitted
    assert plan.to_dict()["score"]["kind"] == "chain"
    assert "forgetting >> relative_bias" in text


REFUSED: dict[str, tuple[Any, str]] = {
    "kind": ({"kind": "alibbi"}, "score.kind is 'alibbi'.*Did you mean 'alibi'"),
    "no_kind": ({"cap": 3.0}, "score.kind is None"),
    "odd_kind": ({"kind": ["alibi"]}, "score.kind is"),
    "key": ({"kind": "alibi", "slope": [1.0]}, "'slope'.*Did you mean 'slopes'"),
    "in_a_list": (["alibi", {"kind": "soft_cap", "cap": -1}], r"score.scores\[1\]: SoftCap cap=-1"),
    "a_text": ({"kind": "soft_cap", "cap": "3"}, "score: SoftCap cap='3'"),
    "rule": ({"kind": "relative_bias", "buckets": {"kind": "t6"}}, "score.buckets.kind is 't6'"),
    "odd_rule": ({"kind": "relative_bias", "buckets": {"kind": []}}, "score.buckets.kind is"),
    "array": ({"kind": "forgetting", "log_gate": True}, "score.log_gate is True.*pass log_gate= in the call"),
    "captures": ({"kind": "score_function", "name": "tests.declared.gain", "captures": ["gain"]}, "score.captures is"),
    "number": (3, "score is 3"),
    "a_list_in_a_list": (["alibi", ["alibi"]], r"score.scores\[1\] is \['alibi'\]"),
    "empty": ([], "score.scores is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_cannot_say_is_refused_with_its_place(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        Declaration.from_json(json.dumps({"operation": "vanilla", "call": {"score": value}}))


def test_a_deep_score_is_refused() -> None:
    score: Any = "alibi"
    for _ in range(80):
        score = {"kind": "chain", "scores": [score]}
    with pytest.raises(ConfigError, match="deeper than 64"):
        Attention("vanilla", score=score)


def test_arrays_are_for_the_call() -> None:
    with pytest.raises(ConfigError, match="holds arrays"):
        Attention("vanilla", score=RelativeBias(jnp.zeros((4, 4)), Clip(3)))
    attend = Attention("vanilla", score=RelativeBias(buckets=Clip(3)))
    with pytest.raises(InputError, match="needs table"):
        attend(Q, Q, Q)
    with pytest.raises(InputTypeError, match=r"'tabel'.*Did you mean 'table'"):
        attend(Q, Q, Q, tabel=jnp.zeros((4, 4)))
    with pytest.raises(InputTypeError, match="'table'"):
        Attention("vanilla")(Q, Q, Q, table=jnp.zeros((4, 4)))
    with pytest.raises(ConfigError, match=r"operands has 'tables'.*Did you mean 'table'"):
        CallDeclaration(**SIZES, score=RelativeBias(buckets=Clip(3)), operands={"tables": True}).shapes()


def test_a_score_in_the_call_must_be_the_declared_one() -> None:
    attend = Attention("vanilla", score=ALiBi())
    assert attend(Q, Q, Q, score=ALiBi()).plan.problem.score.kind == "alibi"
    for other in (SoftCap(3.0), ALiBi((1.0, 2.0, 3.0, 4.0))):
        with pytest.raises(ConfigError, match="score: the declaration says alibi"):
            attend(Q, Q, Q, score=other)


def test_slopes_may_come_in_the_call() -> None:
    slopes = jnp.asarray([0.5, 0.25, 0.125, 1.0])
    np.testing.assert_array_equal(
        Attention("vanilla", score=ALiBi())(Q, Q, Q, slopes=slopes).attention_outputs,
        Attention("vanilla")(Q, Q, Q, score=ALiBi(slopes)).attention_outputs,
    )


def test_the_schema_has_every_kind() -> None:
    from attnops.scores.serial import BUCKETS, SCORES

    text = json.dumps(declaration_json_schema("vanilla"))
    for kind in (*SCORES, *BUCKETS, "chain"):
        assert f'"const": "{kind}"' in text, kind


def test_the_reference_has_scores_and_their_gradients() -> None:
    """Held against float64 jax of the formulas, written here."""
    random = np.random.default_rng(3)
    q, k, v, d_out = (random.standard_normal((2, 6, 4, 8)) for _ in range(4))
    gate, temperature = -np.abs(random.standard_normal((2, 4, 6))), random.standard_normal((4,))
    i, j = np.arange(6)[:, None], np.arange(6)[None]
    visible = (j <= i)[None, None]

    def formula(q: Any, k: Any, v: Any, gate: Any, temperature: Any) -> Any:
        x = 2.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 / 2.0)
        sums = jnp.cumsum(gate, -1)
        x = (x + sums[:, :, :, None] - sums[:, :, None, :]) * temperature[None, :, None, None]
        weights = jax.nn.softmax(jnp.where(visible, x, -jnp.inf), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    score = Forgetting() >> Temperature()
    given: dict[str, Any] = {"scale": 0.3, "mask": visible, "soft_cap": 2.0, "score": score}
    given["captures"] = {"log_gate": gate, "temperature": temperature}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        inputs = [jnp.asarray(x) for x in (q, k, v, gate, temperature)]
        want, back = jax.vjp(formula, *inputs)
        gradients = back(jnp.asarray(d_out))
    np.testing.assert_allclose(reference_attention(q, k, v, **given).output, want, atol=1e-12)
    found = reference_gradients(q, k, v, d_out, **given)
    for name, gradient in zip(("query", "key", "value", "log_gate", "temperature"), gradients, strict=True):
        np.testing.assert_allclose(found[name], gradient, atol=1e-12, err_msg=name)
