"""Variants: the code paths for a tile that a kernel is compiled with; each knows what every sub-tile of the tile needs.

A tile at the edge of a mask has sub-tiles without visible keys and fully visible sub-tiles. If the host knows the tiles, similar
ones share a variant, which leaves out the former and doesn't mask the latter. A kernel has at most three variants, because they
cost compile time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MASKED", "MAX_VARIANTS", "WHOLE", "KernelVariant", "cells", "few_variants", "variants_of"]

MAX_VARIANTS = 3  # an entry's packed flags have two bits for the number of its variant
_LOOKED_AT = 12  # the most frequent tiles compared with each other
_MASK = 1.25  # cost of a sub-tile with its mask
_WORTH = 0.02  # the share of the work that an additional variant must save


@dataclass(frozen=True)
class KernelVariant:
    """What a code path does with each sub-tile of a tile: 0 leaves it out, 1 applies the mask, 2 needs no mask.

    kinds: by sub-tiles of queries, then of keys; one number applies to the whole tile.
    """

    kinds: tuple[tuple[int, ...], ...]

    def kind(self, query: int, key: int, block_q: int, block_kv: int) -> int:
        """The kind of the sub-tile that begins with these of the tile's queries and keys."""
        return self.kinds[query * len(self.kinds) // block_q][key * len(self.kinds[0]) // block_kv]

    @property
    def computed(self) -> float:
        """The fraction of the tile that is computed."""
        return float((np.asarray(self.kinds) > 0).mean())

    @property
    def masked(self) -> float:
        """The fraction of the tile that is masked."""
        return float((np.asarray(self.kinds) == 1).mean())

    @property
    def work(self) -> float:
        """Its cost relative to a tile without a mask."""
        return _work(np.asarray(self.kinds))


WHOLE, MASKED = KernelVariant(((2,),)), KernelVariant(((1,),))


def cells(kinds: Any, blocks: tuple[int, int], of_block: tuple[int, int]) -> Any:
    """Kinds of sub-tiles [..., q sub-tiles, kv sub-tiles] by tile: [..., q blocks, kv blocks, sub-tiles of each, sub-tiles of
    each].

    blocks: their numbers. The last tile's sub-tiles beyond the last query are like those before them; beyond the last key
    nothing is visible.
    """
    short = tuple(n * size - have for n, size, have in zip(blocks, of_block, kinds.shape[-2:], strict=True))
    if any(short):
        xp = np if isinstance(kinds, np.ndarray) else _jax_numpy()
        rest = [(0, 0)] * (kinds.ndim - 2)
        kinds = xp.pad(kinds, [*rest, (0, short[0]), (0, 0)], mode="edge")
        kinds = xp.pad(kinds, [*rest, (0, 0), (0, short[1])])
    shape = kinds.shape[:-2]
    by_block = kinds.reshape(*shape, blocks[0], of_block[0], blocks[1], of_block[1])
    return by_block.swapaxes(-3, -2)


def variants_of(tiles: np.ndarray) -> tuple[tuple[KernelVariant, ...], np.ndarray]:
    """(variants, the number of each tile's, from 1, and 0 for a empty one) for tiles [..., sub-tiles of queries, sub-tiles of
    keys].
    """
    flat = np.ascontiguousarray(tiles.reshape(-1, *tiles.shape[-2:]).astype(np.int8))
    as_bytes = flat.reshape(len(flat), -1).view(np.dtype((np.void, flat[0].size)))[:, 0]
    distinct, place, counts = np.unique(as_bytes, return_inverse=True, return_counts=True)
    kinds = distinct.view(np.int8).reshape(len(distinct), *flat.shape[1:])
    visible = [i for i in np.argsort(-counts, kind="stable") if kinds[i].any()]
    variants, of_kind = few_variants(Counter({kinds[i].tobytes(): int(counts[i]) for i in visible}), kinds.shape[1:])
    numbers = np.array([of_kind.get(tile_kinds.tobytes(), 0) for tile_kinds in kinds], np.int8)
    return variants, numbers[place].reshape(tiles.shape[:-2])


def few_variants(counts: Counter[bytes], shape: tuple[int, ...]) -> tuple[tuple[KernelVariant, ...], dict[bytes, int]]:
    """(variants, each tile's number) for tiles, int8 as bytes, with their frequencies: as few as are worth their compile time."""
    total = sum(counts.values())
    groups: list[tuple[np.ndarray, int, list[bytes]]] = [
        (np.frombuffer(tile, np.int8).reshape(shape), count, [tile]) for tile, count in counts.most_common()
    ]
    if len(groups) > _LOOKED_AT:
        rest = groups[_LOOKED_AT - 1 :]
        kinds = np.stack([kinds for kinds, _, _ in rest])
        same = np.where(kinds.min(0) == kinds.max(0), kinds[0], np.int8(1))
        groups[_LOOKED_AT - 1 :] = [
            (same, sum(n for _, n, _ in rest), [tile for _, _, tiles in rest for tile in tiles])
        ]
    while len(groups) > 1:
        dearer, i, j = min((_more_work(a, b), i, j) for (i, a), (j, b) in itertools.combinations(enumerate(groups), 2))
        if len(groups) <= MAX_VARIANTS and dearer > _WORTH * total:
            break
        groups[i] = _merged(groups[i], groups[j])
        del groups[j]
    groups.sort(key=lambda group: (not (group[0] == 2).all(), -_work(group[0])))  # without a mask first
    variants = tuple(KernelVariant(tuple(tuple(map(int, row)) for row in _short(kinds))) for kinds, _, _ in groups)
    return variants, {tile: number for number, (_, _, tiles) in enumerate(groups, 1) for tile in tiles}


def _merged(
    a: tuple[np.ndarray, int, list[bytes]], b: tuple[np.ndarray, int, list[bytes]]
) -> tuple[np.ndarray, int, list[bytes]]:
    return np.where(a[0] == b[0], a[0], np.int8(1)), a[1] + b[1], a[2] + b[2]


def _more_work(a: tuple[np.ndarray, int, list[bytes]], b: tuple[np.ndarray, int, list[bytes]]) -> float:
    both = _merged(a, b)
    return _work(both[0]) * both[1] - _work(a[0]) * a[1] - _work(b[0]) * b[1]


def _work(kinds: np.ndarray) -> float:
    return float(((kinds > 0) + (_MASK - 1) * (kinds == 1)).mean())


def _short(kinds: np.ndarray) -> np.ndarray:
    """One number if all sub-tiles have the same kind."""
    return kinds[:1, :1] if (kinds == kinds.flat[0]).all() else kinds


def _jax_numpy() -> Any:
    import jax.numpy

    return jax.numpy
