"""Scores in calls against formulas written out in float64: outputs, and the gradient of every array."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import (
    T5,
    ALiBi,
    Clip,
    Distance,
    Forgetting,
    InputError,
    OperationMetadata,
    OperationRegistry,
    Positions,
    RefusedError,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SoftCap,
    Temperature,
    register_score_function,
)
from attnops.errors import InputTypeError, ScoreError
from attnops.scores import PositionTemperature, score_from_dict

BATCH, LENGTH, HEADS, DIM = 2, 64, 4, 8
TOLERANCE = 2e-5


@register_score_function("tests.scores.gated")
def _gated(x: Any, batch: Any, head: Any, q: Any, kv: Any, gain: Any) -> Any:
    batch, head, q, kv = (n.astype(x.dtype) for n in (batch, head, q, kv))
    return x * jnp.tanh(gain) + 0.01 * head * (q - kv) + 0.1 * batch


@register_score_function("tests.scores.root")
def _root(distance: Any) -> Any:
    return -0.1 * jnp.sqrt(jnp.abs(distance).astype(jnp.float32))


@dataclasses.dataclass
class Case:
    """A score with its arrays, and the formula: new logits from logits, arrays, and positions q [.., q, 1], kv [.., 1, kv]."""

    score: Any
    formula: Callable[..., Any]


def _numbers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _t5(distance: np.ndarray) -> np.ndarray:
    """The buckets of T5's encoder, as its authors write them."""
    away, exact = np.abs(distance), 8
    far = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(128 / exact))
    large = np.minimum(exact + (far * np.float32(16 - exact)).astype(np.int64), 15)
    return np.where(distance > 0, 16, 0) + np.where(away < exact, away, large)


def _grid(q: Any, kv: Any) -> Any:
    return (q // 8 - kv // 8 + 7) * 15 + q % 8 - kv % 8 + 7


def _table(index: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, a, q, kv: x + jnp.moveaxis(a[0][index(np.asarray(kv - q))[:, 0]], -1, 1)


def _forgetting(x: Any, a: Any, q: Any, kv: Any) -> Any:
    sums = jnp.cumsum(a[0], -1)
    return x + sums[:, :, q[0, 0, :, 0], None] - sums[:, :, None, :]


def _function(x: Any, a: Any, q: Any, kv: Any) -> Any:
    batch, head = np.arange(BATCH)[:, None, None, None], np.arange(HEADS)[None, :, None, None]
    return x * jnp.tanh(a[0][..., None]) + 0.01 * head * (q - kv) + 0.1 * batch


CASES = {
    "soft_cap": Case(SoftCap(1.5), lambda x, a, q, kv: 1.5 * jnp.tanh(x / 1.5)),
    "alibi": Case(ALiBi(), lambda x, a, q, kv: x - 2.0 ** (-2 * np.arange(1.0, 5))[None, :, None, None] * abs(q - kv)),
    "slopes": Case(ALiBi(_numbers(HEADS)), lambda x, a, q, kv: x - a[0][None, :, None, None] * abs(q - kv)),
    "t5": Case(RelativeBias(_numbers(32, HEADS)), _table(_t5)),
    "clip": Case(RelativeBias(_numbers(9, HEADS), Clip(4, 4)), _table(lambda d: np.minimum(np.maximum(d, -4), 4) + 4)),
    "forgetting": Case(Forgetting(-np.abs(_numbers(BATCH, HEADS, LENGTH))), _forgetting),
    "temperature": Case(Temperature(_numbers(HEADS, LENGTH)), lambda x, a, q, kv: x * a[0][None, :, :, None]),
    "positions": Case(
        PositionTemperature(8.0, 0.3), lambda x, a, q, kv: x * (1 + 0.3 * np.log(1 + np.floor((q + 1) / 8)))
    ),
    "distance": Case(Distance("tests.scores.root"), lambda x, a, q, kv: x - 0.1 * np.sqrt(abs(q - kv))),
    "function": Case(
        ScoreFunction("tests.scores.gated", {"gain": (_numbers(BATCH, HEADS, 1), ("batch", "heads", "q_len"))}),
        _function,
    ),
    "swin": Case(
        RelativeBias2D(grid=(8, 8), table=_numbers(225, HEADS)),
        lambda x, a, q, kv: x + jnp.moveaxis(a[0][_grid(q, kv)[:, 0]], -1, 1),
    ),
    "sam": Case(
        RelativeBias2D(_numbers(BATCH, HEADS, LENGTH, 8), _numbers(BATCH, HEADS, LENGTH, 8, seed=2), grid=(8, 8)),
        lambda x, a, q, kv: x + a[0][..., kv[0, 0, 0] // 8] + a[1][..., kv[0, 0, 0] % 8],
    ),
    "chain": Case(
        ALiBi(_numbers(HEADS)) >> SoftCap(4.0) >> Temperature(_numbers(HEADS)),
        lambda x, a, q, kv: 4 * jnp.tanh((x - a[0][None, :, None, None] * abs(q - kv)) / 4) * a[1][None, :, None, None],
    ),
}

PLACES: dict[str, dict[str, Any]] = {
    "one": {},
    "gather": {"axes": {"sp": 2, "tp": 2, "dp": 2}},
    "ring": {"axes": {"sp": 4}, "sequence_parallel": "ring"},
    "zigzag": {"axes": {"sp": 4}, "sequence_parallel": "ring", "ring_order": "zigzag"},
    "ulysses": {"axes": {"sp": 4}, "sequence_parallel": "ulysses"},
}


def _operation(path: str, axes: dict[str, int] | None = None, **policy: Any) -> Any:
    config: dict[str, Any] = {"path": path} | ({"block_q": 16, "block_kv": 16} if path == "blockwise" else {})
    mesh = None
    if axes:
        count = int(np.prod(list(axes.values())))
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])
    return OperationRegistry.create(
        "vanilla", OperationMetadata(mesh=mesh, operation_configs={"vanilla": config}, **policy)
    )


def _expected(case: Case, arrays: Any, q: Any, k: Any, v: Any, *, causal: bool = True, offset: int = 0) -> Any:
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    rows = np.arange(q.shape[1])[None, None, :, None] + offset
    keys = np.arange(k.shape[1])[None, None, None, :]
    logits = case.formula(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]), arrays, rows, keys)
    logits = jnp.where(keys <= rows, logits, -jnp.inf) if causal else logits
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)


def _compare(got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    gots, wants = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(gots) == len(wants) > 0
    for x, y in zip(gots, wants, strict=True):
        y = np.asarray(y, np.float64)
        assert np.abs(np.asarray(x, np.float64) - y).max() <= tolerance * np.abs(y).max()


def _inputs(kv_heads: int = HEADS, q_len: int = LENGTH) -> tuple[np.ndarray, ...]:
    shapes = (BATCH, q_len, HEADS, DIM), *[(BATCH, LENGTH, kv_heads, DIM)] * 2
    return tuple(_numbers(*shape, seed=5 + n) for n, shape in enumerate(shapes))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("path", "place"), [("plain", "one"), *(("blockwise", place) for place in PLACES)])
def test_outputs_and_gradients(name: str, path: str, place: str) -> None:
    case, (q, k, v) = CASES[name], _inputs()
    operation, weights = _operation(path, **PLACES[place]), _numbers(BATCH, LENGTH, HEADS, DIM, seed=9)
    arrays = tuple(x for x in case.score.arrays() if x is not None)

    def scored(a: Any) -> Any:
        return case.score.with_arrays(a) if a else case.score

    def total(q: Any, k: Any, v: Any, a: Any) -> Any:
        return (operation(q, k, v, score=scored(a), causal=True).attention_outputs * weights).sum()

    output = operation(q, k, v, score=case.score, causal=True).attention_outputs
    gradients = jax.jit(jax.grad(total, (0, 1, 2, 3)))(q, k, v, arrays)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (q, k, v, arrays))
        expected = _expected(case, wide[3], *wide[:3])
        wanted = jax.grad(lambda q, k, v, a: (_expected(case, a, q, k, v) * weights).sum(), (0, 1, 2, 3))(*wide)
    _compare(output, expected)
    _compare(gradients, wanted)


@pytest.mark.parametrize("path", ["plain", "blockwise", "decode", "decode_rows"])
@pytest.mark.parametrize("name", ["alibi", "t5", "clip", "positions", "distance", "chain"])
def test_few_queries_at_the_end_of_a_cache(name: str, path: str) -> None:
    case, (q, k, v) = CASES[name], _inputs(kv_heads=2, q_len=3)
    operation = _operation(path)
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    by_number = operation(q, k, v, score=case.score, query_offset=LENGTH - 3).attention_outputs
    offsets = jnp.full(BATCH, LENGTH - 3)
    by_row = operation(q, k, v, score=case.score, query_offset=offsets).attention_outputs
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        expected = _expected(case, arrays, *wide, offset=LENGTH - 3)
    _compare(by_number, expected)
    _compare(by_row, expected)


@pytest.mark.parametrize("path", ["plain", "blockwise"])
@pytest.mark.parametrize("name", ["alibi", "t5", "positions", "distance"])
def test_positions_given_as_arrays_count(name: str, path: str) -> None:
    """Two documents packed in a row: distances and temperatures follow the positions within each."""
    case, (q, k, v) = CASES[name], _inputs()
    places = np.concatenate([np.arange(40), np.arange(24)]).astype(np.int32)
    at = jnp.asarray(np.stack([places] * BATCH))
    documents = jnp.asarray(np.stack([np.repeat([1, 2], [40, 24])] * BATCH).astype(np.int32))
    output = _operation(path)(
        q, k, v, score=case.score, mask=Positions(at, at), q_segment_ids=documents, kv_segment_ids=documents
    ).attention_outputs
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        parts = [slice(0, 40), slice(40, 64)]
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        expected = jnp.concatenate([_expected(case, arrays, *(x[:, part] for x in wide)) for part in parts], 1)
    _compare(output, expected)


def test_arrays_may_be_given_in_the_call_and_are_placed() -> None:
    q, k, v = _inputs()
    operation, table = _operation("blockwise", axes={"sp": 2, "tp": 2, "dp": 2}), _numbers(32, HEADS)
    declared = RelativeBias(buckets=T5())
    in_score = operation(q, k, v, score=RelativeBias(table, T5()))
    in_call = operation(q, k, v, score=declared, table=table)
    np.testing.assert_array_equal(in_score.attention_outputs, in_call.attention_outputs)
    plan = operation.plan(q, k, v, score=declared, table=table)
    assert "score" in plan.problem.features
    assert plan.placement.fitted["table"].spec[1] == "tp"
    assert plan.placement.fitted["table"].local_shape == (32, HEADS // 2)


def test_a_leading_soft_cap_is_the_old_argument() -> None:
    q, k, v = _inputs()
    operation = _operation("blockwise")
    programs = [
        jax.jit(lambda q, k, v, call=call: operation(q, k, v, **call).attention_outputs).lower(q, k, v).as_text()
        for call in ({"score": SoftCap(5.0)}, {"logits_soft_cap": 5.0})
    ]
    assert programs[0] == programs[1]


def test_what_carries_no_score_refuses_it() -> None:
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    plan = OperationRegistry.create("splash", OperationMetadata(platform="tpu")).plan(x, x, x, score=ALiBi())
    assert plan.kind == "fallback"
    assert "feature.score" in {reason.code for rejected in plan.rejected for reason in rejected.reasons}
    with pytest.raises(RefusedError):
        OperationRegistry.create("sdpa")(*_inputs(), score=ALiBi())


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("function",)])
def test_json_round_trip(name: str) -> None:
    score = CASES[name].score
    bare = score.with_arrays([None] * len(score.arrays()))
    assert score_from_dict(bare.to_dict()) == bare


def _branches(x: Any, *_: Any) -> Any:
    return x if x > 0 else -x


def _sums(x: Any, *_: Any) -> Any:
    return x - x.sum()


def _whole(x: Any, *_: Any) -> Any:
    return x.astype(jnp.int32)


@pytest.mark.parametrize("function", [_branches, _sums, _whole])
def test_functions_that_no_tile_can_evaluate_are_refused_by_name(function: Any) -> None:
    name = f"tests.scores.bad_{function.__name__}"
    register_score_function(name, override=True)(function)
    with pytest.raises(ScoreError, match=name):
        ScoreFunction(name)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: ALiBi([1.0, float("nan")]), "nan"),
        (lambda: ScoreFunction("tests.scores.gate"), "tests.scores.gated"),
        (lambda: score_from_dict({"kind": "alibis"}), "alibi"),
        (lambda: RelativeBias(np.zeros(3, np.float32)), "[32, heads]"),
        (lambda: SoftCap(-1.0), "positive"),
    ],
)
def test_wrong_scores_say_what_is_wanted(make: Callable[[], Any], part: str) -> None:
    with pytest.raises(ScoreError) as error:
        make()
    assert part in str(error.value)


def test_wrong_arguments_say_what_is_wanted() -> None:
    q, k, v = _inputs()
    operation = _operation("plain")
    with pytest.raises(InputTypeError, match="ALiBi"):
        operation(q, k, v, score=ALiBi)
    with pytest.raises(InputError, match="table"):
        operation(q, k, v, score=RelativeBias())
    with pytest.raises(InputError, match="slopes"):
        operation(q, k, v, score=ALiBi(np.ones(3, np.float32)))
    with pytest.raises(InputError, match="alibi"):
        operation(q[:, :3], k, v, score=ALiBi(), causal=False)
