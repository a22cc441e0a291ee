"""Rules about the order of entries that every kernel relies on, stated once and asserted if the host knows a list.

Sums stay in scratch memory, and a block of an output in VMEM, only while the steps that revisit it are consecutive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .schedule import FIRST, LAST, VARIANT, TileSchedule, kv_block_of, q_block_of, variant_of

__all__ = ["broken_rule"]


def broken_rule(schedule: TileSchedule, slow: str) -> str | None:
    """The first rule that a list breaks; None for a valid one, and for a list made on the device. slow: 'q' or 'kv'.

    A block of the slow axis is visited in consecutive steps; only the first of them has FIRST, only the last LAST; blocks
    are in ascending order without gaps, so that each output is written once; no tile occurs twice; a tile's variant is one of
    the existing ones. What follows a list's end has no flags and stays at its last place.
    """
    if not isinstance(schedule.words, np.ndarray):
        return None
    for words in schedule.words.reshape(-1, schedule.length):
        if (broken := _broken_by(words, slow, len(schedule.variants))) is not None:
            return broken
    return None


def _broken_by(words: np.ndarray, slow: str, variants: int) -> str | None:
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
        "a tile's variant is one of those there are": (variant_of(words) <= variants).all(),
        "what follows the end has no flags and stays where it is": (
            (beyond == words[end - 1] & ~(FIRST | LAST | VARIANT)).all()
        ),
    }
    return next((rule for rule, holds in rules.items() if not holds), None)
