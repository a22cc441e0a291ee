"""Masks for the kernels in Mosaic GPU whose mistakes are planted, and mistakes in the spans of columns that a mask's lines see.

They change results and no barrier: see mosaic_mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops import Causal, SlidingWindow
from attnops.masks import And, Lengths, SegmentIds
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.mosaic.kernel import mosaic_attention
from attnops.operators.mosaic.kernel.block import MosaicBlock
from attnops.operators.mosaic.kernel.tile import MosaicTile
from attnops.operators.mosaic.kernel.within import Span

Mistakes = dict[str, Callable[[], None]]
LEFT, RIGHT = 180, 20
_BEYOND, _FEW, _MANY = 60, 33, 2**30  # keys


class Hidden(NamedTuple):
    """A mask, and what it shows as bool [batch, 1, q, kv]."""

    mask: LocalMask
    seen: np.ndarray

    @property
    def batch(self) -> int:
        return len(self.seen)


def causal(q_len: int, kv_len: int, offset: int) -> Hidden:
    """Keys up to a row's position."""
    seen = np.arange(kv_len) <= np.arange(q_len)[:, None] + offset
    return Hidden(LocalMask(Causal(), 0, q_len, kv_len, offset), seen[None, None])


def window(q_len: int, kv_len: int, offset: int) -> Hidden:
    """A window that goes beyond the last key: spans of numbers that the compiler knows."""
    offset += _BEYOND
    mask = LocalMask(SlidingWindow(left=LEFT, right=RIGHT), 0, q_len, kv_len, offset)
    return Hidden(mask, _near(q_len, kv_len, np.array([offset])))


def edges(q_len: int, kv_len: int, offset: int) -> Hidden:
    """A row sees its position, the key before and some behind it."""
    distance = np.arange(kv_len) - (np.arange(q_len)[:, None] + offset)
    mask = LocalMask(SlidingWindow(left=1, right=_FEW), 0, q_len, kv_len, offset)
    return Hidden(mask, ((distance >= -1) & (distance <= _FEW))[None, None])


def documents(q_len: int, kv_len: int, offset: int) -> Hidden:
    """The same of three batch rows, with lengths and segment ids: in order, in order from one that isn't the least, and in none.
    A row has its position's id."""
    offsets = offset - np.array([0, 8, 4], np.int32)
    lengths = np.array([kv_len - 56, kv_len - 6, kv_len - 30], np.int32)  # of hidden keys some sums are 0
    keys = np.arange(kv_len)
    ids = [
        np.searchsorted([30, 50], keys, "right"),
        np.array([3, 5, 0])[np.searchsorted([50, 110], keys, "right")],
    ]
    of_keys = np.stack([*ids, keys // 40 % 2]).astype(np.int32)
    of_rows = np.take_along_axis(of_keys, np.arange(q_len) + offsets[:, None], axis=1)
    parts = SlidingWindow(left=LEFT, right=RIGHT), SegmentIds(*map(jax.numpy.asarray, (of_rows, of_keys)))
    mask = And((*parts, Lengths(jax.numpy.asarray(lengths))))
    seen = _near(q_len, kv_len, offsets) & (of_rows[:, None, :, None] == of_keys[:, None, None])
    seen &= keys < lengths[:, None, None, None]
    return Hidden(LocalMask(mask, 0, q_len, kv_len, jax.numpy.asarray(offsets)), seen)


def _near(q_len: int, kv_len: int, offsets: np.ndarray) -> np.ndarray:
    distance = np.arange(kv_len) - (np.arange(q_len)[:, None] + offsets[:, None, None, None])
    return (distance >= -LEFT) & (distance <= RIGHT)


MASKS = {"causal": causal, "window": window, "edges": edges, "documents": documents}


class FirstPlace:
    """A reference that is always cut at its first place, as that to an array of one batch row."""

    shape = (1,)

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.ref.at[0]


def change_span(change: Callable[[Span, Any], Span]) -> None:
    """A tile's span, changed. change: of the span and the number of the tile's first column."""
    plain = MosaicTile._span

    def span(self: Any) -> Any:
        made: Span | None = plain(self)
        return made if made is None else change(made, self.first["q" if self.axis["q"] else "kv"])

    MosaicTile._span = span  # type: ignore[method-assign]


def _moved(begin: int, end: int) -> None:
    """Each span begins and ends so many columns later."""

    def later(x: Any, columns: Any) -> Any:
        return None if x is None else x + columns

    change_span(lambda span, first: Span(later(span.begin, begin), later(span.end, end), span.zeros))


def _from_tile() -> None:
    def moved(span: Span, first: Any) -> Span:
        return Span(*(None if x is None else x + first for x in (span.begin, span.end)), span.zeros)

    change_span(moved)


def _numbers_of(change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """The numbers that spans are made of are those of another batch row or of other lines."""
    plain = MosaicTile.with_numbers.__func__  # type: ignore[attr-defined]

    def with_numbers(cls: Any, refs: Any, mask: Any, batch: Any, first: Any) -> Any:
        return plain(cls, refs, mask, *change(batch, first))

    MosaicTile.with_numbers = classmethod(with_numbers)  # type: ignore[method-assign, assignment]


def _first_row_of(start: str) -> None:
    """Numbers of this name are those of the first batch row."""
    plain = MosaicTile.with_numbers.__func__  # type: ignore[attr-defined]

    def with_numbers(cls: Any, refs: Any, mask: Any, batch: Any, first: Any) -> Any:
        of_first = plain(cls, refs, mask, 0, first)
        changed = {name: x for name, x in of_first.items() if name.startswith(start) and name[-1].isdigit()}
        assert changed
        return plain(cls, refs, mask, batch, first) | changed

    MosaicTile.with_numbers = classmethod(with_numbers)  # type: ignore[method-assign, assignment]


def _other_axis() -> None:
    """Of a window's two spans the other: of numbers that a kernel computes, not of those that the host plans with."""
    keys, rows = SlidingWindow.key_span, SlidingWindow.row_span

    def of(plain: Any, other: Any) -> Any:
        return lambda self, x: (other if isinstance(x, jax.Array) else plain)(self, x)

    SlidingWindow.key_span, SlidingWindow.row_span = of(keys, rows), of(rows, keys)  # type: ignore[method-assign]


def _lengths_along_lines(by_keys: bool) -> None:
    """Where lines are keys a length hides columns, where they are rows it hides lines."""
    plain = MosaicTile._before

    def before(self: Any, length: Any) -> Any:
        axis, self.axis = self.axis, {"q": int(not by_keys), "kv": int(by_keys)}
        made = plain(self, length)
        self.axis = axis
        return made

    MosaicTile._before = before  # type: ignore[method-assign]


def _padding_seen() -> None:
    plain = MosaicTile._before
    MosaicTile._before = lambda self, length: plain(self, _MANY if isinstance(length, int) else length)  # type: ignore[method-assign]


def _no_id_compared() -> None:
    """All tiles have spans of ids, whether or not these are in order."""
    plain = MosaicTile.__init__

    def init(self: Any, *given: Any, **more: Any) -> None:
        plain(self, *given, **more | {"by_ids": False})

    MosaicTile.__init__ = init  # type: ignore[method-assign]


def _first_ids() -> None:
    plain = MosaicTile._loaded
    MosaicTile._loaded = lambda self, ref, place, dim: plain(self, ref, (0, *place[1:]), dim)  # type: ignore[method-assign]


def _compared_ids(of_columns: Callable[[Any], Any], of_lines: Callable[[Any], Any] = lambda x: x) -> None:
    """The ids that are compared, changed."""
    plain = MosaicTile._with_ids

    def with_ids(self: Any, span: Any) -> Any:
        made = plain(self, span)
        return made._replace(equal=tuple((of_lines(x), of_columns(y)) for x, y in made.equal))

    MosaicTile._with_ids = with_ids  # type: ignore[method-assign]


def _ids(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> None:
    """The spans of ids, changed."""
    plain = mosaic_attention.id_spans
    mosaic_attention.id_spans = lambda lines, columns: change(*plain(lines, columns))


def _unordered(change: Callable[[Any], Any]) -> None:
    """What a block reads of whether ids are in order, changed."""
    plain = MosaicBlock.fold_tiles

    def fold(self: Any, refs: Any, *given: Any, **more: Any) -> Any:
        return plain(self, {**refs, "unordered": change(refs["unordered"])}, *given, **more)

    MosaicBlock.fold_tiles = fold  # type: ignore[method-assign]


def span_mistakes(mask: str, by_keys: bool, totals: bool = False) -> Mistakes:
    """The mistakes of a kernel with one of these masks, by name. by_keys: lines are keys. totals: whether it sums weights: in
    other sums padded keys are 0."""
    if mask == "documents":
        return _of_arrays(by_keys)
    made: Mistakes = {
        "none": lambda: None,
        "begin and end swapped": lambda: change_span(lambda span, first: Span(span.end, span.begin, span.zeros)),
        "a span begins early": lambda: _moved(-1, 0),
        "a span begins late": lambda: _moved(1, 0),
        "a span ends early": lambda: _moved(0, -1),
        "a span ends late": lambda: _moved(0, 1),
        "the first column not subtracted": _from_tile,
        "nothing hidden": lambda: setattr(MosaicTile, "within", lambda self, x, *_: x),
        "spans of rows for those of keys": _other_axis,
        "no offset": lambda: setattr(MosaicTile, "offset", lambda self: 0),
    }
    return made | {"padding seen": _padding_seen} if totals else made


def _of_arrays(by_keys: bool) -> Mistakes:
    """Those of a mask's arrays."""
    return {
        "none": lambda: None,
        "the first batch row's offset": lambda: setattr(
            MosaicTile, "offset", lambda self: self.refs["query_offset"][0]
        ),
        "numbers of the first batch row": lambda: _numbers_of(lambda batch, first: (0, first)),
        "lengths of the first batch row": lambda: _first_row_of("length"),
        "spans of ids of the first batch row": lambda: _first_row_of("begin"),
        "ends of ids of the first batch row": lambda: _first_row_of("end"),
        "spans of ids of the first lines": lambda: _numbers_of(lambda batch, first: (batch, 0)),
        "lengths along lines": lambda: _lengths_along_lines(by_keys),
        "ids are never compared": _no_id_compared,
        "ids are compared, and not tested": lambda: setattr(MosaicTile, "_with_ids", lambda self, span: span),
        "ids of the first batch row are compared": _first_ids,
        "ids of neighbouring columns are compared": lambda: _compared_ids(lambda x: jnp.roll(x, 1)),
        "ids are equal that differ by one bit": lambda: _compared_ids(lambda x: x | 1, lambda x: x | 1),
        "ids are said to be in order": lambda: _ids(lambda begin, end, rest: (begin, end, rest & False)),
        "ids are compared where they are in order": lambda: _ids(lambda begin, end, rest: (begin, end, ~rest)),
        "whether the first batch row's ids are in order": lambda: _unordered(FirstPlace),
        "ids end at the last": lambda: _ids(lambda begin, end, rest: (begin, end - 1, rest)),
        "ids begin with the second": lambda: _ids(lambda begin, end, rest: (begin + 1, end, rest)),
    }
