"""Scores in splash's kernels, in Pallas' interpreter, against formulas in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_cases import (
    BATCH,
    HEADS,
    KERNEL_PLACES,
    cases,
    check,
    check_documents,
    compare,
    expected,
    inputs,
    numbers,
    operation_with,
    partial_functions,
)

from attnops import (
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    ScoreFunction,
    register_score_function,
)

LENGTH = 328  # three blocks of 128, the last one padded
CASES = cases(LENGTH)
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"transposed_tiles": False},
    "transposed": {"transposed_tiles": True, "heads_per_tile": 2},
    "unfused": {"use_fused_bwd_kernel": False, "block_q": 256, "block_kv": 256, "block_kv_compute": 128},
}


def _operation(axes: dict[str, int] | None = None, policy: dict[str, Any] | None = None, **config: Any) -> Any:
    sizes = {"interpret": True, "block_q": 128, "block_kv": 128} | config
    return operation_with("splash", sizes, axes, {"runtime_dtype": "float32", "fallback": "error"} | (policy or {}))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_outputs_and_gradients(name: str, way: str) -> None:
    check(CASES[name], _operation(**WAYS[way]), LENGTH, kv_heads=2)


@pytest.mark.parametrize("name", ["alibi", "t5", "forgetting", "function", "swin", "sam"])
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_on_meshes(name: str, place: str) -> None:
    check(cases(512)[name], _operation(**KERNEL_PLACES[place]), 512, kv_heads=HEADS)


@pytest.mark.parametrize("name", ["alibi", "t5", "positions", "distance", "function"])
def test_positions_given_as_arrays_count(name: str) -> None:
    check_documents(CASES[name], _operation(), 200, LENGTH)


@pytest.mark.parametrize("name", ["alibi", "t5", "forgetting", "temperature"])
def test_query_offsets(name: str) -> None:
    """The last 200 of 328 tokens as queries, aligned by a number or by a number for each batch row."""
    case, (q, k, v) = CASES[name], inputs(2, 200, LENGTH)
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    if name == "temperature":
        arrays = [arrays[0][:, 128:]]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        wanted = expected(case, arrays, *wide, offset=128)
    score = case.score.with_arrays(arrays) if arrays else case.score
    for offset in (128, jnp.full(BATCH, 128)):
        compare(_operation()(q, k, v, score=score, query_offset=offset, causal=True).attention_outputs, wanted)


@register_score_function("tests.scores.gamma")
def _gamma(x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return x + jax.lax.lgamma(x)


def test_functions_that_mosaic_does_not_compile_are_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    plan = OperationRegistry.create("splash", OperationMetadata(platform="tpu")).plan(
        x, x, x, score=ScoreFunction("tests.scores.gamma")
    )
    assert "splash.score_function_operation" in {r.code for rejected in plan.rejected for r in rejected.reasons}


@pytest.mark.parametrize("name", ["log", "log_cap", "log_times", "quotient"])
@pytest.mark.parametrize("way", ["rows", "unfused"])
def test_hidden_keys_and_padding_where_a_function_has_no_number_have_no_part_in_gradients(name: str, way: str) -> None:
    check(partial_functions(LENGTH)[name], _operation(**WAYS[way]), LENGTH, kv_heads=2)


@pytest.mark.slow
def test_vmap() -> None:
    """Calls that are mapped over tables of their own."""
    q, k, v = inputs(2, 256, 256)
    operation, tables = _operation(), jnp.asarray(numbers(2, 32, HEADS))

    def total(table: jax.Array) -> jax.Array:
        return (operation(q, k, v, score=RelativeBias(table), causal=True).attention_outputs ** 2).sum()

    mapped = jax.vmap(jax.value_and_grad(total))(tables)
    alone = [jax.value_and_grad(total)(table) for table in tables]
    for n, whole in enumerate(mapped):
        compare(whole, np.stack([np.asarray(one[n]) for one in alone]))
