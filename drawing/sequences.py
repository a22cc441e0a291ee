"""The sequences of a ragged batch as SVG: which of each sequence's tokens a step reads, and which are new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .svg import label, picture, rectangle

__all__ = ["SequenceBar", "sequences"]

_WIDTH, _LEFT, _RIGHT, _ROW = 440.0, 72.0, 128.0, 20.0
_MAX = 24


class SequenceBar(NamedTuple):
    """A sequence of `length` tokens: those before `first` aren't read, and the last `new` are the step's own."""

    name: str
    length: int
    first: int
    new: int
    text: str


def sequences(bars: Sequence[SequenceBar]) -> str:
    """One line for each sequence, all to one scale; at most 24 are drawn."""
    longest = max((bar.length for bar in bars), default=0) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = [label(12, 20, f"Sequences, up to {longest} tokens", class_="ao-strong")]
    y = 32.0
    for bar in bars[:_MAX]:
        ends = bar.first, bar.length - bar.new, bar.length
        for (start, end), kind in zip(
            ((0, ends[0]), ends[:2], ends[1:]), ("ao-dead", "ao-part", "ao-full"), strict=True
        ):
            if end > start:
                parts.append(rectangle(_LEFT + start * scale, y, max((end - start) * scale, 1.5), _ROW - 6, kind))
        parts.append(rectangle(_LEFT, y, bar.length * scale, _ROW - 6, "ao-frame"))
        parts.append(label(_LEFT - 6, y + 11, bar.name, "ao-small", "end"))
        parts.append(label(_LEFT + bar.length * scale + 6, y + 11, bar.text, "ao-small"))
        y += _ROW
    if len(bars) > _MAX:
        parts.append(label(_LEFT, y + 11, f"and {len(bars) - _MAX} more", "ao-small"))
        y += _ROW
    x = 12.0
    for kind, words, width in (("ao-full", "new", 60), ("ao-part", "read", 66), ("ao-dead", "not read", 90)):
        parts += [rectangle(x, y + 8, 12, 12, kind), label(x + 18, y + 18, words, "ao-small")]
        x += width
    return picture(_WIDTH, y + 30, "Sequences of a batch", parts)
