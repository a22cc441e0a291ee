"""The harness itself: what it must refuse, and what rounding alone may do."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st

from . import cases, harness

SIZES = cases.Sizes(batch=1, length=512)
PUBLISHED = sorted(
    {
        (name, dtype, *bounds)
        for name, implementation in (harness.RUNNABLE | harness.DECLARED_ONLY).items()
        for dtype, bounds in implementation.capability.tolerance.items()
    }
)


@pytest.fixture(scope="module")
def want() -> Any:
    """Causal rows decay as 1 over the root of their number."""
    case = cases.build("lse", "bthd", SIZES)
    case.call["mask"], case.mask = None, np.tril(np.ones((512, 512), bool))
    return harness.expect(case, harness.draw(case, "bfloat16"))


def _parts(want: Any) -> list[str]:
    return ["output", "lse", *want.gradients]


def _with(want: Any, part: str, change: Any) -> Any:
    if part in want.gradients:
        return want._replace(gradients=want.gradients | {part: change(want.gradients[part])})
    return want._replace(**{part: change(getattr(want, part))})


@pytest.mark.parametrize(("dtype", "forward", "backward"), sorted({p[1:] for p in PUBLISHED}))
@pytest.mark.parametrize("rows", [slice(35, None), slice(300, 301), slice(509, 510)], ids=str)
def test_rows_scaled_by_nine_tenths_are_refused(want: Any, dtype: str, forward: float, backward: float, rows: slice):
    """Row 300's output is a twentieth of the first row's; the last keys' gradients are smaller still."""
    harness.agree(want, want, forward, backward)
    for part in _parts(want):
        axis = 2 if part == "lse" else 1

        def scaled(x: np.ndarray, axis: int = axis) -> np.ndarray:
            factor = np.ones((*(1,) * axis, 512, *(1,) * (x.ndim - axis - 1)))
            factor[(slice(None),) * axis + (rows,)] = 0.9
            return x * factor

        with pytest.raises(AssertionError, match=part):
            harness.agree(_with(want, part, scaled), want, forward, backward)


@pytest.mark.parametrize("name", ["sinks", "bias", "int8_kv"])
def test_other_gradients_scaled_by_nine_tenths_are_refused(name: str) -> None:
    case = cases.build(name, "bthd")
    want = harness.expect(case, harness.draw(case, "bfloat16"))
    for part in case.differentiate:

        def scaled(x: np.ndarray) -> np.ndarray:
            y = x.copy()
            y[-1:] *= 0.9
            return y

        with pytest.raises(AssertionError, match=part):
            harness.agree(_with(want, part, scaled), want, 0.06, 0.06)


def test_a_dead_row_must_be_dead() -> None:
    case = cases.build("negated", "bthd")
    want = harness.expect(case, harness.draw(case, "float32"))

    def alive(x: np.ndarray) -> np.ndarray:
        y = x.copy()
        y[:, -1] = 1e-6
        return y

    for part in ("output", "query"):
        with pytest.raises(AssertionError, match=part):
            harness.agree(_with(want, part, alive), want, 0.06, 0.06)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_alone_passes(want: Any, dtype: str) -> None:
    """Rows that are rounded to the dtype, as every result is."""
    rounded = lambda x: np.asarray(jnp.asarray(x, jnp.float32).astype(dtype), np.float64)  # noqa: E731
    got = want._replace(output=rounded(want.output), dtype=jnp.dtype(dtype))
    got = got._replace(gradients={name: rounded(x) for name, x in want.gradients.items()})
    step = float(jnp.finfo(dtype).eps)
    harness.agree(got, want, step, step)


def test_every_published_bound_is_below_a_tenth() -> None:
    """Else rows scaled by 0.9 would pass."""
    assert [p for p in PUBLISHED if max(p[2:]) >= 0.1] == []
    assert len(PUBLISHED) > 8


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 3), st.data())
def test_a_covering_has_every_combination_that_its_rows_have(sizes: list[int], strength: int, data: Any) -> None:
    strength = min(strength, len(sizes))
    rows = sorted(
        data.draw(st.sets(st.sampled_from(list(itertools.product(*map(range, sizes)))), min_size=1)),
    )
    first = data.draw(st.sets(st.sampled_from(rows)))

    def met(of: Any) -> set[Any]:
        return {c for row in of for c in itertools.combinations(enumerate(row), strength)}

    some = covering(rows, strength, first)
    assert met(some) == met(rows)
    assert first <= set(some) <= set(rows)
    assert some == sorted(some)


def test_a_covering_is_small_and_the_products_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNOPS_TEST_PRODUCTS", raising=False)
    rows = list(itertools.product(range(5), repeat=4))
    assert 25 <= len(covering(rows, 2)) <= 40  # of 625
    monkeypatch.setenv("ATTNOPS_TEST_PRODUCTS", "1")
    assert covering(rows, 2) == rows
