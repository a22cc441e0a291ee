"""How attention in plain XLA is computed without whole logits: tiles, pieces, and what every way needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Blocking", "Pieces", "Ways"]


@dataclass(frozen=True)
class Blocking:
    """Tile sizes: query rows, keys, and kv heads worked on together."""

    block_q: int
    block_kv: int
    heads: int


@dataclass(frozen=True)
class Pieces:
    """The keys of one piece, and whether they are attended to in place, by decode_rows.

    Otherwise the caller fixes the number of pieces, which is small: each is its own part of the program.
    """

    block_kv: int
    in_place: bool = False


@dataclass(frozen=True)
class Ways:
    """How both passes are computed; the forward pass in pieces for few queries."""

    layout: str
    scale: float
    soft_cap: float | None
    softmax_dtype: np.dtype
    platform: str
    forward: Blocking | Pieces
    backward: Blocking
