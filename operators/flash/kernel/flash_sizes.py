"""The kernels' tuning choices: blocks, warps, pipeline stages, parts of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["DIM_STEP", "DimPart", "FlashSizes", "HeadParts", "TileSizes", "TileSteps", "dim_parts"]

DIM_STEP = 16  # the least width of a product on tensor cores


class TileSizes(NamedTuple):
    """Sizes of one kernel. Blocks are powers of two, at least 16; stages: tiles being loaded from memory at once."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


class TileSteps(NamedTuple):
    """How the forward pass goes through the keys of a tile: in `softmaxes` parts, each with its own running softmax, and with
    `products` products with the values in each part.

    The compiler puts independent work side by side: the product of the next part's keys beside this part's softmax, and a
    product with values beside the exponentials of the next one. lanes: sums of a row's weights, each of every lanes-th key. With
    8, threads exchange nothing in the loops, because on tensor cores four of them hold two such keys each; it takes registers.
    """

    softmaxes: int = 1
    products: int = 1
    lanes: int = 1


@dataclass(frozen=True)
class FlashSizes:
    """Sizes of the forward pass, of the gradients of key and value, and of that of the query.

    kv_splits: parts of the keys that the forward pass works on separately, merged by their lse. fold: the query heads of a kv
    head are rows of the same tiles.
    """

    forward: TileSizes
    dkv: TileSizes
    dq: TileSizes
    kv_splits: int
    fold: bool
    steps: TileSteps


@dataclass(frozen=True)
class DimPart:
    """`width` columns of a head from `start` on, a power of two; `inside` of them belong to the head."""

    start: int
    width: int
    inside: int


class HeadParts(NamedTuple):
    """The parts of a query or key, and of a value. in_key: the value's are the first ones of the key."""

    key: tuple[DimPart, ...]
    value: tuple[DimPart, ...]
    in_key: bool

    @classmethod
    def of(cls, dim: int, value_dim: int, in_key: bool) -> HeadParts:
        """For these dims."""
        value = dim_parts(value_dim)
        return cls((*value, *dim_parts(dim, value_dim)) if in_key else dim_parts(dim), value, in_key)


def dim_parts(dim: int, start: int = 0) -> tuple[DimPart, ...]:
    """A head dim, from a column on, as powers of two, as Triton's tiles require: 80 is 64 and 16."""
    parts: list[DimPart] = []
    while start < dim:
        left = dim - start
        width = max(DIM_STEP, 1 << (left.bit_length() - 1))
        parts.append(DimPart(start, width, min(width, left)))
        start += width
    return tuple(parts)
