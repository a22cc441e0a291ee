"""Scores that read a number for each pair, in Mosaic GPU: tables and products. In the interpreter, which looks for races."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import (
    Buckets,
    Causal,
    Clip,
    Full,
    Positions,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SlidingWindow,
    SoftCap,
    register_score_function,
)
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

from . import cases, harness

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: the interpreter of {JAX_NEEDED} looks for races", allow_module_level=True)

HEADS, KV_HEADS, LENGTH, WIDTH = 4, 2, 80, 8
GRID = LENGTH // WIDTH, WIDTH
RNG = np.random.default_rng(3)
ROWS, KEYS = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]


@register_score_function("conformance.odd")
def _odd(distance: Any) -> Any:
    return jnp.where(distance > 3, 2, distance & 1)


@register_score_function("conformance.repeated")
def _repeated(x: Any, batch: Any, head: Any, q: Any, kv: Any, gain: Any) -> Any:
    return x + 0.2 * gain * x * jnp.tanh(x) + 0.1 * (gain * x) ** 2 + jax.nn.relu(x) * jax.nn.sigmoid(gain - x)


def _numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _case(score: Any, arrays: dict[str, np.ndarray], seen: Any, call: dict[str, Any], **reference: Any) -> cases.Case:
    """Its arrays are differentiated unless the reference is told what they add."""
    told = reference or {"score": score, "captures": arrays}
    made = cases.Case("", frozenset(), {"score": score, **arrays, **call}, seen, told)
    size = {"q_len": LENGTH, "kv_len": LENGTH, "heads": HEADS, "kv_heads": KV_HEADS, "batch": 1}
    return replace(made, differentiate=() if reference else tuple(arrays), **size)


def _grid() -> cases.Case:
    table = _numbers((2 * GRID[0] - 1) * (2 * GRID[1] - 1), HEADS)
    case = _case(RelativeBias2D(grid=GRID), {"table": table}, None, {"mask": Full(), "logits_soft_cap": 3.0})
    return replace(case, reference=case.reference | {"soft_cap": 3.0})


def _class_token() -> cases.Case:
    rows = (2 * GRID[0] - 1) * (2 * GRID[1] - 1) + 3
    lengths = np.array([LENGTH - 9], np.int32)
    call = {"mask": Full(), "kv_lengths": lengths, "return_lse": True}
    score = RelativeBias2D(grid=GRID, class_token=True) >> SoftCap(4.0)
    case = _case(score, {"table": _numbers(rows, HEADS)}, (np.arange(LENGTH + 1) < lengths[0])[None, None, None], call)
    return replace(case, q_len=LENGTH + 1, kv_len=LENGTH + 1)


def _decomposed() -> cases.Case:
    """Of all query heads alike, and of all batch rows alike; by the queries' numbers in a packed sequence."""
    ids = (np.arange(LENGTH) // 30).astype(np.int32)[None]
    arrays = {"height": _numbers(1, 1, LENGTH, GRID[0]), "width": _numbers(1, HEADS, LENGTH, WIDTH)}
    seen = (KEYS <= ROWS) & (KEYS >= ROWS - 40) & (ids[0] == ids[0][:, None])
    call = {"mask": Causal() & SlidingWindow(40), "q_segment_ids": ids, "kv_segment_ids": ids}
    return _case(RelativeBias2D(grid=GRID, decomposed=True), arrays, seen[None, None], call)


def _one_row() -> cases.Case:
    """The same numbers for all queries."""
    arrays = {"height": _numbers(1, HEADS, 1, GRID[0]), "width": _numbers(1, 1, 1, WIDTH)}
    return _case(RelativeBias2D(grid=GRID, decomposed=True), arrays, (KEYS <= ROWS)[None, None], {"mask": Causal()})


def _twice() -> cases.Case:
    """Two tables with a cap between them."""
    table = _numbers((2 * GRID[0] - 1) * (2 * GRID[1] - 1), HEADS)
    score = RelativeBias2D(grid=GRID) >> SoftCap(2.0) >> RelativeBias2D(grid=GRID)
    return _case(
        score, {"table": table, "table_2": _numbers(*table.shape)}, (KEYS <= ROWS)[None, None], {"mask": Causal()}
    )


def _t5(distance: np.ndarray) -> np.ndarray:
    """The buckets of T5's encoder, as its authors write them."""
    away, exact = np.abs(distance), 8
    far = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(128 / exact))
    large = np.minimum(exact + (far * np.float32(16 - exact)).astype(np.int64), 15)
    return np.where(distance > 0, 16, 0) + np.where(away < exact, away, large)


def _by_positions(buckets: Any, rows: int, index: Callable[[np.ndarray], np.ndarray]) -> cases.Case:
    """Tokens in any order: no number for each distance of two indices."""
    q, kv = (RNG.permutation(3 * LENGTH)[None, :LENGTH].astype(np.int32) for _ in range(2))
    distance, table = kv[0][None] - q[0][:, None], _numbers(rows, HEADS)
    seen = (distance <= 0) & (distance >= -150)
    added = np.moveaxis(table[index(distance)], -1, 0)[None]
    call = {"mask": Positions(q, kv, left=150)}
    return _case(RelativeBias(buckets=buckets), {"table": table}, seen[None, None], call, bias=added)


def _function() -> cases.Case:
    """Whose logit and array are read several times, so that gradients are summed."""
    score = ScoreFunction("conformance.repeated", {"gain": ("batch", "heads", "kv_len")})
    return _case(score, {"gain": _numbers(1, HEADS, LENGTH)}, (KEYS <= ROWS)[None, None], {"mask": Causal()})


CASES: dict[str, Callable[[], cases.Case]] = {
    "grid": _grid,
    "class_token": _class_token,
    "decomposed": _decomposed,
    "one_row": _one_row,
    "twice": _twice,
    "function": _function,
    "t5": lambda: _by_positions(None, 32, _t5),
    "clip": lambda: _by_positions(Clip(20, 4), 25, lambda d: np.clip(d, -20, 4) + 20),
    "buckets": lambda: _by_positions(
        Buckets("conformance.odd", 3), 3, lambda d: np.where(d > 3, 2, d & 1)
    ),
}  # fmt: skip


def _check(generation: str, case: cases.Case, layout: str = "bthd", **config: Any) -> None:
    dtype, kernel = "bfloat16", harness.MOSAIC[generation]
    if config:  # the sizes by the rule
        kernel = kernel._replace(config={name: kernel.config[name] for name in ("interpret", "kernel")} | config)
    attend, tensors = kernel.make(dtype), harness.draw(case, dtype)
    plan = attend.plan(*harness.handed_over(case, tensors, dtype, layout), layout=layout, **case.call)
    assert plan.method == f"forward_{generation}", plan.rejected
    published = kernel.capability.tolerance[dtype]
    want = harness.expect(case, tensors)
    harness.agree(harness.run(attend, case, tensors, dtype, layout), want, published.forward, published.backward)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("generation", harness.MOSAIC)
def test_forward_and_gradients(generation: str, name: str, layout: str) -> None:
    _check(generation, CASES[name](), layout)


def _few(name: str, rows: int) -> cases.Case:
    case = cases.last_rows(CASES[name](), rows)
    by_row = [x for x in ("height", "width") if x in case.call and case.call[x].shape[2] == LENGTH]
    cut = {x: case.call[x][:, :, -rows:] for x in by_row}
    captures = case.reference.get("captures", {}) | cut
    return replace(case, call=case.call | cut, reference=case.reference | ({"captures": captures} if cut else {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid", "decomposed", "one_row", "t5"])
@pytest.mark.parametrize(("generation", "rows"), [(one, n) for one in harness.MOSAIC for n in (1, 5, 40)])
def test_few_queries(generation: str, rows: int, name: str) -> None:
    """Heads folded into rows, each with the numbers of its own head, and the keys in parts."""
    config = {"block_q": 128 if rows == 40 or generation == "blackwell" else 64, "block_kv": 64, "num_stages": 2}
    _check(generation, _few(name, rows), fold=True, kv_splits=2, **config)
