"""How a mesh lies on a target's links: each mesh axis as segments, one for each physical axis that it runs along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AxisSegment", "PhysicalAxis", "assign_axes"]


@dataclass(frozen=True)
class PhysicalAxis:
    """One physical axis: devices along it, bytes per second from a device to a neighbour, one way.

    closed: the last device is next to the first. switched: there are no neighbours, each device reaches all at this rate.
    """

    size: int
    link: float
    closed: bool = False
    switched: bool = False


@dataclass(frozen=True)
class AxisSegment:
    """A part of a mesh axis along one physical axis: its size, and the hops between its neighbours."""

    size: int
    link: float
    stride: int = 1
    closed: bool = False
    switched: bool = False


def assign_axes(physical: tuple[PhysicalAxis, ...], sizes: Mapping[str, int]) -> dict[str, tuple[AxisSegment, ...]]:
    """The segments of each mesh axis, the slowest-changing first; the sizes multiply to the number of devices.

    This follows jax.make_mesh: the last mesh axis chooses first, and takes whole physical axes whose sizes multiply to its
    own. If none do, devices are counted row by row, and a mesh axis may get a part of a physical one: it
    is then no ring, and neighbours may be several hops apart.
    """
    segments = _whole(physical, sizes)
    return _row_by_row(physical, sizes) if segments is None else segments


def _whole(physical: tuple[PhysicalAxis, ...], sizes: Mapping[str, int]) -> dict[str, tuple[AxisSegment, ...]] | None:
    left = [index for index, axis in enumerate(physical) if axis.size > 1]
    segments: dict[str, tuple[AxisSegment, ...]] = {}
    for name, size in reversed([*sizes.items()]):
        choices = (c for count in range(len(left), 0, -1) for c in itertools.combinations(left, count))
        taken = next((c for c in choices if math.prod(physical[i].size for i in c) == size), None) if size > 1 else ()
        if taken is None:
            return None
        left = [index for index in left if index not in taken]
        segments[name] = tuple(
            AxisSegment(p.size, p.link, 1, p.closed, p.switched) for p in (physical[index] for index in taken)
        )
    return {name: segments[name] for name in sizes}


def _row_by_row(physical: tuple[PhysicalAxis, ...], sizes: Mapping[str, int]) -> dict[str, tuple[AxisSegment, ...]]:
    rest = [[axis, 1] for axis in physical if axis.size > 1]  # and how much of it is used
    axis_segments: dict[str, tuple[AxisSegment, ...]] = {}
    for name, size in reversed([*sizes.items()]):
        segments: list[AxisSegment] = []
        while size > 1 and rest:
            axis, used = rest[-1]
            assert isinstance(axis, PhysicalAxis)
            assert isinstance(used, int)
            part = math.gcd(size, axis.size // used) if used < axis.size else 1
            if part == 1:
                # The rest of this axis has no common factor: the neighbours are on the next one, or further along this one.
                if used < axis.size and len(rest) == 1:
                    part = size
                else:
                    rest.pop()
                    continue
            is_whole = part == axis.size
            segments.insert(
                0, AxisSegment(part, axis.link, 1 if axis.switched else used, axis.closed and is_whole, axis.switched)
            )
            rest[-1][1] = used * part
            size //= part
            if used * part >= axis.size:
                rest.pop()
        if size > 1:  # sizes that no physical axis has a factor of
            segments.insert(0, AxisSegment(size, physical[0].link, physical[-1].size, False, physical[0].switched))
        axis_segments[name] = tuple(segments)
    return {name: axis_segments[name] for name in sizes}
