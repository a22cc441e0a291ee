"""Which parts of a mask are spans: each line of a tile sees columns that follow one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ....masks import Lengths, Mask, SegmentIds
from ....masks.static import SpanMask
from ...kernels.block_words import is_blocks
from ...kernels.operands import StaticArgs

__all__ = ["BOUNDS", "Numbered", "all_spans", "bounds_of", "is_span", "numbered"]

_FAR = 2**28  # from sums of numbers up to this and of places in arrays int32 is far
BOUNDS = "begin", "end"  # of segment ids, as arrays are called


class Numbered(NamedTuple):
    """A part of a mask, and the numbers of its first array and of its first words."""

    part: Mask
    array: int
    words: int


def numbered(parts: Sequence[Mask]) -> list[Numbered]:
    """Parts of a mask in order."""
    made, arrays, words = list[Numbered](), 0, 0
    for part in parts:
        made.append(Numbered(part, arrays, words))
        leaves = list(part.leaves())
        arrays, words = arrays + sum(len(leaf.parts) for leaf in leaves), words + sum(map(is_blocks, leaves))
    return made


def bounds_of(one: Numbered) -> tuple[str, ...]:
    """The names of the arrays with the spans of segment ids."""
    return tuple(f"{name}{one.array}" for name in BOUNDS)


def is_span(
    one: Numbered, static_args: StaticArgs, refs: dict[str, Any], block_kv: int, *, by_keys: bool = False
) -> bool:
    """Whether a part of the mask is a span of the keys, by_keys of the rows."""
    part: Any = one.part
    if part.kind == SegmentIds.kind:
        return bounds_of(one)[0] in refs
    if not is_blocks(part):
        return part.kind == Lengths.kind or (isinstance(part, SpanMask) and _is_near(part))
    if f"words{one.words}" not in refs:
        return True  # what isn't visited is all that it hides
    start = static_args.k_start
    alone = start is not None and start % block_kv == 0 and part.block_kv % block_kv == 0
    return alone and not by_keys  # then a tile has one bit for each row


def _is_near(part: SpanMask) -> bool:
    return all(number is None or abs(number) <= _FAR for number in vars(part).values())


def all_spans(static_args: StaticArgs, refs: dict[str, Any], block_kv: int) -> bool:
    """Whether all of the mask is a span of keys."""
    return all(is_span(one, static_args, refs, block_kv) for one in numbered(static_args.mask.conjuncts()))
