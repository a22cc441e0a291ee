"""The gradients that the TPU kernels of linear attention make, interpreted, agree with those of the float64 reference."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import call_of, expected, expected_gradients

import attnops.operators.recurrent as recurrent
from attnops import OperationMetadata, OperationRegistry
from attnops.operators.recurrent.kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING, Sizes, schedule
from attnops.operators.recurrent.tpu import RecurrentOnTpu
from attnops.planning.notes import has_note

_CLASSES = [cls for cls in (getattr(recurrent, name) for name in recurrent.__all__) if hasattr(cls, "config")]
ON_TPU = {
    cls.name: cls.forward_tpu for cls in _CLASSES if isinstance(getattr(cls, "forward_tpu", None), RecurrentOnTpu)
}
RULES = [name for name in ON_TPU if OperationRegistry.get(name).backend_operation in (None, name)]
NARROWED = ("query", "key", "value", "x", "B", "C")
FAST = {
    ("gated_delta_rule", "float32", True, True, True),
    ("gated_delta_rule", "bfloat16", True, False, False),
    ("kda", "float32", False, True, True),
    ("simple_gla", "float32", True, True, False),
}
# Every rule that a TPU kernel runs, with each dtype that its implementation has a tolerance for.
CELLS = [
    pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in FAST else [pytest.mark.slow])
    for kind in RULES
    for cell in itertools.product(
        (kind,), ON_TPU[kind].capability.tolerance, (False, True), (False, True), (False, True)
    )
]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def rounded(call: dict[str, Any], dtype: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A call in a dtype, and the same numbers in float32."""
    narrow = {name: jnp.asarray(x, dtype) if name in NARROWED else x for name, x in call.items()}
    return narrow, {name: np.asarray(x, np.float32) if name in NARROWED else x for name, x in narrow.items()}


def gradients_agree(
    kind: str, call: dict[str, Any], within: float, dtype: str = "float32", chunk: int = 16, **metadata: Any
) -> None:
    """Each gradient of a row's head is right to `within` of the greatest there."""
    narrow, wide = rounded(call, dtype)
    rng, names = np.random.default_rng(1), [name for name, x in call.items() if x.dtype == np.float32]
    d_outputs, d_state = (rng.standard_normal(x.shape).astype(np.float32) for x in expected(kind, wide))
    d_outputs = np.asarray(jnp.asarray(d_outputs, dtype), np.float32)
    configs = {kind: {"interpret": True, "chunk_size": chunk}}
    operation = OperationRegistry.create(kind, OperationMetadata(operation_configs=configs, tuning="off", **metadata))
    plan = operation.plan(**narrow)
    assert plan.method == "forward_tpu"
    assert not has_note(plan.notes, "recurrent.gradient_on_xla")

    def loss(*arrays: jax.Array) -> jax.Array:
        output = operation(**(narrow | dict(zip(names, arrays, strict=True))))
        return jnp.sum(output.attention_outputs.astype(jnp.float32) * d_outputs) + jnp.sum(output.state * d_state)

    arrays = [jnp.asarray(narrow[name]) for name in names]
    found = jax.jit(jax.grad(loss, argnums=tuple(range(len(names)))))(*arrays)
    wanted = expected_gradients(kind, wide, d_outputs, d_state)
    for name, gradient in zip(names, found, strict=True):
        want, got = wanted[name], np.asarray(gradient, np.float64)
        assert gradient.dtype == narrow[name].dtype
        axes = (2, 3) if name == "initial_state" else {4: (1, 3), 3: (1,)}.get(want.ndim)
        size = np.maximum(np.abs(want).max(axes, keepdims=True), 1.0)
        assert np.all(np.abs(got - want) <= within * size), (name, (np.abs(got - want) / size).max())


@pytest.mark.parametrize(("kind", "dtype", "grouped", "documents", "state"), CELLS)
def test_gradients(kind: str, dtype: str, grouped: bool, documents: bool, state: bool) -> None:
    call = call_of(
        kind,
        tokens=37,
        key_heads=1 if grouped else 2,
        heads=2,
        state=state,
        segments=documents,
        lengths=documents,
    )
    wide = 5e-5 if dtype == "float32" else ON_TPU[kind].capability.tolerance[dtype].backward
    gradients_agree(kind, call, wide, dtype)


@pytest.mark.parametrize("heads", [slow((1, 8)), slow((2, 16)), slow((3, 6)), slow((1, 3)), slow((5, 5))])
def test_gradients_of_a_key_are_sums_over_its_heads(heads: tuple[int, int]) -> None:
    """Within a step, and over steps with the part of a group each."""
    call = call_of("simple_gla", tokens=33, key_heads=heads[0], heads=heads[1], batch=2)
    gradients_agree("simple_gla", call, 5e-5)


@pytest.mark.parametrize(
    ("kind", "chunk", "dims"),
    [slow(kind, size, dims) for kind in RULES for size in (64, 128) for dims in ((128, 64), (64, 256))],
)
def test_sizes_of_models(kind: str, chunk: int, dims: tuple[int, int]) -> None:
    call = call_of(kind, batch=1, tokens=150, dim=dims[0], value_dim=dims[1], key_heads=1, heads=1)
    gradients_agree(kind, call, 5e-5, chunk=chunk)


@pytest.mark.parametrize("kind", [slow(kind) for kind in RULES if kind not in ("lightning", "retention")])
def test_decays_of_thirty_a_step_lose_nothing(kind: str) -> None:
    call = call_of(kind, tokens=40, batch=1, key_heads=1, heads=2)
    if "A" in call:
        call["A"], dt = np.full_like(call["A"], -1), np.full_like(call["dt"], 1e-3)
        dt[:, ::7] = 30
        call["dt"], call["x"] = dt, call["x"] * 0.1
    else:
        decay = np.full_like(call["decay"], -1e-3)
        decay[:, ::7], decay[:, 5] = -30, -1000
        call["decay"] = decay
    gradients_agree(kind, call, 2e-5)


@pytest.mark.parametrize(("dtype", "within"), [slow("float32", 1e-5), slow("bfloat16", 2e-2)])
def test_repeated_keys(dtype: str, within: float) -> None:
    """All keys alike and beta 1: each token replaces what the one before stored."""
    call = call_of("gated_delta_rule", tokens=64, batch=1, key_heads=1, heads=1, state=False)
    call["key"][:], call["beta"][:], call["decay"][:] = np.array([1] + [0] * 7), 1, 0
    gradients_agree("gated_delta_rule", call, within, dtype, chunk=64)


@pytest.mark.parametrize("kind", [slow("gated_delta_rule"), slow("kda"), slow("mamba2")])
def test_on_meshes(kind: str) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"))
    call = call_of(kind, tokens=72, segments=True, lengths=True)
    gradients_agree(kind, call, 5e-5, mesh=mesh, sequence_parallel="state")


SIZES = Sizes(8, 8, 128, 128, 128, np.dtype(jnp.bfloat16), False, True, True)


@pytest.mark.parametrize(
    ("group", "dims", "wanted"),
    [
        (1, (128, 128), (4, 1, 1)),
        (4, (128, 128), (4, 1, 1)),
        (8, (128, 128), (4, 2, 1)),
        # The states of all heads of the group, 16 times 512 KiB, leave no room: two sums over eight heads each.
        (16, (256, 512), (1, 8, 2)),
    ],
)
def test_steps_of_a_group(group: int, dims: tuple[int, int], wanted: tuple[int, int, int]) -> None:
    sizes = SIZES._replace(heads=16, group=group, dim=dims[0], value_dim=dims[1])
    assert tuple(schedule(sizes, BACKWARD)) == wanted


def planned(kind: str, call: dict[str, Any], mode: str = "train", **declared: Any) -> Any:
    metadata = OperationMetadata(operation_configs={kind: declared}, platform="tpu", fallback="allow", tuning="off")
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items()}
    return OperationRegistry.create(kind, metadata).plan(**shapes, mode=mode)


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_the_plan_counts_the_kernels_of_the_gradient(mode: str) -> None:
    plan = planned("simple_gla", call_of("simple_gla", tokens=64), mode)
    assert not has_note(plan.notes, "recurrent.gradient_on_xla")
    parts = plan.runs.memory(plan.problem, plan.placement, plan.config)
    assert set(parts) == ({FORWARD, KEEPING, BACKWARD} if mode == "train" else {FORWARD})
    # 4 heads of a step, 8 x 6 numbers of 4 bytes in tiles of 8 x 128, each given and returned, twice
    state = 4 * 8 * 128 * 4
    assert parts[FORWARD]["states"] == state * 2 * 2
    if mode == "train":
        assert parts[KEEPING]["states"] == state * 3 * 2
        assert parts[BACKWARD]["states"] == state * 2 * 2
        assert parts[BACKWARD]["sums"] == state


def test_a_gradient_without_room_is_made_on_xla() -> None:
    call = call_of("kda", batch=1, tokens=2048, dim=256, value_dim=256)
    plan = planned("kda", call, chunk_size=128)
    assert plan.method == "forward_tpu"
    assert has_note(plan.notes, "recurrent.gradient_on_xla")
    assert set(plan.runs.memory(plan.problem, plan.placement, plan.config)) == {FORWARD}
    assert not has_note(planned("kda", call, "prefill", chunk_size=128).notes, "recurrent.gradient_on_xla")


def test_chunks_are_as_large_as_have_room() -> None:
    call = call_of("kda", batch=1, tokens=2048, dim=256, value_dim=256)
    plan = planned("kda", call)
    assert plan.config.chunk_size == 64
    assert has_note(plan.notes, "recurrent.smaller_chunks")
    assert not has_note(plan.notes, "recurrent.gradient_on_xla")
