"""RelativeBias and RelativeBias2D: learnt numbers by the distance between query and key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ScoreError, a_type, is_whole, shown
from ..symbolic import surely
from .buckets import T5, BucketRule
from .functions import Named
from .node import Capture, Captured, Score, capture_array
from .places import Places
from .steps import Diagonal, Lookup, Lowering, Product

__all__ = ["RelativeBias", "RelativeBias2D"]


@dataclass(frozen=True)
class _OfPair:
    """The bucket of a pair of positions."""

    rule: BucketRule

    def __call__(self, q: Any, kv: Any) -> Any:
        return self.rule.index(kv - q, jnp)


@dataclass(frozen=True, eq=False)
class RelativeBias(Score):
    """logit + table[bucket of the distance, head]. table: [buckets, heads]; buckets: T5(...), Clip(...) or Buckets(...)."""

    kind: ClassVar[str] = "relative_bias"
    captured: ClassVar[tuple[str, ...]] = ("table",)
    table: Captured = None
    buckets: Any = None

    def __post_init__(self) -> None:
        rule = T5() if self.buckets is None else self.buckets
        if not isinstance(rule, BucketRule):
            raise ScoreError(
                f"RelativeBias buckets is {a_type(rule)}; wanted T5(...), Clip(...) or Buckets(name, rows)"
            )
        object.__setattr__(self, "buckets", rule)
        table = capture_array(self.table, "RelativeBias table", (2,), f"[{rule.count}, heads] for {rule.describe()}")
        object.__setattr__(self, "table", table)

    def captures(self) -> tuple[Capture, ...]:
        return (Capture("table", ("buckets", "heads"), broadcasts=False, sizes=(("buckets", self.buckets.count),)),)

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        index = xp.broadcast_to(self.buckets.index(at.distance, xp), np.broadcast_shapes(at.q.shape, at.kv.shape))
        return logits + xp.moveaxis(arrays[0][index[:, 0]], -1, 1)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Diagonal.name if contiguous else Lookup.name})

    def operations(self, contiguous: bool) -> frozenset[str]:
        named = not contiguous and isinstance(self.buckets, Named)
        return self.buckets.primitives((np.int32,)) if named else frozenset()

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        table = arrays[0].astype(lowering.dtype)
        if not lowering.contiguous:
            reads, rule = (lowering.array(table.T, "table"),), self.buckets
            lowering.add(Lookup(reads, index=_OfPair(rule), reach=rule.reach))
            return
        index = self.buckets.index(lowering.distances(), jnp)
        values = _of_buckets(index, table)
        lowering.add(Diagonal((lowering.array(values, "diagonal"),), rows=lowering.q_len))


_CHOSEN_TOGETHER = 8192  # numbers whose ones and zeros are in memory together


def _of_buckets(index: jax.Array, table: jax.Array) -> jax.Array:
    """table [buckets, heads] at index [batch, n]: [batch, heads, n].

    As a product with ones and zeros, of which the gradient is a product too: a sum in a fixed order on every platform.
    """
    buckets, heads = table.shape

    @jax.checkpoint  # else they are kept for the gradient
    def of_some(index: jax.Array) -> jax.Array:
        rows = lax.broadcasted_iota(index.dtype, (1, 1, buckets), 2)
        chosen = (index[..., None] == rows).astype(table.dtype)
        return jnp.einsum("bnk,kh->bhn", chosen, table, precision="highest")

    batch, n = index.shape
    if not surely(lambda: n > _CHOSEN_TOGETHER):
        return of_some(index)
    parts = -(-n // _CHOSEN_TOGETHER)
    padded = jnp.pad(index, ((0, 0), (0, parts * _CHOSEN_TOGETHER - n)))
    values = lax.map(of_some, padded.reshape(batch, parts, _CHOSEN_TOGETHER).swapaxes(0, 1))
    return values.transpose(1, 2, 0, 3).reshape(batch, heads, -1)[..., :n]


def _place(n: Any, width: Any) -> tuple[Any, Any]:
    """(row, column) of places. What there is for a negative one, before a class token, isn't used."""
    if isinstance(n, jax.Array):  # // and % of jax.numpy are ten instructions, for negative numbers
        width = n.dtype.type(width)
        return lax.div(n, width), lax.rem(n, width)
    return n // width, n % width


@dataclass(frozen=True)
class _GridIndex:
    """The row of Swin's table of a pair of places in a grid of height x width; BEiT's, if a class token comes first."""

    height: int
    width: int
    class_token: bool = False

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return (2 * self.height - 1) * (2 * self.width - 1) + (3 if self.class_token else 0)

    def __call__(self, q: Any, kv: Any) -> Any:
        if not self.class_token:
            return self._of_places(q, kv)
        xp: Any = np if isinstance(q, np.ndarray) else jnp
        # Its last three rows: the class token to a place, a place to it, and it to itself.
        of_others = xp.where(kv == 0, self.rows - 2, self._of_places(q - 1, kv - 1))
        return xp.where(q == 0, xp.where(kv == 0, self.rows - 1, self.rows - 3), of_others)

    def _of_places(self, q: Any, kv: Any) -> Any:
        (q_row, q_column), (row, column) = (_place(x, self.width) for x in (q, kv))
        return (q_row - row + self.height - 1) * (2 * self.width - 1) + q_column - column + self.width - 1


@dataclass(frozen=True)
class _GridRow:
    width: int

    def __call__(self, kv: Any) -> Any:
        return _place(kv, self.width)[0]


@dataclass(frozen=True)
class _GridColumn:
    width: int

    def __call__(self, kv: Any) -> Any:
        return _place(kv, self.width)[1]


@dataclass(frozen=True, eq=False)
class RelativeBias2D(Score):
    """Tokens are the places of a grid (height, width), row by row, and the bias follows from the two distances.

    table: [(2 height - 1) (2 width - 1), heads], Swin's. class_token: the first token has no place, and the table three more
    rows: it to a place, a place to it, it to itself, as in BEiT. Or decomposed, as in SAM and ViTDet: height [batch, heads, q,
    rows] and width [batch, heads, q, columns], numbers of each query for each row and column of the keys' grid. Source: Liu et
    al., "Swin Transformer" (2021); Li et al., "MViTv2" (2022).
    """

    kind: ClassVar[str] = "relative_bias_2d"
    captured: ClassVar[tuple[str, ...]] = ("height", "width", "table")
    height: Captured = None
    width: Captured = None
    grid: tuple[int, int] = (0, 0)
    table: Captured = None
    decomposed: bool | None = None
    class_token: bool = False

    def __post_init__(self) -> None:
        grid = self.grid
        if not isinstance(grid, tuple | list) or len(grid) != 2 or not all(is_whole(n, 1, 2**15) for n in grid):
            raise ScoreError(f"RelativeBias2D grid={shown(grid)}; wanted (height, width) of the grid of tokens")
        object.__setattr__(self, "grid", tuple(grid))
        decomposed = self.decomposed
        if decomposed is None:
            decomposed = self.height is not None or self.width is not None
        object.__setattr__(self, "decomposed", decomposed)
        if decomposed and self.table is not None:
            raise ScoreError("RelativeBias2D has height and width as well as table; wanted one of the two forms")
        if not isinstance(self.class_token, bool) or (self.class_token and decomposed):
            raise ScoreError(
                f"RelativeBias2D class_token={shown(self.class_token)}; wanted True or False, and False with height and width"
            )
        rows = self._index.rows
        for name, dims, ranks in (
            ("height", f"[batch, heads, q, {grid[0]}]", (4,)), ("width", f"[batch, heads, q, {grid[1]}]", (4,)),
            ("table", f"[{rows}, heads]", (2,)),
        ):  # fmt: skip
            value = capture_array(getattr(self, name), f"RelativeBias2D {name}", ranks, dims)
            object.__setattr__(self, name, value)

    @property
    def _index(self) -> _GridIndex:
        return _GridIndex(*self.grid, self.class_token)

    def captures(self) -> tuple[Capture, ...]:
        if not self.decomposed:
            sizes = (("entries", self._index.rows),)
            return (Capture("table", ("entries", "heads"), broadcasts=False, sizes=sizes),)
        return tuple(
            Capture(name, ("batch", "heads", "q_len", f"grid_{name}"), sizes=((f"grid_{name}", size),))
            for name, size in zip(("height", "width"), self.grid, strict=True)
        )

    def arrays(self) -> tuple[Captured, ...]:
        return (self.height, self.width) if self.decomposed else (self.table,)

    def with_arrays(self, arrays: Sequence[Captured]) -> RelativeBias2D:
        names = ("height", "width") if self.decomposed else ("table",)
        return self._changed(**dict(zip(names, arrays, strict=True)))

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        if not self.decomposed:
            index = xp.broadcast_to(self._index(at.q, at.kv), np.broadcast_shapes(at.q.shape, at.kv.shape))
            return logits + xp.moveaxis(arrays[0][xp.clip(index, 0, len(arrays[0]) - 1)[:, 0]], -1, 1)
        keys = xp.broadcast_to(at.kv, (1, 1, 1, logits.shape[-1]))[0, 0, 0]
        rows, columns = keys // self.grid[1], keys % self.grid[1]
        return logits + arrays[0][..., xp.clip(rows, 0, self.grid[0] - 1)] + arrays[1][..., columns]

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Product.name if self.decomposed else Lookup.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        if not self.decomposed:
            lowering.add(Lookup((lowering.array(arrays[0].T, "table"),), index=self._index))
            return
        places: tuple[Any, ...] = _GridRow(self.grid[1]), _GridColumn(self.grid[1])
        for array, index in zip(arrays, places, strict=True):
            lowering.add(Product((lowering.array(array, "columns"),), index=index))
