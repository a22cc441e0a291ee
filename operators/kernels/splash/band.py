"""The band of keys that causal masks and windows leave a row.

Where the host knows how far a tile's keys are from its rows, a unit at the band's edge tests only the squares that the edge
crosses, with constants.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ....masks import And, Causal, Mask, SlidingWindow

__all__ = ["EVERYTHING", "Band", "band_of"]

_SIDE = 128  # of a square: the lanes of a register


class Band(NamedTuple):
    """Keys from `row + least` to `row + most`, both visible; None for no bound on that side."""

    least: int | None = None
    most: int | None = None

    def hide(self, x: jax.Array, distance: int, across: bool) -> jax.Array:
        """-inf for the keys of a unit outside the band. distance: its first row less its first key. across: x is [keys, rows].

        Both sides of a unit are multiples of 128.
        """
        lines = []
        for i in range(0, x.shape[0], _SIDE):
            line: list[tuple[slice, Band | None]] = []
            for j in range(0, x.shape[1], _SIDE):
                band = self._cut(distance + (j - i if across else i - j))
                start = j
                if line and line[-1][1] == band and band in (None, EVERYTHING):  # one square, if nothing is tested
                    start = line.pop()[0].start
                line.append((slice(start, j + _SIDE), band))
            lines.append((slice(i, i + _SIDE), line))
        if all(band == EVERYTHING for _, line in lines for _, band in line):
            return x
        return jnp.concatenate(
            [jnp.concatenate([_hide(x[at, to], band, across) for to, band in line], axis=1) for at, line in lines]
        )

    def _cut(self, distance: int) -> Band | None:
        """The bounds that cut a square, relative to its own first row and key; None if the square is hidden."""
        last = _SIDE - 1
        least, most = (None if bound is None else bound + distance for bound in self)
        if (least is not None and least > last) or (most is not None and most < -last):
            return None
        return Band(None if least is None or least <= -last else least, None if most is None or most >= last else most)


EVERYTHING = Band()


def band_of(mask: Mask) -> tuple[Band, Mask]:
    """(the band of a mask's causal and window conjuncts, the And of the others). A part without an offset is among the others."""
    least, most, others = EVERYTHING.least, EVERYTHING.most, []
    for part in mask.conjuncts():
        if not isinstance(part, Causal | SlidingWindow) or part.offset is None:
            others.append(part)
            continue
        offset = part.offset
        left, right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)
        if left is not None:
            least = offset - left if least is None else max(least, offset - left)
        if right is not None:
            most = offset + right if most is None else min(most, offset + right)
    return Band(least, most), And(others)


def _hide(square: jax.Array, band: Band | None, across: bool) -> jax.Array:
    if band is None:
        return jnp.full_like(square, -jnp.inf)
    if band == EVERYTHING:
        return square
    keys, rows = (lax.broadcasted_iota(jnp.int32, square.shape, axis) for axis in ((0, 1) if across else (1, 0)))
    ahead = keys - rows
    tests = [] if band.least is None else [ahead >= band.least]
    tests += [] if band.most is None else [ahead <= band.most]
    return jnp.where(functools.reduce(jnp.logical_and, tests), square, -jnp.inf)
