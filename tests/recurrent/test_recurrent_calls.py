"""Calls of recurrent operations as users make them: declarations, plans, refusals, and numbers at the edges."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import KINDS, LINEAR, call_of, expected

from attnops import (
    Attention,
    ConfigError,
    Declaration,
    InputError,
    OperationMetadata,
    OperationRegistry,
)
from attnops.compat import abstract_device
from attnops.errors import InputTypeError, RefusedShardingError

FILE = {
    "operation": "gated_delta_rule",
    "call": {"q_len": 32, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "operands": {"decay": True, "beta": True}},
}
SIZES = {
    "mamba1": {"q_len": 20, "dims": {"channels": 12, "state_dim": 4}, "operands": {"D": True}},
    "causal_conv1d": {"q_len": 20, "dims": {"channels": 12, "width": 4}, "operands": {"bias": True}},
    "mamba2": {"q_len": 20, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "operands": {"D": True}},
}


def of(kind: str, **metadata: Any) -> Any:
    return OperationRegistry.create(kind, OperationMetadata(**metadata))


def mesh(**axes: int) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))])
    return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_declaration_runs_as_the_operation_does(kind: str) -> None:
    call = call_of(kind, tokens=20)
    attend = Attention(kind)
    names = [row.name for row in attend.operation.operands.required]
    rest = {name: x for name, x in call.items() if name not in names}
    output = attend(*(call[name] for name in names), **rest)
    np.testing.assert_allclose(output.attention_outputs, expected(kind, call).outputs, rtol=0, atol=1e-4)
    assert attend.plans == (output.plan,)
    assert attend.plan(*(call[name] for name in names), **rest) == output.plan
    assert Attention(json.loads(json.dumps(attend.declared().to_dict()))) == attend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_files_have_their_arrays(kind: str, layout: str) -> None:
    call = SIZES.get(kind, {**FILE["call"], "operands": {}})  # type: ignore[dict-item]
    declaration = Declaration.from_dict({"operation": kind, "call": {**call, "layout": layout, "segment_ids": 2}})
    arrays = declaration.draw(3)
    assert {name: x.shape for name, x in arrays.items()} == {n: x.shape for n, x in declaration.shapes().items()}
    plan = of(kind).plan(**declaration.call_arguments(declaration.shapes()))
    assert plan.method == "forward_native"
    assert plan.problem.size["q_len"] == call["q_len"]
    assert json.loads(json.dumps(plan.to_dict()))["options"] == plan.problem.option


@pytest.mark.parametrize(
    ("mode", "tokens", "strategy"),
    [("train", "sp", "state"), ("prefill", "sp", "state"), ("autoregressive", None, ""), ("insert", None, "")],
)
def test_specs_follow_the_mode(mode: str, tokens: str | None, strategy: str) -> None:
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call_of("kda", tokens=64).items()}
    plan = of("kda", mesh=mesh(dp=2, sp=2, tp=2)).plan(**shapes, mode=mode)
    for name in ("query", "key", "value", "decay"):
        assert tuple(plan.specs[name]) == ("dp", tokens, "tp", None)
    assert tuple(plan.specs["beta"]) == ("dp", tokens, "tp")
    assert tuple(plan.specs["state"]) == tuple(plan.specs["initial_state"]) == ("dp", "tp", None, None)
    assert plan.placement.strategy == strategy
    idle = [x.values["names"] for x in plan.notes if getattr(x, "code", "") == "table.idle_axes"]
    assert idle == ([] if strategy else [["sp=2"]])


def test_what_is_sent_does_not_depend_on_the_length() -> None:
    split = of("gated_delta_rule", mesh=mesh(sp=4))
    codes, sizes = [], []
    for tokens in (256, 4096):
        shapes = {
            name: jax.ShapeDtypeStruct(
                (x.shape[0], tokens, *x.shape[2:]) if x.shape[1:2] == (75,) else x.shape, x.dtype
            )
            for name, x in call_of("gated_delta_rule").items()
        }
        (made,) = (x for x in split.plan(**shapes).notes if x.field == "sequence_parallel")
        codes.append(made.code)
        sizes.append(made.values["size"])
    assert codes == ["recurrent.passed"] * 2
    # 2 rows, 4 heads, numbers of 4 bytes: [8, 6] of two rounds, of the state before and 3/2 of that after all tokens; [8, 8] once
    assert sizes == [2 * 4 * 4 * (8 * 6 * 9 // 2 + 8 * 8)] * 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_convolutions_tokens_are_sent_in_their_own_dtype(dtype: Any) -> None:
    call = {name: x.astype(dtype) for name, x in call_of("causal_conv1d", tokens=64).items()}
    split = of("causal_conv1d", mesh=mesh(sp=4), sequence_parallel="state")
    text = jax.jit(lambda call: split(**call).attention_outputs).lower(call).as_text()
    (sent,) = re.findall(r"collective_permute.*: \(tensor<(\d+)x(\d+)x(\d+)x(b?f\d+)", text)
    assert sent == ("2", "3", "24", "f32" if dtype == jnp.float32 else "bf16")
    # Once to the neighbour, and 2 * 3/4 of it for the state after all tokens; XLA:CPU sends 16-bit numbers as float32.
    tpus = jax.sharding.AbstractMesh((4,), ("sp",), abstract_device=abstract_device("TPU v5", 1, "tpu"))
    for devices, wide in ((mesh(sp=4), 4), (tpus, jnp.dtype(dtype).itemsize)):
        split = of("causal_conv1d", mesh=devices, sequence_parallel="state")
        (made,) = (x for x in split.plan(**call).notes if x.field == "sequence_parallel")
        assert made.values["size"] == 2 * 3 * 24 * wide * 5 // 2


def test_few_tokens_are_gathered() -> None:
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call_of("kda", tokens=8, dim=32).items()}
    plan = of("kda", mesh=mesh(sp=4)).plan(**shapes)
    assert plan.placement.strategy == "gather"
    assert [x.code for x in plan.notes if x.field == "sequence_parallel"] == ["recurrent.gathered"]
    # All devices have all tokens, so they do the same work.
    assert [x.values["names"] for x in plan.notes if getattr(x, "code", "") == "table.idle_axes"] == [["sp=4"]]
    with pytest.raises(RefusedShardingError, match="sp=4"):
        of("kda", mesh=mesh(sp=4), strict=True).plan(**shapes)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "simple_gla", "gla", "mamba2", "mamba1"])
def test_decays_of_thirty_a_step_lose_nothing(kind: str) -> None:
    """Steps of e^-30 beside steps of 1: neither NaN, nor an error of the tokens after them."""
    call = call_of(kind, tokens=130, key_heads=4)
    if "A" in call:
        call["A"], dt = np.full_like(call["A"], -1), np.full_like(call["dt"], 1e-3)
        dt[:, ::7] = 30
        call["dt"] = dt
        call["x"] = call["x"] * 0.1
    else:
        decay = np.full_like(call["decay"], -1e-3)
        decay[:, ::7] = -30
        call["decay"] = decay
    output, wanted = of(kind)(**call), expected(kind, call)
    size = np.abs(wanted.outputs).max((0, 1), keepdims=True)
    assert np.all(np.abs(output.attention_outputs - wanted.outputs) <= 2e-5 * size)

    def loss(call: dict[str, jax.Array]) -> jax.Array:
        return of(kind)(**call).attention_outputs.sum()

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.grad(loss)(call)))


def test_repeated_keys_are_solved_exactly() -> None:
    """All keys alike and beta 1: each token replaces what the one before stored, where products of powers would cancel."""
    call = call_of("gated_delta_rule", tokens=64, key_heads=4, state=False)
    call["key"][:] = call["key"][:, :1]
    call["beta"][:] = 1
    call["decay"][:] = 0
    output, wanted = of("gated_delta_rule")(**call), expected("gated_delta_rule", call)
    np.testing.assert_allclose(output.attention_outputs, wanted.outputs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", LINEAR)
def test_bfloat16_stays_near(kind: str) -> None:
    call = call_of(kind)
    narrow = {name: x.astype(jnp.bfloat16) if name != "initial_state" else x for name, x in call.items()}
    wide = {name: np.asarray(x, np.float32) for name, x in narrow.items()}
    output, wanted = of(kind)(**narrow), expected(kind, wide)
    assert output.attention_outputs.dtype == jnp.bfloat16
    assert output.state.dtype == jnp.float32
    size = np.abs(wanted.outputs).max()
    assert np.abs(np.asarray(output.attention_outputs, np.float64) - wanted.outputs).max() <= 1e-2 * size


Broken = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("kind", "change", "error", "names"),
    [
        ("gated_delta_rule", {"decay": np.ones((2, 20, 4), np.float32)}, InputError, "decay holds 1"),
        ("gated_delta_rule", {"beta": np.full((2, 20, 4), 1.5, np.float32)}, InputError, "beta holds 1.5"),
        ("mamba2", {"A": np.ones(4, np.float32)}, InputError, "A holds 1"),
        ("kda", {"decay": np.zeros((2, 20, 4), np.float32)}, InputError, "decay has shape"),
        ("kda", {"lengths": np.array([3, 21], np.int32)}, InputError, "lengths holds 21"),
        ("kda", {"segment_ids": np.zeros((2, 20), np.float32)}, InputError, "segment_ids is float32"),
        ("lightning", {"value": np.zeros((2, 20, 3, 6), np.float32)}, InputError, "3 heads of values over 2"),
        ("kda", {"initial_state": np.zeros((2, 4, 6, 8), np.float32)}, InputError, "initial_state has shape"),
        ("kda", {"initial_state": np.zeros((2, 4, 8, 6), np.int32)}, InputError, "initial_state is int32"),
        ("kda", {"A_log": np.zeros(4, np.float32)}, InputError, "gate='raw' only"),
        ("kda", {"decays": np.zeros(4, np.float32)}, InputTypeError, "'decay'"),
        ("kda", {"scale": -1.0}, InputError, "scale=-1.0"),
        ("kda", {"normalise_qk": 1}, InputTypeError, "normalise_qk=1"),
        ("kda", {"value": None}, InputTypeError, "no value"),
        ("simple_gla", {"beta": np.zeros((2, 20, 4), np.float32)}, InputTypeError, "unknown argument 'beta'"),
        ("causal_conv1d", {"weight": np.zeros((1, 24), np.float32)}, InputError, "width 1"),
        ("causal_conv1d", {"activation": "relu"}, InputError, "activation='relu'"),
    ],
)
def test_wrong_calls_are_refused(kind: str, change: dict[str, Any], error: type[Exception], names: str) -> None:
    call = call_of(kind, tokens=20, state=False) | change
    if kind == "causal_conv1d":
        del call["bias"]
    with pytest.raises(error, match=names):
        of(kind)(**call)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"call": {**FILE["call"], "causal": True}}, "call.causal"),  # type: ignore[dict-item]
        ({"call": {**FILE["call"], "dims": {"width": 4}}}, "call.dims has 'width'"),  # type: ignore[dict-item]
        ({"call": {**FILE["call"], "operands": {"bias": True}}}, "call.operands has 'bias'"),  # type: ignore[dict-item]
        ({"call": {"q_len": 32, "q_heads": 4}}, "call.head_dim"),
        ({"operation": "mamba1", "call": {"q_len": 32}}, "call.dims.channels, call.dims.state_dim"),
        (
            {"operation": "causal_conv1d", "call": {"q_len": 32, "dims": {"channels": 8, "width": 1}}},
            "call.dims.width=1",
        ),
        (
            {"operation": "splash", "call": {"q_len": 32, "q_heads": 4, "head_dim": 8, "dims": {"width": 4}}},
            "call.dims",
        ),
    ],
)
def test_wrong_files_are_refused(change: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Declaration.from_dict(FILE | change).shapes()


def test_what_a_call_and_a_file_say_must_agree() -> None:
    call = call_of("gated_delta_rule", tokens=32, value_dim=8, state=False)
    assert Attention(FILE)(**call).attention_outputs.shape == (2, 32, 4, 8)
    other = call_of("gated_delta_rule", tokens=32, value_dim=8, dim=4, state=False)
    with pytest.raises(InputError, match="head dim is 4; the file declares 8"):
        Attention(FILE)(**other)
    with pytest.raises(InputError, match=r"call.beta is declared"):
        Attention(FILE)(**{name: x for name, x in call.items() if name != "beta"})
    with pytest.raises(InputTypeError, match="no key"):
        Attention(FILE)(call["query"], decay=call["decay"], beta=call["beta"])


def test_strategies_of_attention_are_refused_here_and_that_of_states_there() -> None:
    call = call_of("kda", tokens=20)
    with pytest.raises(ConfigError, match="'ring' is for attention"):
        of("kda", sequence_parallel="ring")(**call)
    with pytest.raises(ConfigError, match="'state' is for recurrences"):
        of("splash", sequence_parallel="state")
    with pytest.raises(RefusedShardingError, match="sp"):
        of("kda", mesh=mesh(sp=8), strict=True).plan(**call)  # 20 tokens over 8 devices


def test_parts_that_are_shorter_than_a_convolution_are_refused() -> None:
    call = call_of("causal_conv1d", tokens=16)
    plan = of("causal_conv1d", mesh=mesh(sp=8), sequence_parallel="state").plan(**call)
    assert [reason.code for rejected in plan.rejected for reason in rejected.reasons] == ["recurrent.short_parts"]
    output = of("causal_conv1d", mesh=mesh(sp=8))(**call)
    assert output.plan.placement.strategy == "gather"
    np.testing.assert_allclose(output.attention_outputs, expected("causal_conv1d", call).outputs, rtol=0, atol=1e-4)


def test_inside_a_shard_map_each_device_has_its_own_rows() -> None:
    call = call_of("kda", tokens=20)
    devices = mesh(dp=2)
    split = jax.shard_map(
        lambda call: of("kda")(**call).attention_outputs,
        mesh=devices,
        in_specs=jax.sharding.PartitionSpec("dp"),
        out_specs=jax.sharding.PartitionSpec("dp"),
    )
    np.testing.assert_allclose(jax.jit(split)(call), expected("kda", call).outputs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_sequence_inside_a_shard_map(kind: str) -> None:
    call = call_of(kind, tokens=32, segments=True, lengths=True)
    devices, whole = mesh(sp=4), jax.sharding.PartitionSpec()
    along = jax.sharding.PartitionSpec(None, "sp")
    specs = {name: along if x.ndim > 1 and x.shape[1] == 32 else whole for name, x in call.items()}

    def part(call: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = of(kind, sequence_parallel="state")(**call)
        (passed,) = (x for x in found.plan.notes if getattr(x, "code", "") == "recurrent.passed")
        assert passed.values["other"] > 0
        return found.attention_outputs, found.state[None]

    run = jax.shard_map(part, mesh=devices, in_specs=(specs,), out_specs=(along, jax.sharding.PartitionSpec("sp")))
    outputs, states = jax.jit(run)(call)
    wanted = expected(kind, call)
    np.testing.assert_allclose(outputs, wanted.outputs, rtol=0, atol=1e-4)
    for state in states:
        np.testing.assert_allclose(state, wanted.state, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_manual_axis_of_the_sequence_is_told(kind: str) -> None:
    call, devices, codes = call_of(kind, tokens=8, batch=2, state=False), mesh(sp=2), []

    def rows(call: dict[str, jax.Array]) -> jax.Array:
        found = of(kind)(**call)
        codes.extend(x.code for x in found.plan.notes if x.field == "sequence_parallel")
        return found.attention_outputs

    spec = {name: jax.sharding.PartitionSpec("sp") if x.shape[0] == 2 else None for name, x in call.items()}
    spec = {name: jax.sharding.PartitionSpec() if x is None else x for name, x in spec.items()}
    out = jax.shard_map(rows, mesh=devices, in_specs=(spec,), out_specs=jax.sharding.PartitionSpec("sp"))
    np.testing.assert_allclose(jax.jit(out)(call), expected(kind, call).outputs, rtol=0, atol=1e-4)
    assert codes == ["recurrent.manual"]


def test_decays_by_head_alone_are_counted() -> None:
    """A decay [heads] has one dim, though the table's first has three."""
    call = {name: x for name, x in call_of("lightning", batch=1, tokens=32).items() if name != "initial_state"}
    operation = of("lightning")
    plan = operation.plan(**call)
    (decay,) = (x for x in plan.tensors if x.tensor == "decay")
    assert decay.dims == ("heads",)
    # products of 32 tokens with 32 keys of 8 numbers and values of 6, and with a state of 8 x 6, twice, for 4 heads
    assert type(operation).flops(plan) == 32 * 2 * 4 * (64 * (8 + 6) + 2 * 8 * 6)
