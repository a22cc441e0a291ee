"""Scores in the kernels in Mosaic GPU over pages, in Pallas' interpreter with its races, against the float64 reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from paged_batches import PagedCase

from attnops import (
    ALiBi,
    Clip,
    Distance,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SoftCap,
    Temperature,
    register_score_function,
)
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.scores import PositionTemperature

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from mosaic_pages_runs import SEQUENCES, SIZES, expect_scored, run, with_score
from test_page_stride import joined


@register_score_function("tests.hopper_pages.gated")
def _gated(x: Any, batch: Any, head: Any, q: Any, kv: Any, gain: Any) -> Any:
    head, ahead = head.astype(x.dtype), (q - kv).astype(x.dtype)
    return x * jnp.tanh(gain) + 0.01 * head * ahead


@register_score_function("tests.hopper_pages.root")
def _root(distance: Any) -> Any:
    return -0.1 * jnp.sqrt(jnp.abs(distance).astype(jnp.float32))


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


BF16: dict[str, Any] = {"dtype": "bfloat16", "page": 16}
OF_HEADS = np.random.default_rng(4).uniform(0.1, 1.0, 4).astype(np.float32)
# Logits of several scores; rows of several tokens, whose heads differ, and devices that have every other page.
CASES = {
    "alibi": (ALiBi(), "split", PagedCase("long", (4, 2), cap=3.0, **BF16)),
    "slopes": (ALiBi(OF_HEADS), "heads", PagedCase("mixed", (4, 1), window=(50, 0), **BF16)),
    "temperature": (Temperature(OF_HEADS), "packed", PagedCase("speculate", (4, 2), tree=3, sinks=True, **BF16)),
    "position": (
        PositionTemperature(4.0, 0.3), "split", PagedCase("mixed", (4, 2), spans=True, dtype="float16", page=16)
    ),
    "distance": (Distance("tests.hopper_pages.root"), "joined", PagedCase("decode", (4, 2), **BF16)),
    "function": (
        ScoreFunction("tests.hopper_pages.gated", {"gain": (OF_HEADS, ("heads",))}),
        "interleaved",
        PagedCase("mixed", (4, 2), **BF16),
    ),
    "buckets": (RelativeBias(_numbers(32, 4)), "split", PagedCase("mixed", (4, 2), **BF16)),
    "tables": (
        RelativeBias(_numbers(34, 4), Clip(30, 3)) >> ALiBi() >> RelativeBias(_numbers(9, 4), Clip(4, 4)),
        "heads",
        PagedCase("speculate", (4, 1), sinks=True, **BF16),
    ),
    "grid": (
        RelativeBias2D(grid=(20, 16), table=_numbers(39 * 31, 4)), "joined", PagedCase("decode", (4, 2), cap=3.0, **BF16)
    ),
    "chain": (
        SoftCap(3.0) >> ALiBi() >> SoftCap(9.0), "latent", PagedCase("decode", (4, 1), (128, 64), latent=True, **BF16)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["distance", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "distance")]
)
@pytest.mark.parametrize("generation", ["hopper", pytest.param("blackwell", marks=pytest.mark.slow)])
def test_agrees_with_the_reference(generation: str, name: str) -> None:
    score, layout, case = CASES[name]
    arrays = batches.make(case, SEQUENCES[case.kind], spare=1)
    got = run(case, arrays, layout, generation=generation, **with_score(score))
    batches.agree(case, got, expect_scored(score, case, arrays))
    plain = batches.expect(case, arrays)
    assert (
        np.nanmax(np.abs(plain.output - expect_scored(score, case, arrays).output)) > 0.05
    )  # the score changes something


@pytest.mark.slow
@pytest.mark.parametrize("generation", SIZES)
def test_positions_that_are_given(generation: str) -> None:
    """Not the tokens' places; the mask is by these."""
    score, case = SoftCap(4.0) >> PositionTemperature(4.0, 0.3), PagedCase("mixed", (4, 2), **BF16)
    arrays = batches.make(case, SEQUENCES["mixed"], spare=1)
    arrays["q_positions"] = np.random.default_rng(7).integers(0, 60, len(arrays["query"]), np.int32)
    got = run(case, arrays, generation=generation, **with_score(score))
    batches.agree(case, got, expect_scored(score, case, arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "kind"), [("hopper", "decode"), ("hopper", "mixed"), ("blackwell", "mixed")])
def test_pages_of_a_sequence_on_several_devices(generation: str, kind: str) -> None:
    """Every other page is another device's, so that a key isn't where it is counted; heads begin after those of others."""
    score, _, case = CASES["function"]
    case = batches.varied(case, kind=kind)
    arrays = batches.make(case, SEQUENCES[kind], spare=1)
    of = {"generation": generation} | with_score(score)
    one = lambda case, part, **more: run(case, part, **of, **more)  # noqa: E731
    batches.agree(case, joined(case, arrays, 2, one), expect_scored(score, case, arrays))
