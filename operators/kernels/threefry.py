"""Threefry-2x32, a counter-based random function: the same bits for the same key and counter, wherever it is evaluated.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. 13 rounds is the fewest that passes
their statistical tests (BigCrush); jax.random uses 20 of the same function.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["threefry"]

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key0: Any, key1: Any, counter0: Any, counter1: Any, rounds: int = 13) -> tuple[Any, Any]:
    """Return two uint32 words for a key and a counter of two uint32 words each, elementwise (NumPy or JAX arrays)."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x, y = counter0 + key0, counter1 + key1
    for step in range(rounds):
        turn = _ROTATIONS[step % 8]
        x = x + y
        y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
        if step % 4 == 3:
            number = step // 4 + 1
            x = x + keys[number % 3]
            y = y + keys[(number + 1) % 3] + np.uint32(number)
    return x, y
