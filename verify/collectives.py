"""What a compiled program sends between devices: the collectives in its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .device_groups import axes_along, device_groups

__all__ = ["Collective", "collectives", "sent_bytes"]

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d+[a-z0-9]*|pred)\[(?P<sizes>[\d,]*)\]")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|branch_computations|called_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BELOW = re.compile(r"ROOT .* compare\(%[\w.\-]+, %(?P<limit>[\w.\-]+)\), direction=LT")
_WAITS = re.compile(r'"is_sync":true')  # a GPU collective that is awaited where it starts
_DEVICES = re.compile(r"num_partitions=(\d+)")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and array size: how often they run, bytes of the result per device, devices per group.

    overlapped: start and wait are separate, so work can go on in between. axes: the mesh axes along which the devices of
    a group lie; () if no mesh is given.
    """

    kind: str
    count: int
    result_bytes: int
    group: int
    overlapped: bool
    axes: tuple[str, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in total, by the usual ring algorithms."""
        share = (self.group - 1) / self.group
        per_call = {
            "all-gather": self.result_bytes * share,
            "all-reduce": 2 * self.result_bytes * share,
            "reduce-scatter": self.result_bytes * (self.group - 1),
            "all-to-all": self.result_bytes * share,
            "collective-permute": float(self.result_bytes),
        }[self.kind]
        return self.count * per_call


def collectives(text: str, sizes: Mapping[str, int] | None = None) -> tuple[Collective, ...]:
    """The collectives in a compiled program's text; inside a loop each counts as often as the loop is known to run.

    A collective over one device sends nothing and is left out. `sizes` are the mesh's, to identify the axes.
    """
    computations = dict(_computations(text))
    device_count = _DEVICES.search(text)
    devices = int(device_count[1]) if device_count else 1
    counts: dict[tuple[str, int, int, bool, tuple[str, ...]], int] = {}
    entry = next((name for name, (is_entry, _) in computations.items() if is_entry), None)

    def walk(name: str, times: int, overlapped: bool, channels: set[str] | None) -> None:
        """`channels`: those already seen in the fusions of one computation; None outside fusions."""
        seen: set[str] = set()
        for line in computations[name][1]:
            if match := _OPERATION.search(line):
                channel = _CHANNEL.search(line)
                if channels is not None and channel:
                    if channel[1] in channels:
                        continue
                    channels.add(channel[1])
                groups = device_groups(line, devices)
                group = max(map(len, groups), default=1)
                if group > 1:
                    axes = axes_along(groups, sizes) if sizes else ()
                    alone = overlapped or (match["start"] is not None and not _WAITS.search(line))
                    key = match["kind"], _result_bytes(match), group, alone, axes
                    counts[key] = counts.get(key, 0) + times
            fused, started = " fusion(" in line, "-start(" in line
            if fused or started or " while(" in line or " call(" in line or " conditional(" in line:
                trips = _trips(line, computations) if " while(" in line else 1
                for called in _CALLED.findall(line):
                    for callee in re.findall(r"%([\w.\-]+)", called):
                        if callee in computations:
                            # A collective that overlaps fusions appears in each of them, with the same channel.
                            inside = (channels if channels is not None else seen) if fused else channels
                            walk(callee, times * trips, overlapped or fused or started, inside)

    if entry is not None:
        walk(entry, 1, False, None)
    collected = (
        Collective(kind, count, size, group, overlapped, axes)
        for (kind, size, group, overlapped, axes), count in counts.items()
    )
    return tuple(sorted(collected, key=lambda c: (c.kind, -c.result_bytes, c.axes)))


def _trips(line: str, computations: dict[str, tuple[bool, list[str]]]) -> int:
    """How often a loop runs: its stated trip count, else the limit of its counter; 1 if neither is known."""
    if trip_count := _TRIPS.search(line):
        return int(trip_count[1])
    condition = _CONDITION.search(line)
    lines = computations[condition[1]][1] if condition and condition[1] in computations else []
    for condition_line in lines:
        if below := _BELOW.search(condition_line):
            limit = re.compile(rf"%{re.escape(below['limit'])} = s32\[\]\S* constant\((\d+)\)")
            return next((int(match[1]) for other in lines if (match := limit.search(other))), 1)
    return 1


def sent_bytes(collectives: tuple[Collective, ...]) -> float:
    """Bytes that a device sends."""
    return sum(collective.sent_bytes for collective in collectives)


def _computations(text: str) -> Iterator[tuple[str, tuple[bool, list[str]]]]:
    name: str | None = None
    is_entry, lines = False, list[str]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, is_entry, lines = head["name"], head["entry"] is not None, []
        elif line == "}" and name is not None:
            yield name, (is_entry, lines)
            name = None
        elif name is not None:
            lines.append(line)


def _result_bytes(match: re.Match[str]) -> int:
    """Bytes of the result's arrays. A collective's start lists its operands first and its counters last."""
    sizes = []
    for array in _ARRAY.finditer(match["type"]):
        bits = 8 if array["dtype"] == "pred" else int(_BITS.search(array["dtype"])[0])  # type: ignore[index]
        if array["sizes"] or not match["start"]:  # a start's scalars are its counters
            sizes.append(math.prod(int(n) for n in array["sizes"].split(",") if n) * bits // 8)
    return sum(sizes[len(sizes) // 2 :]) if match["start"] and len(sizes) > 1 else sum(sizes)
