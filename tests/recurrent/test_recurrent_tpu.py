"""The TPU kernel of linear attention, interpreted, agrees with the token-by-token definition in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import LINEAR, call_of, expected

from attnops import OperationMetadata, OperationRegistry

BASES = ("gated_delta_rule", "kda", "gla", "simple_gla", "mamba2")


def of(kind: str, declared: dict[str, Any] | None = None, **metadata: Any) -> Any:
    configs = {kind: {"interpret": True, "chunk_size": 16} | (declared or {})}
    return OperationRegistry.create(kind, OperationMetadata(operation_configs=configs, tuning="off", **metadata))


def agrees(kind: str, operation: Any, call: dict[str, Any], within: float = 2e-5) -> Any:
    output, wanted = operation(**call), expected(kind, call)
    assert output.plan.method == "forward_tpu", output.plan.explain()
    for found, want in ((output.attention_outputs, wanted.outputs), (output.state, wanted.state)):
        assert found.shape == want.shape
        size = max(np.abs(want).max(), 1.0)
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=0, atol=within * size)
    return output


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def laid(**axes: int) -> Any:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[: int(np.prod(list(axes.values())))])


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("gated_delta_rule", "all"),
        ("kda", "all"),
        ("simple_gla", "all"),
        *(slow(kind, given) for kind in LINEAR for given in ("plain", "state", "segments", "lengths")),
        *(slow(kind, "all") for kind in ("gla", "lightning", "retention", "mamba2")),
    ],
)
def test_is_the_recurrence(kind: str, given: str) -> None:
    call = call_of(
        kind,
        tokens=37,
        state=given in ("state", "all", "lengths"),
        segments=given in ("segments", "all"),
        lengths=given in ("lengths", "all"),
    )
    agrees(kind, of(kind), call)


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 2), (3, 6), (1, 8), (5, 5)])
def test_heads_of_a_step_are_those_of_their_key(heads: tuple[int, int]) -> None:
    """A step works on several heads: whole groups, or a part of one."""
    agrees(
        "simple_gla", of("simple_gla"), call_of("simple_gla", tokens=17, key_heads=heads[0], heads=heads[1], batch=1)
    )


@pytest.mark.parametrize(
    ("kind", "chunk", "dims"),
    [("gated_delta_rule", 64, (16, 24)), *(slow(kind, size, (128, 256)) for kind in BASES for size in (64, 128))],
)
def test_sizes_of_models(kind: str, chunk: int, dims: tuple[int, int]) -> None:
    call = call_of(kind, batch=1, tokens=150, dim=dims[0], value_dim=dims[1], key_heads=1, heads=2)
    agrees(kind, of(kind, {"chunk_size": chunk}), call)


@pytest.mark.parametrize("kind", ["gated_delta_rule", slow("kda"), slow("gla"), slow("simple_gla"), slow("mamba2")])
def test_decays_of_thirty_a_step_lose_nothing(kind: str) -> None:
    call = call_of(kind, tokens=40, batch=1, key_heads=4)
    if "A" in call:
        call["A"], dt = np.full_like(call["A"], -1), np.full_like(call["dt"], 1e-3)
        dt[:, ::7] = 30
        call["dt"], call["x"] = dt, call["x"] * 0.1
    else:
        decay = np.full_like(call["decay"], -1e-3)
        decay[:, ::7], decay[:, 5] = -30, -1000
        call["decay"] = decay
    output, wanted = of(kind)(**call), expected(kind, call)
    size = np.abs(wanted.outputs).max((0, 1), keepdims=True)
    assert np.all(np.abs(output.attention_outputs - wanted.outputs) <= 2e-5 * size)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 5e-6), ("bfloat16", 8e-3)])
def test_repeated_keys_are_solved_exactly(dtype: str, within: float) -> None:
    """All keys alike and beta 1: each token replaces what the one before stored, where products of powers would cancel."""
    call = call_of("gated_delta_rule", tokens=64, batch=1, key_heads=4, state=False)
    call["key"][:], call["beta"][:], call["decay"][:] = np.array([1] + [0] * 7), 1, 0
    narrow = {n: jnp.asarray(x, dtype) if n in ("query", "key", "value") else x for n, x in call.items()}
    wanted = expected("gated_delta_rule", {n: np.asarray(x, np.float32) for n, x in narrow.items()})
    output = of("gated_delta_rule", {"chunk_size": 64})(**narrow)
    np.testing.assert_allclose(np.asarray(output.attention_outputs, np.float64), wanted.outputs, rtol=0, atol=within)
    np.testing.assert_allclose(output.state, wanted.state, rtol=0, atol=within)


@pytest.mark.parametrize(
    ("kind", "dtype", "within"),
    [("gated_delta_rule", "bfloat16", 2e-2), slow("kda", "bfloat16", 2e-2), slow("simple_gla", "float16", 4e-3)],
)
def test_narrow_dtypes(kind: str, dtype: str, within: float) -> None:
    call = call_of(kind, tokens=40, batch=1)
    rounded = {n: jnp.asarray(x, dtype) if n in ("query", "key", "value") else x for n, x in call.items()}
    wide = {n: np.asarray(x, np.float32) for n, x in rounded.items()}
    output, wanted = of(kind)(**rounded), expected(kind, wide)
    assert output.attention_outputs.dtype == dtype
    assert output.plan.method == "forward_tpu"
    error = np.abs(np.asarray(output.attention_outputs, np.float64) - wanted.outputs).max()
    assert error <= within * np.abs(wanted.outputs).max()


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("gated_delta_rule", {"sp": 2}),
        *(slow(kind, {"dp": 2, "sp": 2, "tp": 2}) for kind in BASES),
        slow("kda", {"sp": 4}),
    ],
)
def test_on_meshes(kind: str, axes: dict[str, int]) -> None:
    call = call_of(kind, tokens=72, segments=True, lengths=True)
    output = agrees(kind, of(kind, mesh=laid(**axes), sequence_parallel="state"), call)
    assert output.plan.placement.strategy == "state"


def test_one_token_is_no_chunk() -> None:
    call = call_of("gated_delta_rule", tokens=1)
    text = jax.jit(lambda call: of("gated_delta_rule")(**call).state).lower(call).as_text()
    agrees("gated_delta_rule", of("gated_delta_rule"), call)
    assert "attnops_recurrent" not in text


@pytest.mark.parametrize(
    ("kind", "declared", "dims", "code"),
    [
        ("gated_delta_rule", {"chunk_size": 8}, (128, 128), "recurrent.chunk"),
        ("kda", {"chunk_size": 1024}, (256, 512), "recurrent.vmem"),
    ],
)
def test_reasons_against_it(kind: str, declared: dict[str, Any], dims: tuple[int, int], code: str) -> None:
    metadata = OperationMetadata(operation_configs={kind: declared}, platform="tpu", fallback="allow")
    call = call_of(kind, batch=1, tokens=2048, dim=dims[0], value_dim=dims[1])
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items()}
    plan = OperationRegistry.create(kind, metadata).plan(**shapes)
    assert plan.method == "forward_native"
    assert [reason.code for rejected in plan.rejected for reason in rejected.reasons] == [code]
