"""Scores in the GPU kernels, in Pallas' interpreter, against formulas in float64; lowered for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
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
    operation_with,
    partial_functions,
)

from attnops import OperationMetadata, OperationRegistry, ScoreFunction, register_score_function
from attnops.compat import abstract_device
from attnops.verify.devices import tracing_on

LENGTH = 72  # three blocks of 32, the last one padded
CASES = cases(LENGTH)
SIZES = {"block_q": 32, "block_kv": 32, "block_q_dkv": 32, "block_kv_dkv": 32, "block_q_dq": 32, "block_kv_dq": 32}


@register_score_function("tests.scores.lgamma")
def _lgamma(x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return x + jax.lax.lgamma(x)


def _operation(axes: dict[str, int] | None = None, policy: dict[str, Any] | None = None, **config: Any) -> Any:
    fields = {"runtime_dtype": "float32", "fallback": "error"} | (policy or {})
    return operation_with("flash_attn2", {"interpret": True, **SIZES, **config}, axes, fields)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_outputs_and_gradients(name: str, kv_heads: int) -> None:
    check(CASES[name], _operation(), LENGTH, kv_heads)


@pytest.mark.parametrize("name", ["log", "log_cap", "log_times", "quotient"])
def test_hidden_keys_and_padding_where_a_function_has_no_number_have_no_part_in_gradients(name: str) -> None:
    check(partial_functions(LENGTH)[name], _operation(), LENGTH, kv_heads=2)


@pytest.mark.parametrize("name", ["alibi", "t5", "forgetting", "function", "swin", "sam"])
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_on_meshes(name: str, place: str) -> None:
    check(cases(128)[name], _operation(**KERNEL_PLACES[place]), 128, HEADS)


@pytest.mark.parametrize("name", ["alibi", "t5", "positions", "distance", "function"])
def test_positions_given_as_arrays_count(name: str) -> None:
    check_documents(CASES[name], _operation(), 40, LENGTH)


@pytest.mark.parametrize(
    "name", ["alibi", "slopes", "t5", "clip", "temperature", "forgetting", "distance", "chain", "sam"]
)
@pytest.mark.parametrize("splits", [1, 3])
def test_few_queries_of_grouped_heads_are_folded(name: str, splits: int) -> None:
    """The queries of a kv head's heads are rows of one tile, each with the numbers of its own head."""
    case, (q, k, v) = CASES[name], inputs(2, 3, LENGTH)
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    if name in ("temperature", "sam"):
        arrays = [x[:, -3:] if name == "temperature" else x[:, :, -3:] for x in arrays]
    score = case.score.with_arrays(arrays) if arrays else case.score
    config = {"block_q": 16, "block_kv": 16, "kv_splits": splits}
    operation = _operation(**{**dict.fromkeys(SIZES), **config})
    plan = operation.plan(q, k, v, score=score, query_offset=LENGTH - 3, causal=True)
    assert plan.config.fold
    for offset in (LENGTH - 3, jnp.full(BATCH, LENGTH - 3)):
        output = operation(q, k, v, score=score, query_offset=offset, causal=True).attention_outputs
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            wanted = expected(case, arrays, *(jnp.asarray(x, jnp.float64) for x in (q, k, v)), offset=LENGTH - 3)
        compare(output, wanted)


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name: str) -> None:
    """The kernels become Triton's code, forward and backward, at the sizes that a plan chooses."""
    case = cases(256)[name]
    arrays = tuple(jnp.asarray(x) for x in case.score.arrays() if x is not None)
    mesh = AbstractMesh(
        (1,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=abstract_device("NVIDIA H100 80GB HBM3", 1, "gpu")
    )
    configs = {"flash_attn2": {"kernel": "triton"}}
    operation = OperationRegistry.create(
        "flash_attn2", OperationMetadata(mesh=mesh, fallback="error", operation_configs=configs)
    )
    q, k = (jax.ShapeDtypeStruct((BATCH, 256, heads, 64), jnp.bfloat16) for heads in (HEADS, 2))

    def total(q: Any, k: Any, v: Any, a: Any) -> Any:
        score = case.score.with_arrays(a) if a else case.score
        return operation(q, k, v, score=score, causal=True).attention_outputs.astype(jnp.float32).sum()

    with tracing_on(mesh, "cuda"):
        traced = jax.jit(jax.grad(total, (0, 1, 2, 3))).trace(q, k, k, arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"attnops_flash_{name}" in text for name in ("forward", "dq", "dkv"))


def test_a_function_that_triton_lacks_is_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    plan = OperationRegistry.create("flash_attn2", OperationMetadata(platform="cuda")).plan(
        x, x, x, score=ScoreFunction("tests.scores.lgamma")
    )
    assert "flash.score_function_operation" in {r.code for rejected in plan.rejected for r in rejected.reasons}
