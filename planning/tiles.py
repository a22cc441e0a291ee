"""Tiles of arrays on TPUs: which two dimensions lie along their rows and lanes, and what is padded there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["lanes_of", "least_tiled", "tiled"]

_ROWS = 8
_LANES = 128


def lanes_of(size: int) -> int:
    """The size of a dimension along the lanes."""
    return -(-size // _LANES) * _LANES


def tiled(shape: Sequence[int], row: int, lane: int) -> int:
    """How many numbers an array takes, padded, with these two of its dimensions along rows and lanes."""
    rows, lanes = shape[row], shape[lane]
    tile = min(_ROWS, 1 << (rows - 1).bit_length())  # of 1, 2, 4 or 8 rows
    return math.prod(shape) // (rows * lanes) * (-(-rows // tile) * tile) * lanes_of(lanes)


def least_tiled(shape: Sequence[int]) -> int:
    """How many numbers an array of rank 2 or more takes as an argument of a program, for which XLA chooses the two dimensions
    that are padded least, whatever their order."""
    return min(tiled(shape, row, lane) for row, lane in itertools.permutations(range(len(shape)), 2))
