"""Seconds that a collective takes on the links between its devices: bytes over the busiest link, and hops.

docs/advise.md has the formulas, with their sources.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from .spans import Span

__all__ = ["busiest_link", "hops", "reordered_seconds", "ring_hop_seconds", "seconds_of"]

Message = tuple[int, int, float]  # from, to, bytes; places on the mesh axis


def seconds_of(kind: str, sent: float, spans: tuple[Span, ...]) -> float:
    """Seconds of an all-gather, reduce-scatter, all-reduce or all-to-all; `sent` is each device's bytes by the usual counts.

    All physical axes are used at once, and both directions of a ring: an all-gather's bytes move at the sum of their rates.
    """
    if not spans or not sent:
        return 0.0
    if kind == "all-to-all":
        return _exchange(sent, spans)
    if any(span.switched for span in spans):
        return sent / _switched_rate(spans)
    return sent / sum((2 if span.closed else 1) * span.link / span.stride for span in spans)


def hops(kind: str, spans: tuple[Span, ...]) -> int:
    """Sequential messages of a collective: the distance to the farthest device, twice for an all-reduce."""
    far = sum(
        1 if span.switched else (span.size // 2 if span.closed else span.size - 1) * span.stride for span in spans
    )
    return far * (2 if kind == "all-reduce" else 1)


def ring_hop_seconds(sent: float, spans: tuple[Span, ...], by: int) -> float:
    """A hop of a ring over the axis: all devices at once send so many bytes `by` places on."""
    return sent * _hop(spans, by)


def reordered_seconds(sent: float, spans: tuple[Span, ...]) -> float:
    """Into zigzag order or out of it: a device sends so many bytes in all, half of them for each of its two pieces."""
    return sent * _reordered(spans)


@functools.lru_cache(maxsize=4096)
def _hop(spans: tuple[Span, ...], by: int) -> float:
    size = math.prod(span.size for span in spans)
    return busiest_link(spans, [(i, (i + by) % size, 1.0) for i in range(size)])


@functools.lru_cache(maxsize=4096)
def _reordered(spans: tuple[Span, ...]) -> float:
    """There are twice as many pieces as devices. Piece p is with device p // 2, in zigzag order with p or 2 * devices - 1 - p."""
    size = math.prod(span.size for span in spans)
    moves = [(p // 2, min(p, 2 * size - 1 - p)) for p in range(2 * size)]
    max_moves = max(sum(a == device != b for a, b in moves) for device in range(size))
    return busiest_link(spans, [(a, b, 1.0 / max_moves) for a, b in moves if a != b])


def busiest_link(spans: tuple[Span, ...], messages: Sequence[Message]) -> float:
    """Seconds until the busiest link has carried its bytes. A message goes along one physical axis after another, the
    last first, and takes the shorter way around a ring."""
    shape = tuple(span.size for span in spans)
    load: dict[tuple[int, tuple[int, ...], int, int], float] = {}
    for source, target, size in messages:
        at, end = (list(np.unravel_index(place, shape)) for place in (source, target))
        for axis in reversed(range(len(spans))):
            span, start, goal = spans[axis], int(at[axis]), int(end[axis])
            if start != goal:
                line = tuple(int(c) for i, c in enumerate(at) if i != axis)
                for link, way in _path(span, start, goal):
                    key = (axis, line, link, way)
                    load[key] = load.get(key, 0.0) + size * span.stride / span.link
            at[axis] = end[axis]
    return max(load.values(), default=0.0)


def _path(span: Span, start: int, goal: int) -> list[tuple[int, int]]:
    """(link, direction) in turn; for a switch, the sender's own link."""
    if span.switched:
        return [(start, 1)]
    ahead = (goal - start) % span.size
    if span.closed and ahead <= span.size - ahead:
        return [((start + i) % span.size, 1) for i in range(ahead)]
    if span.closed:
        return [((start - i) % span.size, -1) for i in range(span.size - ahead)]
    way = 1 if goal > start else -1
    return [(place, way) for place in range(start, goal, way)]


def _exchange(sent: float, spans: tuple[Span, ...]) -> float:
    """All-to-all: every device sends the same to each other one; the axis with the busiest link counts."""
    size = math.prod(span.size for span in spans)
    each = sent / (size - 1)
    slowest = 0.0
    for span in spans:
        m, pair = span.size, each * size / span.size  # bytes from one place of the span to another
        if span.switched:
            load = pair * (m - 1)
        elif span.closed:
            load = pair * (m * m // 4) / 2  # shortest paths, over both directions of m links
        else:
            load = pair * (m // 2) * ((m + 1) // 2)  # over the link in the middle
        slowest = max(slowest, load * span.stride / span.link)
    return slowest


def _switched_rate(spans: tuple[Span, ...]) -> float:
    """Through switches: a host's devices share its outgoing bandwidth, each with its own adapter."""
    *outer, inner = spans
    return min([inner.link, *(span.link * inner.size for span in outer)])
