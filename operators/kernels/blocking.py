"""How attention in plain XLA is computed without whole logits: tiles, chunks of keys, and what every method needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Blocking", "BlockwiseMethod", "KeyChunks"]


@dataclass(frozen=True)
class Blocking:
    """Tile sizes: query rows, keys, and kv heads worked on together."""

    block_q: int
    block_kv: int
    heads: int


@dataclass(frozen=True)
class KeyChunks:
    """The keys of one chunk, and whether they are attended to in place, by decode_rows.

    Otherwise the caller fixes the number of chunks, which is small: each is its own part of the program.
    """

    block_kv: int
    in_place: bool = False


@dataclass(frozen=True)
class BlockwiseMethod:
    """How both passes are computed; the forward pass in chunks of keys for few queries. value_columns: values are the first so
    many numbers of their keys, and their gradient is a part of these."""

    layout: str
    scale: float
    soft_cap: float | None
    softmax_dtype: np.dtype
    platform: str
    forward: Blocking | KeyChunks
    backward: Blocking
    value_columns: int | None = None
