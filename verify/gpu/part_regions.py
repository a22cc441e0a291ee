"""of_turn: how often a warp runs each instruction of a loop that looks at parts of a tile.

A word of the warp has a bit for each part of which one of its rows sees something, and from _CUT on one for each that some row
doesn't see whole. Forward branches by these bits leave instructions out; see `operators/mosaic/kernel/seen_parts.py`. Where a
test doesn't show its bit, what lies in another such region runs where a part is cut, and so does what has no exponentials and no
further regions in it; the rest where a part is seen. Of two, one of which runs instead of the other, that is the longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .instructions import Instruction
from .warp_words import branch_bits

__all__ = ["EVERY_PART", "PartShares", "Weight", "of_turn"]

_CUT, _EXPONENTIAL = 16, "MUFU.EX2"


class PartShares(NamedTuple):
    """seen: the share of a warp's parts of tiles with a mask of which one of its rows sees something. cut: of those parts, too,
    the share that is seen and not whole by all rows."""

    seen: float
    cut: float


EVERY_PART = PartShares(1.0, 1.0)  # nothing is left out


class Weight(NamedTuple):
    """A warp runs an instruction `always + seen * PartShares.seen + cut * PartShares.cut` times in a turn."""

    always: int
    seen: int
    cut: int

    @property
    def all_cut(self) -> bool:
        """Whether it does if it sees something of each part, and none whole."""
        return sum(self) > 0


# What a part can be for a warp: (bit for seen, bit for cut), and how often that is so. No part is hidden and not cut.
_CASES = {(True, False): Weight(0, 1, -1), (True, True): Weight(0, 0, 1), (False, True): Weight(1, -1, 0)}


class _Region(NamedTuple):
    """Instructions that run only where a part is seen or cut, or only where it isn't. number: of the part, if it's known."""

    start: int
    end: int
    cut: bool
    number: int | None
    positive: bool = True

    def holds(self, other: _Region) -> bool:
        """Whether another region lies in it, and may be of the same part."""
        unknown = self.number is None or other.number is None
        return self.start <= other.start and other.end <= self.end and (unknown or self.number == other.number)


def of_turn(body: Sequence[Instruction], targets: Sequence[int | None]) -> list[Weight]:
    """The weight of each instruction of a loop. targets: as `branch_bits` takes them."""
    weights = [Weight(1, 0, 0)] * len(body)
    regions = sorted(_regions(body, targets), key=lambda region: region.end - region.start, reverse=True)
    for at, region in enumerate(regions):  # the smallest one is weighed last, with those around it
        around = [one for one in regions[: at + 1] if one.holds(region)]
        cases = [weight for case, weight in _CASES.items() if all(case[one.cut] == one.positive for one in around)]
        weight = Weight(*(sum(numbers) for numbers in zip((0, 0, 0), *cases, strict=True)))
        weights[region.start : region.end] = [weight] * (region.end - region.start)
    return weights


def _regions(body: Sequence[Instruction], targets: Sequence[int | None]) -> Iterator[_Region]:
    bits = branch_bits(body, targets)
    spans = [
        (at + 1, target, bit)
        for at, (bit, target) in enumerate(zip(bits, targets, strict=True))
        if bit is not None and target is not None and target > at + 1
    ]
    for start, end, bit in spans:
        others = [(first, last) for first, last, _ in spans if (first, last) != (start, end)]
        cut = any(first <= start and end <= last for first, last in others)
        number = None if bit.number is None else bit.number % _CUT
        if bit.number is None:
            holds = any(start <= first and last <= end for first, last in others)
            cut |= not holds and not any(one.name.startswith(_EXPONENTIAL) for one in body[start:end])
        elif bit.number >= _CUT or bit.positive is not None:
            cut = bit.number >= _CUT
        region = _Region(start, end, cut, number, not bit.positive)
        last, after = body[end - 1], targets[end - 1]
        jumps = last.name == "BRA" and last.guard is None
        if jumps and after is not None and after > end:  # then what it jumps over runs instead
            if bit.positive is None:
                region = region._replace(positive=_stalls(body[start:end]) >= _stalls(body[end:after]))
            yield region._replace(start=end, end=after, positive=not region.positive)
        yield region


def _stalls(body: Sequence[Instruction]) -> int:
    return sum(instruction.stall for instruction in body)
