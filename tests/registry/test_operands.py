"""Operands as a table: what follows from an operation's own rows, on every mesh and layout, with gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from attnops import Attention, Causal, InputError, OperationMetadata, OperationRegistry, RefusedError
from attnops.authoring import LocalCall, LocalOutput, Operation, OperationConfig, implementation
from attnops.call_arguments import CALL_ARGUMENTS, CALL_OPTIONS
from attnops.cli.app import main
from attnops.errors import ConfigError, InputTypeError
from attnops.operators.vanilla import NATIVE
from attnops.planning import STATIC_MASKS
from attnops.sharding import ATTENTION, RESULTS, AttnShardingRules, Operand, OperandTable
from attnops.verify import reference_attention, reference_gradients

TEMPERATURE = Operand("temperature", ("heads",))
KEY_BIAS = Operand("key_bias", ("batch", "kv_len", "kv_heads"), "bth", broadcasts=True)


class OwnConfig(OperationConfig):
    operation: Literal["tempered"] = "tempered"


class Tempered(Operation):
    """Logits are multiplied by a number for each head, and have a term for each key and kv head."""

    name = "tempered"
    config = OwnConfig
    operands: ClassVar[OperandTable] = ATTENTION.extended(TEMPERATURE, KEY_BIAS)

    @implementation(
        STATIC_MASKS | {"gqa", "segment_ids"}, operands=("temperature", "key_bias"), tolerance={"float32": (6e-6, 2e-5)}
    )
    def forward_native(self, call: LocalCall) -> LocalOutput:
        query, bias = call.query, None
        if (by_head := call.further.get("temperature")) is not None:
            query = query * (by_head[None, None, :, None] if call.layout == "bthd" else by_head[None, :, None, None])
        if (by_key := call.further.get("key_bias")) is not None:
            by_key = by_key.swapaxes(1, 2) if call.layout == "bthd" else by_key
            heads = call.query.shape[call.layout.index("h")]
            bias = jnp.repeat(by_key, heads // by_key.shape[1], axis=1)[:, :, None]
        return NATIVE(replace(call, query=query, bias=bias))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    OperationRegistry.register(Tempered)
    yield
    OperationRegistry.unregister("tempered")


RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((4, 16, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
T = RNG.uniform(0.5, 2, 4).astype(np.float32)
B = RNG.standard_normal((4, 16, 2)).astype(np.float32)
SEEN = np.tri(16, dtype=bool)[None, None]


def in_layout(x: np.ndarray, layout: str) -> np.ndarray:
    return x.swapaxes(1, 2) if layout == "bhtd" else x


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("alone", ["", "batch", "kv_heads"])  # a dim of 1, which is broadcast
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (None, "gather"),
        ({"fsdp": 2, "tp": 2}, "gather"),
        ({"fsdp": 2, "tp": 4}, "gather"),
        ({"fsdp": 2, "sp": 2}, "gather"),
        ({"fsdp": 2, "sp": 2}, "ulysses"),
        ({"fsdp": 4}, "gather"),
    ],
)
def test_output_and_gradients(mesh: dict[str, int] | None, strategy: str, alone: str, layout: str) -> None:
    attend = Tempered(OperationMetadata(mesh=mesh, sequence_parallel=strategy))
    at = KEY_BIAS.dims.index(alone) if alone else None
    key_bias = B if at is None else B.take([0], axis=at)

    def loss(q: Any, k: Any, v: Any, temperature: Any, key_bias: Any) -> Any:
        call: dict[str, Any] = {"temperature": temperature, "key_bias": key_bias}
        out = attend(q, k, v, mask=Causal(), layout=layout, **call).attention_outputs
        return out.sum(), out

    given = [in_layout(x, layout) for x in (Q, K, V)] + [T, in_layout(key_bias, layout)]
    (_, out), got = jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))(*given)
    whole = np.broadcast_to(key_bias, B.shape)
    bias = np.repeat(whole.swapaxes(1, 2), 2, axis=1)[:, :, None].astype(np.float64)
    bias = np.broadcast_to(bias, (4, 4, 16, 16))
    hot = Q.astype(np.float64) * T[:, None]
    want = reference_attention(hot, K, V, scale=8**-0.5, mask=SEEN, bias=bias).output
    back = reference_gradients(hot, K, V, np.ones_like(want), scale=8**-0.5, mask=SEEN, bias=bias)
    wanted = [in_layout(x, layout) for x in (back["query"] * T[:, None], back["key"], back["value"])]
    wanted.append((back["query"] * Q).sum(axis=(0, 1, 3)))
    by_key = back["bias"].sum(axis=2).reshape(4, 2, 2, 16).sum(axis=2).swapaxes(1, 2)
    wanted.append(in_layout(by_key if at is None else by_key.sum(axis=at, keepdims=True), layout))
    np.testing.assert_allclose(out, in_layout(want, layout), atol=2e-6)
    for found, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_packed_tokens() -> None:
    ids = np.repeat([1, 2], 8).astype(np.int32)
    got = Tempered(OperationMetadata(mesh={"tp": 2}))(
        Q[0], K[0], V[0], q_segment_ids=ids, mask=Causal(), layout="thd", temperature=T, key_bias=B[0]
    ).attention_outputs  # type: ignore[call-arg]
    seen = SEEN & (ids[:, None] == ids)[None, None]
    bias = np.repeat(B[:1].swapaxes(1, 2), 2, axis=1)[:, :, None].astype(np.float64)
    bias = np.broadcast_to(bias, (1, 4, 16, 16))
    want = reference_attention(Q[:1] * T[:, None], K[:1], V[:1], scale=8**-0.5, mask=seen, bias=bias).output
    np.testing.assert_allclose(got, want[0], atol=2e-6)


def test_a_ring_is_refused() -> None:
    plan = Tempered(OperationMetadata(mesh={"sp": 2}, sequence_parallel="ring")).plan(Q, K, V, temperature=T)  # type: ignore[call-arg]
    assert [reason.code for one in plan.rejected for reason in one.reasons] == ["ring.parts"]


def test_specs_and_plan() -> None:
    attend = Tempered(OperationMetadata(mesh={"fsdp": 2, "tp": 4}))
    plan = attend.plan(Q, K, V, temperature=T, key_bias=B)  # type: ignore[call-arg]
    shardings = plan.named_shardings()
    assert shardings["temperature"].spec == PartitionSpec("tp")
    assert shardings["key_bias"].spec[0] == "fsdp"
    # Two kv heads on four devices: repeated inside, so that each device gets its head.
    assert plan.placement.spec("key_bias") == PartitionSpec("fsdp", None, "tp")
    tensors = plan.to_dict()["tensors"]
    assert tensors["temperature"]["device_shape"] == [1]
    assert tensors["key_bias"]["shape"] == [4, 16, 2]
    assert "temperature" in plan.explain(verbose=True)
    assert "temperature" in plan.draw().svg()
    half = Tempered(OperationMetadata(mesh={"fsdp": 2, "tp": 2})).plan(Q, K, V, temperature=T)  # type: ignore[call-arg]
    assert half.named_shardings()["temperature"].spec == PartitionSpec("tp")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"temperature": T[:3]}, InputError, ["temperature", "(3,)", "(4,)", "heads"]),
        ({"temperature": T.astype(np.int32)}, InputTypeError, ["temperature", "int32", "floats"]),
        ({"temperature": [1.0]}, InputTypeError, ["temperature", "list"]),
        ({"key_bias": B[:, :, :1, None]}, InputError, ["key_bias", "kv_len"]),
        ({"temprature": T}, InputTypeError, ["temprature", "temperature"]),
    ],
)
def test_wrong_input(call: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        Tempered()(Q, K, V, **call)
    assert all(word in str(caught.value) for word in words)


def test_other_operations_do_not_take_it() -> None:
    with pytest.raises(InputTypeError):
        OperationRegistry.create("vanilla")(Q, K, V, temperature=T)  # type: ignore[call-arg]


class Deaf(Tempered):
    """Declares the operands, but its method takes none."""

    name = "deaf"

    @implementation(STATIC_MASKS | {"gqa"}, tolerance={"float32": (6e-6, 2e-5)})
    def forward_native(self, call: LocalCall) -> LocalOutput:
        return NATIVE(call)


def test_a_method_that_does_not_take_an_operand_is_refused() -> None:
    plan = Deaf().plan(Q, K, V, temperature=T)  # type: ignore[call-arg]
    assert [reason.code for reason in plan.rejected[0].reasons] == ["operand.temperature"]
    with pytest.raises(RefusedError):
        Deaf()(Q, K, V, temperature=T)  # type: ignore[call-arg]


SIZES = {"batch": 4, "q_len": 16, "q_heads": 4, "kv_heads": 2, "head_dim": 8}


def test_a_file_declares_it(tmp_path: Path) -> None:
    file = {"operation": "tempered", "call": SIZES | {"operands": {"temperature": True, "key_bias": [4, 1, 2]}}}
    attend = Attention(file)
    assert Attention(json.loads(attend.declared().to_json())) == attend
    shapes = attend.declaration.shapes()
    assert (shapes["temperature"].shape, shapes["key_bias"].shape) == ((4,), (4, 1, 2))
    drawn = attend.declaration.draw(0)
    out = attend(Q, K, V, temperature=drawn["temperature"], key_bias=drawn["key_bias"])  # type: ignore[call-arg]
    assert out.attention_outputs.shape == Q.shape
    with pytest.raises(InputError) as caught:
        attend(Q, K, V)
    assert "temperature" in str(caught.value)
    with pytest.raises(ConfigError) as unknown:
        Attention({"operation": "tempered", "call": SIZES | {"operands": {"heat": True}}}).declaration.shapes()
    assert all(word in str(unknown.value) for word in ("heat", "temperature"))


def test_the_command_line_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "call.json"
    path.write_text(json.dumps({"operation": "tempered", "call": SIZES | {"operands": {"temperature": True}}}))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["temperature"]["shape"] == [4]
    assert main(["verify", str(path), "--target", "here", "--mode", "train"]) == 0  # with its gradient
    capsys.readouterr()
    inputs = tmp_path / "in.npz"
    np.savez(inputs, query=Q, key=K, value=V, temperature=T)
    for declared in ({"operands": {"temperature": True}}, {}):  # an inputs file may have it undeclared
        path.write_text(json.dumps({"operation": "tempered", "call": SIZES | declared | {"mask": "causal"}}))
        out = tmp_path / f"out{len(declared)}.npz"
        assert main(["run", str(path), "--inputs", str(inputs), "--json", "--output", str(out)]) == 0
        result = json.loads(capsys.readouterr().out)
        assert not any("temperature" in note for note in result["notes"])
        assert "temperature" in str(result["compare"])  # jax.nn doesn't do the same work
        want = reference_attention(Q * T[:, None], K, V, scale=8**-0.5, mask=SEEN).output
        np.testing.assert_allclose(np.load(out)["output"], want, atol=2e-6)
    assert main(["run", str(path), "--inputs", str(inputs), "--check"]) == 2
    assert "temperature" in capsys.readouterr().err
    path.write_text(json.dumps({"operation": "tempered", "call": SIZES | {"operands": {"key_bias": True}}}))
    assert main(["run", str(path), "--inputs", str(inputs)]) == 2
    assert "holds no key_bias" in capsys.readouterr().err


def test_the_table_of_attention() -> None:
    """It agrees with the typed keywords of a call and with the rules."""
    assert {*ATTENTION.names, "mask", "score", *CALL_OPTIONS} == set(CALL_ARGUMENTS)
    named = {*ATTENTION.names, *RESULTS, "mask", "query3d"}
    assert set(AttnShardingRules._fields) <= named
    for row in (*ATTENTION, *RESULTS.values()):
        assert not row.order or len(row.order) == len(row.dims)
        assert row.split_as is None or len(row.split_as) == len(row.dims)
    for row in (
        Operand("x", ("heads",), moves="keys"),
        Operand("x", (), dtype="key"),
        Operand("x", (), optional=False),
    ):
        with pytest.raises(ValueError, match="own operands"):
            ATTENTION.extended(row)
    clashing = type("Clashing", (Tempered,), {"name": "clashing", "operands": ATTENTION.extended(Operand("mode", ()))})
    with pytest.raises(ConfigError, match="mode"):
        OperationRegistry.register(clashing)
    with pytest.raises(ValueError, match="once"):
        ATTENTION.extended(TEMPERATURE, TEMPERATURE)
