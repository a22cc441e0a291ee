"""Layers of a hybrid model on one mesh and one order of tokens: a convolution, a recurrence, and attention in a ring."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from recurrent_inputs import call_of

from attnops import Causal, OperationMetadata, OperationRegistry, RefusedError
from attnops.planning.recurrent.traffic import recurrence_traffic
from attnops.planning.traffic import Traffic, min_traffic
from attnops.verify.collectives import collectives
from attnops.verify.differences import differences
from attnops.verify.recurrent_reference import reference_convolution, reference_linear
from attnops.verify.reference import reference_attention

AXES = {"dp": 2, "sp": 2, "tp": 2}
BATCH, TOKENS, HEADS, DIM = 2, 48, 4, 8
CHANNELS = HEADS * DIM
Arrays = dict[str, Any]


def arrays() -> Arrays:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    call = {"x": normal(BATCH, TOKENS, CHANNELS), "decay": -np.exp(normal(BATCH, TOKENS, HEADS) - 2)}
    call["beta"] = (1 / (1 + np.exp(-normal(BATCH, TOKENS, HEADS)))).astype(np.float32)
    return call | {name: 0.5 * normal(4, CHANNELS) for name in ("query", "key", "value")}


class Model:
    """A convolution for each of query, key and value, the gated delta rule, and attention to what it returns."""

    def __init__(self, metadata: OperationMetadata) -> None:
        create, state = OperationRegistry.create, metadata.replace(sequence_parallel="state")
        self.convolve, self.recur = create("causal_conv1d", state), create("gated_delta_rule", state)
        self.attend = create("vanilla", metadata)
        self.plans: list[Any] = []

    def __call__(self, x: Arrays) -> jax.Array:
        self.plans, mixed = [], {}
        for name in ("query", "key", "value"):
            found = self.convolve(x["x"], x[name], activation="silu")
            mixed[name] = found.attention_outputs.reshape(BATCH, TOKENS, HEADS, DIM)
            self.plans.append(self.convolve.plan(x["x"], x[name]))
        call = {**mixed, "decay": x["decay"], "beta": x["beta"], "normalise_qk": True}
        self.plans.append(self.recur.plan(**call))
        past = self.recur(**call).attention_outputs
        query = x["x"].reshape(past.shape) + past
        self.plans.append(self.attend.plan(query, mixed["key"], past, mask=Causal()))
        return self.attend(query, mixed["key"], past, mask=Causal()).attention_outputs


def of_reference(x: Arrays) -> np.ndarray:
    """The same model in float64, on one device."""
    mixed = {}
    for name in ("query", "key", "value"):
        found = reference_convolution(x["x"], x[name]).outputs
        mixed[name] = (found / (1 + np.exp(-found))).reshape(BATCH, TOKENS, HEADS, DIM)
    query, key = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (mixed["query"], mixed["key"]))
    decay, beta = x["decay"][..., None], x["beta"]
    past = reference_linear(query, key, mixed["value"], decay, beta, scale=DIM**-0.5).outputs
    query = x["x"].reshape(past.shape) + past
    mask = np.tri(TOKENS, dtype=bool)[None, None]
    return reference_attention(query, mixed["key"], past, mask=mask, scale=DIM**-0.5).output


@pytest.mark.parametrize("strategy", ["ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_layers_follow_one_another_without_resharding(strategy: str) -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape([*AXES.values()]), tuple(AXES))
    model = Model(OperationMetadata(mesh=mesh, sequence_parallel=strategy))
    given, spec = (
        arrays(),
        {"x": jax.P("dp", "sp", "tp"), "decay": jax.P("dp", "sp", "tp"), "beta": jax.P("dp", "sp", "tp")},
    )
    placed = {
        name: jax.device_put(x, jax.NamedSharding(mesh, spec.get(name, jax.P(None, "tp")))) for name, x in given.items()
    }
    weight = np.random.default_rng(1).standard_normal((BATCH, TOKENS, HEADS, DIM)).astype(np.float32)
    d_outputs = jax.device_put(weight, jax.NamedSharding(mesh, jax.P("dp", "sp", "tp", None)))

    def both(x: Arrays, d_outputs: jax.Array) -> tuple[jax.Array, Arrays]:
        outputs, back = jax.vjp(model, x)
        return outputs, back(d_outputs)[0]

    where = jax.NamedSharding(mesh, jax.P("dp", "sp", "tp", None)), {name: x.sharding for name, x in placed.items()}
    compiled = jax.jit(both, out_shardings=where).lower(placed, d_outputs).compile()
    outputs, gradients = compiled(placed, d_outputs)

    wide = {name: x.astype(np.float64) for name, x in given.items()}
    np.testing.assert_allclose(outputs, of_reference(wide), rtol=0, atol=2e-5)
    for name, x in wide.items():
        direction = np.random.default_rng(2).standard_normal(x.shape)
        ahead, behind = (of_reference(wide | {name: x + step * direction}) for step in (1e-5, -1e-5))
        slope = float(((ahead - behind) * weight).sum()) / 2e-5
        along, size = (
            float((np.asarray(gradients[name], np.float64) * direction).sum()),
            np.linalg.norm(gradients[name]),
        )
        assert abs(along - slope) <= 1e-4 * float(size) * np.linalg.norm(direction) ** 0.5, name

    # All that is sent is what the plans say, forward and backward; nobody uses the states after all tokens.
    *recurrent, attention = model.plans
    assert [plan.placement.strategy for plan in recurrent] == ["state"] * 4
    assert attention.placement.sequence.strategy == strategy
    needs = [
        need
        for plan in recurrent
        for need in recurrence_traffic(plan.operation, plan.problem, plan.placement, True).needs
        if "the state after all tokens" not in need.what
    ]
    needed = Traffic((*needs, *min_traffic(attention, True).needs))
    assert differences(needed, collectives(compiled.as_text())) == ()


def test_zigzag_order_stays_inside_a_ring() -> None:
    """A model's metadata with ring_order='zigzag': attention permutes its own keys, and a recurrence says that it reads none."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("sp",))
    metadata = OperationMetadata(mesh=mesh, sequence_parallel="state", ring_order="zigzag")
    given = arrays()
    convolve = OperationRegistry.create("causal_conv1d", metadata)
    found = convolve(given["x"], given["query"])
    np.testing.assert_allclose(
        found.attention_outputs, reference_convolution(given["x"], given["query"]).outputs, rtol=0, atol=1e-5
    )
    told = [note for note in found.plan.notes if getattr(note, "field", "") == "ring_order"]
    assert [(note.code, note.values["value"]) for note in told] == [("recurrent.plain_order", "zigzag")]


@pytest.mark.parametrize("kind", ["causal_conv1d", "simple_gla"])
def test_tokens_that_a_caller_has_in_zigzag_order_are_refused(kind: str) -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("sp",))
    metadata = OperationMetadata(sequence_parallel="state", ring_order="zigzag")
    call, codes = call_of(kind, tokens=32, state=False), list[str]()
    along = {name: jax.P(None, "sp") if x.shape[1:2] == (32,) else jax.P() for name, x in call.items()}

    def part(call: Arrays) -> jax.Array:
        operation = OperationRegistry.create(kind, metadata)
        codes.extend(reason.code for one in operation.plan(**call).rejected for reason in one.reasons)
        return operation(**call).attention_outputs

    run = jax.shard_map(part, mesh=mesh, in_specs=(along,), out_specs=jax.P(None, "sp"))
    with pytest.raises(RefusedError):
        jax.eval_shape(run, call)
    assert codes == ["recurrent.zigzag"]
