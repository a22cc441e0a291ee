"""Named patterns of block-sparse attention: functions that return masks. `length` is the number of queries and of keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import MaskError
from .algebra import Mask
from .block_sparse import Blocks
from .checks import whole
from .static import Causal, Prefix, SlidingWindow

__all__ = ["a_shape", "bigbird", "dilated_blocks", "local_blocks", "longformer", "strided_blocks"]


def bigbird(
    length: int, *, block: int = 64, window: int = 3, first: int = 2, random: int = 3, seed: int = 0, heads: int = 1
) -> Blocks:
    """A window of blocks, global first blocks, and random blocks.

    window: blocks around the row's own, which is included; odd. first: blocks that see all blocks and that all blocks see.
    random: further blocks that each block of queries sees, or fewer if fewer are left; different in each of `heads`. For a
    decoder, add `& Causal()`.
    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences" (2020).
    """
    q_block, kv_block = _grid(length, block)
    window, first, random, heads = _counts(window=window, first=first, random=random, heads=heads)
    if window % 2 == 0:
        raise MaskError(
            f"bigbird window={window}; wanted an odd number of blocks: the same number before and after the row's own"
        )
    _counts(heads=heads, minimum=1)
    fixed = (abs(q_block - kv_block) <= window // 2) | (q_block < first) | (kv_block < first)
    layout = np.repeat(fixed[None], heads, axis=0)
    draw = np.random.RandomState(
        whole(seed, "bigbird seed", minimum=0)
    )  # gives the same numbers in every version of NumPy
    for head in layout:
        for row in head:
            free = np.flatnonzero(~row)
            row[draw.permutation(free)[:random]] = True
    return Blocks(layout, block, block)


def longformer(length: int, *, window: int, first: int = 0) -> Mask:
    """Keys within window // 2 on both sides, and `first` tokens that see all tokens and that all tokens see.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer" (2020).
    """
    length, window = whole(length, "longformer length", minimum=1), whole(window, "longformer window", minimum=0)
    near: Mask = SlidingWindow(left=window // 2, right=window // 2)
    first = whole(first, "longformer first", minimum=0)
    if not first:
        return near
    rows = np.arange(-(-length // first))[:, None] == 0
    return near | Prefix(first) | Blocks(rows, first, length)


def local_blocks(length: int, *, block: int = 64, window: int = 4) -> Mask:
    """Causal, with the last `window` blocks, including the row's own: the local heads of a Sparse Transformer, in blocks.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019).
    """
    q_block, kv_block = _grid(length, block)
    (window,) = _counts(window=window, minimum=1)
    return Causal() & Blocks((kv_block <= q_block) & (q_block - kv_block < window), block, block)


def strided_blocks(length: int, *, block: int = 64, stride: int = 4) -> Mask:
    """Causal, with every `stride`-th block back from the row's own: the strided heads of a Sparse Transformer, in blocks.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019).
    """
    q_block, kv_block = _grid(length, block)
    (stride,) = _counts(stride=stride, minimum=1)
    return Causal() & Blocks((kv_block <= q_block) & ((q_block - kv_block) % stride == 0), block, block)


def dilated_blocks(length: int, *, block: int = 64, window: int = 4, dilation: int = 2) -> Blocks:
    """Blocks up to `window` steps of `dilation` blocks away on both sides; add `& Causal()` for earlier blocks only.

    Source: the dilated sliding window of Beltagy et al., "Longformer: The Long-Document Transformer" (2020), in blocks.
    """
    q_block, kv_block = _grid(length, block)
    (window,), (dilation,) = _counts(window=window), _counts(dilation=dilation, minimum=1)
    away = abs(q_block - kv_block)
    return Blocks((away <= window * dilation) & (away % dilation == 0), block, block)


def a_shape(*, first: int, window: int) -> Mask:
    """Causal, with the `first` keys and the last `window` keys, including the row's own. Works for any length, not in blocks.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023); the name is from Jiang et al.,
    "MInference 1.0" (2024).
    """
    window = whole(window, "a_shape window", minimum=1)
    return Causal() & (Prefix(whole(first, "a_shape first", minimum=0)) | SlidingWindow(left=window - 1))


def _grid(length: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of query blocks, as a column, and of key blocks, as a row."""
    count = -(-whole(length, "length", minimum=1) // whole(block, "block", minimum=1))
    numbers = np.arange(count)
    return numbers[:, None], numbers[None, :]


def _counts(*, minimum: int = 0, **counts: int) -> list[int]:
    return [whole(count, name, minimum=minimum) for name, count in counts.items()]
