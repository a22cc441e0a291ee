"""Scores as the bias of jax.nn's attention: those that only add to logits, with the bytes told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_cases import BATCH, DIM, HEADS, LENGTH, cases, check, inputs

from attnops import OperationMetadata, OperationRegistry

CASES = cases(LENGTH)
ADDING = ("alibi", "slopes", "t5", "clip", "forgetting", "distance", "swin", "sam")


def _operation(**metadata: Any) -> Any:
    return OperationRegistry.create("sdpa", OperationMetadata(fallback="error", **metadata))


@pytest.mark.parametrize("name", ADDING)
@pytest.mark.parametrize("split", [False, True])
def test_outputs_and_gradients(name: str, split: bool) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("sp", "tp", "dp")) if split else None
    check(CASES[name], _operation(mesh=mesh), LENGTH, kv_heads=HEADS)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ADDING])
def test_what_does_more_is_refused(name: str) -> None:
    plan = _operation().plan(*inputs(), score=CASES[name].score, causal=True)
    codes = {reason.code for rejected in plan.rejected for reason in rejected.reasons}
    assert plan.implementation is None
    assert codes & {"sdpa.score", "feature.logits_soft_cap"}


@pytest.mark.parametrize(
    ("name", "platform", "size"),
    [
        ("alibi", "cpu", 4 * HEADS * LENGTH**2),
        ("alibi", "cuda", 2 * HEADS * LENGTH**2),
        ("distance", "cpu", 4 * LENGTH**2),
        ("forgetting", "cpu", 4 * BATCH * HEADS * LENGTH**2),
    ],
)
def test_the_plan_says_the_bytes_of_the_bias(name: str, platform: str, size: int) -> None:
    case = CASES[name]
    q = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, DIM), jnp.bfloat16)
    plan = _operation(platform=platform, runtime_dtype="bfloat16").plan(q, q, q, score=case.score, causal=True)
    (told,) = (note for note in plan.notes if getattr(note, "code", "") == "score.bias_bytes")
    assert told.values["size"] == size
    bias = 1 if name == "distance" else HEADS
    assert told.values["shape"] == (BATCH if name == "forgetting" else 1, bias, LENGTH, LENGTH)
    assert np.prod(told.values["shape"]) * (2 if platform == "cuda" else 4) == size
