"""Every field of the config of a recurrent operation changes what is lowered, and means what the reference says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import call_of
from step_inputs import convolved, drawn

import attnops.operators.recurrent as recurrent
from attnops import ConfigError, OperationMetadata, OperationRegistry
from attnops.verify.recurrent_of_call import recurrent_reference

COMMON = {"operation", "schema_version", "exchange"}  # test_exchange.py has the last, which is of split sequences
NAMES = {cls.name: cls for cls in (getattr(recurrent, name) for name in recurrent.__all__) if hasattr(cls, "config")}
RAW = {"gate": "raw"}
# field -> (what else is declared, a value whose program differs from that of the field left out)
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "chunk_size": ({}, 16),
    "state_dtype": ({}, "bfloat16"),
    "scale": ({}, 0.7),
    "normalise_qk": ({}, True),
    "normalise_eps": ({"normalise_qk": True}, 1e-3),
    "gate": ({}, "raw"),
    "beta_form": ({}, "sigmoid"),
    "beta_max": ({"beta_form": "sigmoid"}, 2.0),
    "dt_softplus": ({}, True),
    "dt_min": ({}, 0.3),
    "dt_max": ({}, 0.4),
    "activation": ({}, "silu"),
    "interpret": ({}, True),
    "conv_activation": ({}, "silu"),
}
FIELDS = [(name, field) for name, cls in NAMES.items() for field in cls.config.model_fields if field not in COMMON]
OF_KERNEL = [(name, field) for name, field in FIELDS if NAMES[name].backend_operation is None]


def _call(name: str, declared: dict[str, Any]) -> dict[str, Any]:
    kind = NAMES[name].backend_operation or name
    if issubclass(NAMES[name], recurrent.SlotsOperation):
        step = drawn(kind, "mixed", dim=4, value_dim=3)
        names = [one.removesuffix("_conv_window") for one in NAMES[name].operands.names if one.endswith("_conv_window")]
        call = convolved(step, *names).given
    else:
        call = call_of(kind, batch=1, tokens=20, dim=4, value_dim=3)
    if declared.get("gate") == "raw":
        rng = np.random.default_rng(5)
        call["decay"] = rng.standard_normal(call["decay"].shape).astype(np.float32)
        call["A_log"] = rng.standard_normal(call["value"].shape[-2]).astype(np.float32)
        own = NAMES[name].operands["dt_bias"].dims
        call["dt_bias"] = rng.standard_normal(call["decay"].shape[-len(own) :]).astype(np.float32)
    return call


def _operation(name: str, declared: dict[str, Any]) -> Any:
    return OperationRegistry.create(name, OperationMetadata(operation_configs={name: declared}, tuning="off"))


def _lowered(name: str, declared: dict[str, Any], call: dict[str, Any]) -> str:
    operation = _operation(name, declared)
    if "state" in call:  # slots come in the declared dtype
        call = call | {"state": call["state"].astype(jnp.dtype(declared.get("state_dtype", "float32")))}

    def run(call: dict[str, Any]) -> Any:
        output = operation(**call)
        return output.attention_outputs, output.state

    return jax.jit(run).lower(call).as_text()


# Other names of an operation have configs of their own, with the same fields.
@pytest.mark.parametrize(
    ("name", "field"), [x if x in OF_KERNEL else pytest.param(*x, marks=pytest.mark.slow) for x in FIELDS]
)
def test_a_field_changes_what_is_lowered(name: str, field: str) -> None:
    beside, value = CHANGES[field]  # a new field without a line there fails
    declared = beside | {field: value}
    call = _call(name, declared)
    before = {key: x for key, x in call.items() if field != "gate" or key not in ("A_log", "dt_bias")}
    if field == "gate":
        before["decay"] = -np.abs(call["decay"])
    assert _lowered(name, declared, call) != _lowered(name, beside, before)


@pytest.mark.parametrize(("name", "field"), [x for x in OF_KERNEL if x[1] not in ("chunk_size", "state_dtype")])
def test_a_field_means_what_the_reference_says(name: str, field: str) -> None:
    beside, value = CHANGES[field]
    declared = beside | {field: value}
    call, operation = _call(name, declared), _operation(name, declared)
    output = operation(**call)
    wanted = recurrent_reference(output.plan.problem, call, operation, output.plan.config)
    for result in ("attention_outputs", "state"):
        size = np.abs(wanted[result]).max()
        np.testing.assert_allclose(getattr(output, result), wanted[result], rtol=0, atol=2e-5 * size)


def test_steps_have_a_range() -> None:
    with pytest.raises(ConfigError, match=r"dt_min=0.5 is above dt_max=0.1"):
        _operation("mamba2", {"dt_min": 0.5, "dt_max": 0.1})
