"""What each device has to work on, hop by hop: weights in tiles that may be live, by the mask and its tokens' positions."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from ..masks import Mask
from ..planning import PassSizes, Plan

__all__ = ["VisibleBlocks", "kernels_of_pass", "visible_blocks"]

_MAX_BLOCKS = 2048  # per side; beyond that several blocks are treated as one


class VisibleBlocks(NamedTuple):
    """Weights per head and batch row, by device of the sequence and hop: [devices, hops], in blocks of these sizes.

    Of blocks that the mask cuts, only the computed parts count.
    """

    weights: np.ndarray
    block_q: int
    block_kv: int

    @property
    def tiles(self) -> np.ndarray:
        return self.weights / (self.block_q * self.block_kv)


def kernels_of_pass(plan: Plan, backward: bool) -> tuple[PassSizes, ...]:
    """The kernels of the forward pass, or of the backward pass without it; of a route the sizes that it takes."""
    local, route = plan.placement.local, plan.route
    if route is None:
        return () if plan.runs is None else plan.runs.passes(plan.config, backward)
    sizes = (None, None) if route.whole else route.tile(backward)
    q, kv = (n or length for n, length in zip(sizes, local[1:3], strict=True))
    return (PassSizes("backward" if backward else "forward", q, kv),)


def visible_blocks(plan: Plan, kernel: PassSizes) -> VisibleBlocks:
    """The live tiles of a planned call. If visibility is only known at run time, everything counts."""
    problem, placement = plan.problem, plan.placement
    local, split = placement.local, placement.sequence
    block_q, block_kv = _even(local.q_len, kernel.block_q), _even(local.kv_len, kernel.block_kv)
    compute_q, compute_kv = kernel.compute_q or kernel.block_q, kernel.compute_kv or kernel.block_kv
    sub_tile = _even(local.q_len, min(compute_q, block_q)), _even(local.kv_len, min(compute_kv, block_kv))
    chunks_q, chunks_kv = problem.q_len // local.q_len, problem.kv_len // local.kv_len
    if problem.dynamic_query_offset or (plan.route is not None and plan.route.whole):
        pairs = np.full((chunks_q, chunks_kv), float(local.q_len * local.kv_len))
    else:
        pairs = _pairs(
            problem.mask,
            problem.q_len,
            problem.kv_len,
            problem.query_offset or 0,
            *sub_tile,
            chunks_q,
            chunks_kv,
        )
    if split.ring_axes:
        weights = _around(pairs, split.ring_size, split.steps, split.zigzag)
    elif split.strategy == "split_kv":
        weights = pairs.sum(0)[:, None]
    else:
        weights = pairs.sum(1)[:, None]
    return VisibleBlocks(weights, block_q, block_kv)


def _even(length: int, block: int) -> int:
    """The block that cuts a length into as many equal parts as blocks of the given size would."""
    return math.ceil(length / math.ceil(length / block))


@functools.lru_cache(maxsize=2048)
def _pairs(
    mask: Mask, q_len: int, kv_len: int, offset: int, block_q: int, block_kv: int, chunks_q: int, chunks_kv: int
) -> np.ndarray:
    """Weights in live tiles of each chunk of the queries with each chunk of the keys."""
    q = _sampled_block(q_len, block_q, chunks_q)
    kv = _sampled_block(kv_len, block_kv, chunks_kv)
    visible = mask.live_blocks(q, kv, q_len=q_len, kv_len=kv_len, query_offset=offset) > 0
    rows, columns = _bounds(q_len, q, chunks_q), _bounds(kv_len, kv, chunks_kv)
    padded = np.zeros((rows[-1], columns[-1]))
    padded[: visible.shape[0], : visible.shape[1]] = visible[: rows[-1], : columns[-1]]
    sums = np.add.reduceat(np.add.reduceat(padded, rows[:-1], 0), columns[:-1], 1)
    return sums * (q * kv)


def _sampled_block(length: int, block: int, chunks: int) -> int:
    """The block size for looking at the mask: a chunk at most, and no more than `_MAX_BLOCKS` blocks per side."""
    chunk = length // chunks
    while math.ceil(length / block) > max(_MAX_BLOCKS, chunks) and block * 2 <= chunk and chunk % (block * 2) == 0:
        block *= 2
    return block


def _bounds(length: int, block: int, chunks: int) -> list[int]:
    """Where chunks begin, in blocks, and the end of the last."""
    blocks = max(1, math.ceil(length // chunks / block))
    return [blocks * chunk for chunk in range(chunks + 1)]


def _around(pairs: np.ndarray, devices: int, steps: tuple[int, ...], zigzag: bool) -> np.ndarray:
    """By device and hop. In zigzag order device k has the k-th chunk from the start and the k-th from the end."""
    devices_of_rows = np.arange(devices)[:, None]
    sources = (devices_of_rows - np.array(steps)) % devices
    if not zigzag:
        return pairs[devices_of_rows, sources]
    last = 2 * devices - 1
    return sum(pairs[i, j] for i in (devices_of_rows, last - devices_of_rows) for j in (sources, last - sources))
