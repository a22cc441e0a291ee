"""What a plan says of a mask array."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, Causal, Dense, MaskWarning, OperationRegistry, SlidingWindow
from attnops.planning.notes import is_info
from attnops.verify import reference_attention

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


# -- causal by default --------------------------------------------------------------------------------------------------

DEFAULT = "causal, the metadata's default, applies to the array"


def _square(length: int) -> np.ndarray:
    """A mask of a length that no other test has: warnings are given once for each shape."""
    return np.ones((1, 1, length, length), bool)


def _arrays(length: int) -> tuple[np.ndarray, ...]:
    return tuple(np.random.default_rng(n).normal(size=(1, length, 2, 4)).astype(np.float32) for n in range(3))


@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("attend", [ATTEND, Attention("vanilla"), Attention("sdpa")], ids=["operation", "v", "sdpa"])
def test_an_array_mask_that_default_causality_cuts_warns_once(attend: Any, made: Any, request: Any) -> None:
    length = 21 + 2 * (attend is ATTEND) + 4 * (made is jnp.asarray)
    if attend is not ATTEND:
        length += 8 * (attend.declaration.operation == "sdpa")
    q, k, v = _arrays(length)
    mask = made(_square(length))
    with pytest.warns(MaskWarning, match=r"Pass causal=False.* or causal=True") as told:
        output = attend(q, k, v, mask=mask).attention_outputs
    assert len(told) == 1
    assert told[0].filename == __file__  # the caller's line, whichever object was called
    attend(q, k, v, mask=mask)  # a second warning would be an error
    causal = np.tril(_square(length))
    np.testing.assert_allclose(output, reference_attention(q, k, v, scale=0.5, mask=causal).output, atol=2e-6)
    output = attend(q, k, v, mask=mask, causal=False).attention_outputs
    np.testing.assert_allclose(output, reference_attention(q, k, v, scale=0.5).output, atol=2e-6)


@pytest.mark.parametrize(
    ("mask", "call"),
    [
        (np.tril(_square(17)), {}),  # causal itself
        (np.tril(_square(17), -2), {}),
        (_square(17)[:, :, :1], {}),  # padding: one row for all queries
        (_square(17)[:, :, :1], {"query_offset": 3}),  # and one query, below
        (_square(17), {"causal": True}),
        (_square(17), {"causal": False}),
        (Dense(_square(17)), {}),  # a Mask object, to which no default applies
        (np.ones((1, 1, 17, 21), bool) & (np.arange(21) <= np.arange(17)[:, None] + 4), {"query_offset": 4}),
    ],
)
def test_array_masks_that_do_not_warn(mask: Any, call: dict[str, Any]) -> None:
    q, k, v = _arrays(17)
    if call.get("query_offset") == 4:
        k, v = _arrays(21)[1:]
    if call.get("query_offset") == 3:
        q = q[:, :1]
    ATTEND(q, k, v, mask=mask, **call)  # warnings are errors here
    notes = ATTEND.plan(q, k, v, mask=mask, **call).notes
    assert not [note for note in notes if DEFAULT in note and not is_info(note)]


def test_declared_causality_is_no_default() -> None:
    q, k, v = _arrays(19)
    declared = Attention({"operation": "vanilla", "metadata": {"causal": True}})
    output = declared(q, k, v, mask=_square(19)).attention_outputs
    want = reference_attention(q, k, v, scale=0.5, mask=np.tril(_square(19))).output
    np.testing.assert_allclose(output, want, atol=2e-6)


def test_a_traced_array_mask_is_told_in_the_plan() -> None:
    x = jax.ShapeDtypeStruct((1, 8, 2, 4), np.float32)
    for mask, told in (
        (_square(8), True),
        (np.tril(_square(8)), False),
        (jax.ShapeDtypeStruct((1, 1, 8, 8), bool), True),
    ):
        assert any(DEFAULT in note for note in ATTEND.plan(x, x, x, mask=mask).notes) == told
    one = jax.ShapeDtypeStruct((1, 1, 1, 8), bool)
    (note,) = [note for note in ATTEND.plan(x, x, x, mask=one).notes if DEFAULT in note]
    assert is_info(note)
    seen: list[str] = []
    x = np.ones((1, 8, 2, 4), np.float32)
    jax.jit(lambda m: seen.extend(ATTEND(x, x, x, mask=m).plan.notes))(_square(8))  # type: ignore[union-attr]
    assert any(DEFAULT in note for note in seen)
