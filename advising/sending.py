"""Seconds that a collective takes on the links between its devices: bytes over the busiest link, and hops.

docs/advise.md has the formulas, with their sources.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from .axis_segments import AxisSegment

__all__ = ["busiest_link", "hops", "reordered_seconds", "ring_hop_seconds", "seconds_of"]

Message = tuple[int, int, float]  # from, to, bytes; places on the mesh axis


def seconds_of(kind: str, sent: float, segments: tuple[AxisSegment, ...]) -> float:
    """Seconds of an all-gather, reduce-scatter, all-reduce or all-to-all; `sent` is each device's bytes by the usual counts.

    All physical axes are used at once, and both directions of a ring: an all-gather's bytes move at the sum of their rates.
    """
    if not segments or not sent:
        return 0.0
    if kind == "all-to-all":
        return _exchange(sent, segments)
    if any(segment.switched for segment in segments):
        return sent / _switched_rate(segments)
    return sent / sum((2 if segment.closed else 1) * segment.link / segment.stride for segment in segments)


def hops(kind: str, segments: tuple[AxisSegment, ...]) -> int:
    """Sequential messages of a collective: the distance to the farthest device, twice for an all-reduce."""
    distance = sum(
        1 if segment.switched else (segment.size // 2 if segment.closed else segment.size - 1) * segment.stride
        for segment in segments
    )
    return distance * (2 if kind == "all-reduce" else 1)


def ring_hop_seconds(sent: float, segments: tuple[AxisSegment, ...], by: int) -> float:
    """A hop of a ring over the axis: all devices at once send so many bytes `by` places on."""
    return sent * _hop(segments, by)


def reordered_seconds(sent: float, segments: tuple[AxisSegment, ...]) -> float:
    """Into zigzag order or out of it: a device sends so many bytes in all, half of them for each of its two chunks."""
    return sent * _reordered(segments)


@functools.lru_cache(maxsize=4096)
def _hop(segments: tuple[AxisSegment, ...], by: int) -> float:
    size = math.prod(segment.size for segment in segments)
    return busiest_link(segments, [(i, (i + by) % size, 1.0) for i in range(size)])


@functools.lru_cache(maxsize=4096)
def _reordered(segments: tuple[AxisSegment, ...]) -> float:
    """There are twice as many chunks as devices. Chunk p is with device p // 2, in zigzag order with p or 2 * devices - 1 - p."""
    size = math.prod(segment.size for segment in segments)
    moves = [(p // 2, min(p, 2 * size - 1 - p)) for p in range(2 * size)]
    max_moves = max(sum(a == device != b for a, b in moves) for device in range(size))
    return busiest_link(segments, [(a, b, 1.0 / max_moves) for a, b in moves if a != b])


def busiest_link(segments: tuple[AxisSegment, ...], messages: Sequence[Message]) -> float:
    """Seconds until the busiest link has carried its bytes. A message goes along one physical axis after another, the
    last first, and takes the shorter way around a ring."""
    shape = tuple(segment.size for segment in segments)
    load: dict[tuple[int, tuple[int, ...], int, int], float] = {}
    for source, target, size in messages:
        at, end = (list(np.unravel_index(place, shape)) for place in (source, target))
        for axis in reversed(range(len(segments))):
            segment, start, goal = segments[axis], int(at[axis]), int(end[axis])
            if start != goal:
                line = tuple(int(c) for i, c in enumerate(at) if i != axis)
                for link, direction in _path(segment, start, goal):
                    key = (axis, line, link, direction)
                    load[key] = load.get(key, 0.0) + size * segment.stride / segment.link
            at[axis] = end[axis]
    return max(load.values(), default=0.0)


def _path(segment: AxisSegment, start: int, goal: int) -> list[tuple[int, int]]:
    """(link, direction) in turn; for a switch, the sender's own link."""
    if segment.switched:
        return [(start, 1)]
    ahead = (goal - start) % segment.size
    if segment.closed and ahead <= segment.size - ahead:
        return [((start + i) % segment.size, 1) for i in range(ahead)]
    if segment.closed:
        return [((start - i) % segment.size, -1) for i in range(segment.size - ahead)]
    direction = 1 if goal > start else -1
    return [(place, direction) for place in range(start, goal, direction)]


def _exchange(sent: float, segments: tuple[AxisSegment, ...]) -> float:
    """All-to-all: every device sends the same to each other one; the axis with the busiest link counts."""
    size = math.prod(segment.size for segment in segments)
    per_device = sent / (size - 1)
    slowest = 0.0
    for segment in segments:
        m, pair = segment.size, per_device * size / segment.size  # bytes from one place of the segment to another
        if segment.switched:
            load = pair * (m - 1)
        elif segment.closed:
            load = pair * (m * m // 4) / 2  # shortest paths, over both directions of m links
        else:
            load = pair * (m // 2) * ((m + 1) // 2)  # over the link in the middle
        slowest = max(slowest, load * segment.stride / segment.link)
    return slowest


def _switched_rate(segments: tuple[AxisSegment, ...]) -> float:
    """Through switches: a host's devices share its outgoing bandwidth, each with its own adapter."""
    *outer, inner = segments
    return min([inner.link, *(segment.link * inner.size for segment in outer)])
