"""Passes with different blocks, over lengths that are multiples of none: each pads the others' rows."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from attnops import Causal, ConfigError, Full, OperationMetadata, OperationRegistry, SlidingWindow

from . import harness
from .cases import Case


def _case(mask: Any, visible: np.ndarray, q_len: int, kv_len: int, **call: Any) -> Case:
    return Case(
        name="",
        features=frozenset(),
        call={"mask": mask, **call},
        mask=visible,
        q_len=q_len,
        kv_len=kv_len,
        heads=2,
        kv_heads=1,
        batch=1,
    )


def _grid(q: int, kv: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(q)[:, None], np.arange(kv)[None, :]


ROWS, KEYS = _grid(300, 300)
MASKS = {
    "causal": (Causal(), ROWS >= KEYS),
    "full": (Full(), np.ones_like(ROWS >= KEYS)),
    "window": (SlidingWindow(10, 10), abs(ROWS - KEYS) <= 10),
}
# The others are for `make test-all`.
CAUSAL_OFTEN = ["causal", *(pytest.param(name, marks=pytest.mark.slow) for name in MASKS if name != "causal")]
OFTEN_SUMMED = (("causal", "head_dim_minor", False), ("window", "seq_minor", False), ("causal", "head_dim_minor", True))
OF_JAX = {
    "q_dkv": {"block_q": 128, "block_kv": 128, "block_q_dkv": 256, "block_q_dq": 128},
    "q_both": {"block_q": 128, "block_kv": 128, "block_q_dkv": 256, "block_q_dq": 256},
    "q_small": {"block_q": 64, "block_kv": 128},
    "q_tiny": {"block_q": 8},
    "fused": {"block_q": 128, "block_q_dkv": 256, "block_kv": 128, "use_fused_bwd_kernel": True},
    "kv": {"block_q": 128, "block_kv": 128, "block_kv_dkv": 256, "block_kv_dq": 128},
    "compute": {"block_kv": 256, "block_kv_compute": 128, "block_kv_dkv": 128},
}
OF_TOKAMAX = {
    "q_dkv": {"block_q": 128, "block_kv": 128, "block_q_dkv": 256},
    "q_tiny": {"block_q": 8},
    "kv": {"block_q": 128, "block_kv": 128, "block_kv_dkv": 256, "block_kv_dkv_compute": 128},
    "compute": {"block_kv": 256, "block_kv_compute": 128, "block_kv_dkv": 128},
    "natural": {"block_kv": 128, "use_base2_exp": False, "fuse_reciprocal": False},
    "layouts": {
        "block_q": 128,
        "block_kv": 128,
        "q_layout": "seq_minor",
        "k_layout": "seq_minor",
        "v_layout": "seq_minor",
    },
}
BLOCKS = {
    "q_dkv": {"block_q": 128, "block_kv": 128, "block_q_dkv": 256, "block_q_dq": 128, "block_kv_dq": 256},
    "fused": {"block_q": 128, "block_q_dkv": 256, "block_kv": 128, "block_kv_dkv": 256, "use_fused_bwd_kernel": True},
    "parts": {"block_q": 128, "block_kv_dkv": 128, "block_kv_dkv_sums": 128},
    "parts_of_two": {"block_q_dkv": 256, "block_kv_dkv": 128, "block_kv_dkv_sums": 256, "heads_per_tile": 2},
    "compute": {
        "block_q": 256,
        "block_kv": 384,
        "block_kv_compute": 128,
        "block_kv_dkv": 256,
        "block_kv_dkv_compute": 128,
    },
    "compute_in": {"block_kv": 256, "block_kv_compute": 256, "block_kv_compute_in": 128, "use_fused_bwd_kernel": False},
    "natural": {"block_kv": 128, "use_base2_exp": False, "fuse_reciprocal": False},
    "layouts": {"block_q": 128, "q_layout": "seq_minor", "k_layout": "seq_minor", "v_layout": "seq_minor"},
    "pipelined": {
        "block_q": 256,
        "block_q_compute": 128,
        "block_kv": 256,
        "block_kv_compute": 128,
        "transposed_tiles": True,
        "products_ahead": 2,
        "block_q_dkv_compute": 128,
        "block_kv_dkv": 256,
        "block_kv_dkv_compute": 128,
        "products_ahead_dkv": 3,
    },
    "layouts_dq": {
        "q_layout": "seq_minor",
        "k_layout": "seq_minor",
        "use_fused_bwd_kernel": False,
        "block_kv_dq": 256,
        "block_kv_dq_compute": 128,
    },
    "two_heads": {"block_q": 128, "block_kv": 128, "heads_per_tile": 2},
    "four_heads": {"block_q": 128, "block_kv": 128, "heads_per_tile": 4, "use_fused_bwd_kernel": False},
}
SHARED = {
    "attnops": BLOCKS["q_dkv"],
    "jax": OF_JAX["kv"] | {"kernel": "jax"},
    "jax_q": OF_JAX["q_both"] | {"kernel": "jax"},
    "tokamax": OF_TOKAMAX["kv"] | {"kernel": "tokamax", "block_q_dkv": 256},
}
EACH_KERNEL = [
    pytest.param(
        blocks,
        id=name,
        marks={"tokamax": [harness.NEEDS_TOKAMAX], "jax_q": [pytest.mark.slow]}.get(name, []),
    )
    for name, blocks in SHARED.items()
]


def _often(choices: dict[str, dict[str, Any]], *names: str) -> list[Any]:
    """All of them; those that are not named for `make test-all` only."""
    return [
        pytest.param(blocks, id=name, marks=[] if name in names else [pytest.mark.slow])
        for name, blocks in choices.items()
    ]


# Those that the tests below it don't have, in `make test`.
@pytest.mark.parametrize(
    "blocks", _often(BLOCKS, "q_dkv", "parts_of_two", "compute", "pipelined", "natural", "layouts", "four_heads")
)
@pytest.mark.parametrize("name", CAUSAL_OFTEN)
def test_blocks(name: str, blocks: dict[str, Any]) -> None:
    case = _case(*MASKS[name], 300, 300)
    _check(replace(case, heads=4, kv_heads=2), blocks)


@pytest.mark.parametrize(
    ("blocks", "stationary"),
    [
        pytest.param(*key, marks=[] if key in (("fused", False), ("layouts_dq", False)) else [pytest.mark.slow])
        for key in itertools.product(("q_dkv", "fused", "layouts", "layouts_dq", "two_heads"), (False, True))
    ],
)
def test_products_with_either_factor_in_the_matrix_unit(blocks: str, stationary: bool) -> None:
    case = replace(_case(*MASKS["causal"], 300, 300), heads=4, kv_heads=2)
    _check(case, BLOCKS[blocks] | {"stationary_weights": stationary})


@pytest.mark.parametrize(
    ("name", "layout", "transposed"),
    [
        pytest.param(*key, marks=[] if key in OFTEN_SUMMED else [pytest.mark.slow])
        for key in itertools.product(MASKS, ("head_dim_minor", "seq_minor"), (False, True))
    ],
)
def test_sums_by_the_product_with_the_values(name: str, layout: str, transposed: bool) -> None:
    case = replace(_case(*MASKS[name], 300, 300), value_dim=48 if transposed else 128)
    blocks = {"block_kv": 256, "block_kv_compute_in": 128, "transposed_tiles": transposed}
    _check(case, blocks | {"sum_by_product": True, "v_layout": layout})


def test_sums_by_product_refuse_what_they_can_not_do() -> None:
    configs = {"splash": {"interpret": True, "sum_by_product": True}}
    attend = OperationRegistry.create("splash", OperationMetadata(operation_configs=configs, fallback="error"))
    x = np.ones((1, 128, 2, 128), np.float32)
    drop = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.key(0)}
    for plan in (attend.plan(x, x, x[..., :64]), attend.plan(x, x, x, **drop)):
        assert [r.code for rejected in plan.rejected for r in rejected.reasons][:1] == ["splash.sum_by_product"]
    assert attend.plan(x, x, x).implementation == "splash.forward_tpu"


@pytest.mark.parametrize("blocks", _often(OF_JAX, "q_both", "fused"))
@pytest.mark.parametrize("name", CAUSAL_OFTEN)
def test_unequal_blocks(name: str, blocks: dict[str, Any]) -> None:
    _check(_case(*MASKS[name], 300, 300), blocks | {"kernel": "jax"})


@harness.NEEDS_TOKAMAX
@pytest.mark.parametrize("blocks", _often(OF_TOKAMAX, "q_dkv", "layouts"))
@pytest.mark.parametrize("name", CAUSAL_OFTEN)
def test_unequal_blocks_of_tokamax(name: str, blocks: dict[str, Any]) -> None:
    _check(_case(*MASKS[name], 300, 300), blocks | {"kernel": "tokamax"})


@harness.NEEDS_TOKAMAX
@pytest.mark.parametrize("name", ["lengths", "ids"])
def test_nothing_visible_but_a_sink(name: str) -> None:
    """Without padding either: tokamax 0.0.17 leaves out every tile here, and its own gradient of the sinks is NaN."""
    dead = {
        "lengths": {"kv_lengths": np.array([0], np.int32)},
        "ids": {"q_segment_ids": np.full((1, 256), 1, np.int32), "kv_segment_ids": np.full((1, 256), 7, np.int32)},
    }[name]
    sinks = np.array([0.3, -0.7], np.float32)
    case = _case(Full(), np.zeros((256, 256), bool), 256, 256, softmax_aux=sinks, **dead)
    case = replace(case, reference={"sinks": sinks}, differentiate=("softmax_aux",))
    _check(case, {"kernel": "tokamax", "block_q": 128, "block_kv": 128, "block_kv_dkv": 256, "block_q_dkv": 256})


@pytest.mark.parametrize("blocks", EACH_KERNEL)
def test_unequal_blocks_with_keys_that_nobody_sees(blocks: dict[str, Any]) -> None:
    i, j = _grid(100, 256)
    visible = (j <= i + 28) & (j >= i + 26)
    _check(_case(SlidingWindow(2, 0, offset=28), visible, 100, 256), blocks)


@pytest.mark.parametrize("blocks", EACH_KERNEL)
def test_unequal_blocks_with_a_row_without_keys(blocks: dict[str, Any]) -> None:
    lengths = np.array([0], np.int32)
    _check(_case(Full(), np.zeros((150, 150), bool), 150, 150, kv_lengths=lengths), blocks)


def _check(case: Case, blocks: dict[str, Any]) -> None:
    configs = {"splash": {"interpret": True, **blocks}}
    attend = OperationRegistry.create("splash", OperationMetadata(operation_configs=configs, fallback="error"))
    tensors = harness.draw(case, "float32")
    got = harness.run(attend, case, tensors, "float32", "bthd")
    published = harness.RUNNABLE["splash.forward_tpu"].capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_kv": None, "block_kv_compute": 256}, "block_kv=128 is not a multiple of block_kv_compute=256"),
        ({"kernel": "jax", "block_q": 64, "q_layout": "seq_minor"}, "q_layout='seq_minor' wants"),
        ({"block_kv_compute": 256, "block_kv_compute_in": 384}, "not a multiple of block_kv_compute_in=384"),
        ({"kernel": "jax", "heads_per_tile": 1}, "can't be carried by kernel='jax'"),
        ({"kernel": "tokamax", "use_fused_bwd_kernel": False}, "whose backward is the fused one"),
        ({"block_kv_dq_compute": 256, "block_kv_dq": 384}, "not a multiple of block_kv_dq_compute=256"),
    ],
)
def test_blocks_that_can_not_work_together(config: dict[str, Any], message: str) -> None:
    x = np.ones((1, 1024, 2, 16), np.float32)

    def declared_and_planned() -> None:
        metadata = OperationMetadata(operation_configs={"splash": {"interpret": True, **config}})
        OperationRegistry.create("splash", metadata).plan(x, x, x)

    with pytest.raises(ConfigError, match=message):
        declared_and_planned()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"heads_per_tile": 3}, "heads_per_tile=3 doesn't divide the 2 query heads .* wanted one of 1, 2"),
        (
            {"block_kv": None, "block_kv_compute_in": 384},
            "block_kv_compute=128 is not a multiple of block_kv_compute_in=384",
        ),
        ({"kernel": "jax", "block_q": 1000, "block_q_dkv": 896, "block_q_dq": 1152}, "share no small multiple"),
    ],
)
def test_blocks_that_do_not_work_with_the_call_are_a_reason(config: dict[str, Any], message: str) -> None:
    x = np.ones((1, 1024, 2, 16), np.float32)
    configs = {"splash": {"interpret": True, **config}}
    for fallback, method in (("error", None), ("allow", "forward_native")):
        metadata = OperationMetadata(operation_configs=configs, fallback=fallback)
        plan = OperationRegistry.create("splash", metadata).plan(x, x, x)
        assert plan.method == method
        (reason,) = plan.rejected[0].reasons
        assert (reason.code, reason.field) == ("config", "operation_configs")
        assert re.search(message, reason.message)
        assert "leave them out" in reason.hint


def test_a_lone_compute_block_draws_the_others_after_it() -> None:
    x = np.ones((1, 512, 2, 16), np.float32)
    configs = {"splash": {"interpret": True, "block_kv_dkv_compute": 384}}
    plan = OperationRegistry.create("splash", OperationMetadata(operation_configs=configs)).plan(x, x, x)
    assert plan.config.block_kv_dkv == 768
    configs["splash"]["kernel"] = "jax"
    plan = OperationRegistry.create("splash", OperationMetadata(operation_configs=configs)).plan(x, x, x)
    assert (plan.config.block_kv, plan.config.block_kv_dkv) == (384, 384)
    assert plan.padding.kv_len == 256


def test_a_fed_block_size_is_named() -> None:
    x = np.ones((1, 512, 2, 16), np.float32)
    with pytest.raises(ConfigError, match="blocksize_q=100 can't feed the config of splash"):
        OperationRegistry.create("splash", OperationMetadata(blocksize_q=100)).plan(x, x, x)
