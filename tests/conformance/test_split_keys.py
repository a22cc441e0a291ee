"""Every way to split a sequence, around every kernel, under every kind of mask: tiles that lie elsewhere are found.

Each device has several blocks of keys, so that a list of tiles that leaves some out gives wrong rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from covering import covering

from attnops import (
    Causal,
    Chunked,
    Dense,
    Full,
    Mask,
    MaskFunction,
    Positions,
    Prefix,
    SegmentIds,
    SlidingWindow,
    register_mask_function,
)
from attnops.masks import Lengths

from . import harness
from .cases import Case

KV, Q, BATCH, SHARDS = 1024, 300, 2, 4
RNG = np.random.default_rng(3)
IDS = np.sort(RNG.integers(0, 5, (BATCH, KV)), axis=1).astype(np.int32)
LENGTHS = np.array([700, 1000], np.int32)
DENSE = RNG.random((BATCH, 1, KV, KV)) < 0.3


@register_mask_function("split_keys_stripes")
def _stripes(position: Any, key: Any) -> Any:
    return (key <= position) & ((position - key) % 400 < 200)


class Kind(NamedTuple):
    """A mask, and the same by hand for positions [q, 1], keys [kv] and the rows [q] of the arrays that have rows."""

    make: Callable[[np.ndarray], Mask]
    seen: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _static(mask: Mask, seen: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Kind:
    return Kind(lambda rows: mask, lambda i, j, rows: seen(i, j))


KINDS: dict[str, Kind] = {
    "full": _static(Full(), lambda i, j: (i - i) == (j - j)),
    "causal": _static(Causal(), lambda i, j: j <= i),
    "window": _static(Causal() & SlidingWindow(400, 0), lambda i, j: (j <= i) & (j >= i - 400)),
    "window_of_few": _static(SlidingWindow(90, 20), lambda i, j: (j >= i - 90) & (j <= i + 20)),
    "chunked": _static(Causal() & Chunked(192), lambda i, j: (j <= i) & (j // 192 == i // 192)),
    "prefix": _static(Causal() & (Prefix(150) | SlidingWindow(64, 0)), lambda i, j: (j <= i) & ((j < 150) | (j >= i - 64))),
    "not_causal": _static(~Causal(), lambda i, j: j > i),
    "not_window": _static(~SlidingWindow(300, 100), lambda i, j: ~((j >= i - 300) & (j <= i + 100))),
    "or": _static(Prefix(70) | Chunked(256) & ~Causal(), lambda i, j: (j < 70) | (j // 256 == i // 256) & (j > i)),
    "explicit_offset": Kind(
        lambda rows: Causal(offset=-200), lambda i, j, rows: j <= np.arange(len(rows))[:, None] - 200
    ),
    "mask_function": _static(MaskFunction("split_keys_stripes"), lambda i, j: (j <= i) & ((i - j) % 400 < 200)),
    "segment_ids": Kind(
        lambda rows: Causal() & SegmentIds(IDS[:, rows], IDS),
        lambda i, j, rows: (j <= i) & (IDS[:, None, rows, None] == IDS[:, None, None, :]),
    ),
    "lengths": Kind(
        lambda rows: SlidingWindow(500, 200) & Lengths(LENGTHS),
        lambda i, j, rows: (j >= i - 500) & (j <= i + 200) & (j < LENGTHS[:, None, None, None]),
    ),
    "positions": Kind(
        lambda rows: Positions(np.tile(3 * rows, (BATCH, 1)), np.tile(2 * np.arange(KV), (BATCH, 1)), left=300),
        lambda i, j, rows: (2 * j <= 3 * rows[:, None]) & (2 * j >= 3 * rows[:, None] - 300),
    ),
    "dense": Kind(
        lambda rows: Causal() & Dense(DENSE[:, :, rows]), lambda i, j, rows: (j <= i) & DENSE[:, :, rows]
    ),
    "dynamic_or": Kind(
        lambda rows: Causal() & (SegmentIds(IDS[:, rows], IDS) | Prefix(100)),
        lambda i, j, rows: (j <= i) & ((IDS[:, None, rows, None] == IDS[:, None, None, :]) | (j < 100)),
    ),
}  # fmt: skip

# (queries, what is declared, what the call says): whole queries against split keys, or both split.
SPLIT_KEYS = {"decode_key_sequence_axis": "sp", "decode_query_sequence_axis": None}
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "split_kv": (Q, {"sequence_parallel": "ring", "partition_axis": SPLIT_KEYS}, {"mode": "insert"}),
    "split_kv_early": (Q, {"sequence_parallel": "ring", "partition_axis": SPLIT_KEYS}, {"mode": "insert", "query_offset": 130}),
    "split_kv_traced": (
        Q,
        {"sequence_parallel": "ring", "partition_axis": SPLIT_KEYS},
        {"mode": "insert", "query_offset": np.array([130, 600], np.int32)},
    ),
    "split_kv_few": (8, {"sequence_parallel": "ring", "partition_axis": SPLIT_KEYS}, {"mode": "insert"}),
    "split_kv_train": (KV, {"sequence_parallel": "ring", "partition_axis": {"query_sequence_axis": None}}, {}),
    "gather": (KV, {"sequence_parallel": "gather"}, {}),
    "ring": (KV, {"sequence_parallel": "ring", "ring_order": "contiguous"}, {}),
    "zigzag": (KV, {"sequence_parallel": "ring", "ring_order": "zigzag"}, {}),
    "ulysses": (KV, {"sequence_parallel": "ulysses"}, {}),
}  # fmt: skip
# Rows that see later keys, which a zigzag ring is not for.
AHEAD = {"full", "window_of_few", "not_causal", "not_window", "or", "lengths", "positions"}
KERNELS = ("vanilla.forward_native blockwise", "splash.forward_tpu", "flash_attn2.forward_cuda")
# What `make test` runs; `make test-all` tries every kind of mask in every way, by turns around each kernel.
OFTEN = {
    ("split_kv_few", "splash.forward_tpu", "window"),
    ("split_kv_early", "splash.forward_tpu", "not_causal"),
    ("split_kv_traced", "flash_attn2.forward_cuda", "window"),
}


@pytest.mark.parametrize(
    ("way", "kernel", "kind"),
    [
        pytest.param(*key, id="-".join(key), marks=[] if key in OFTEN else [pytest.mark.slow])
        for key in covering(itertools.product(WAYS, KERNELS, KINDS), 2, OFTEN)
    ],
)
def test_split_keys(way: str, kernel: str, kind: str) -> None:
    q_len, fields, call = WAYS[way]
    mesh = jax.make_mesh((SHARDS,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:SHARDS])
    attend = harness.RUNNABLE[kernel].make("float32", mesh, tuning="off", **fields)
    # New queries stand at the end of what is filled of the cache.
    at_end = LENGTHS - q_len if kind == "lengths" and call.get("mode") == "insert" else KV - q_len
    offset = np.asarray(call.get("query_offset", at_end))
    rows = np.arange(q_len) + int(offset.flat[0])  # of arrays that have rows
    positions = np.arange(q_len)[:, None] + offset.reshape(-1, 1, 1, 1)
    seen = KINDS[kind].seen(positions if offset.ndim else positions[0, 0], np.arange(KV), rows)
    heads = 4 if way == "ulysses" else 2
    case = Case(
        kind,
        frozenset(),
        {"mask": KINDS[kind].make(rows), "return_lse": True, **call},
        seen,
        q_len=q_len,
        kv_len=KV,
        heads=heads,
        kv_heads=heads // 2 if way != "ulysses" else heads,
        batch=BATCH,
    )
    tensors = harness.draw(case, "float32")
    plan = attend.plan(*harness.handed_over(case, tensors, "float32", "bthd"), **case.call)
    if way == "zigzag" and kind in AHEAD:
        assert [r.code for r in plan.rejected[0].reasons] == ["ring.zigzag"]
        return
    assert plan.placement.sequence.strategy == ("split_kv" if "split_kv" in way else fields["sequence_parallel"])
    got = harness.run(attend, case, tensors, "float32", "bthd")
    published = harness.RUNNABLE[kernel].capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward, shards=True)
