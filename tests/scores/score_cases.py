"""Scores with the formulas that say what they do, and attention written out; shared by the tests of all kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import (
    ALiBi,
    Clip,
    Distance,
    Forgetting,
    OperationMetadata,
    OperationRegistry,
    Positions,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SoftCap,
    Temperature,
    register_score_function,
)
from attnops.scores import PositionTemperature
from attnops.sharding import virtual_mesh

BATCH, LENGTH, HEADS, DIM = 2, 64, 4, 8
TOLERANCE = 2e-5


@register_score_function("tests.scores.gated")
def _gated(x: Any, batch: Any, head: Any, q: Any, kv: Any, gain: Any) -> Any:
    batch, head, q, kv = (n.astype(x.dtype) for n in (batch, head, q, kv))
    return x * jnp.tanh(gain) + 0.01 * head * (q - kv) + 0.1 * batch


@register_score_function("tests.scores.root")
def _root(distance: Any) -> Any:
    return -0.1 * jnp.sqrt(jnp.abs(distance).astype(jnp.float32))


@register_score_function("tests.scores.log")
def _log(x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return x - jnp.log(1.0 + (q - kv).astype(x.dtype))  # no number for later keys


@register_score_function("tests.scores.quotient")
def _quotient(x: Any, batch: Any, head: Any, q: Any, kv: Any, divisor: Any) -> Any:
    return x / divisor  # no number where a kernel reads zeros, beyond the last query


@dataclasses.dataclass
class Case:
    """A score with its arrays, and the formula: new logits from logits, arrays, and positions q [.., q, 1], kv [.., 1, kv]."""

    score: Any
    formula: Callable[..., Any]


def numbers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _t5(distance: np.ndarray) -> np.ndarray:
    """The buckets of T5's encoder, as its authors write them."""
    away, exact = np.abs(distance), 8
    far = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(128 / exact))
    large = np.minimum(exact + (far * np.float32(16 - exact)).astype(np.int64), 15)
    return np.where(distance > 0, 16, 0) + np.where(away < exact, away, large)


def _grid(height: int, width: int) -> Callable[[Any, Any], Any]:
    return lambda q, kv: (q // width - kv // width + height - 1) * (2 * width - 1) + q % width - kv % width + width - 1


def _table(index: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, a, q, kv: x + jnp.moveaxis(a[0][index(np.asarray(kv - q))[:, 0]], -1, 1)


def _forgetting(x: Any, a: Any, q: Any, kv: Any) -> Any:
    sums = jnp.cumsum(a[0], -1)
    return x + sums[:, :, q[0, 0, :, 0], None] - sums[:, :, None, :]


def _function(x: Any, a: Any, q: Any, kv: Any) -> Any:
    batch, head = np.arange(BATCH)[:, None, None, None], np.arange(HEADS)[None, :, None, None]
    return x * jnp.tanh(a[0][..., None]) + 0.01 * head * (q - kv) + 0.1 * batch


def cases(length: int) -> dict[str, Case]:
    """Every kind of score for that many queries and keys, a multiple of 8."""
    grid = length // 8, 8
    return {
        "soft_cap": Case(SoftCap(1.5), lambda x, a, q, kv: 1.5 * jnp.tanh(x / 1.5)),
        "alibi": Case(
            ALiBi(), lambda x, a, q, kv: x - 2.0 ** (-2 * np.arange(1.0, 5))[None, :, None, None] * abs(q - kv)
        ),
        "slopes": Case(ALiBi(numbers(HEADS)), lambda x, a, q, kv: x - a[0][None, :, None, None] * abs(q - kv)),
        "t5": Case(RelativeBias(numbers(32, HEADS)), _table(_t5)),
        "clip": Case(
            RelativeBias(numbers(9, HEADS), Clip(4, 4)), _table(lambda d: np.minimum(np.maximum(d, -4), 4) + 4)
        ),
        "forgetting": Case(Forgetting(-np.abs(numbers(BATCH, HEADS, length))), _forgetting),
        "temperature": Case(Temperature(numbers(HEADS, length)), lambda x, a, q, kv: x * a[0][None, :, :, None]),
        "positions": Case(
            PositionTemperature(8.0, 0.3), lambda x, a, q, kv: x * (1 + 0.3 * np.log(1 + np.floor((q + 1) / 8)))
        ),
        "distance": Case(Distance("tests.scores.root"), lambda x, a, q, kv: x - 0.1 * np.sqrt(abs(q - kv))),
        "function": Case(
            ScoreFunction("tests.scores.gated", {"gain": (numbers(BATCH, HEADS, 1), ("batch", "heads", "q_len"))}),
            _function,
        ),
        "swin": Case(
            RelativeBias2D(grid=grid, table=numbers((2 * grid[0] - 1) * 15, HEADS)),
            lambda x, a, q, kv: x + jnp.moveaxis(a[0][_grid(*grid)(q, kv)[:, 0]], -1, 1),
        ),
        "sam": Case(
            RelativeBias2D(
                numbers(BATCH, HEADS, length, length // 8), numbers(BATCH, HEADS, length, 8, seed=2), grid=grid
            ),
            lambda x, a, q, kv: x + a[0][..., kv[0, 0, 0] // 8] + a[1][..., kv[0, 0, 0] % 8],
        ),
        "chain": Case(
            ALiBi(numbers(HEADS)) >> SoftCap(4.0) >> Temperature(numbers(HEADS)),
            lambda x, a, q, kv: (
                4 * jnp.tanh((x - a[0][None, :, None, None] * abs(q - kv)) / 4) * a[1][None, :, None, None]
            ),
        ),
    }


def partial_functions(length: int) -> dict[str, Case]:
    """Functions that have no number for hidden keys, or beyond the end; alone and before other steps."""
    divisor = 0.5 + np.abs(numbers(BATCH, HEADS, length))

    def log(x: Any, q: Any, kv: Any) -> Any:
        return x - jnp.log(1.0 + jnp.maximum(q - kv, 0))

    return {
        "log": Case(ScoreFunction("tests.scores.log"), lambda x, a, q, kv: log(x, q, kv)),
        "log_cap": Case(
            ScoreFunction("tests.scores.log") >> SoftCap(3.0), lambda x, a, q, kv: 3 * jnp.tanh(log(x, q, kv) / 3)
        ),
        "log_times": Case(
            ScoreFunction("tests.scores.log") >> Temperature(numbers(HEADS)),
            lambda x, a, q, kv: log(x, q, kv) * a[0][None, :, None, None],
        ),
        "quotient": Case(
            ScoreFunction("tests.scores.quotient", {"divisor": (divisor, ("batch", "heads", "q_len"))}),
            lambda x, a, q, kv: x / a[0][..., None],
        ),
    }


def expected(case: Case, arrays: Any, q: Any, k: Any, v: Any, *, causal: bool = True, offset: int = 0) -> Any:
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    rows = np.arange(q.shape[1])[None, None, :, None] + offset
    keys = np.arange(k.shape[1])[None, None, None, :]
    logits = case.formula(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]), arrays, rows, keys)
    logits = jnp.where(keys <= rows, logits, -jnp.inf) if causal else logits
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)


def compare(got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    gots, wants = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(gots) == len(wants) > 0
    for x, y in zip(gots, wants, strict=True):
        y = np.asarray(y, np.float64)
        assert np.abs(np.asarray(x, np.float64) - y).max() <= tolerance * np.abs(y).max()


def inputs(kv_heads: int = HEADS, q_len: int = LENGTH, kv_len: int = LENGTH) -> tuple[np.ndarray, ...]:
    shapes = (BATCH, q_len, HEADS, DIM), *[(BATCH, kv_len, kv_heads, DIM)] * 2
    return tuple(numbers(*shape, seed=5 + n) for n, shape in enumerate(shapes))


def check(case: Case, operation: Any, length: int, kv_heads: int) -> None:
    """Compare a causal call and all its gradients, those of the score's arrays too, with the formula in float64."""
    (q, k, v), weights = inputs(kv_heads, length, length), numbers(BATCH, length, HEADS, DIM, seed=9)
    arrays = tuple(x for x in case.score.arrays() if x is not None)

    def total(q: Any, k: Any, v: Any, a: Any) -> Any:
        score = case.score.with_arrays(a) if a else case.score
        output = operation(q, k, v, score=score, causal=True).attention_outputs
        return (output * weights).sum(), output

    gradients, output = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))(q, k, v, arrays)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (q, k, v, arrays))
        wanted_output = expected(case, wide[3], *wide[:3])
        wanted = jax.grad(lambda q, k, v, a: (expected(case, a, q, k, v) * weights).sum(), (0, 1, 2, 3))(*wide)
    compare(output, wanted_output)
    compare(gradients, wanted)


def operation_with(
    name: str, config: dict[str, Any], axes: dict[str, int] | None = None, policy: dict[str, Any] | None = None
) -> Any:
    """The operation with its config, on a mesh of explicit axes. policy: other fields of the metadata."""
    mesh = virtual_mesh(axes, explicit=True) if axes else None
    return OperationRegistry.create(
        name, OperationMetadata(mesh=mesh, operation_configs={name: config}, **(policy or {}))
    )


KERNEL_PLACES: dict[str, dict[str, Any]] = {
    "mesh": {"axes": {"sp": 2, "tp": 2, "dp": 2}},
    "ring": {"axes": {"sp": 4}, "policy": {"sequence_parallel": "ring"}},
}


def check_documents(case: Case, operation: Any, first: int, length: int) -> None:
    """Two documents packed in a row: distances and temperatures follow the positions within each."""
    q, k, v = inputs(2, length, length)
    parts = first, length - first
    at = jnp.asarray(np.stack([np.concatenate([np.arange(n) for n in parts]).astype(np.int32)] * BATCH))
    documents = jnp.asarray(np.stack([np.repeat([1, 2], parts)] * BATCH).astype(np.int32))
    output = operation(
        q, k, v, score=case.score, mask=Positions(at, at), q_segment_ids=documents, kv_segment_ids=documents
    ).attention_outputs
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        halves = []
        for part in (slice(0, first), slice(first, length)):
            some = [x[:, :, part] if x.shape[2:3] == (length,) else x for x in arrays]
            halves.append(expected(case, some, *(x[:, part] for x in wide)))
    compare(output, jnp.concatenate(halves, 1))
