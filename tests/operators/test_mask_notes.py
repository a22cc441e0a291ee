"""What a plan says of a mask array."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal, Dense, OperationRegistry, SlidingWindow

ATTEND = OperationRegistry.create("vanilla")
UNKNOWN = "isn't known to the plan"


def _notes(mask: Any, length: int = 8, **call: Any) -> list[str]:
    x = jax.ShapeDtypeStruct((1, length, 2, 4), np.float32)
    return [n for n in ATTEND.plan(x, x, x, mask=mask, **({"causal": False} | call)).notes if n.startswith("mask:")]


def _triangle(length: int = 8) -> np.ndarray:
    return np.tril(np.ones((1, 1, length, length), bool))


@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
def test_what_is_known_is_said_with_the_words_for_it(made: Any) -> None:
    (note,) = _notes(made(_triangle()))
    assert 'is causal; declare "causal": true or "mask": {"kind": "causal", "offset": null} in call' in note
    (note,) = _notes(made(_triangle() & ~np.tril(np.ones((8, 8), bool), -3)))
    assert '"mask": {"kind": "sliding_window", "left": 2, "right": 0, "offset": null} in call' in note
    (note,) = _notes(made(np.ones((1, 2, 8, 8), bool)))
    assert "is full: it hides nothing; pass no array" in note
    (note,) = _notes(made(_triangle()[..., ::-1]))
    assert "is none of full, prefix, causal, window" in note


def test_what_is_declared_already() -> None:
    for call in ({"causal": True}, {"mask": Causal() & Dense(_triangle())}):
        (note,) = _notes(**({"mask": _triangle()} | call))
        assert "is causal, which is declared already; pass no array" in note
    (note,) = _notes(SlidingWindow(3) & Dense(_triangle()))
    assert "is causal; declare" in note


def test_what_is_not_known() -> None:
    (note,) = _notes(jax.ShapeDtypeStruct((1, 1, 8, 8), bool))
    assert UNKNOWN in note
    seen: list[str] = []
    jax.jit(lambda m: seen.extend(_notes(m)))(_triangle())
    assert UNKNOWN in seen[0]
    # A padding mask has no rows, so nothing to declare in its place.
    assert _notes(np.ones((1, 1, 1, 8), bool)) == []


def test_the_plan_of_a_call_does_not_depend_on_values() -> None:
    """It is kept for every call of the same shapes."""
    x = jnp.ones((1, 8, 2, 4))
    notes = [ATTEND(x, x, x, mask=jnp.asarray(m), causal=False).plan.notes for m in (_triangle(), ~_triangle())]
    assert notes[0] == notes[1]
    assert any(UNKNOWN in note for note in notes[0])


def test_a_large_mask_is_looked_at_in_some_rows() -> None:
    length = 1 << 13
    cells = jnp.asarray(_triangle(length))
    _notes(cells, length)
    began = time.perf_counter()
    (note,) = _notes(cells, length)
    assert time.perf_counter() - began < 1
    assert "is causal in the 64 rows looked at" in note
    twice = jnp.broadcast_to(cells, (1, 2, length, length))
    assert "in the 64 rows of the first of 2 planes looked at" in _notes(twice, length)[0]
