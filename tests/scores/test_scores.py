"""Scores in calls against formulas written out in float64: outputs, and the gradient of every array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from score_cases import (
    BATCH,
    HEADS,
    LENGTH,
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
    T5,
    ALiBi,
    Attention,
    Clip,
    Forgetting,
    InputError,
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    ScoreFunction,
    SoftCap,
    Temperature,
    register_score_function,
)
from attnops.errors import InputTypeError, ScoreError
from attnops.operators.kernels.scores import diagonal_sums, from_diagonals
from attnops.scores import relative, score_from_dict

CASES = cases(LENGTH)

PLACES: dict[str, dict[str, Any]] = {
    "one": {},
    "gather": {"axes": {"sp": 2, "tp": 2, "dp": 2}},
    "ring": {"axes": {"sp": 4}, "sequence_parallel": "ring"},
    "zigzag": {"axes": {"sp": 4}, "sequence_parallel": "ring", "ring_order": "zigzag"},
    "ulysses": {"axes": {"sp": 4}, "sequence_parallel": "ulysses"},
}


def _operation(path: str, axes: dict[str, int] | None = None, **policy: Any) -> Any:
    config: dict[str, Any] = {"path": path} | ({"block_q": 16, "block_kv": 16} if path == "blockwise" else {})
    return operation_with("vanilla", config, axes, policy)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("path", "place"), [("plain", "one"), *(("blockwise", place) for place in PLACES)])
def test_outputs_and_gradients(name: str, path: str, place: str) -> None:
    check(CASES[name], _operation(path, **PLACES[place]), LENGTH, HEADS)


@pytest.mark.parametrize("name", ["log", "log_cap", "log_times", "quotient"])
def test_hidden_keys_and_padding_where_a_function_has_no_number_have_no_part_in_gradients(name: str) -> None:
    check(partial_functions(72)[name], _operation("blockwise"), 72, kv_heads=2)


@pytest.mark.parametrize("path", ["plain", "blockwise", "decode", "decode_rows"])
@pytest.mark.parametrize("name", ["alibi", "t5", "clip", "positions", "distance", "chain"])
def test_few_queries_at_the_end_of_a_cache(name: str, path: str) -> None:
    case, (q, k, v) = CASES[name], inputs(kv_heads=2, q_len=3)
    operation = _operation(path)
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    by_number = operation(q, k, v, score=case.score, query_offset=LENGTH - 3).attention_outputs
    offsets = jnp.full(BATCH, LENGTH - 3)
    by_row = operation(q, k, v, score=case.score, query_offset=offsets).attention_outputs
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        wanted_output = expected(case, arrays, *wide, offset=LENGTH - 3)
    compare(by_number, wanted_output)
    compare(by_row, wanted_output)


@pytest.mark.parametrize("path", ["plain", "blockwise"])
@pytest.mark.parametrize("name", ["alibi", "t5", "positions", "distance"])
def test_positions_given_as_arrays_count(name: str, path: str) -> None:
    check_documents(CASES[name], _operation(path), 40, LENGTH)


def test_arrays_may_be_given_in_the_call_and_are_placed() -> None:
    q, k, v = inputs()
    operation, table = _operation("blockwise", axes={"sp": 2, "tp": 2, "dp": 2}), numbers(32, HEADS)
    declared = RelativeBias(buckets=T5())
    in_score = operation(q, k, v, score=RelativeBias(table, T5()))
    in_call = operation(q, k, v, score=declared, table=table)
    np.testing.assert_array_equal(in_score.attention_outputs, in_call.attention_outputs)
    plan = operation.plan(q, k, v, score=declared, table=table)
    assert "score" in plan.problem.features
    assert plan.placement.fitted["table"].spec[1] == "tp"
    assert plan.placement.fitted["table"].local_shape == (32, HEADS // 2)


def test_a_leading_soft_cap_is_the_old_argument() -> None:
    q, k, v = inputs()
    operation = _operation("blockwise")
    programs = [
        jax.jit(lambda q, k, v, call=call: operation(q, k, v, **call).attention_outputs).lower(q, k, v).as_text()
        for call in ({"score": SoftCap(5.0)}, {"logits_soft_cap": 5.0})
    ]
    assert programs[0] == programs[1]


def test_what_carries_no_score_refuses_it() -> None:
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    metadata = OperationMetadata(platform="tpu", operation_configs={"splash": {"kernel": "jax"}})
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x, score=ALiBi())
    assert plan.kind == "fallback"
    assert "splash.jax.score" in {reason.code for rejected in plan.rejected for reason in rejected.reasons}


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
    q, k, v = inputs()
    operation = _operation("plain")
    with pytest.raises(InputTypeError, match="ALiBi"):
        operation(q, k, v, score=ALiBi)
    with pytest.raises(InputError, match="table"):
        operation(q, k, v, score=RelativeBias())
    with pytest.raises(InputError, match="slopes"):
        operation(q, k, v, score=ALiBi(np.ones(3, np.float32)))
    with pytest.raises(InputError, match="alibi"):
        operation(q[:, :3], k, v, score=ALiBi(), causal=False)


def _in_shard_map(score: Callable[[Any], Any], array: np.ndarray, spec: P) -> tuple[Any, Any]:
    """(a call in the caller's own shard_map, over parts of the sequence and of the heads; the same call without a mesh)."""
    mesh = jax.make_mesh((2, 2), ("sp", "tp"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    operation, (q, k, v) = _operation("blockwise"), inputs()
    manual = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, sequence_parallel="ring"))
    of = P(None, "sp", "tp")
    call = jax.shard_map(
        lambda q, k, v, x: manual(q, k, v, score=score(x), causal=True).attention_outputs,
        mesh=mesh, in_specs=(of, of, of, spec), out_specs=of, check_vma=False,
    )  # fmt: skip
    return jax.jit(call)(q, k, v, array), operation(q, k, v, score=score(array), causal=True).attention_outputs


@pytest.mark.parametrize(
    ("score", "array", "spec"),
    [
        (ALiBi, numbers(HEADS), P("tp")),
        (lambda table: RelativeBias(table, T5()), numbers(32, HEADS), P(None, "tp")),
        (Forgetting, -np.abs(numbers(BATCH, HEADS, LENGTH)), P(None, "tp")),
    ],
)
def test_in_the_callers_own_shard_map(score: Any, array: np.ndarray, spec: P) -> None:
    compare(*_in_shard_map(score, array, spec))


@pytest.mark.parametrize(
    ("score", "array", "spec", "part"),
    [
        (lambda _: ALiBi(), numbers(HEADS), P("tp"), "paper_slopes"),
        (Temperature, numbers(HEADS, LENGTH), P("tp"), "temperature"),
    ],
)
def test_what_a_part_in_the_callers_shard_map_cannot_know(score: Any, array: Any, spec: P, part: str) -> None:
    with pytest.raises(InputError, match=part):
        _in_shard_map(score, array, spec)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 5), (2, 1), (2, 2), (7, 3), (8, 16), (64, 64), (96, 40)])
def test_numbers_by_diagonal_and_their_sums(rows: int, keys: int, platform: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, rows + keys - 1)).astype(np.float32)
    wanted = np.stack([x[..., rows - 1 - r : rows - 1 - r + keys] for r in range(rows)], -2)
    np.testing.assert_array_equal(from_diagonals(jnp.asarray(x), rows, keys), wanted)
    tile = rng.standard_normal((2, 3, rows, keys))
    sums = np.zeros((2, 3, rows + keys - 1))
    for r in range(rows):
        sums[..., rows - 1 - r : rows - 1 - r + keys] += tile[:, :, r]
    np.testing.assert_allclose(diagonal_sums(jnp.asarray(tile, jnp.float32), platform), sums, atol=1e-5)


def test_a_long_table_by_distance_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """81 distances of 41 queries and keys, 32 at a time; the table's gradient is a histogram of the weights' gradient."""
    monkeypatch.setattr(relative, "_CHOSEN_TOGETHER", 32)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((8, 3)).astype(np.float32)
    index = rng.integers(0, 8, (2, 81)).astype(np.int32)
    direction = rng.standard_normal((2, 3, 81)).astype(np.float32)
    values, back = jax.vjp(lambda table: relative._of_buckets(jnp.asarray(index), table), jnp.asarray(table))
    np.testing.assert_array_equal(values, np.moveaxis(table[index], -1, 1))
    wanted = np.stack([(direction * (index == n)[:, None]).sum((0, 2)) for n in range(8)])
    np.testing.assert_allclose(back(jnp.asarray(direction))[0], wanted, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"ring_order": "contiguous"}], ids=["zigzag", "contiguous"])
def test_a_bias_beside_a_score_goes_around_a_ring(fields: dict[str, Any]) -> None:
    """Scores first, then the bias: whose gradient is that of the logits, summed over the batch."""
    rng = np.random.default_rng(0)
    q, k, v, direction = (rng.standard_normal((2, 32, 4, 8)) for _ in range(4))
    bias, slopes = 3 * rng.standard_normal((1, 4, 32, 32)), np.asarray([0.5, 0.25, 0.125, 0.0625])
    place = np.arange(32)
    away = abs(place[:, None] - place)
    logits = np.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    logits = 4 * np.tanh((2 * np.tanh(logits / 2) - slopes[:, None, None] * away) / 4) + bias
    logits = np.where(place <= place[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bihd,bjhd->bhij", direction, v)
    of_bias = (weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))).sum(0, keepdims=True)
    attend = Attention("ring", mesh={"sp": 4}, score=SoftCap(2.0) >> ALiBi(tuple(slopes)) >> SoftCap(4.0), **fields)

    def total(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
        output = attend(*arrays, bias=bias, causal=True).attention_outputs
        return (output * direction.astype(np.float32)).sum(), output

    gradient, output = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(bias, jnp.float32))
    np.testing.assert_allclose(output, np.einsum("bhij,bjhd->bihd", weights, v), atol=1e-5)
    np.testing.assert_allclose(gradient, of_bias, atol=2e-5)


@pytest.mark.parametrize(
    "rule",
    [T5(), T5(bidirectional=False), T5(16, 64), T5(4, 1000), T5(32, 9), T5(8, 100, False), Clip(5, 3), Clip(0)],
    ids=lambda rule: rule.describe(),
)
def test_a_row_stays_the_same_from_the_reach_on(rule: T5 | Clip) -> None:
    """And changes up to there."""
    before, after = rule.reach
    index = rule.index(np.arange(-1200, 1201, dtype=np.int32), np)
    changes = np.flatnonzero(np.diff(index)) - 1200  # from this distance to the next
    assert (-changes.min(), changes.max() + 1) == (before, after) if len(changes) else (before, after) == (0, 0)
