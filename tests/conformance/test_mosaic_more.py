"""The kernels in Mosaic GPU in Pallas' interpreter: head dims, sizes of tiles, features together, hidden keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from attnops import Blocks, Causal, Chunked, Full, Mask, SlidingWindow
from attnops.operators.flash.kernel.tile_schedule import tile_schedule
from attnops.operators.kernels.local_mask import Dropout, LocalMask, dropout_seed
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

from . import cases, harness
from .span_cases import segments

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: the interpreter of {JAX_NEEDED} looks for races", allow_module_level=True)

SIZES = cases.Sizes(batch=1, heads=2, kv_heads=1, length=80)
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("generation", harness.MOSAIC)]


def _check(generation: str, case: cases.Case, dim: int = cases.DIM, hidden: slice | None = None, **config: Any) -> None:
    dtype, layout, kernel = "bfloat16", "bthd", harness.MOSAIC[generation]
    attend = kernel._replace(config=(kernel.config or {}) | config).make(dtype)
    tensors = harness.draw(case, dtype, dim)
    want = harness.expect(case, tensors, dim)
    if hidden is not None:
        key, value = tensors.key.copy(), tensors.value.copy()
        key[:, hidden], value[:, hidden] = np.nan, np.inf
        tensors = tensors._replace(key=key, value=value)
    plan = attend.plan(*harness.handed_over(case, tensors, dtype, layout), layout=layout, **case.call)
    assert plan.method == f"forward_{generation}", plan.rejected
    published = kernel.capability.tolerance[dtype]
    harness.agree(harness.run(attend, case, tensors, dtype, layout), want, published.forward, published.backward)


@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (128, 128), (96, 128), (80, 48), (192, 128), (64, 256), (256, 256)], ids=str
)
def test_head_dims(generation: str, dims: tuple[int, int]) -> None:
    case = cases.build("causal_window", "bthd", SIZES)
    case.heads = case.kv_heads = 1
    case.value_dim = dims[1]
    alone: dict[str, int] = {}
    if generation == "blackwell":  # what tensor memory and shared memory hold
        alone |= {"block_q": 128} if dims[1] > 128 else {}
        alone |= {"num_stages_dkv": 1, "num_stages_dq": 1} if sum(dims) > 384 else {}
    _check(generation, case, dims[0], **alone)


TILES = {
    "hopper": (
        {"block_q": 64, "block_q_dq": 64, "block_kv_dkv": 128, "block_q_dkv": 128},
        {"block_kv": 128, "block_kv_dq": 128, "block_kv_dkv": 128, "num_stages": 2, "num_stages_dkv": 3},
    ),
    "blackwell": (
        {
            "block_q": 128,
            "num_stages": 2,
            "block_q_dkv": 128,
            "num_stages_dkv": 1,
            "block_kv_dq": 128,
            "num_stages_dq": 1,
        },
        {"block_kv": 128, "num_stages": 2, "num_stages_dkv": 4, "num_stages_dq": 1},
    ),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["causal_window", "segment_ids", "chosen_blocks"])
def test_tiles(generation: str, name: str, which: int) -> None:
    _check(generation, cases.build(name, "bthd", replace(SIZES, length=200)), **TILES[generation][which])


@pytest.mark.parametrize("rows", [128, 256])
def test_weights_in_the_place_of_their_logits(generation: str, rows: int) -> None:
    """Where tensor memory has no more room: 128 keys, and values of 128 numbers for 256 rows, of 256 for 128."""
    if generation != "blackwell":
        pytest.skip("logits are in registers")
    case = cases.build("causal_window", "bthd", replace(SIZES, length=300))
    case.heads = case.kv_heads = 1
    case.value_dim = 32768 // rows
    _check(generation, case, 64, block_q=rows, block_kv=128)


def _together(sizes: cases.Sizes) -> cases.Case:
    rng, length = np.random.default_rng(3), sizes.length
    ids = np.sort(rng.integers(0, 3, (1, length)), axis=1).astype(np.int32)
    places = np.arange(length)
    seen = (places <= places[:, None]) & (places >= places[:, None] - 40) & (ids[0] == ids[0][:, None])
    seen = seen & (places < length - 9)
    call = {
        "mask": Causal() & SlidingWindow(left=40, right=None), "q_segment_ids": ids, "kv_segment_ids": ids,
        "kv_lengths": np.array([length - 9], np.int32), "logits_soft_cap": 3.0, "return_lse": True,
        "softmax_aux": rng.standard_normal(sizes.heads).astype(np.float32),
    }  # fmt: skip
    reference = {"soft_cap": 3.0, "sinks": call["softmax_aux"]}
    return cases.Case(
        "together", frozenset(), call, seen[None, None], reference, ("softmax_aux",), length, length, sizes.heads,
        sizes.kv_heads, 1, cases.VALUE_DIM,
    )  # fmt: skip


def test_features_together(generation: str) -> None:
    _check(generation, _together(replace(SIZES, length=150)))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize(("mask", "kv_len"), [(Full(), 259), (Causal(), 1100)], ids=["padded", "causal"])
def test_few_tiles_have_a_mask(generation: str, mask: Mask, kv_len: int, soft_cap: float | None) -> None:
    """On Blackwell beside one softmax: all tiles are in one loop, and most of them hide nothing."""
    q_len, offset = 80, kv_len - 80 if isinstance(mask, Causal) else 0
    table = tile_schedule(LocalMask(mask, 0, q_len, kv_len, offset), 128, 32, "q", asks=True)
    assert (table.asked, table.some_full) == (True, False)
    seen = np.asarray(mask.test(*[np.arange(q_len)[:, None] + offset] * 2, np.arange(kv_len)[None]))
    seen = np.broadcast_to(seen, (q_len, kv_len))[None, None]
    call: dict[str, Any] = {"mask": mask, "query_offset": offset, "logits_soft_cap": soft_cap}
    case = cases.Case(
        "few", frozenset(), call, seen, {} if soft_cap is None else {"soft_cap": soft_cap}, (), q_len, kv_len, 2, 1, 1,
        cases.VALUE_DIM,
    )  # fmt: skip
    sizes = {"block_q": 128, "block_kv": 32} if generation == "blackwell" else {}
    _check(generation, case, **sizes)


@pytest.mark.parametrize(
    ("name", "dim"), [("gqa", cases.DIM), *(("causal_window", dim) for dim in (cases.DIM, 128, 160, 256))]
)
def test_dropout_is_the_same_everywhere(generation: str, name: str, dim: int) -> None:
    """A weight that another path keeps, or drops, changes its row by far more than the tolerance."""
    case, probability = cases.build(name, "bthd", SIZES), 0.3
    key = jax.random.key(3)
    of_all = Dropout(dropout_seed(key), probability, 0, 0, 0)
    keep = np.asarray(of_all.keep_all(case.batch, case.heads, case.q_len, slice(0, case.kv_len)))
    assert abs(keep.mean() - 0.7) < 0.02
    case.call |= {"dropout_prob": probability, "deterministic": False, "dropout_rng": key}
    case.reference |= {"keep": keep, "keep_probability": 1 - probability}
    _check(generation, case, dim)


def test_bias_and_score_together(generation: str) -> None:
    """A bias by head and key, one by query, and a score with a number for each row."""
    case, rng = cases.build("forgetting", "bthd", SIZES), np.random.default_rng(5)
    bias = rng.standard_normal((1, case.heads, 1, case.kv_len)).astype(np.float32)
    case.call |= {"bias": bias, "logits_soft_cap": 3.0}
    case.reference |= {"bias": bias, "soft_cap": 3.0}
    case.differentiate = (*case.differentiate, "bias")
    _check(generation, case)


def test_a_negative_scale(generation: str) -> None:
    """The highest product is then the lowest logit."""
    case = cases.build("causal_window", "bthd", replace(SIZES, length=200))
    case.call |= {"softmax_scale": -0.4}
    case.reference |= {"scale": -0.4}
    _check(generation, case)


def test_hidden_keys_may_hold_anything(generation: str) -> None:
    case = _together(SIZES)
    _check(generation, case, hidden=slice(SIZES.length - 9, None))


WINDOW = SlidingWindow(left=50, right=3)
LAYOUT = np.array([[True, False, True], [True, True, False], [True, False, True]])
SPANS: dict[str, Callable[[], cases.Case]] = {
    "rising": lambda: segments(["rising"], [Causal()]),
    "padded": lambda: segments(["padded"], [Causal()]),
    "padded_alone": lambda: segments(["padded"]),
    "unordered": lambda: segments(["unordered"], [Causal()]),
    "unordered_alone": lambda: segments(["unordered"]),
    "each": lambda: segments(["rising", "unordered"], [Causal()]),
    "absent": lambda: segments(["unordered", "padded"], absent=True),
    "whole_tiles": lambda: segments(["long", "long"], [Causal()], kv_len=256, q_len=256, lengths=[256, 211]),
    "window": lambda: segments(["rising", "unordered"], [WINDOW]),
    "chunks": lambda: segments(["padded", "unordered"], [Causal(), Chunked(48)]),
    "chunks_of_64": lambda: segments(["unordered", "long"], [Chunked(64)], lengths=[150, 80]),
    "lengths": lambda: segments(["unordered", "padded"], [Causal()], lengths=[77, 130]),
    "no_keys": lambda: segments(["unordered", "rising"], [WINDOW], lengths=[0, 150], return_lse=True),
    "window_of_each": lambda: segments(["unordered", "rising"], [Causal(), WINDOW], lengths=[140, 65]),
    "fewer_queries": lambda: segments(["rising", "unordered"], [Causal()], q_len=70, offsets=80),
    "offsets": lambda: segments(["padded", "unordered"], [Causal(), Chunked(48)], q_len=70, offsets=[80, 11]),
    "offsets_before": lambda: segments(
        ["unordered", "rising"], [WINDOW], q_len=100, offsets=[-40, 90], return_lse=True
    ),
    "more_queries": lambda: segments(["rising", "unordered"], [Causal()], kv_len=70),
    "more_queries_in_chunks": lambda: segments(["rising"], [Chunked(48)], kv_len=70, offsets=-20),
    "groups": lambda: segments(["unordered", "padded"], [Causal(), WINDOW], heads=(4, 1)),
    "either": lambda: segments(["rising", "unordered"], [WINDOW], either=True, lengths=[150, 99]),
    "blocks": lambda: segments(["rising", "unordered"], [Causal(), Blocks(LAYOUT, 64, 64)], lengths=[150, 131]),
    "smaller_blocks": lambda: segments(["unordered", "padded"], [Blocks(LAYOUT.repeat(4, 1), 64, 16)]),
    "cap": lambda: segments(["unordered", "padded"], [Causal()], logits_soft_cap=3.0),
}


@pytest.mark.parametrize("name", SPANS)
def test_spans(generation: str, name: str) -> None:
    """Each row of a batch visits its tiles by its own kind of ids."""
    case = SPANS[name]()
    if "logits_soft_cap" in case.call:
        case.reference["soft_cap"] = case.call["logits_soft_cap"]
    _check(generation, case)


def test_lengths_of_more_than_all_keys_and_of_less_than_none(generation: str) -> None:
    """Lengths that are known only at run time aren't refused."""
    case = segments(["rising", "unordered"], [WINDOW], lengths=[-(2**31), 2**31 - 1], return_lse=True)
    dtype, kernel = "bfloat16", harness.MOSAIC[generation]
    tensors, published = harness.draw(case, dtype), kernel.capability.tolerance[dtype]
    got = harness.run(kernel.make(dtype), case, tensors, dtype, "bthd")
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)
