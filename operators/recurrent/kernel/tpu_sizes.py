"""Sizes of the TPU kernels: tokens of a chunk, heads of a step, and the VMEM that they take."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "BACKWARD", "FORWARD", "KEEPING", "LEAST_CHUNK", "STEP", "Schedule", "Sizes", "StepSizes", "Window", "chunk_tokens",
    "counted_vmem", "kernels_of", "schedule", "step_heads", "step_vmem", "turns", "vmem_parts",
]  # fmt: skip

FORWARD = "attnops_recurrent_forward"
KEEPING = "attnops_recurrent_forward_keeping"  # the forward pass that keeps what the backward pass reads
BACKWARD = "attnops_recurrent_backward"
STEP = "attnops_recurrent_step"  # the last tokens of each row over slots
LEAST_CHUNK = 16  # tokens of a tile of bfloat16
_HEADS = 4  # of a step at most: independent products fill the matrix unit
_LANES, _ROWS, _WORD = 128, 8, 4
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


class Schedule(NamedTuple):
    """How a kernel goes through heads. step: heads of a step of the grid, whole groups of a key head or a part of one. Of a
    backward pass whose steps take a part of a group: parts, the steps that add to the same gradients of query and key, one after
    the other, with the states of all their heads in VMEM; copies: of these gradients for a key head, which are added later."""

    step: int
    parts: int = 1
    copies: int = 1

    def keys(self, group: int) -> int:
        """Key heads of a step."""
        return max(self.step // group, 1)


def kernels_of(trains: bool) -> tuple[str, ...]:
    """The kernels of a call: without or with a gradient."""
    return (KEEPING, BACKWARD) if trains else (FORWARD,)


def chunk_tokens(tokens: int, chunk_size: int) -> int:
    """Tokens of a chunk: fewer than declared if the call has fewer."""
    return max(LEAST_CHUNK, min(chunk_size, 1 << max(tokens - 1, 0).bit_length()))


def counted_vmem(sizes: Sizes, kernel: str) -> int:
    """Bytes of VMEM with which a kernel of a call compiles, with some margin."""
    return _with_room(sizes, kernel, schedule(sizes, kernel))


def schedule(sizes: Sizes, kernel: str) -> Schedule:
    """As many heads in a step as have room in VMEM, and as few copies of gradients."""
    options = []
    for step in range(_HEADS, 0, -1):
        if sizes.heads % step == 0 and (step % sizes.group == 0 or sizes.group % step == 0):
            parts = max(sizes.group // step, 1) if kernel == BACKWARD else 1
            options += [Schedule(step, n, parts // n) for n in range(parts, 0, -1) if parts % n == 0]
    return next((x for x in options if _with_room(sizes, kernel, x) <= _LIMIT), options[-1])


def vmem_parts(sizes: Sizes, kernel: str) -> dict[str, int]:
    """Bytes of VMEM, by what they hold."""
    return _parts(sizes, kernel, schedule(sizes, kernel))


def _with_room(sizes: Sizes, kernel: str, how: Schedule) -> int:
    return math.ceil(_ROOM * sum(_parts(sizes, kernel, how).values()))


def _lanes(n: int) -> int:
    return -(-n // _LANES) * _LANES


def _parts(sizes: Sizes, kernel: str, how: Schedule) -> dict[str, int]:
    """Blocks count twice: one is worked on while the next one is fetched."""
    step, keys, chunk, wide = how.step, how.keys(sizes.group), sizes.chunk, sizes.dtype.itemsize
    dim, value_dim, row = _lanes(sizes.dim), _lanes(sizes.value_dim), _lanes(chunk)
    state = -(-sizes.dim // _ROWS) * _ROWS * value_dim * _WORD
    decays = step * chunk * dim * _WORD if sizes.by_channel else 0
    gates = step * _ROWS * row * _WORD if sizes.delta or not sizes.by_channel else 0
    solved = step * chunk * (row + value_dim) * _WORD if sizes.delta else 0  # the inverse, and what no key had seen
    # Heads of a step are independent, and the compiler works on all at once. Of each: rows of queries and keys, for decays by
    # channel at every level of halves; values and updates; square matrices; and a state, in float32.
    levels = chunk.bit_length() - 1 if sizes.by_channel else 1
    if kernel != BACKWARD:
        squares = 4 if sizes.delta else 2
        worked = step * (chunk * ((1 + levels) * dim + 2 * value_dim + squares * row) * _WORD + state)
        keeping = kernel == KEEPING
        return {
            "query_key": 2 * 2 * keys * chunk * dim * wide,
            "value_output": 2 * 2 * step * chunk * value_dim * wide,
            "gates": 2 * (decays + gates),
            "states": 2 * ((2 if sizes.initial else 1) + keeping) * step * state,
            **({"kept": 2 * solved} if keeping and solved else {}),
            "temporaries": worked,
        }
    sums = 2 * chunk * dim * _WORD if how.parts > 1 else 0
    wide_sums = _WORD if how.copies > 1 else wide
    # Products of float32 are made of its parts.
    each = (6 if sizes.by_channel else 4) if wide < _WORD else 12 if sizes.by_channel else 8
    worked = step * (chunk * (each * levels * dim + 2 * value_dim + 4 * row) * _WORD + state)
    return {
        "query_key": 2 * 2 * keys * chunk * dim * wide,
        "value_output": 2 * (1 if sizes.delta else 2) * step * chunk * value_dim * wide,
        "gates": 2 * (decays + gates),
        "states": 2 * 2 * step * state,
        **({"kept": 2 * solved} if solved else {}),
        "gradients": 2
        * (2 * keys * chunk * dim * wide_sums + step * (chunk * value_dim * wide + state) + decays + gates),
        "sums": how.parts * step * state + sums,
        "temporaries": worked,
    }


_STEP_HEADS = 16  # of a step over slots at most: each is unrolled


class Window(NamedTuple):
    """The tokens before a convolution, of a row's slot: width - 1 of so many heads."""

    history: int
    heads: int
    dim: int
    itemsize: int

    @classmethod
    def of(cls, slots: Any) -> Window:
        """Of slots [slots, width - 1, heads, dim]."""
        _, history, heads, dim = slots.shape
        return cls(history, heads, dim, np.dtype(slots.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.history * self.heads * self.dim * self.itemsize


class StepSizes(NamedTuple):
    """What the VMEM of STEP depends on besides heads. itemsize: of states. tokens: of a row."""

    dim: int
    value_dim: int
    itemsize: int
    delta: bool
    tokens: int
    windows: tuple[Window, ...] = ()


def step_heads(heads: int, group: int, sizes: StepSizes) -> int:
    """Heads of a step of the grid of STEP, whole groups of a key head or a part of one: as many as have room in VMEM."""

    def fits(n: int) -> bool:
        return math.ceil(_ROOM * sum(step_vmem(n, sizes).values())) <= _LIMIT

    whole = (n for n in range(min(heads, _STEP_HEADS), 1, -1) if heads % n == 0 and (n % group == 0 or group % n == 0))
    return next(filter(fits, whole), 1)


def step_vmem(step: int, sizes: StepSizes) -> dict[str, int]:
    """Bytes of VMEM of STEP with so many heads in a step, by what they hold, each with its own key. Blocks count twice. States of
    rows of several tokens are passed on."""

    def rows(n: int, size: int = _WORD) -> int:
        tile = _ROWS * _WORD // size
        return -(-n // tile) * tile

    dim, value_dim, itemsize, delta, tokens, windows = sizes
    turned = turns(dim, value_dim)
    high, wide = (value_dim, dim) if turned else (dim, value_dim)
    turning = 1 if turned else 3  # arrays whose rows become columns
    convolved = {
        "windows": sum(2 * 2 * x.history * rows(x.heads, x.itemsize) * _lanes(x.dim) * x.itemsize for x in windows),
        # Weights, a token of all heads, which is kept for later blocks, and the window between tokens.
        "convolutions": sum(
            (2 * (x.history + 3) + tokens + x.history) * rows(x.heads) * _lanes(x.dim) * _WORD for x in windows
        ),
    }
    return {
        "states": 2 * 2 * step * rows(high, itemsize) * _lanes(wide) * itemsize,
        **({"passed": step * rows(high) * _lanes(wide) * _WORD} if tokens > 1 else {}),
        "tokens": 2 * rows(step) * (3 * _lanes(dim) + 2 * _lanes(value_dim)) * _WORD
        + 2 * delta * _ROWS * _LANES * _WORD,
        "columns": turning * rows(high) * _lanes(step) * _WORD,
        "temporaries": 4 * rows(high) * _lanes(wide) * _WORD,
        **(convolved if windows else {}),
    }


def turns(dim: int, value_dim: int) -> bool:
    """Whether a state [dim, value_dim] lies with its dims exchanged in HBM, so that it fills the lanes of registers."""
    return value_dim % _LANES != 0 and dim % _LANES == 0
