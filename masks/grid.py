"""Grid: the blocks of a rectangle of the attention matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .checks import whole

__all__ = ["CELLS", "Grid"]

# Rows and cells processed at once. They bound the memory and don't affect the result; 2**14 rows of int64 fit in a cache.
_ROWS = 1 << 14
CELLS = 1 << 22


@dataclass(frozen=True)
class Grid:
    """Blocks over rows q_start..q_start+q_len and keys k_start..k_start+kv_len."""

    block_q: int
    block_kv: int
    q_len: int
    kv_len: int
    q_start: int
    query_offset: int
    k_start: int = 0

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "q_len", "kv_len", "q_start", "k_start"):
            minimum = 1 if name.startswith("block") else 0
            object.__setattr__(self, name, whole(getattr(self, name), name, minimum=minimum))
        object.__setattr__(self, "query_offset", whole(self.query_offset, "query_offset"))

    @classmethod
    def of(
        cls,
        block_q: int,
        block_kv: int,
        *,
        q_len: int,
        kv_len: int,
        q_start: int = 0,
        query_offset: int = 0,
        k_start: int = 0,
    ) -> Grid:
        """Create a grid from the arguments of `live_blocks`."""
        return cls(block_q, block_kv, q_len, kv_len, q_start, query_offset, k_start)

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.q_len // self.block_q), -(-self.kv_len // self.block_kv)

    def slabs(self) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """Yield (block rows, their rows) in pieces of bounded size."""
        count, width = self.shape
        step = max(1, min(_ROWS // self.block_q, CELLS // (width + 1)))
        for first in range(0, count, step):
            last = min(first + step, count)
            rows = np.arange(first * self.block_q, min(last * self.block_q, self.q_len), dtype=np.int64)
            yield slice(first, last), rows + self.q_start
