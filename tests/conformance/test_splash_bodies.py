"""Tiles of many units, of which splash's kernels leave out those that nobody sees: every case, each way to hold a tile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.sharding import virtual_mesh

from . import cases, harness

_SIZES = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), 512)
_UNITS = {f"{name}_compute": 128 for name in _SIZES}
WAYS: dict[str, dict[str, Any]] = {
    "plain": _SIZES | _UNITS,
    "two_heads": _SIZES | _UNITS | {"heads_per_tile": 2, "transposed_tiles": True, "products_ahead": 2},
    "pipelined": _SIZES
    | _UNITS
    | {"transposed_tiles": True, "products_ahead": 3, "products_ahead_dkv": 2, "stationary_weights": True},
    "apart": _SIZES
    | _UNITS
    | {"use_fused_bwd_kernel": False, "block_q_dq": 256, "block_kv_dq": 512, "block_kv_dq_compute": 128},
}
QUICK = {
    ("gqa", "two_heads"),
    ("causal", "apart"),
    ("causal_window", "pipelined"),
    ("bias_broadcast", "plain"),
    ("segment_ids", "pipelined"),
}
LENGTH = 600  # two blocks, the second of which ends within a unit


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*key, marks=[] if key in QUICK else [pytest.mark.slow])
        for key in itertools.product(cases.names(), WAYS)
    ],
)
def test_every_feature(name: str, way: str) -> None:
    case = cases.build(name, "bthd", cases.Sizes(batch=1, length=LENGTH))
    metadata = OperationMetadata(
        runtime_dtype="float32", operation_configs={"splash": {"interpret": True} | WAYS[way]}, fallback="error"
    )
    attend = OperationRegistry.create("splash", metadata)
    tensors = harness.draw(case, "float32")
    q, k, v = harness.handed_over(case, tensors, "float32", "bthd")
    if attend.plan(q, k, v, **case.call).implementation != "splash.forward_tpu":
        pytest.skip("splash refuses it, or another route runs: test_features.py")
    got = harness.run(attend, case, tensors, "float32", "bthd")
    published = harness.RUNNABLE["splash.forward_tpu"].capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gather", "ring", "zigzag"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["causal", "causal_window", "chunked", "segment_ids"])
def test_devices_of_a_split_sequence(name: str, way: str, strategy: str) -> None:
    """Where a device's rows lie is known when the program runs: a tile takes the body of the mask's edge, or is masked."""
    case = cases.build(name, "bthd", cases.Sizes(batch=1, length=1024))
    smaller = {size: 256 for size in (*_SIZES, "block_q_dq", "block_kv_dq") if size in WAYS[way]}
    fields: dict[str, Any] = {"sequence_parallel": "ring" if strategy == "zigzag" else strategy}
    if strategy == "ring":
        fields["ring_order"] = "contiguous"
    metadata = OperationMetadata(
        runtime_dtype="float32",
        mesh=virtual_mesh({"sp": 2}),
        operation_configs={"splash": {"interpret": True} | WAYS[way] | smaller},
        fallback="error",
        **fields,
    )
    attend = OperationRegistry.create("splash", metadata)
    tensors = harness.draw(case, "float32")
    got = harness.run(attend, case, tensors, "float32", "bthd")
    published = harness.RUNNABLE["splash.forward_tpu"].capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward, shards=True)
