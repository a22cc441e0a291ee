"""Scores in splash's kernels, in Pallas' interpreter, against formulas in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_cases import BATCH, HEADS, cases, check, compare, expected, inputs, numbers, partial_functions

from attnops import (
    OperationMetadata,
    OperationRegistry,
    Positions,
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
PLACES: dict[str, dict[str, Any]] = {
    "mesh": {"axes": {"sp": 2, "tp": 2, "dp": 2}},
    "ring": {"axes": {"sp": 4}, "sequence_parallel": "ring"},
}


def _operation(axes: dict[str, int] | None = None, policy: dict[str, Any] | None = None, **config: Any) -> Any:
    mesh = None
    if axes:
        count = int(np.prod(list(axes.values())))
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])
    sizes = {"block_q": 128, "block_kv": 128} | config
    metadata = OperationMetadata(
        mesh=mesh,
        runtime_dtype="float32",
        operation_configs={"splash": {"interpret": True, **sizes}},
        fallback="error",
        **(policy or {}),
    )
    return OperationRegistry.create("splash", metadata)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_outputs_and_gradients(name: str, way: str) -> None:
    check(CASES[name], _operation(**WAYS[way]), LENGTH, kv_heads=2)


@pytest.mark.parametrize("name", ["alibi", "t5", "forgetting", "function", "swin", "sam"])
@pytest.mark.parametrize("place", PLACES)
def test_on_meshes(name: str, place: str) -> None:
    place_of = dict(PLACES[place])
    check(cases(512)[name], _operation(place_of.pop("axes"), place_of), 512, kv_heads=HEADS)


@pytest.mark.parametrize("name", ["alibi", "t5", "positions", "distance", "function"])
def test_positions_given_as_arrays_count(name: str) -> None:
    """Two documents packed in a row: distances and temperatures follow the positions within each."""
    case, (q, k, v) = CASES[name], inputs(2, LENGTH, LENGTH)
    at = jnp.asarray(np.stack([np.concatenate([np.arange(200), np.arange(128)]).astype(np.int32)] * BATCH))
    documents = jnp.asarray(np.stack([np.repeat([1, 2], [200, 128])] * BATCH).astype(np.int32))
    output = _operation()(
        q, k, v, score=case.score, mask=Positions(at, at), q_segment_ids=documents, kv_segment_ids=documents
    ).attention_outputs
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        halves = []
        for part in (slice(0, 200), slice(200, 328)):
            some = [x[:, :, part] if x.shape[2:3] == (LENGTH,) else x for x in arrays]
            halves.append(expected(case, some, *(x[:, part] for x in wide)))
    compare(output, jnp.concatenate(halves, 1))


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
