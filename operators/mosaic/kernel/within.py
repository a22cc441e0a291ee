"""Replace what a row of a tile doesn't see, outside of a span of columns or where ids differ: on a GPU by bits, interpreted by
comparing.

A comparison and a choice for each number of a tile would take four cycles of a unit that has other work. Instead a thread makes
words of bits for the columns that it has, one instruction makes predicates of several bits, and some of the numbers are chosen by
a multiplication, which is another unit's work. The compiler does so for instructions in this order only, hence they are written
out here. All that a compiled kernel and an interpreted one don't share of it is in this file.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from .ptx import asm

__all__ = [
    "Span",
    "ThreadColumns",
    "any_in_warp",
    "both_words",
    "chosen",
    "ends_in_warp",
    "equal_bit",
    "hidden",
    "span_place",
    "span_word",
    "with_words",
    "within",
    "words_of",
]

_BITS, _BYTE = 32, 8
_MULTIPLIED = (4, 5, 6)  # bits of a byte whose numbers are chosen by a multiplication
_MOST = 256  # columns of a tile
_Place = tuple[int, int, int]  # (which of a thread's rows, which of the neighbours, which word)


class Span(NamedTuple):
    """begin, end: the first column that each row sees and the one after the last, int32 [rows]; None without a bound. zeros:
    int32 [rows], of which the compiler doesn't know that they are 0. equal: pairs of int32 [rows] and [columns], where a row sees
    the columns with the same number. words: see `with_words`; None until they are computed."""

    begin: jax.Array | None
    end: jax.Array | None
    zeros: jax.Array
    equal: tuple[tuple[jax.Array, jax.Array], ...] = ()
    words: jax.Array | None = None

    @property
    def bounds(self) -> list[jax.Array]:
        """Those that there are."""
        return [x for x in (self.begin, self.end) if x is not None]

    @property
    def hides(self) -> bool:
        """Whether bits of its words stand for what is hidden, not for what is seen."""
        return self.begin is None and not self.equal

    def counted_from(self, column: int) -> Span:
        """The bounds of columns that are counted from this one."""
        begin, end = (x if x is None or column == 0 else x - column for x in (self.begin, self.end))
        return Span(begin, end, self.zeros)


@dataclass(frozen=True)
class ThreadColumns:
    """Which numbers of a tile a thread has, in the order of its registers: of `rows` rows in turn `together` neighbours, of every
    `period` columns those that its lane tells. used: bits of each byte of a word that stand for columns. Of 8 the compiler tests
    the last one by an instruction of its own; of 6 it leaves a predicate for what else the loop has."""

    period: int
    together: int
    rows: int
    used: int

    def place(self, number: int) -> tuple[int, int, int]:
        """(which of its rows, which of the neighbours, which period) the number-th of its numbers is of."""
        rest, neighbour = divmod(number, self.together)
        period, row = divmod(rest, self.rows)
        return row, neighbour, period

    def words(self, width: int) -> int:
        """Of a neighbour's columns, in a tile of this width."""
        return 1 + self.bit(width // self.period - 1)[0]

    def bit(self, period: int) -> tuple[int, int]:
        """(word, bit) of a neighbour's column."""
        byte, bit = divmod(period, self.used)
        return divmod(byte * _BYTE + bit, _BITS)


def within(
    x: jax.Array, span: Span, columns: ThreadColumns, layout: Any, instead: float, *, interpret: bool
) -> jax.Array:
    """Numbers [rows, columns], and another one instead of those outside of their row's span."""
    if interpret:
        return _compared(x, span, layout, instead)
    by_row = layout.reduce(1)
    told, layouts = _told(span, layout) if span.words is None else ([span.words], [layout])
    like = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, *layouts, by_row), return_type=like)
    def hide(context: Any, x: Any, *arrays: Any) -> Any:
        del context
        *given, zeros = map(_scalars, arrays)
        if span.words is None:
            word_of = _words(span, given, columns)
        else:
            (words,) = given
            word_of = {columns.place(number): word for number, word in enumerate(words)}.__getitem__
        made = iter(hidden(_scalars(x), word_of, span.hides, zeros, columns, instead))
        return x.foreach(lambda *_: next(made), create_array=True)

    hidden_x: jax.Array = hide(x, *told, span.zeros)
    return hidden_x


def with_words(span: Span, width: int, columns: ThreadColumns, layout: Any, *, interpret: bool) -> Span:
    """The span of a tile of this width, and the words by which `within` hides: a thread can make them while it waits for numbers.
    In the interpreter there are none.

    words: int32 [rows, period * words], of which a thread has those of each of its rows and neighbours.
    """
    if interpret:
        return span
    shape, (told, layouts) = (span.zeros.shape[0], columns.period * columns.words(width)), _told(span, layout)
    like = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, *layouts), return_type=like)
    def make(context: Any, empty: Any, *arrays: Any) -> Any:
        del context
        word_of = _words(span, list(map(_scalars, arrays)), columns)
        made = (word_of(columns.place(number)) for number in range(len(_scalars(empty))))
        return empty.foreach(lambda *_: next(made), create_array=True, is_signed=True)

    empty = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
    return span._replace(words=make(empty, *told))


def _told(span: Span, layout: Any) -> tuple[list[jax.Array], list[Any]]:
    """The arrays of which words are made, and their layouts."""
    by_row, pair = layout.reduce(1), (layout.reduce(1), layout.reduce(0))
    return [*span.bounds, *itertools.chain(*span.equal)], [by_row] * len(span.bounds) + [*pair] * len(span.equal)


def _words(span: Span, told: list[list[Any]], columns: ThreadColumns) -> Callable[[_Place], Any]:
    """What makes the words of a thread, of its numbers of these arrays."""
    begin = told.pop(0) if span.begin is not None else None
    end = told.pop(0) if span.end is not None else None
    return words_of(begin, end, columns, list(zip(told[::2], told[1::2], strict=True)))


def ends_in_warp(numbers: jax.Array, layout: Any, *, interpret: bool) -> tuple[Any, Any]:
    """The least and the greatest of a warp's rows' numbers, int32 [rows]; in the interpreter of all rows."""
    if interpret:
        return numbers.min(), numbers.max()
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=[number, number])
    def of_warp(context: Any, numbers: Any) -> Any:
        del context
        made = []
        for kind, of_two in (("min", arith.minsi), ("max", arith.maxsi)):
            one = functools.reduce(of_two, _scalars(numbers))
            whole = asm(one.type, f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", one, together=True)
            made.append(mgpu.FragmentedArray.splat(whole, (), is_signed=True))
        return made

    least, most = of_warp(numbers)
    return least, most


def any_in_warp(numbers: jax.Array, layout: Any, *, interpret: bool) -> Any:
    """Whether one of a warp's rows has a number above 0, of int32 [rows]; in the interpreter one of all rows."""
    if interpret:
        return (numbers > 0).any()
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=number)
    def of_warp(context: Any, numbers: Any) -> Any:
        del context
        most = functools.reduce(arith.maxsi, _scalars(numbers))
        return mgpu.FragmentedArray.splat(asm(most.type, any_above(), most, together=True), (), is_signed=True)

    return of_warp(numbers) != 0


def _compared(x: jax.Array, span: Span, layout: Any, instead: float) -> jax.Array:
    at = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=layout)
    for bound, seen in ((span.begin, at.__ge__), (span.end, at.__lt__)):
        if bound is not None:
            x = jnp.where(seen(lax.broadcast_in_dim(bound, x.shape, (0,))), x, instead)
    for pair in span.equal:
        of_rows, of_columns = (lax.broadcast_in_dim(ids, x.shape, (axis,)) for axis, ids in enumerate(pair))
        x = jnp.where(of_rows == of_columns, x, instead)
    return x


# -- what a thread does, in PTX ------------------------------------------------------------------------------------------


def span_place(columns: ThreadColumns, neighbour: int) -> str:
    """$0: the number of the bit, among those of all words of this neighbour's columns, at which a bound lies. $1: the bound, less
    the thread's first column."""
    more, shift = columns.together - 1 - neighbour, columns.period.bit_length() - 1
    lines = [f"add.s32 a, $1, {columns.period - columns.together};", "max.s32 a, a, 0;"]
    lines += [f"add.s32 a, a, {more};"] if more else []
    lines += [f"shr.u32 a, a, {shift};"] if shift else []
    if columns.used == _BYTE:
        return _block(".b32 a", *lines, "mov.b32 $0, a;")
    share = -(-(1 << 16) // columns.used)  # of 2**16: what is divided by it is at most _MOST
    return _block(
        ".b32 a, b", *lines, f"min.s32 a, a, {_MOST};", f"mul.lo.s32 b, a, {share};", "shr.u32 b, b, 16;",
        f"mad.lo.s32 $0, b, {_BYTE - columns.used}, a;",
    )  # fmt: skip


def span_word(number: int, begin: bool, end: bool) -> str:
    """$0: the number-th word. A bit is 1 within the span; without a begin it is 0 there. $1, $2: the places of begin and end, of
    those that there are."""
    lines = ["mov.b32 c, 0xFFFFFFFF;"]
    for name, at in (("a", 1), ("b", 1 + begin)):
        if (begin, end)[name == "b"]:
            # A shift by 32 bits or more leaves none.
            less = [f"sub.s32 {name}, ${at}, {number * _BITS};", f"max.s32 {name}, {name}, 0;"]
            lines += [*(less if number else [f"mov.b32 {name}, ${at};"]), f"shl.b32 {name}, c, {name};"]
    both = ["not.b32 b, b;", "and.b32 $0, a, b;"]
    return _block(".b32 a, b, c", *lines, *(both if begin and end else [f"mov.b32 $0, {'a' if begin else 'b'};"]))


def equal_bit(bit: int) -> str:
    """$0: the word $1, in which this bit, which was 0, is 1 if $2 and $3 are equal."""
    lines = "mov.b32 a, $1;", "setp.ne.b32 p, $2, $3;", f"@!p or.b32 a, a, {1 << bit:#x};", "mov.b32 $0, a;"
    return _block(".pred p; .reg .b32 a", *lines)


def both_words(hides: bool) -> str:
    """$0: the bits of $1, with `hides` those that are 0, that are 1 in $2 too."""
    return _block(".b32 a", f"{'not' if hides else 'mov'}.b32 a, $1;", "and.b32 $0, a, $2;")


def chosen(bit: int, hides: bool, instead: float) -> str:
    """$0: $1 where this bit of the word $2 is 1, with `hides` where it is 0, else another number. $3: 0."""
    other = f"{np.float32(instead).view(np.uint32):#010x}"
    lines = [f"and.b32 a, $2, {1 << bit:#x};", f"setp.{'eq' if hides else 'ne'}.b32 p, a, 0;"]
    if bit % _BYTE in _MULTIPLIED:
        lines += ["mov.b32 a, $1;", f"@!p mad.lo.s32 a, a, $3, {other};", "mov.b32 $0, a;"]
    else:
        lines.append(f"selp.b32 $0, $1, {other}, p;")
    return _block(".pred p; .reg .b32 a", *lines)


def any_above() -> str:
    """$0: 1 if $1 is above 0 in a thread of the warp, else 0."""
    return _block(
        ".pred p", "setp.gt.s32 p, $1, 0;", "vote.sync.any.pred p, p, 0xffffffff;", "selp.b32 $0, 1, 0, p;"
    )  # fmt: skip


def _block(registers: str, *lines: str) -> str:
    return " ".join(("{ .reg", f"{registers};", *lines, "}"))


def words_of(
    begin: list[Any] | None,
    end: list[Any] | None,
    columns: ThreadColumns,
    equal: Sequence[tuple[list[Any], list[Any]]] = (),
) -> Callable[[_Place], Any]:
    """What makes the words of a thread. begin, end: of each of its rows. equal: pairs of numbers of its rows and columns."""
    if columns.period > 1 and (begin or end):
        first = _first_column(columns)
        begin, end = ([arith.subi(x, first) for x in some] if some else None for some in (begin, end))
    bounds = [of_rows for of_rows in (begin, end) if of_rows is not None]
    places = dict[tuple[int, int], list[Any]]()

    def of_span(place: _Place) -> Any:
        row, neighbour, word = place
        if (row, neighbour) not in places:
            places[row, neighbour] = [asm(_word_type(), span_place(columns, neighbour), x[row]) for x in bounds]
        text = span_word(word, begin is not None, end is not None)
        return asm(_word_type(), text, *places[row, neighbour])

    def of_pair(place: _Place, of_rows: list[Any], of_columns: list[Any]) -> Any:
        row, neighbour, word = place
        made = mgpu.c(0, _word_type())
        for period, number in enumerate(of_columns[neighbour :: columns.together]):
            of_word, bit = columns.bit(period)
            if of_word == word:
                made = asm(_word_type(), equal_bit(bit), made, of_rows[row], number)
        return made

    def word_of(place: _Place) -> Any:
        words = [of_pair(place, *pair) for pair in equal]
        if bounds and words:
            words[0] = asm(_word_type(), both_words(begin is None), of_span(place), words[0])
        both = functools.partial(asm, _word_type(), both_words(False))
        return functools.reduce(both, words) if words else of_span(place)

    return word_of


def hidden(
    values: list[Any],
    word_of: Callable[[_Place], Any],
    hides: bool,
    zeros: list[Any],
    columns: ThreadColumns,
    instead: float,
) -> list[Any]:
    """A thread's numbers of a tile, and another one where a bit is 0; with `hides` where it is 1. zeros: one for each of its
    rows."""
    # By words: only tests of neighbouring bits, one after the other, become one instruction.
    words = dict[_Place, list[tuple[int, int]]]()
    for number in range(len(values)):
        row, neighbour, period = columns.place(number)
        word, bit = columns.bit(period)
        words.setdefault((row, neighbour, word), []).append((number, bit))
    made = list(values)
    for place, some in words.items():
        whole = word_of(place)
        for number, bit in some:
            value = values[number]
            made[number] = asm(value.type, chosen(bit, hides, instead), value, whole, zeros[place[0]])
    return made


def _first_column(columns: ThreadColumns) -> Any:
    lane = mgpu.thread_idx()
    lanes, together = (mgpu.c(n, lane.type) for n in (columns.period // columns.together, columns.together))
    return arith.muli(arith.remui(lane, lanes), together)  # a warp has a multiple of so many lanes


def _scalars(x: Any) -> list[Any]:
    """A thread's numbers of an array."""
    numbers: list[Any] = []
    x.foreach(lambda value, _: numbers.append(value))
    return numbers


def _word_type() -> Any:
    return ir.IntegerType.get_signless(_BITS)
