"""Random integers of a declared call: segment ids, and places of keys."""

from __future__ import annotations

import numpy as np

__all__ = ["distinct_places", "segments"]


def segments(random: np.random.Generator, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Sorted ids 1..count; every row has each id at least once."""
    length = shape[-1]

    def row() -> np.ndarray:
        cuts = np.sort(random.choice(np.arange(1, length), count - 1, replace=False))
        return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32) + 1

    return row() if len(shape) == 1 else np.stack([row() for _ in range(shape[0])])


def distinct_places(random: np.random.Generator, shape: tuple[int, ...], kv_len: int) -> np.ndarray:
    """int32 [..., q, n]: for each query different keys up to its own, the last of which is the last query's; then -1."""
    places, count = np.full(shape, -1, np.int32), shape[-2]
    for at in np.ndindex(*shape[:-1]):
        end = max(1, kv_len - count + at[-1] + 1)
        chosen = np.sort(random.choice(end, min(shape[-1], end), replace=False, shuffle=False))
        places[at][: len(chosen)] = chosen
    return places
