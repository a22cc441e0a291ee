"""Scores in steps over pages, against formulas in float64 on each sequence's own keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_cases import Case, compare, expected, numbers

from attnops import (
    T5,
    ALiBi,
    Distance,
    Forgetting,
    InputError,
    KVCache,
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    ScoreFunction,
    SoftCap,
    Temperature,
    register_score_function,
)
from attnops.errors import InputTypeError
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.scores import PositionTemperature, RelativeBias2D
from attnops.sharding import virtual_mesh

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
LENGTHS = (11, 6, 21)  # of sequences, after the second step
CACHE: dict[str, Any] = {
    "layers": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "float32", "page_size": PAGE, "pages": 24,
    "max_sequences": 4, "max_length": 32,
}  # fmt: skip


@register_score_function("tests.pages.gated")
def _gated(x: Any, batch: Any, head: Any, q: Any, kv: Any, gain: Any) -> Any:
    head, ahead = head.astype(x.dtype), (q - kv).astype(x.dtype)
    return x * jnp.tanh(gain) + 0.01 * head * ahead


@register_score_function("tests.pages.root")
def _root(distance: Any) -> Any:
    return -0.1 * jnp.sqrt(jnp.abs(distance).astype(jnp.float32))


def _t5(x: Any, a: Any, q: Any, kv: Any) -> Any:
    away, exact = np.maximum(q - kv, 0), 4
    far = np.log(np.maximum(away, 1) / exact) / np.log(16 / exact) * (8 - exact)
    index = np.where(away < exact, away, np.minimum(exact + far.astype(int), 7))
    return x + jnp.moveaxis(a[0][index[:, 0]], -1, 1)


def _of_heads(a: Any) -> Any:
    return a[None, :, None, None]


HEAD = np.arange(HEADS)[None, :, None, None]
CASES = {
    "alibi": Case(ALiBi(), lambda x, a, q, kv: x - 2.0 ** (-2 * (HEAD + 1.0)) * abs(q - kv)),
    "slopes": Case(ALiBi(numbers(HEADS)), lambda x, a, q, kv: x - _of_heads(a[0]) * abs(q - kv)),
    "t5": Case(RelativeBias(numbers(8, HEADS), T5(8, 16, bidirectional=False)), _t5),
    "temperature": Case(Temperature(numbers(HEADS)), lambda x, a, q, kv: x * _of_heads(a[0])),
    "positions": Case(
        PositionTemperature(4.0, 0.3), lambda x, a, q, kv: x * (1 + 0.3 * np.log(1 + np.floor((q + 1) / 4)))
    ),
    "distance": Case(Distance("tests.pages.root"), lambda x, a, q, kv: x - 0.1 * np.sqrt(abs(q - kv))),
    "function": Case(
        ScoreFunction("tests.pages.gated", {"gain": (numbers(HEADS), ("heads",))}),
        lambda x, a, q, kv: x * jnp.tanh(_of_heads(a[0])) + 0.01 * HEAD * (q - kv),
    ),
    "chain": Case(
        SoftCap(3.0) >> ALiBi() >> SoftCap(9.0),
        lambda x, a, q, kv: 9 * jnp.tanh((3 * jnp.tanh(x / 3) - 2.0 ** (-2 * (HEAD + 1.0)) * abs(q - kv)) / 9),
    ),
}


def _tokens(seed: int) -> list[tuple[np.ndarray, ...]]:
    """Query, key and value of each sequence, whole."""
    return [
        tuple(numbers(1, n, heads, DIM, seed=seed + 3 * s + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
        for s, n in enumerate(LENGTHS)
    ]


def _batch(plan: Any, starts: tuple[int, ...], ends: tuple[int, ...]) -> RaggedBatch:
    table, page = [], 0
    for n in LENGTHS:
        count = -(-n // PAGE)
        table.append(list(range(page, page + count)))
        page += count + count % 2  # a sequence's first page is on the first of two devices that share its pages
    q_lens = np.subtract(ends, starts)
    return RaggedBatch.make(
        plan, cu_q_lens=np.cumsum([0, *q_lens]), kv_lens=list(ends), page_table=table, tokens=int(q_lens.sum())
    )


def _steps(case: Case, last: tuple[int, ...], mesh: Any = None, window: Any = None, **cache: Any) -> None:
    """Two steps: all but the `last` tokens of each sequence, then these."""
    declared = KVCache(**CACHE | cache)
    operation = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, fallback="error"))
    plan, tokens = declared.plan(mesh), _tokens(5)
    state = init(declared) if mesh is None else init(declared, mesh)
    middle = tuple(n - k for n, k in zip(LENGTHS, last, strict=True))
    arrays = [jnp.asarray(x) for x in case.score.arrays() if x is not None]
    for starts, ends in (((0,) * len(LENGTHS), middle), (middle, LENGTHS)):
        parts = zip(tokens, starts, ends, strict=True)
        q, k, v = (np.concatenate(x) for x in zip(*([y[0, a:b] for y in of] for of, a, b in parts), strict=True))
        step = jax.jit(
            lambda state, q, k, v, batch: operation(
                q, k, v, state=state, layer=0, batch=batch, score=case.score, sliding_window=window
            )
        )
        result = step(state, q, k, v, _batch(plan, starts, ends))
        state, row = result.state, 0
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            for (q, k, v), a, b in zip(tokens, starts, ends, strict=True):
                wide = [jnp.asarray(x, jnp.float64) for x in (q[:, a:b], k[:, :b], v[:, :b])]
                windowed = case
                if window is not None:
                    windowed = Case(
                        case.score,
                        lambda x, a, q, kv: jnp.where(kv >= q - window[0], case.formula(x, a, q, kv), -jnp.inf),
                    )
                want = expected(windowed, arrays, *wide, offset=a)[0]
                compare(result.attention_outputs[row : row + b - a], want)
                row += b - a


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("last", [(1, 1, 1), (3, 1, 9)])
def test_prefill_then_a_step(name: str, last: tuple[int, ...]) -> None:
    _steps(CASES[name], last)


@pytest.mark.parametrize("layout", ["heads", "joined", "interleaved", "packed"])
def test_layouts(layout: str) -> None:
    _steps(CASES["t5"], (1, 2, 1), layout=layout)


@pytest.mark.parametrize("name", ["alibi", "t5", "function"])
def test_windows(name: str) -> None:
    _steps(CASES[name], (1, 1, 4), window=(5, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_heads_on_devices(name: str) -> None:
    mesh = virtual_mesh({"tp": 2}, explicit=True)
    _steps(CASES[name], (1, 2, 1), mesh=mesh, kv_head_axis="tp")


@pytest.mark.parametrize("name", ["alibi", "t5", "function", "positions"])
def test_pages_of_a_sequence_on_two_devices(name: str) -> None:
    mesh = virtual_mesh({"sp": 2, "tp": 2}, explicit=True)
    _steps(CASES[name], (1, 2, 1), mesh=mesh, kv_head_axis="tp", page_sequence_axis="sp")


@pytest.mark.parametrize("name", ["slopes", "t5", "function"])
def test_a_plan_places_the_arrays(name: str) -> None:
    mesh = virtual_mesh({"tp": 2}, explicit=True)
    operation = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
    cache = KVCache(**CACHE | {"kv_head_axis": "tp"})
    q, k = (jax.ShapeDtypeStruct((8, n, DIM), jnp.float32) for n in (HEADS, KV_HEADS))
    plan = operation.plan(q, k, k, cache=cache, score=CASES[name].score)
    assert plan.implementation == "paged.forward_native"
    (array,) = (x for x in plan.tensors if x.tensor in ("slopes", "table", "gain"))
    assert array.local_shape[-1] == HEADS // 2
    assert str(plan.problem.score) in plan.explain()


@pytest.mark.parametrize(
    "score",
    [
        Forgetting(np.zeros((3, HEADS, 32), np.float32)),
        Temperature(np.ones((HEADS, 8), np.float32)),
        RelativeBias2D(numbers(1, HEADS, 8, 4), numbers(1, HEADS, 8, 2), grid=(4, 2)),
    ],
)
def test_arrays_by_query_or_key_are_refused(score: Any) -> None:
    operation = OperationRegistry.create("paged", OperationMetadata())
    q, k = (jax.ShapeDtypeStruct((8, n, DIM), jnp.float32) for n in (HEADS, KV_HEADS))
    plan = operation.plan(q, k, k, cache=KVCache(**CACHE), score=score)
    assert plan.implementation is None
    assert "paged.score" in {reason.code for rejected in plan.rejected for reason in rejected.reasons}


def test_the_tpu_kernel_has_no_score_and_the_plan_says_so() -> None:
    operation = OperationRegistry.create("paged", OperationMetadata(platform="tpu"))
    q, k = (jax.ShapeDtypeStruct((8, n, 128), jnp.bfloat16) for n in (HEADS, KV_HEADS))
    cache = KVCache(**CACHE | {"head_dim": 128, "dtype": "bfloat16", "page_size": 16, "layout": "joined"})
    plan = operation.plan(q, k, k, cache=cache, score=ALiBi())
    assert (plan.kind, plan.implementation) == ("fallback", "paged.forward_native")
    assert [r.code for rejected in plan.rejected for r in rejected.reasons] == ["feature.score"]


def test_wrong_arguments_say_what_is_wanted() -> None:
    operation = OperationRegistry.create("paged", OperationMetadata())
    q, k = (jax.ShapeDtypeStruct((8, n, DIM), jnp.float32) for n in (HEADS, KV_HEADS))
    cache = KVCache(**CACHE)
    with pytest.raises(InputError, match="slopes"):
        operation.plan(q, k, k, cache=cache, score=ALiBi(np.ones(3, np.float32)))
    with pytest.raises(InputError, match="table"):
        operation.plan(q, k, k, cache=cache, score=RelativeBias())
    with pytest.raises(InputTypeError, match="tabel"):
        operation.plan(q, k, k, cache=cache, score=RelativeBias(), tabel=np.ones((32, HEADS), np.float32))
    given = operation.plan(q, k, k, cache=cache, score=RelativeBias(), table=np.ones((32, HEADS), np.float32))
    assert given.implementation == "paged.forward_native"
