"""What a kernel works on at once: parts of a tile, in the order in which the compiler sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .grid import KernelGrid
from .variants import KernelVariant

__all__ = ["SubTile", "pipelined", "rows_of", "subtiles_of"]


class SubTile(NamedTuple):
    """Queries and keys of a head in a tile; `number` is the head's place there, `head` (kv head, query head of its group).

    masked: whether some of them are hidden.
    """

    number: int
    head: tuple[int, int]
    queries: slice
    keys: slice
    masked: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys)."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def parts(self, size: int) -> Iterator[SubTile]:
        """The same with `size` keys at a time."""
        for start in range(self.keys.start, self.keys.stop, size):
            yield self._replace(keys=slice(start, start + size))


def subtiles_of(grid: KernelGrid, queries: int, keys: int, variant: KernelVariant) -> list[SubTile]:
    """The parts of a tile that a variant computes, in sub-tiles of this many queries and keys."""
    return [
        SubTile(number, head, slice(q, q + queries), slice(k, k + keys), kind == 1)
        for q in range(0, grid.block_q, queries)
        for k in range(0, grid.block_kv, keys)
        if (kind := variant.kind(q, k, grid.block_q, grid.block_kv))
        for number, head in enumerate(grid.heads.in_tile)
    ]


def pipelined(
    subtiles: list[SubTile], depth: int, first: Callable[[SubTile], Any], second: Callable[[SubTile, Any], None]
) -> None:
    """Software pipelining by hand: a sub-tile's products (`first`) are emitted `depth` sub-tiles before their use (`second`).

    The compiler's scheduler stays close to the order in which it meets operations.
    """
    waiting: deque[tuple[SubTile, Any]] = deque()
    for subtile in subtiles:
        waiting.append((subtile, first(subtile)))
        if len(waiting) > depth:
            second(*waiting.popleft())
    for entry in waiting:
        second(*entry)


def rows_of(ref: Any, head: tuple[int, ...], rows: slice, seq_minor: int) -> Any:
    """Rows of a head, [rows, dim], or [dim, rows] if that is the tensor's order."""
    return ref[(*head, slice(None), rows)] if seq_minor else ref[(*head, rows, slice(None))]
