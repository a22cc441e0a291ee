"""Sizes of the TPU kernel: tokens of a chunk, heads of a step, and the VMEM that they take."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

__all__ = ["LEAST_CHUNK", "NAME", "Sizes", "chunk_tokens", "counted_vmem", "heads_per_step", "vmem_parts"]

NAME = "attnops_recurrent_forward"
LEAST_CHUNK = 16  # tokens of a tile of bfloat16
_HEADS = 4  # of a step at most: independent products fill the matrix unit
_LANES, _WORD = 128, 4
_ROOM = 1.25  # what is counted is at most so much less than what the compiler takes
_LIMIT = 16 << 20  # the least VMEM that a kernel has by default, on any TPU


class Sizes(NamedTuple):
    """One device's call. group: heads that share a key head. chunk: tokens of one."""

    heads: int
    group: int
    dim: int
    value_dim: int
    chunk: int
    dtype: np.dtype
    by_channel: bool
    delta: bool
    initial: bool


def chunk_tokens(tokens: int, chunk_size: int) -> int:
    """Tokens of a chunk: fewer than declared if the call has fewer."""
    return max(LEAST_CHUNK, min(chunk_size, 1 << max(tokens - 1, 0).bit_length()))


def counted_vmem(sizes: Sizes) -> int:
    """Bytes of VMEM with which a call compiles, with some margin."""
    return math.ceil(_ROOM * sum(vmem_parts(sizes).values()))


def heads_per_step(sizes: Sizes) -> int:
    """How many heads a step works on: whole groups of a key head, or a part of one; as many as have room in VMEM."""

    def fits(n: int) -> bool:
        whole = sizes.heads % n == 0 and (n % sizes.group == 0 or sizes.group % n == 0)
        return whole and math.ceil(_ROOM * sum(_parts(sizes, n).values())) <= _LIMIT

    return next((n for n in range(_HEADS, 1, -1) if fits(n)), 1)


def vmem_parts(sizes: Sizes) -> dict[str, int]:
    """Bytes of VMEM, by what they hold."""
    return _parts(sizes, heads_per_step(sizes))


def _parts(sizes: Sizes, step: int) -> dict[str, int]:
    """Blocks count twice: one is worked on while the next one is fetched."""
    keys, chunk, wide = max(step // sizes.group, 1), sizes.chunk, sizes.dtype.itemsize

    def lanes(n: int) -> int:
        return -(-n // _LANES) * _LANES

    dim, value_dim, row = lanes(sizes.dim), lanes(sizes.value_dim), lanes(chunk)
    state = -(-sizes.dim // 8) * 8 * value_dim * _WORD
    decays = step * chunk * dim * _WORD if sizes.by_channel else 0
    gates = step * 8 * row * _WORD if sizes.delta or not sizes.by_channel else 0
    # Of one head: rows of queries and keys, values and updates, square matrices and a state, in float32.
    many = 3 if sizes.by_channel else 1
    worked = chunk * (8 * many * dim + 4 * value_dim + 6 * many * row) * _WORD + state
    return {
        "query_key": 2 * 2 * keys * chunk * dim * wide,
        "value_output": 2 * 2 * step * chunk * value_dim * wide,
        "gates": 2 * (decays + gates),
        "states": 2 * (2 if sizes.initial else 1) * step * state,
        "temporaries": worked,
    }
