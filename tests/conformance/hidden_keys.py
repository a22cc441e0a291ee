"""Masks that hide some keys from every query: each as arguments of a call, and written out."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnops import (
    Blocks,
    Causal,
    Chunked,
    Dense,
    Mask,
    MaskFunction,
    Positions,
    Prefix,
    SegmentIds,
    SlidingWindow,
    register_mask_function,
)
from attnops.masks import Lengths

BATCH, HEADS, Q, KV = 4, 8, 48, 160
row, col = np.arange(Q)[:, None], np.arange(KV)[None, :]
RNG = np.random.default_rng(5)
LENGTHS, STARTS = np.array([130, 0, 77, 160], np.int32), np.array([0, 5, 77, 20], np.int32)
Q_IDS, KV_IDS = (RNG.integers(0, 6, (BATCH, n)).astype(np.int32) for n in (Q, KV))
Q_IDS[:, 3], KV_IDS[0] = 9, 7  # a query whose id no key has, a row whose keys' id no query has
Q_IDS[Q_IDS == 2] = 1
OFFSETS = np.array([0, 31, 90, 112], np.int32)
POSITIONS = tuple(RNG.permutation(KV)[None, :n].repeat(BATCH, 0).astype(np.int32) for n in (Q, KV))
DENSE = RNG.random((BATCH, HEADS, Q, KV)) < 0.05
DENSE[0, :, 4], DENSE[1] = False, False
PADDING = RNG.random((BATCH, 1, 1, KV)) < 0.6
LAYOUT = RNG.random((HEADS, -(-Q // 16), -(-KV // 20))) < 0.3
LAYOUT[:, :, 4] = False
CHOICE = RNG.integers(-1, 7, (BATCH, HEADS // 2, -(-Q // 8), 2)).astype(np.int32).repeat(2, 1)
CHOSEN = (CHOICE[..., None, :] == np.arange(10)[:, None]).any(-1)[:, :, row // 8, col // 16]


@register_mask_function("hidden_keys_stripes")
def _stripes(position: Any, key: Any) -> Any:
    return (key <= position) & (key % 5 != 2)


Kind = tuple[dict[str, Any], np.ndarray]


def _static(mask: Mask, seen: np.ndarray, **call: Any) -> Kind:
    return {"mask": mask, "query_offset": 0} | call, seen[None, None]


def _rows(x: np.ndarray) -> np.ndarray:
    """Numbers of batch rows, beside [batch, heads, q, kv]."""
    return x[:, None, None, None]


SAME_ID = (Q_IDS[:, :, None] == KV_IDS[:, None, :])[:, None]
NEAR = (POSITIONS[1][:, None, :] <= POSITIONS[0][:, :, None]) & (
    POSITIONS[1][:, None, :] >= POSITIONS[0][:, :, None] - 9
)
ALL = np.ones((1, 1, Q, KV), bool)
# The call's arguments beside q, k and v, and the same mask written out.
KINDS: dict[str, Kind] = {
    "causal": _static(Causal(), col <= row),
    "causal_later": _static(Causal(), col <= row + 70, query_offset=70),
    "window": _static(SlidingWindow(20, 3), (col >= row + 60) & (col <= row + 83), query_offset=80),
    "two_windows": _static(SlidingWindow(20, 3) & SlidingWindow(9, 30, offset=5), (col >= row - 4) & (col <= row + 3)),
    "no_window": _static(SlidingWindow(2, 0) & Causal(offset=-9), ALL[0, 0] & False),
    "chunked": _static(Causal() & Chunked(48), (col <= row + 48) & (col // 48 == (row + 48) // 48), query_offset=48),
    "prefix": _static(Prefix(37), (col < 37) & (row == row)),
    "prefix_or": _static(Prefix(37) | SlidingWindow(5, 0), (col < 37) | ((col >= row + 75) & (col <= row + 80)), query_offset=80),
    "negated": _static(~Causal(), col > row),
    "mask_function": _static(MaskFunction("hidden_keys_stripes"), (col <= row + 90) & (col % 5 != 2), query_offset=90),
    "kv_lengths": ({"causal": False, "kv_lengths": LENGTHS}, ALL & (col < _rows(LENGTHS))),
    "kv_starts": (
        {"causal": False, "kv_lengths": LENGTHS, "kv_starts": STARTS},
        ALL & (col < _rows(LENGTHS)) & (col >= _rows(STARTS)),
    ),
    "lengths_and_causal": (
        {"mask": Causal(), "kv_lengths": LENGTHS, "query_offset": 100},
        (col < _rows(LENGTHS)) & (col <= row + 100),
    ),
    "lengths_and_chunks": (
        {"mask": Chunked(32), "kv_lengths": LENGTHS, "query_offset": 64},
        (col < _rows(LENGTHS)) & (col // 32 == (row + 64) // 32),
    ),
    "offsets": (
        {"mask": SlidingWindow(9, 2), "query_offset": OFFSETS},
        (col >= row + _rows(OFFSETS) - 9) & (col <= row + _rows(OFFSETS) + 2),
    ),
    "segment_ids": ({"causal": False, "q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS}, SAME_ID),
    "segments_and_causal": (
        {"mask": Causal(), "q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS, "query_offset": 60},
        SAME_ID & (col <= row + 60),
    ),
    "positions": ({"mask": Positions(*POSITIONS, left=9)}, NEAR[:, None]),
    "dense": ({"mask": DENSE, "causal": False}, DENSE),
    "padding": ({"mask": PADDING, "causal": True, "query_offset": 90}, PADDING & (col <= row + 90)),
    "blocks": _static(Blocks(LAYOUT[0], 16, 20), LAYOUT[0][row // 16, col // 20]),
    "blocks_of_heads": ({"mask": Blocks(LAYOUT, 16, 20)}, LAYOUT[:, row // 16, col // 20][None]),
    "chosen_blocks": ({"mask": Blocks(CHOICE, 8, 16)}, CHOSEN),
    "dynamic_or": (
        {"mask": Prefix(11) | SegmentIds(Q_IDS, KV_IDS) & Lengths(LENGTHS)},
        (col < 11) | (SAME_ID & (col < _rows(LENGTHS))),
    ),
    "not_dense": ({"mask": ~Dense(~DENSE)}, DENSE),
}  # fmt: skip
