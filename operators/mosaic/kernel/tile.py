"""The tile of a warpgroup: its mask, and the arrays that go along its rows and keys.

A tile is [rows, keys], or [keys, rows] where the gradients of key and value are summed. Numbers of rows and keys have the tile's
whole shape: the layouts of a warpgroup's registers know no tile of one row. The compiler computes each of them once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....masks import And, Lengths, Mask, Not, SegmentIds
from ....masks.static import SpanMask
from ....scores.steps import Lookup, Product
from ...kernels.block_words import is_blocks
from ...kernels.local_mask import Dropout
from ...kernels.tile_mask import TileLogits, TileMask
from .gather import gathered
from .mosaic_sizes import MosaicSizes
from .ptx import reciprocal
from .seen_parts import ALL_SEEN, SeenParts, seen_parts
from .spans import Numbered, bounds_of, is_span, numbered
from .within import Span, ThreadColumns, any_in_warp, with_words, within

__all__ = ["MosaicLogits", "MosaicTile"]

_MANY = 2**30  # columns: all that there are


@dataclass(frozen=True)
class MosaicLogits(TileLogits):
    """interpret: no MLIR."""

    interpret: bool


class _Negated(Mask):
    """Visible where the mask is not. Mosaic GPU has no negation of booleans."""

    kind = "negated"

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return _Negated(children[0])

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return self.mask.test(rows, positions, cols) ^ True


def _with_negations(mask: Mask) -> Mask:
    if not mask.children():
        return mask
    children = [_with_negations(child) for child in mask.children()]
    return _Negated(children[0]) if isinstance(mask, Not) else mask.with_children(children)


class MosaicTile(TileMask):
    """A warpgroup's tile of a batch row and query head. first_row, first_key: where it begins on this device. sizes: of the tiles
    of its block. columns: a reference to 0, 1, ... in shared memory; None where the compiler knows the numbers of a thread's
    columns. by_keys: [lines, block_q rows] instead of [lines, block_kv keys]. keys: those of a part of a tile. period, group:
    rows have the queries of the `group` heads of a kv head, which is then the head, each with that many. by_ids: segment ids are
    compared."""

    lines: ClassVar[int]  # rows of a warpgroup, or its keys
    in_registers: ClassVar[Any]  # how the tile's numbers lie in the registers of a warpgroup
    of_thread: ClassVar[ThreadColumns]  # the same of a thread

    def __init__(
        self,
        logits: MosaicLogits,
        refs: dict[str, Any],
        place: tuple[Any, Any],
        first_row: Any,
        first_key: Any,
        sizes: MosaicSizes,
        columns: Any,
        *,
        by_keys: bool = False,
        keys: int | None = None,
        period: int | None = None,
        group: int = 1,
        by_ids: bool = False,
    ) -> None:
        batch, self.head = place
        self.period, self.group, self.by_ids = period, group, by_ids
        super().__init__(logits.static_args, refs, batch)
        self.parts = _with_negations(self.static_args.mask).conjuncts()
        self.logits, self.block_q, self.block_kv, self.columns = logits, sizes.block_q, sizes.block_kv, columns
        self.first = {"q": first_row, "kv": first_key}
        self.axis = {"q": int(by_keys), "kv": int(not by_keys)}
        self.shape = (self.lines, sizes.block_q if by_keys else keys or sizes.block_kv)

    @classmethod
    def with_numbers(cls, refs: dict[str, Any], mask: Mask, batch: Any, first: Any) -> dict[str, Any]:
        """The references, and the numbers that spans of all tiles of some lines are made of, read once. first: of the lines."""

        def row(ref: Any) -> Any:
            return batch if ref.shape[0] > 1 else 0

        read = dict[str, Any]()
        for one in numbered(mask.conjuncts()):
            if one.part.kind == Lengths.kind:
                ref = refs[f"leaf{one.array}"]
                read[f"length{one.array}"] = ref[row(ref)]
            elif one.part.kind == SegmentIds.kind:
                for name in (name for name in bounds_of(one) if name in refs):
                    cut = refs[name].at[row(refs[name]), pl.ds(first, cls.lines)]
                    read[name] = plgpu.load(cut, layout=cls.in_registers.reduce(1), optimized=False)  # type: ignore[call-arg]
        return refs | read

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """See TileMask."""
        return reciprocal(x, self.in_registers, interpret=self.logits.interpret)

    def visible(self) -> list[jax.Array]:
        """The tests that a visible key passes, each of the tile's shape, beside those that `within` stands for."""
        spans = [one.part for one in (*self._spans, *self._compared)]
        padded = not self.takes_spans and self.static_args.kv_len % self.block_kv > 0
        if len(spans) == len(self.parts) and not padded:
            return []
        keys = self._numbers("kv")
        seen = self._tests(And(self.parts), self.local_rows(), self._global_keys(keys), but=spans)
        return [*seen, keys < self.static_args.kv_len] if padded else seen

    def within(self, x: jax.Array, span: Span | None = None, instead: float = -np.inf) -> jax.Array:
        """Numbers, and another one instead of those outside of their line's span. span: of this tile, if there is one already."""
        span = self._with_ids(self._span() if span is None else span)
        if span is None:
            return x
        return within(x, span, self.of_thread, self.in_registers, instead, interpret=self.logits.interpret)

    def span(self, words: bool = True) -> Span | None:
        """The columns that each line sees, counted from the tile's first, and the words by which the others are hidden."""
        span = self._with_ids(self._span())
        if span is None or not words:
            return span
        return with_words(span, self.shape[1], self.of_thread, self.in_registers, interpret=self.logits.interpret)

    def cut(self, words: bool = True) -> SeenParts:
        """Of this tile as the only part, which a warp computes whatever its rows see of it."""
        span = self.span(words)
        if span is None:
            return ALL_SEEN
        hidden = [x for x in (span.begin, None if span.end is None else self.shape[1] - span.end) if x is not None]
        most, by_row = functools.reduce(jnp.maximum, hidden), self.in_registers.reduce(1)
        return SeenParts(None, (any_in_warp(most, by_row, interpret=self.logits.interpret),), span)

    def seen_parts(self, count: int, *, ask: bool = True) -> SeenParts:
        """Of so many tiles that are neighbours, of which this is the first. ask: whether a warp looks at what its rows see."""
        span, width, every = self._span(), self.shape[1], (True,) * count
        if span is None:
            return ALL_SEEN
        if not (ask and span.bounds):
            return SeenParts(None, every, span)
        seen = seen_parts(span, width, count, self.in_registers, interpret=self.logits.interpret)
        return seen._replace(cut=every) if self._compared else seen

    def _span(self) -> Span | None:
        """The columns that each line sees, counted from the tile's first."""
        of_columns = "q" if self.axis["q"] else "kv"
        spans, kv_len = list(map(self._span_of, self._spans)), self.static_args.kv_len
        if kv_len % self.block_kv and self.takes_spans:
            spans.append(self._before(kv_len))
        begins, ends = ([one[number] for one in spans if one[number] is not None] for number in range(2))
        first = self.first[of_columns]
        begin = functools.reduce(jnp.maximum, begins) - first if begins else None
        end = functools.reduce(jnp.minimum, ends) - first if ends else None
        if begin is None and end is None and not self._compared:
            return None
        return Span(begin, end, jnp.minimum(jnp.full(self.shape[:1], first, jnp.int32), 0))

    @property
    def _spans(self) -> list[Numbered]:
        """The parts of the mask that are spans of columns of this device."""
        if not self.takes_spans:
            return []
        by_keys = bool(self.axis["q"])
        return [
            one
            for one in numbered(self.parts)
            if is_span(one, self.static_args, self.refs, self.block_kv, by_keys=by_keys)
            and not (self.by_ids and one.part.kind == SegmentIds.kind)
        ]

    @property
    def _compared(self) -> list[Numbered]:
        """The parts of the mask that are segment ids which are compared."""
        return [one for one in numbered(self.parts) if self.by_ids and one.part.kind == SegmentIds.kind]

    def _with_ids(self, span: Span | None) -> Span | None:
        """A span, and the ids of its lines and of this tile's columns, unless there are words of it."""
        if span is None or span.words is not None:
            return span
        dims = ("kv", "q") if self.axis["q"] else ("q", "kv")

        def ids(one: Numbered, dim: str) -> jax.Array:
            ref = self.refs[f"leaf{one.array + (dim == 'kv')}"]
            return self._loaded(ref, (self.batch if ref.shape[0] > 1 else 0,), dim)

        return span._replace(equal=tuple((ids(one, dims[0]), ids(one, dims[1])) for one in self._compared))

    @property
    def takes_spans(self) -> bool:
        """Whether spans aren't tested for each number."""
        return True

    def _span_of(self, one: Numbered) -> tuple[Any, Any]:
        """(begin, end) of a part of the mask; None without a bound."""
        part, words = one.part, f"words{one.words}"
        if part.kind == SegmentIds.kind:
            begin, end = (self.refs[name] for name in bounds_of(one))
            return begin, end
        if part.kind == Lengths.kind:
            return self._before(self._local_key(self.refs[f"length{one.array}"]))
        if is_blocks(part):
            return None, self._end_of_block(self.refs[words]) if words in self.refs else None
        assert isinstance(part, SpanMask)
        lines = self._lines()
        if self.axis["q"]:
            offset = self.offset() if part.offset is None else part.offset
            begin, end = part.row_span(self._global_keys(lines))
            return self._local_row(begin, offset), self._local_row(end, offset)
        rows = self._global_rows(self._of_head(lines))
        begin, end = part.key_span(part.position(rows, self.position(rows)))
        return self._local_key(begin), self._local_key(end)

    def _before(self, length: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """(begin, end) of each line's span where keys from this one on are hidden; None without a bound."""
        if self.axis["q"]:  # a begin, as most masks have of a key's rows
            return jnp.where(self._lines() < length, 0, _MANY), None
        # The compiler isn't to know that it's the same for all lines: what it does with that takes registers.
        return None, length + jnp.minimum(self._lines(), 0)

    def _end_of_block(self, ref: Any) -> jax.Array:
        """The end of each row's span where a tile lies in one block of the mask."""
        place, tile = self._of_words(ref)
        cut = ref.at[(*place, tile, 0, pl.ds(self.first["q"], self.lines))]
        words = plgpu.load(cut, layout=self.in_registers.reduce(1), optimized=False)  # type: ignore[call-arg] # of jax 0.10
        return jnp.where((words & 1) != 0, _MANY, 0)

    def _of_words(self, ref: Any) -> tuple[tuple[Any, Any], Any]:
        """(the place of this batch row and head, the number of the tile of keys)."""
        batch, head = (at if n > 1 else 0 for at, n in zip((self.batch, self.head), ref.shape[:2], strict=True))
        return (batch, head), lax.div(self.first["kv"], jnp.int32(self.block_kv))

    def _lines(self) -> jax.Array:
        """Numbers of the tile's lines on this device, one each."""
        dim = "kv" if self.axis["q"] else "q"
        numbers: jax.Array = plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=self.in_registers.reduce(1))
        return numbers + self.first[dim]

    def _local_key(self, key: Any) -> Any:
        """A key of the whole problem on this device; None for None."""
        start = self.static_args.k_start
        return key if key is None or start == 0 else key - (self.refs["k_start"][0] if start is None else start)

    def _local_row(self, x: Any, offset: Any) -> Any:
        """The row of this device at x."""
        start = self.static_args.q_start
        if x is None:
            return None
        x = x if isinstance(offset, int) and offset == 0 else x - offset
        return x if start == 0 else x - (self.refs["q_start"][0] if start is None else start)

    def keep(self) -> jax.Array | None:
        """Which weights dropout keeps; None without dropout."""
        if "dropout" not in self.refs:
            return None
        rows, keys = self._global_rows(self.local_rows()), self._global_keys(self._numbers("kv"))
        return Dropout.keep_mask(*self._dropout_key(self.query_heads()), rows, keys, self.static_args.dropout)

    def key_scale(self) -> jax.Array:
        """The scale of each key."""
        kv_head = self.head if self.period is not None else lax.div(self.head, self.group)
        return self._spread(self.refs["key_scale"], (self.batch, kv_head), "kv")

    def local_rows(self) -> jax.Array:
        """The queries' numbers on this device."""
        return self._of_head(self._numbers("q"))

    def _of_head(self, rows: jax.Array) -> jax.Array:
        """The queries of rows."""
        if self.period is None:
            return rows
        # The rest of a division by a power of two, 1 among them, is one instruction.
        even = self.period & (self.period - 1) == 0
        return rows & (self.period - 1) if even else lax.rem(rows, jnp.full_like(rows, self.period))

    def query_heads(self) -> Any:
        """The query head, or that of each row."""
        if self.period is None:
            return self.head
        rows, even = self._numbers("q"), self.period & (self.period - 1) == 0
        number = rows >> (self.period.bit_length() - 1) if even else lax.div(rows, jnp.full_like(rows, self.period))
        return number + self.head * self.group

    def row_and_head(self) -> tuple[Any, Any]:
        """The batch row and the query head in the whole problem."""
        return self.global_row_and_head(self.batch, self.query_heads())

    def positions(self) -> tuple[Any, Any]:
        """Positions of queries and keys, each of the tile's shape."""
        leaf = self.positions_leaf()
        if leaf is not None:
            return self._along(f"leaf{leaf}", "q"), self._along(f"leaf{leaf + 1}", "kv")
        rows, keys = (self.local_rows(), self._numbers("kv")) if self._indexes else self._rows_and_keys()
        return self.position(self._global_rows(rows)), self._global_keys(keys)

    def _rows_and_keys(self) -> tuple[jax.Array, jax.Array]:
        """Their numbers on this device. Where a line and a column are added, sums differ by a number from tile to tile, and the
        compiler would keep those of all of a line's columns. It doesn't know that this changes nothing."""
        numbers = {"q": self.local_rows(), "kv": self._numbers("kv")}
        if self.columns is None:
            lines, columns = ("kv", "q") if self.axis["q"] else ("q", "kv")
            numbers[lines] = jnp.maximum(numbers[lines], jnp.minimum(self.first[columns], 0))
        return numbers["q"], numbers["kv"]

    @property
    def _indexes(self) -> bool:
        """Whether a score computes places in tables: the parts of them that depend on a line alone are worth a register."""
        score = self.static_args.score
        return score is not None and any(isinstance(step, (Lookup, Product)) for step in score.steps)

    def dense(self, name: str) -> jax.Array:
        """The tile of an array [batch, heads, q, kv], any of them 1; by keys [batch, heads, kv, q]."""
        ref, dims = self.refs[name], ("kv", "q") if self.axis["q"] else ("q", "kv")
        place = tuple(at if n > 1 else 0 for at, n in zip((self.batch, self.head), ref.shape[:2], strict=True))
        first, second = (n > 1 for n in ref.shape[2:])
        if first and second:
            cut = ref.at[(*place, *(pl.ds(self.first[dim], n) for dim, n in zip(dims, self.shape, strict=True)))]
            numbers: jax.Array = plgpu.load(cut, layout=self.in_registers, optimized=False)  # type: ignore[call-arg] # of jax 0.10
            return numbers
        if first or second:
            line = ref.at[(*place, slice(None), 0)] if first else ref.at[(*place, 0)]
            return self._spread(line, (), dims[int(second)])
        return jnp.broadcast_to(ref[(*place, 0, 0)], self.shape)

    def diagonal(self, name: str, rows: int) -> jax.Array:
        """Numbers of a Diagonal's array, whose lines are those of a tile; of folded rows it is by query and key."""
        if self.period is not None:
            return self.dense(name)
        ref, (first, second) = self.refs[name], ("kv", "q") if self.axis["q"] else ("q", "kv")
        place = tuple(at if n > 1 else 0 for at, n in zip((self.batch, self.head), ref.shape[:2], strict=True))
        # Place 0 of the second axis has as many numbers before it as the tiles are long along the first.
        start = self.first[second] - self.first[first] + self._padded(first)
        cut = ref.at[(*place, slice(None), pl.ds(start, self.shape[1]))]
        numbers: jax.Array = plgpu.load(cut, layout=self.in_registers, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        return numbers

    def of_table(self, name: str, index: jax.Array) -> jax.Array:
        """Numbers of a Lookup's array, by their places in a head's; those beyond an end read what is there."""
        ref, heads = self.refs[name], self.query_heads()
        index = jnp.clip(index, 0, ref.shape[1] - 1)
        if ref.shape[0] == 1 or self.period is None:
            return self._gathered(ref.at[heads if ref.shape[0] > 1 else 0], index)
        return self._gathered(ref, jnp.minimum(heads, ref.shape[0] - 1) * ref.shape[1] + index)

    def of_columns(self, name: str, index: jax.Array) -> jax.Array:
        """Numbers of a Product's array, which is here [batch, heads, entries, rows of whole tiles], any but the third 1."""
        ref = self.refs[name]
        place = tuple(at if n > 1 else 0 for at, n in zip((self.batch, self.head), ref.shape[:2], strict=True))
        entries, rows = ref.shape[2:]
        index = jnp.clip(index, 0, entries - 1)
        return self._gathered(ref.at[place], index if rows == 1 else index * rows + self._numbers("q"))

    def _gathered(self, ref: Any, places: jax.Array) -> jax.Array:
        return gathered(ref, places, self.in_registers, self.logits.interpret)

    def _padded(self, dim: str) -> int:
        """Rows or keys of this device, in whole tiles."""
        length, block = {"q": (self.static_args.q_len, self.block_q), "kv": (self.static_args.kv_len, self.block_kv)}[
            dim
        ]
        return -(-length // block) * block

    def _dense(self, name: str, *where: Any) -> jax.Array:
        """See TileMask."""
        return self.dense(name)

    def _numbers(self, dim: str) -> jax.Array:
        """Those of the rows or of the keys, on this device."""
        axis = self.axis[dim]
        if axis == 0 or self.columns is None:
            return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.in_registers) + self.first[dim]
        # Computed ones would be kept in registers throughout a loop.
        numbers = plgpu.load(self.columns, layout=self.in_registers.reduce(0)) + self.first[dim]  # type: ignore[call-arg] # of jax 0.10
        return lax.broadcast_in_dim(numbers, self.shape, (1,))

    def _along(self, name: str, dim: str, *where: Any) -> jax.Array:
        """See TileMask."""
        ref = self.refs[name]
        return self._spread(ref, (self.batch if ref.shape[0] > 1 else 0,), dim)

    def _words(self, ref: Any, *where: Any) -> tuple[list[jax.Array], Any]:
        """See TileMask."""
        place, tile = self._of_words(ref)
        words = [self._spread(ref, (*place, tile, word), "q") for word in range(ref.shape[3])]
        return words, tile * self.block_kv

    def _spread(self, ref: Any, place: tuple[Any, ...], dim: str) -> jax.Array:
        """Numbers of an array's last axis, along the tile's rows or keys."""
        return lax.broadcast_in_dim(self._loaded(ref, place, dim), self.shape, (self.axis[dim],))

    def _loaded(self, ref: Any, place: tuple[Any, ...], dim: str) -> jax.Array:
        """The same, one for each row or key."""
        axis = self.axis[dim]
        cut = ref.at[(*place, pl.ds(self.first[dim], self.shape[axis]))]
        along = self.in_registers.reduce(1 - axis)
        numbers: jax.Array = plgpu.load(cut, layout=along, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        return numbers
