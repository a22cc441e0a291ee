"""Recurrent operations agree with the token-by-token definition in float64: outputs, states, gradients, on meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import KINDS, LINEAR, call_of, expected, expected_gradients

import attnops.operators.recurrent as recurrent
from attnops import OperationMetadata

OPERATIONS = {
    cls.name: cls for cls in (getattr(recurrent, name) for name in recurrent.__all__) if hasattr(cls, "config")
}


def run(kind: str, call: dict[str, Any], metadata: OperationMetadata | None = None, **options: Any) -> Any:
    operation = OPERATIONS[kind](metadata)
    table = operation.operands
    required = [call[row.name] for row in table.required]
    rest = {name: x for name, x in call.items() if table[name].optional}
    return operation(*required, **rest, **options)


def split(axes: dict[str, int]) -> OperationMetadata:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    return OperationMetadata(mesh=mesh, sequence_parallel="state" if "sp" in axes else "auto")


def close(found: jax.Array, wanted: np.ndarray, within: float = 2e-5) -> None:
    assert found.shape == wanted.shape
    size = max(np.abs(wanted).max(), 1.0)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=within * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "given", ["plain", *(pytest.param(x, marks=pytest.mark.slow) for x in ("state", "segments", "lengths")), "all"]
)
def test_is_the_recurrence(kind: str, given: str) -> None:
    call = call_of(
        kind,
        state=given in ("state", "all", "lengths"),
        segments=given in ("segments", "all"),
        lengths=given in ("lengths", "all"),
    )
    output, wanted = run(kind, call), expected(kind, call)
    close(output.attention_outputs, wanted.outputs)
    close(output.state, wanted.state)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_one_after_the_other_are_the_whole(kind: str) -> None:
    call, cut = call_of(kind, tokens=40), 23
    wanted = expected(kind, call)
    tokens = [name for name, x in call.items() if x.ndim > 1 and x.shape[1] == 40]
    state, outputs = call["initial_state"], []
    for part in (slice(0, cut), slice(cut, 39), slice(39, 40)):
        output = run(kind, call | {name: call[name][:, part] for name in tokens} | {"initial_state": state})
        outputs.append(output.attention_outputs)
        state = output.state
    close(jnp.concatenate(outputs, 1), wanted.outputs)
    close(state, wanted.state)


@pytest.mark.parametrize("kind", [kind for kind in LINEAR if kind != "mamba2"])
@pytest.mark.parametrize("given", [pytest.param("state", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("axes", [{}, pytest.param({"dp": 2, "sp": 2, "tp": 2}, marks=pytest.mark.slow)])
def test_gradients(kind: str, given: str, axes: dict[str, int]) -> None:
    call = call_of(kind, tokens=72, segments=given == "all", lengths=given == "all")
    metadata = split(axes) if axes else None
    rng = np.random.default_rng(1)
    d_outputs, d_state = (rng.standard_normal(x.shape).astype(np.float32) for x in expected(kind, call))
    names = [name for name, x in call.items() if x.dtype == np.float32]

    def loss(*arrays: jax.Array) -> jax.Array:
        output = run(kind, call | dict(zip(names, arrays, strict=True)), metadata)
        return jnp.sum(output.attention_outputs * d_outputs) + jnp.sum(output.state * d_state)

    found = jax.jit(jax.grad(loss, argnums=tuple(range(len(names)))))(*(call[name] for name in names))
    wanted = expected_gradients(kind, call, d_outputs, d_state)
    for name, gradient in zip(names, found, strict=True):
        close(gradient, wanted[name], 5e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhtd", "thd"])
def test_layouts(kind: str, layout: str) -> None:
    call = call_of(kind, batch=1 if layout == "thd" else 2, segments=True)
    wanted = expected(kind, call)
    table = OPERATIONS[kind].operands
    moved = {}
    for name, x in call.items():
        row = table[name]
        if layout == "thd":
            moved[name] = x[0] if row.order and "b" in row.order else x
        else:
            moved[name] = np.swapaxes(x, 1, 2) if row.order in ("bthd", "bth") else x
    output = run(kind, moved, layout=layout)
    outputs = wanted.outputs
    if layout == "thd":
        outputs = outputs[0]
    elif outputs.ndim == 4:
        outputs = np.swapaxes(outputs, 1, 2)
    close(output.attention_outputs, outputs)
    close(output.state, wanted.state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("axes", "given"),
    [
        ({"dp": 2, "sp": 2, "tp": 2}, "all"),
        *(
            pytest.param(axes, given, marks=pytest.mark.slow)
            for axes in ({"dp": 2, "tp": 2}, {"sp": 4}, {"dp": 2, "sp": 2, "tp": 2})
            for given in ("state", "all")
            if (len(axes), given) != (3, "all")
        ),
    ],
)
def test_on_meshes(kind: str, axes: dict[str, int], given: str) -> None:
    call = call_of(kind, tokens=72, segments=given == "all", lengths=given == "all")
    output, wanted = run(kind, call, split(axes)), expected(kind, call)
    close(output.attention_outputs, wanted.outputs)
    close(output.state, wanted.state)
    assert output.plan.placement.strategy == ("state" if "sp" in axes else "")


@pytest.mark.parametrize("kind", ["causal_conv1d", pytest.param("gated_delta_rule", marks=pytest.mark.slow)])
def test_segment_ids_may_be_split_along_an_explicit_axis(kind: str) -> None:
    axes = ("dp", "sp")
    mesh = jax.make_mesh((2, 2), axes, (jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    call = call_of(kind, tokens=16, segments=True)
    ids = jax.device_put(call["segment_ids"], jax.NamedSharding(mesh, jax.P(*axes)))
    metadata = OperationMetadata(mesh=mesh, sequence_parallel="state")
    with jax.set_mesh(mesh):
        output = jax.jit(lambda ids: run(kind, call | {"segment_ids": ids}, metadata))(ids)
    wanted = expected(kind, call)
    close(output.attention_outputs, wanted.outputs)
    close(output.state, wanted.state)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(x, marks=pytest.mark.slow) for x in KINDS[2:6]), *KINDS[:2], *KINDS[6:]]
)
def test_tokens_beyond_lengths_may_hold_anything(kind: str) -> None:
    call = call_of(kind, tokens=12, lengths=True)
    wanted, counts = expected(kind, call), np.arange(12)[None] < call["lengths"][:, None]
    for name, x in call.items():
        if x.dtype == np.float32 and x.shape[:2] == counts.shape:
            call[name] = np.where(counts.reshape(2, 12, *[1] * (x.ndim - 2)), x, np.nan)
    floats = {name: x for name, x in call.items() if x.dtype == np.float32}

    @jax.jit
    def loss(floats: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        output = run(kind, {**call, **floats})
        return jnp.sum(output.attention_outputs) + jnp.sum(output.state), output

    (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
    run(kind, call)  # nor are such tokens refused
    close(output.attention_outputs, wanted.outputs)
    close(output.state, wanted.state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("kind", ["mamba2", "mamba1", "causal_conv1d"])
@pytest.mark.parametrize("axes", [{}, pytest.param({"dp": 2, "sp": 2, "tp": 2}, marks=pytest.mark.slow)])
def test_gradients_along_a_direction(kind: str, axes: dict[str, int]) -> None:
    """Of every array, against differences of the reference in float64."""
    call = call_of(kind, tokens=24, segments=True, lengths=True)
    rng, wide = np.random.default_rng(2), {n: x.astype(np.float64) for n, x in call.items() if x.dtype == np.float32}
    weights = [rng.standard_normal(x.shape) for x in expected(kind, call)]
    metadata = split(axes) if axes else None

    def loss(some: dict[str, jax.Array]) -> jax.Array:
        output = run(kind, call | some, metadata)
        results = output.attention_outputs, output.state
        return sum(
            (jnp.sum(x * w.astype(np.float32)) for x, w in zip(results, weights, strict=True)), start=jnp.float32(0)
        )

    def reference(some: dict[str, np.ndarray]) -> float:
        return float(sum((x * w).sum() for x, w in zip(expected(kind, call | some), weights, strict=True)))

    gradients = jax.jit(jax.grad(loss))({name: call[name] for name in wide})
    for name, x in wide.items():
        direction = rng.standard_normal(x.shape)
        direction /= np.linalg.norm(direction)
        ahead, behind = (reference(wide | {name: x + step * direction}) for step in (1e-5, -1e-5))
        slope, size = (ahead - behind) / 2e-5, float(np.linalg.norm(gradients[name]))
        assert abs(float((np.asarray(gradients[name], np.float64) * direction).sum()) - slope) <= 1e-4 * size, name
