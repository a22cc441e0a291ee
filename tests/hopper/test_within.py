"""How a compiled kernel of Mosaic GPU hides what lies outside of spans: its instructions in NumPy, against comparisons."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__} has no layouts of registers in public", allow_module_level=True)

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from thread_values import ptx, run_block

from attnops.operators.blackwell.kernel.tile import BlackwellTile
from attnops.operators.hopper.kernel.tile import HopperTile
from attnops.operators.mosaic.kernel import within
from attnops.operators.mosaic.kernel.within import (
    Span,
    any_in_warp,
    both_words,
    chosen,
    ends_in_warp,
    equal_bit,
    hidden,
    span_place,
    span_word,
    with_words,
    words_of,
)

TILES = pytest.mark.parametrize("tile", [HopperTile, BlackwellTile], ids=["hopper", "blackwell"])
WIDTHS = pytest.mark.parametrize("width", [32, 64, 128, 256])
FAR = 2**30
HIDDEN = np.float32(-np.inf).view(np.uint32)
# Bits of NaNs of both signs, infinities, zeros, subnormal numbers, the largest one and an ordinary one.
NANS = 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF
NUMBERS = np.array([*NANS, 0x7F800000, HIDDEN, 0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0x3F800001], np.uint32)


def _bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.int64).astype(np.int32).view(np.uint32)


def _first_column(columns: Any, lane: int) -> int:
    """Of the thread in this lane."""
    return lane % (columns.period // columns.together) * columns.together


def _columns_of_words(columns: Any, width: int) -> dict[tuple[int, int, int], int]:
    """{(neighbour, word, bit): column} of those of a thread, less its first one."""
    per_thread = [
        (neighbour, period) for period in range(width // columns.period) for neighbour in range(columns.together)
    ]
    return {(n, *columns.bit(period)): n + period * columns.period for n, period in per_thread}


@TILES
@WIDTHS
@pytest.mark.parametrize(("has_begin", "has_end"), [(True, True), (True, False), (False, True)])
def test_bits_of_every_span(tile: Any, width: int, has_begin: bool, has_end: bool) -> None:
    """Every span of a tile, and of its neighbourhood, in every lane."""
    columns = tile.of_thread
    bounds = np.r_[np.arange(-5, width + 6), FAR, -FAR]
    begin = bounds[:, None] if has_begin else None
    end = bounds[None, :] if has_end else None
    of_words = _columns_of_words(columns, width)
    for first in sorted({_first_column(columns, lane) for lane in range(32)}):
        given = [_bits(x - first) for x in (begin, end) if x is not None]
        words = dict[tuple[int, int], np.ndarray]()
        for (neighbour, word, bit), column in of_words.items():
            if (neighbour, word) not in words:
                places = [ptx(span_place(columns, neighbour), x) for x in given]
                words[neighbour, word] = ptx(span_word(word, has_begin, has_end), *places)
            seen = np.True_ if begin is None else begin <= first + column
            seen = seen if end is None else seen & (first + column < end)
            found = (words[neighbour, word] >> np.uint32(bit)) & 1 == has_begin
            np.testing.assert_array_equal(found, np.broadcast_to(seen, found.shape))


@pytest.mark.parametrize("bit", range(32))
@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("instead", [-np.inf, 0.0])
def test_what_a_bit_makes_of_a_number(bit: int, hides: bool, instead: float) -> None:
    """Bit by bit: nothing is rounded, and no NaN becomes another."""
    rng = np.random.default_rng(bit)
    word = np.r_[np.uint32(0), np.uint32(2**32 - 1), rng.integers(0, 2**32, 30, np.uint32)][:, None]
    number = np.r_[NUMBERS, rng.integers(0, 2**32, 20, np.uint32)][None, :]
    found = ptx(chosen(bit, hides, instead), number, word, np.zeros_like(number))
    seen = ((word >> np.uint32(bit)) & 1 == 1) ^ hides
    np.testing.assert_array_equal(found, np.where(seen, number, np.float32(instead).view(np.uint32)))


@pytest.mark.parametrize("bit", range(32))
def test_a_bit_of_equal_numbers(bit: int) -> None:
    """It is added to what the word has."""
    rng = np.random.default_rng(bit)
    word = rng.integers(0, 2**32, 30, np.uint32) & ~np.uint32(1 << bit)
    one, other = rng.choice(np.r_[NUMBERS, 0, 5], (2, 30)).astype(np.uint32)
    other[::3] = one[::3]
    found = ptx(equal_bit(bit), word, one, other)
    np.testing.assert_array_equal(found, word | (one == other).astype(np.uint32) << np.uint32(bit))


@pytest.mark.parametrize("hides", [True, False])
def test_bits_of_both_words(hides: bool) -> None:
    one, other = np.random.default_rng(0).integers(0, 2**32, (2, 50), np.uint32)
    np.testing.assert_array_equal(ptx(both_words(hides), one, other), (~one if hides else one) & other)


class Numbers(list[Any]):
    """What a thread has of an array, as the arrays of Mosaic GPU give it."""

    dtype = None  # nobody asks for it

    def __init__(self, shape: tuple[int, ...], values: Iterable[Any]) -> None:
        super().__init__(values)
        self.shape = shape

    def foreach(self, of_number: Any, create_array: bool, is_signed: bool | None = None) -> Numbers:
        assert create_array
        return Numbers(self.shape, [of_number(value, None) for value in self])


class Threads:
    """The threads of two warpgroups, each of which has an array in its registers. ids: (row, column) of a number, or (row,)."""

    count = 256

    def __init__(self) -> None:
        self.module = ir.Module.create()
        self.held = dict[Any, np.ndarray]()

    def make(self, kind: Any, bits: np.ndarray) -> Any:
        """A value that has these bits."""
        value = mgpu.c(0.0 if isinstance(kind, ir.F32Type) else 0, kind)
        self.held[value] = np.broadcast_to(bits, (self.count,))
        return value

    def places(self, layout: Any, shape: tuple[int, ...]) -> list[list[np.ndarray]]:
        """The indices of each number of an array, in the order in which a thread has them."""
        found: list[Any] = []
        zero = mgpu.c(0.0, ir.F32Type.get())
        mgpu.FragmentedArray.splat(zero, shape, layout.to_mgpu()).foreach(lambda _, at: found.append(at))
        held = self.run()
        return [[held[index] for index in at] for at in found]

    def array(self, layout: Any, bits: np.ndarray, kind: Any = None) -> Numbers:
        """An array of these numbers, of int32 by default."""
        kind = kind or ir.IntegerType.get_signless(32)
        return Numbers(bits.shape, [self.make(kind, bits[tuple(at)]) for at in self.places(layout, bits.shape)])

    def run(self) -> dict[Any, np.ndarray]:
        return run_block(self.module.body.operations, self.count, self.held)


@pytest.fixture
def threads() -> Any:
    with make_ir_context(), ir.Location.unknown():
        made = Threads()
        with ir.InsertionPoint(made.module.body):
            yield made


@TILES
@pytest.mark.parametrize("width", [16, 64, 256])
def test_numbers_lie_where_the_tile_says(threads: Threads, tile: Any, width: int) -> None:
    columns = tile.of_thread
    rows = threads.places(tile.in_registers.reduce(1), (tile.lines,))
    assert len(rows) == columns.rows
    first = np.array([_first_column(columns, thread % 32) for thread in range(threads.count)])
    numbers = threads.places(tile.in_registers, (tile.lines, width))
    assert len(numbers) == tile.lines * width // 128
    for number, (row, column) in enumerate(numbers):
        which, neighbour, period = columns.place(number)
        np.testing.assert_array_equal(row, rows[which][0])
        np.testing.assert_array_equal(column, first + neighbour + period * columns.period)


def _spans(rng: np.random.Generator, lines: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Some of them are empty, or have bounds far beyond the tile."""
    bounds = rng.integers(-5, width + 6, (2, lines))
    far = rng.choice([-FAR, FAR], (2, lines))
    return tuple(np.where(rng.random((2, lines)) < 0.1, far, bounds))


@pytest.fixture
def alone(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """What surrounds the instructions is JAX's: here an array is what threads have of it."""

    def cast(x: Any, layout: Any) -> Any:
        return threads.array(layout, np.asarray(x, np.uint32))

    written = {"inline_mgpu": lambda **_: lambda of_context: functools.partial(of_context, None), "layout_cast": cast}
    monkeypatch.setattr(within, "plgpu", SimpleNamespace(**vars(plgpu) | written))
    monkeypatch.setattr(within, "_scalars", list)


# Before the numbers are there a thread can make the words of those layouts that have room for one by row and neighbour.
@pytest.mark.parametrize(("tile", "early"), [(HopperTile, False), (HopperTile, True), (BlackwellTile, False)])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bounds", [("begin",), ("end",), ("begin", "end")], ids="_".join)
@pytest.mark.parametrize("instead", [-np.inf, 0.0])
@pytest.mark.usefixtures("alone")
def test_a_tile(threads: Threads, tile: Any, early: bool, width: int, bounds: tuple[str, ...], instead: float) -> None:
    """All that threads do, from the bounds of their rows to their numbers."""
    _check_a_tile(threads, tile, early, width, bounds, 0, instead)


@pytest.mark.parametrize(("tile", "early"), [(HopperTile, False), (HopperTile, True), (BlackwellTile, False)])
@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("bounds", [(), ("begin",), ("end",), ("begin", "end")], ids="_".join)
@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.usefixtures("alone")
def test_a_tile_of_ids(
    threads: Threads, tile: Any, early: bool, width: int, bounds: tuple[str, ...], pairs: int
) -> None:
    """The same where rows and columns have ids."""
    _check_a_tile(threads, tile, early, width, bounds, pairs)


def _check_a_tile(
    threads: Threads,
    tile: Any,
    early: bool,
    width: int,
    bounds: tuple[str, ...],
    pairs: int,
    instead: float = -np.inf,
) -> None:
    rng = np.random.default_rng(width)
    lines, layout = tile.lines, tile.in_registers
    spans = dict(zip(("begin", "end"), _spans(rng, lines, width), strict=True))
    x = rng.choice(np.r_[NUMBERS, rng.integers(0, 2**32, 50, np.uint32)], (lines, width))
    values, by_row = threads.array(layout, x, ir.F32Type.get()), layout.reduce(1)
    begin, end = (threads.array(by_row, _bits(spans[name])) if name in bounds else None for name in ("begin", "end"))
    ids = [tuple(rng.integers(-1, 2, n) for n in (lines, width)) for _ in range(pairs)]
    equal = tuple(
        (threads.array(by_row, _bits(of_rows)), threads.array(layout.reduce(0), _bits(of_columns)))
        for of_rows, of_columns in ids
    )
    span = Span(begin, end, threads.array(by_row, np.zeros(lines, np.uint32)), equal)
    if early:
        span = with_words(span, width, tile.of_thread, layout, interpret=False)
    made = within.within(values, span, tile.of_thread, layout, instead, interpret=False)
    held, found = threads.run(), np.full_like(x, 0x12345678)
    for value, (row, column) in zip(made, threads.places(layout, x.shape), strict=True):
        found[row, column] = held[value]
    at = np.arange(width)
    seen = np.ones((lines, width), bool)
    if "begin" in bounds:
        seen &= at >= spans["begin"][:, None]
    if "end" in bounds:
        seen &= at < spans["end"][:, None]
    for of_rows, of_columns in ids:
        seen &= of_rows[:, None] == of_columns
    np.testing.assert_array_equal(found, np.where(seen, x, np.float32(instead).view(np.uint32)))


@TILES
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_bits_are_tested_one_after_the_other(threads: Threads, tile: Any, width: int) -> None:
    """Of each byte of a word: one instruction makes predicates of them if nothing is between."""
    columns, word, number = tile.of_thread, ir.IntegerType.get_signless(32), ir.F32Type.get()
    zeros = [threads.make(word, np.uint32(0)) for _ in range(columns.rows)]
    numbers = [mgpu.c(0.0, number) for _ in range(tile.lines * width // 128)]
    hidden(numbers, words_of(zeros, zeros, columns), False, zeros, columns, -np.inf)
    tested, words = [], []
    for operation in threads.module.body.operations:
        op = operation.operation
        text = ir.StringAttr(op.attributes["asm_string"]).value if op.name == "llvm.inline_asm" else ""
        found = re.search(r"and\.b32 a, \$2, (0x\w+);", text)
        if found:
            tested.append((words.index(op.operands[1]), int(found[1], 0).bit_length() - 1))
        elif "shl.b32" in text:
            words.append(op.results[0])
    of_word = {n: [bit for _, bit in some] for n, some in itertools.groupby(tested, lambda x: x[0])}
    assert sum(map(len, of_word.values())) == len(tested) == len(numbers)
    assert len(of_word) == len({n for n, _ in tested}) == len(words)
    for bits in of_word.values():
        used = [byte * 8 + bit for byte in range(4) for bit in range(columns.used)]
        assert bits == used[: len(bits)]


@TILES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("alone")
def test_least_and_greatest_of_a_warp(threads: Threads, tile: Any, seed: int) -> None:
    """Of all of a warp's rows, of whatever sign, and of no other's."""
    rng, warps, by_row = np.random.default_rng(seed), 4, tile.in_registers.reduce(1)  # warps of a warpgroup
    numbers = rng.integers([-(2**31), -5, -FAR, -FAR][seed], [2**31, 6, 0, FAR][seed], tile.lines)
    both = ends_in_warp(threads.array(by_row, _bits(numbers)), by_row, interpret=False)
    least, greatest = (x.registers.item() for x in both)
    together = [x.owner for x in (least, greatest)]
    assert all("has_side_effects" in operation.attributes for operation in together)
    held, of_warps = threads.run(), numbers.reshape(warps, -1)
    for value, want in ((least, of_warps.min(1)), (greatest, of_warps.max(1))):
        np.testing.assert_array_equal(held[value], _bits(np.tile(np.repeat(want, 32), threads.count // 128)))


@TILES
@pytest.mark.parametrize("share", [0, 0.02, 0.3, 1])
@pytest.mark.usefixtures("alone")
def test_whether_a_warp_has_a_number_above_0(threads: Threads, tile: Any, share: float, monkeypatch: Any) -> None:
    """Of all of a warp's rows, and of no other's."""
    rng, by_row = np.random.default_rng(int(100 * share)), tile.in_registers.reduce(1)
    numbers = np.where(
        rng.random(tile.lines) < share, rng.integers(1, FAR, tile.lines), -rng.integers(0, 3, tile.lines)
    )
    monkeypatch.setattr(mgpu.FragmentedArray, "__ne__", lambda x, other: (x, other))  # as JAX's arrays compare
    made, zero = any_in_warp(threads.array(by_row, _bits(numbers)), by_row, interpret=False)
    value = made.registers.item()
    assert zero == 0
    assert "has_side_effects" in value.owner.attributes
    want = (numbers.reshape(4, -1) > 0).any(1)
    np.testing.assert_array_equal(threads.run()[value] != 0, np.tile(np.repeat(want, 32), threads.count // 128))
    assert bool(any_in_warp(jax.numpy.asarray(numbers), by_row, interpret=True)) == want.any()
