"""Operands: the arrays of an operation, declared as a table of names over logical dims.

Shapes, dtypes, PartitionSpecs, gradients and what moves with a split sequence follow from the table. An operation with further
arrays adds rows to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from jax.sharding import PartitionSpec

from .modes import LAYOUTS

__all__ = ["ATTENTION", "RESULTS", "Operand", "OperandShape", "OperandTable"]


@dataclass(frozen=True)
class Operand:
    """An array of an operation.

    dims: the names of its dimensions: batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim; another name is of any size,
    and '' is 1. order: for an array that follows the call's layout, the layout's letters of its dims; packed layouts have no
    'b'. also: other dims that it may have instead. broadcasts: 1 is accepted in place of any size. split_as: for each
    dimension, the dim whose mesh axes split it; default: its own, '' for none.

    dtype: 'floats', 'stored' (floats, or quantised numbers with a scale), 'integers', 'booleans' or 'key' (a jax.random key).
    gradient: whether a call has a gradient for it. part: what it is a part of: 'operands', 'mask' or 'dropout'. feature: the
    feature that a call with it requests. moves: 'rows' or 'keys' if it is sent with them where the sequence is split.

    indexes: the dim whose places its integers are, distinct along its last dimension; '' for none.

    inside: its dims on a device, where they aren't those of the call in the kernel's layout; inside_dtype: its dtype there,
    'given', 'runtime', 'softmax' or a dtype's name. hint: what to pass instead of another dtype.
    """

    name: str
    dims: tuple[str, ...]
    order: str = ""
    also: tuple[tuple[str, ...], ...] = ()
    broadcasts: bool = False
    split_as: tuple[str, ...] | None = None
    dtype: Literal["floats", "stored", "integers", "booleans", "key"] = "floats"
    optional: bool = True
    gradient: bool = True
    part: Literal["operands", "mask", "dropout"] = "operands"
    feature: str = ""
    moves: Literal["", "rows", "keys"] = ""
    indexes: str = ""
    inside: tuple[str, ...] | None = None
    inside_dtype: str = "given"
    hint: str = ""

    def __post_init__(self) -> None:
        # Every call asks for these.
        by_layout = {layout: _ordered(self.dims, self.order, layout) for layout in LAYOUTS}
        object.__setattr__(self, "_by_layout", by_layout)

    def dims_in(self, layout: str) -> tuple[str, ...]:
        """The names of its dimensions in a layout."""
        dims: tuple[str, ...] = self._by_layout[layout]  # type: ignore[attr-defined]
        return dims

    def split_dims(self, layout: str) -> tuple[str, ...]:
        """For each dimension in a layout, the dim whose mesh axes split it."""
        return _ordered(self.dims if self.split_as is None else self.split_as, self.order, layout)

    def dims_inside(self, kernel_layout: str) -> tuple[str, ...]:
        """The names of its dimensions on a device."""
        return self.dims_in(kernel_layout) if self.inside is None else self.inside

    def shape(self, sizes: Mapping[str, int], layout: str) -> tuple[int, ...]:
        """Its shape in a layout. Errors: KeyError for a dim of any size."""
        return sized(self.dims_in(layout), sizes)

    def accepted(self, shape: tuple[int, ...], sizes: Mapping[str, int], layout: str) -> tuple[str, ...] | None:
        """The dims that a shape has; None if the operand can't have it."""
        for dims in (self.dims_in(layout), *self.also):
            if len(shape) == len(dims) and all(
                n == _size(dim, sizes, n) or (self.broadcasts and n == 1) for n, dim in zip(shape, dims, strict=True)
            ):
                return dims
        return None

    def expected_shapes(self, sizes: Mapping[str, int], layout: str) -> str:
        """The shapes that it can have, for a message."""
        options = [self.dims_in(layout), *self.also]
        texts = [f"({', '.join(_text(d, sizes) for d in dims)}{',' if len(dims) == 1 else ''})" for dims in options]
        named = ", ".join(dim or "1" for dim in options[0])
        shapes = " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
        return f"{shapes} [{named}]" + (", or 1 in place of any of these sizes" if self.broadcasts else "")


def _ordered(dims: tuple[str, ...], order: str, layout: str) -> tuple[str, ...]:
    if not order:
        return dims
    by_letter = dict(zip(order, dims, strict=True))
    return tuple(by_letter[letter] for letter in layout if letter in by_letter)


def _size(dim: str, sizes: Mapping[str, int], other: int) -> int:
    """A dim's size; that of the array, which is at least 1, for a dim of any size."""
    return sizes.get(dim, max(other, 1)) if dim else 1


def _text(dim: str, sizes: Mapping[str, int]) -> str:
    return str(sizes.get(dim, dim)) if dim else "1"


def sized(dims: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of dims; 1 for ''."""
    return tuple(sizes[dim] if dim else 1 for dim in dims)


class OperandShape(NamedTuple):
    """An operand of a call without its values: shape and dtype as given, and the declared spec, None for none."""

    operand: Operand
    shape: tuple[int, ...]
    dtype: str
    declared: PartitionSpec | None = None

    @property
    def name(self) -> str:
        return self.operand.name

    def shape_inside(self, kernel_layout: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape inside the operation. One that is given in its own dims keeps a 1 where it is broadcast."""
        if self.operand.inside is not None:
            return sized(self.operand.inside, sizes)
        dims = self.operand.dims_inside(kernel_layout)
        padded = (*(1 for _ in dims[len(self.shape) :]), *self.shape)
        return tuple(n if n == 1 else sizes.get(dim, n) for n, dim in zip(padded, dims, strict=True))


_ATTENTION_ONLY = ("also", "optional", "part", "feature", "moves", "inside")


class OperandTable:
    """The operands of an operation by name, in the order of its call's arguments."""

    def __init__(self, *rows: Operand) -> None:
        self._rows = {row.name: row for row in rows}
        if len(self._rows) < len(rows):
            raise ValueError(f"operands {[row.name for row in rows]}; wanted each name once.")
        self.names = tuple(self._rows)

    def __getitem__(self, name: str) -> Operand:
        return self._rows[name]

    def get(self, name: str) -> Operand | None:
        """The row of a name; None if there is none."""
        return self._rows.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[Operand]:
        return iter(self._rows.values())

    def extended(self, *rows: Operand) -> OperandTable:
        """The table with an operation's own rows. Errors: ValueError for what only attention's rows have a meaning for."""
        plain = Operand("", ())
        for row in rows:
            used = [name for name in _ATTENTION_ONLY if getattr(row, name) != getattr(plain, name)]
            if used or row.dtype not in ("floats", "integers"):
                got = f"dtype={row.dtype!r}" if not used else ", ".join(f"{x}={getattr(row, x)!r}" for x in used)
                raise ValueError(
                    f"operand {row.name!r} has {got}; an operation's own operands are optional floats or integers with dims, "
                    "order, broadcasts, split_as, gradient, indexes, inside_dtype and hint."
                )
        return OperandTable(*self, *rows)

    def part(self, part: str) -> tuple[Operand, ...]:
        """The rows of one part: 'operands', 'mask' or 'dropout'."""
        return tuple(row for row in self if row.part == part)

    @property
    def required(self) -> tuple[Operand, ...]:
        """The rows that every call has."""
        return tuple(row for row in self if not row.optional)


_HEADS_FOLLOW = ("batch", "kv_len", "kv_heads", "kv_head_dim")


def _scale_of(name: str) -> Operand:
    return Operand(
        f"{name}_scale", ("batch", "kv_len", "kv_heads", ""), "bthd", broadcasts=True, split_as=_HEADS_FOLLOW, moves="keys",
        inside=("batch", "kv_heads", "kv_len"), inside_dtype="float32",
    )  # fmt: skip


def _of_rows(name: str, hint: str = "") -> Operand:
    return Operand(name, ("batch",), dtype="integers", gradient=False, part="mask", hint=hint)


ATTENTION = OperandTable(
    Operand(
        "query", ("batch", "q_len", "heads", "head_dim"), "bthd", optional=False, moves="rows", inside_dtype="runtime"
    ),
    Operand(
        "key", ("batch", "kv_len", "kv_heads", "head_dim"), "bthd", split_as=_HEADS_FOLLOW, dtype="stored",
        optional=False, moves="keys", inside_dtype="runtime",
    ),
    Operand(
        "value", ("batch", "kv_len", "kv_heads", "value_dim"), "bthd", split_as=_HEADS_FOLLOW, dtype="stored",
        optional=False, moves="keys", inside_dtype="runtime",
    ),
    _scale_of("key"),
    _scale_of("value"),
    Operand(
        "bias", ("batch", "heads", "q_len", "kv_len"), broadcasts=True,
        split_as=("batch", "bias_heads", "q_len", "bias_kv_len"), feature="bias",
        hint="A boolean mask goes to mask=.",
    ),
    Operand(
        "softmax_aux", ("heads",), also=(("heads", "sinks"), ("kv_heads", "sinks")), feature="sinks", inside=("heads",),
        inside_dtype="softmax",
    ),
    Operand("q_segment_ids", ("batch", "q_len"), "bt", dtype="integers", gradient=False, part="mask"),
    Operand("kv_segment_ids", ("batch", "kv_len"), "bt", dtype="integers", gradient=False, part="mask"),
    _of_rows("kv_lengths"),
    _of_rows("kv_starts"),
    Operand("query_offset", ("batch",), also=((),), dtype="integers", gradient=False, part="mask"),
    Operand("dropout_rng", (), dtype="key", gradient=False, part="dropout"),
)  # fmt: skip
"""The operands of softmax attention. A packed (thd) batch has its tokens on one axis, which is the query or the kv length."""

RESULTS: Mapping[str, Operand] = MappingProxyType(
    {
        row.name: row
        for row in (
            Operand(
                "output", ("batch", "q_len", "heads", "value_dim"), "bthd",
                split_as=("batch", "q_len", "heads", "head_dim"), moves="rows", inside_dtype="runtime",
            ),
            Operand("weights", ("batch", "heads", "q_len", "kv_len"), inside_dtype="softmax"),
            Operand("lse", ("batch", "heads", "q_len"), moves="rows", inside_dtype="softmax"),
        )
    }
)  # fmt: skip
"""What a call of softmax attention returns."""
