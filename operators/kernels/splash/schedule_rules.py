"""What every kernel relies on about the order of its visits, stated once and asserted where the host knows a list.

Sums lie in scratch memory, and a block of an output stays in VMEM, only as long as steps that revisit it follow one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .schedule import BODY, FIRST, LAST, TileSchedule, body_of, kv_block_of, q_block_of

__all__ = ["broken_rule"]


def broken_rule(visits: TileSchedule, slow: str) -> str | None:
    """The first rule that a list breaks; None for a right one, and for a list that is made on the device. slow: 'q' or 'kv'.

    A block of the slow axis is visited in consecutive steps; the first of them, and no other, has FIRST, the last LAST; blocks
    come in ascending order without a gap, so that each output is written once; no tile comes twice; a tile's body is one of
    those there are. What follows a list's end has no flags and stays at its last place.
    """
    if not isinstance(visits.words, np.ndarray):
        return None
    for words in visits.words.reshape(-1, visits.length):
        if (broken := _broken_by(words, slow, len(visits.bodies))) is not None:
            return broken
    return None


def _broken_by(words: np.ndarray, slow: str, bodies: int) -> str | None:
    places = np.stack([q_block_of(words), kv_block_of(words)])
    of_list = np.flatnonzero(words & LAST)
    end = len(words) if not len(of_list) else int(of_list[-1]) + 1
    beyond = words[end:]
    block = (places[0] if slow == "q" else places[1])[:end]
    other = (places[1] if slow == "q" else places[0])[:end]
    starts = np.diff(block, prepend=block[0] - 1) != 0
    ends = np.append(starts[1:], True)
    rules: dict[str, Any] = {
        "blocks of the slow axis come in ascending order without a gap": (np.diff(block, prepend=-1) == starts).all(),
        "the first visit of a block, and no other, has FIRST": (((words[:end] & FIRST) != 0) == starts).all(),
        "the last visit of a block, and no other, has LAST": (((words[:end] & LAST) != 0) == ends).all(),
        "no tile is visited twice": (np.diff(other)[~starts[1:]] > 0).all(),
        "a tile's body is one of those there are": (body_of(words) <= bodies).all(),
        "what follows the end has no flags and stays where it is": (
            (beyond == words[end - 1] & ~(FIRST | LAST | BODY)).all()
        ),
    }
    return next((rule for rule, holds in rules.items() if not holds), None)
