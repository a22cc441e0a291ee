"""What a kernel works on at once: parts of a tile, in the order in which the compiler sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .bodies import Body
from .frame import Frame

__all__ = ["Unit", "pipelined", "rows_of", "units_of"]


class Unit(NamedTuple):
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

    def parts(self, size: int) -> Iterator[Unit]:
        """The same with `size` keys at a time."""
        for start in range(self.keys.start, self.keys.stop, size):
            yield self._replace(keys=slice(start, start + size))


def units_of(frame: Frame, queries: int, keys: int, body: Body) -> list[Unit]:
    """The parts of a tile that a body computes, in units of this many queries and keys."""
    return [
        Unit(number, head, slice(q, q + queries), slice(k, k + keys), kind == 1)
        for q in range(0, frame.block_q, queries)
        for k in range(0, frame.block_kv, keys)
        if (kind := body.kind(q, k, frame.block_q, frame.block_kv))
        for number, head in enumerate(frame.heads.in_tile)
    ]


def pipelined(units: list[Unit], ahead: int, first: Callable[[Unit], Any], second: Callable[[Unit, Any], None]) -> None:
    """Software pipelining by hand: a unit's products (`first`) are emitted `ahead` units before their use (`second`).

    The compiler's scheduler stays close to the order in which it meets operations.
    """
    waiting: deque[tuple[Unit, Any]] = deque()
    for unit in units:
        waiting.append((unit, first(unit)))
        if len(waiting) > ahead:
            second(*waiting.popleft())
    for entry in waiting:
        second(*entry)


def rows_of(ref: Any, head: tuple[int, ...], rows: slice, seq_minor: int) -> Any:
    """Rows of a head, [rows, dim], or [dim, rows] if that is the tensor's order."""
    return ref[(*head, slice(None), rows)] if seq_minor else ref[(*head, rows, slice(None))]
