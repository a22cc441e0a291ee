"""The band of keys that causal masks and windows leave a row.

Where the host knows how far a tile's keys are from its rows, a sub-tile at the band's edge tests only the squares that the edge
crosses, with constants.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ....masks import And, Mask
from ....masks.causal_window import is_band, key_bounds

__all__ = ["EVERYTHING", "DiagonalBand", "band_of"]

_SIDE = 128  # of a square: the lanes of a register
_MAX = 1 << 18  # weights of a sub-tile in squares; for larger ones the compiler takes minutes on tpu7x


class DiagonalBand(NamedTuple):
    """Keys from `row + min_distance` to `row + max_distance`, both visible; None for no bound on that side."""

    min_distance: int | None = None
    max_distance: int | None = None

    def hide(self, x: jax.Array, distance: int, transposed: bool) -> jax.Array:
        """-inf for the keys of a sub-tile outside the band. distance: its first row less its first key. transposed: x is [keys,
        rows].

        Both sides of a sub-tile are multiples of 128.
        """
        high, wide = (_SIDE, _SIDE) if x.size <= _MAX else x.shape
        lines = []
        for down in _parts(x.shape[0], high):
            line: list[tuple[slice, DiagonalBand | None]] = []
            for along in _parts(x.shape[1], wide):
                rows, keys = (along, down) if transposed else (down, along)
                band = self._cut(distance + rows.start - keys.start, rows.stop - rows.start, keys.stop - keys.start)
                start = along.start
                if line and line[-1][1] == band and band in (None, EVERYTHING):  # one square, if nothing is tested
                    start = line.pop()[0].start
                line.append((slice(start, along.stop), band))
            lines.append((down, line))
        if all(band == EVERYTHING for _, line in lines for _, band in line):
            return x
        return jnp.concatenate(
            [jnp.concatenate([_hide(x[at, to], band, transposed) for to, band in line], axis=1) for at, line in lines]
        )

    def _cut(self, distance: int, rows: int, keys: int) -> DiagonalBand | None:
        """The bounds that cut a square, relative to its own first row and key; None if the square is hidden."""
        min_distance, max_distance = (None if bound is None else bound + distance for bound in self)
        if (min_distance is not None and min_distance > keys - 1) or (
            max_distance is not None and max_distance < 1 - rows
        ):
            return None
        return DiagonalBand(
            None if min_distance is None or min_distance <= 1 - rows else min_distance,
            None if max_distance is None or max_distance >= keys - 1 else max_distance,
        )


EVERYTHING = DiagonalBand()


def band_of(mask: Mask) -> tuple[DiagonalBand, Mask]:
    """(the band of a mask's causal and window conjuncts, the And of the others). A part without an offset is among the others."""
    bounded = [part for part in mask.conjuncts() if is_band(part) and part.offset is not None]
    others = [part for part in mask.conjuncts() if not is_band(part) or part.offset is None]
    return DiagonalBand(*key_bounds(bounded, 0)), And(others)


def _parts(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


def _hide(square: jax.Array, band: DiagonalBand | None, transposed: bool) -> jax.Array:
    if band is None:
        return jnp.full_like(square, -jnp.inf)
    if band == EVERYTHING:
        return square
    keys, rows = (lax.broadcasted_iota(jnp.int32, square.shape, axis) for axis in ((0, 1) if transposed else (1, 0)))
    ahead = keys - rows
    tests = [] if band.min_distance is None else [ahead >= band.min_distance]
    tests += [] if band.max_distance is None else [ahead <= band.max_distance]
    return jnp.where(functools.reduce(jnp.logical_and, tests), square, -jnp.inf)
