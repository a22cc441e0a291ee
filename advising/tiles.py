"""What each device has to work on, hop by hop: weights in tiles that may be live, by the mask and its tokens' positions."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from ..masks import Mask
from ..planning import Plan

__all__ = ["Kernel", "Live", "kernels_of_pass", "live_of"]

_TILE = 128  # if an implementation has no tiles of its own
_MOST_BLOCKS = 2048  # per side; beyond that several blocks are treated as one


class Kernel(NamedTuple):
    """One kernel of a pass: what it makes, its blocks, how many products sum over the head dim and over the value dim.

    unit: the queries and keys of the parts of a tile that it can leave out. pipelined: products run ahead of exponentials.
    """

    products: str
    block_q: int
    block_kv: int
    dims: int
    value_dims: int
    unit: tuple[int, int]
    pipelined: bool = False


class Live(NamedTuple):
    """Weights per head and batch row, by device of the sequence and hop: [devices, hops], in blocks of these sizes.

    Of blocks that the mask cuts, only the computed parts count.
    """

    weights: np.ndarray
    block_q: int
    block_kv: int

    @property
    def tiles(self) -> np.ndarray:
        return self.weights / (self.block_q * self.block_kv)


_FORWARD = ("forward", "block_q", "block_kv", 1, 1)
_BACKWARD = (("dkv", "block_q_dkv", "block_kv_dkv", 2, 2), ("dq", "block_q_dq", "block_kv_dq", 2, 1))


def kernels_of_pass(plan: Plan, backward: bool) -> tuple[Kernel, ...]:
    """The kernels of the forward pass, or of the backward pass without it."""
    local, route = plan.placement.local, plan.route
    if route is not None:
        sizes = (
            (getattr(route, "block_q_backward", None), getattr(route, "block_kv_backward", None))
            if backward
            else (getattr(route, "block_q", None), getattr(route, "block_kv", None))
        )
        whole = route.name == "plain"
        q, kv = (
            (local.q_len, local.kv_len) if whole else (n or length for n, length in zip(sizes, local[1:3], strict=True))
        )
        return (Kernel("backward", q, kv, 3, 2, (q, kv)) if backward else Kernel("forward", q, kv, 1, 1, (q, kv)),)
    config = plan.config
    own = plan.method == "forward_tpu" and getattr(config, "kernel", None) == "attnops"

    def made(products: str, q: str, kv: str, dims: int, value_dims: int) -> Kernel:
        block_q, block_kv = block = tuple(getattr(config, name, None) or _TILE for name in (q, kv))
        inner = tuple(
            getattr(config, f"{name}_compute", None) or size for name, size in zip((q, kv), block, strict=True)
        )
        ahead = {"forward": "products_ahead", "backward": "products_ahead_dkv"}.get(products, "")
        pipelined = own and bool(getattr(config, ahead, 0))
        return Kernel(products, block_q, block_kv, dims, value_dims, inner if own else block, pipelined)  # type: ignore[arg-type]

    if not backward:
        return (made(*_FORWARD),)
    if getattr(config, "block_q_dq", None) and not getattr(config, "use_fused_bwd_kernel", None):
        return tuple(made(*one) for one in _BACKWARD)
    return (made("backward", "block_q_dkv", "block_kv_dkv", 3, 2),)


def live_of(plan: Plan, kernel: Kernel) -> Live:
    """The live tiles of a planned call. If visibility is only known at run time, everything counts."""
    problem, placement = plan.problem, plan.placement
    local, split = placement.local, placement.sequence
    block_q, block_kv = _even(local.q_len, kernel.block_q), _even(local.kv_len, kernel.block_kv)
    unit = _even(local.q_len, min(kernel.unit[0], block_q)), _even(local.kv_len, min(kernel.unit[1], block_kv))
    pieces_q, pieces_kv = problem.q_len // local.q_len, problem.kv_len // local.kv_len
    if problem.dynamic_query_offset or (plan.route is not None and plan.route.name == "plain"):
        pairs = np.full((pieces_q, pieces_kv), float(local.q_len * local.kv_len))
    else:
        pairs = _pairs(
            problem.mask,
            problem.q_len,
            problem.kv_len,
            problem.query_offset or 0,
            *unit,
            pieces_q,
            pieces_kv,
        )
    if split.ring_axes:
        weights = _around(pairs, split.ring_size, split.steps, split.zigzag)
    elif split.strategy == "split_kv":
        weights = pairs.sum(0)[:, None]
    else:
        weights = pairs.sum(1)[:, None]
    return Live(weights, block_q, block_kv)


def _even(length: int, block: int) -> int:
    """The block that cuts a length into as many equal parts as blocks of the given size would."""
    return math.ceil(length / math.ceil(length / block))


@functools.lru_cache(maxsize=2048)
def _pairs(
    mask: Mask, q_len: int, kv_len: int, offset: int, block_q: int, block_kv: int, pieces_q: int, pieces_kv: int
) -> np.ndarray:
    """Weights in live tiles of each piece of the queries with each piece of the keys."""
    q = _seen(q_len, block_q, pieces_q)
    kv = _seen(kv_len, block_kv, pieces_kv)
    live = mask.live_blocks(q, kv, q_len=q_len, kv_len=kv_len, query_offset=offset) > 0
    rows, columns = _bounds(q_len, q, pieces_q), _bounds(kv_len, kv, pieces_kv)
    padded = np.zeros((rows[-1], columns[-1]))
    padded[: live.shape[0], : live.shape[1]] = live[: rows[-1], : columns[-1]]
    sums = np.add.reduceat(np.add.reduceat(padded, rows[:-1], 0), columns[:-1], 1)
    return sums * (q * kv)


def _seen(length: int, block: int, pieces: int) -> int:
    """The block size for looking at the mask: a piece at most, and no more than `_MOST_BLOCKS` blocks per side."""
    piece = length // pieces
    while math.ceil(length / block) > max(_MOST_BLOCKS, pieces) and block * 2 <= piece and piece % (block * 2) == 0:
        block *= 2
    return block


def _bounds(length: int, block: int, pieces: int) -> list[int]:
    """Where pieces begin, in blocks, and the end of the last."""
    each = max(1, math.ceil(length // pieces / block))
    return [each * piece for piece in range(pieces + 1)]


def _around(pairs: np.ndarray, devices: int, steps: tuple[int, ...], zigzag: bool) -> np.ndarray:
    """By device and hop. In zigzag order device k has the k-th piece from the start and the k-th from the end."""
    mine = np.arange(devices)[:, None]
    theirs = (mine - np.array(steps)) % devices
    if not zigzag:
        return pairs[mine, theirs]
    last = 2 * devices - 1
    return sum(pairs[i, j] for i in (mine, last - mine) for j in (theirs, last - theirs))
