"""What a score becomes before a kernel runs: a few kinds of elementwise steps over a tile, and the arrays that they read.

Everything that follows from positions alone is computed here once, as numbers per row, per key or per distance, by jax, which
also differentiates it. A kernel has to know only these steps, and never an array [q, kv].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Add", "Cap", "Diagonal", "Function", "Linear", "Lookup", "Lowering", "Multiply", "Product", "Step", "Steps"]

Form = Literal["aligned", "diagonal", "table", "columns"]


@dataclass(frozen=True)
class Step:
    """A step; `reads` are the numbers of its arrays."""

    name: ClassVar[str]
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cap(Step):
    """cap * tanh(x / cap)."""

    name: ClassVar[str] = "cap"
    cap: float = 0.0


@dataclass(frozen=True)
class Multiply(Step):
    """x times an aligned array."""

    name: ClassVar[str] = "multiply"


@dataclass(frozen=True)
class Add(Step):
    """x plus the first aligned array minus the second: the difference first, because the two may be large and close."""

    name: ClassVar[str] = "add"


@dataclass(frozen=True)
class Linear(Step):
    """x minus an aligned array times the distance between query and key."""

    name: ClassVar[str] = "linear"


@dataclass(frozen=True)
class Diagonal(Step):
    """x plus a number for each distance, from an array [batch, heads, rows + keys - 1] of the whole problem's rows and keys.

    Row r and key c have number c - r + rows - 1."""

    name: ClassVar[str] = "diagonal"
    rows: int = 0


@dataclass(frozen=True)
class Lookup(Step):
    """x plus a number of a table [heads, n], at an index that is a function of the positions of query and key.

    reach: where that is a function of their distance, how far before and after the query it still changes.
    """

    name: ClassVar[str] = "lookup"
    index: Callable[[Any, Any], Any] = field(default=lambda q, kv: kv)
    reach: tuple[int, int] | None = None


@dataclass(frozen=True)
class Product(Step):
    """x plus the number of an array [batch, heads, q, n] at an index that is a function of the key's position."""

    name: ClassVar[str] = "product"
    index: Callable[[Any], Any] = field(default=lambda kv: kv)


@dataclass(frozen=True)
class Function(Step):
    """function(x, batch, head, q, kv, *aligned arrays)."""

    name: ClassVar[str] = "function"
    function: Callable[..., Any] = field(default=lambda x, *_: x)


@dataclass(frozen=True)
class Steps:
    """Steps in their order, and the form of each array that they read. Hashable.

    aligned: [batch, heads, q, kv], any of them 1. diagonal, table, columns: see Diagonal, Lookup, Product. positions: whether
    the mask's Positions say where queries and keys are.
    """

    steps: tuple[Step, ...]
    forms: tuple[Form, ...]
    positions: bool

    @property
    def names(self) -> frozenset[str]:
        """The kinds of its steps."""
        return frozenset(step.name for step in self.steps)

    def dims(self, number: int) -> tuple[str, ...]:
        """The names of an array's dimensions."""
        return {
            "aligned": ("batch", "heads", "q", "kv"),
            "diagonal": ("batch", "heads", "diagonal"),
            "table": ("heads", "entries"),
            "columns": ("batch", "heads", "q", "entries"),
        }[self.forms[number]]


class Lowering:
    """Collects the steps of a score for one device's part of a call.

    q_len, kv_len: those of the whole problem; rows, first_row, keys, first_key: how many, and the first, of the queries and keys
    that aligned arrays have here. offset: of the queries' positions, a number or [batch]. positions: (queries' [batch, rows],
    keys' [batch, keys]) if the mask has Positions. contiguous: whether a position follows from an index, so that numbers per
    distance exist; else steps compute them for each pair.
    """

    def __init__(
        self,
        *,
        q_len: int,
        kv_len: int,
        rows: int,
        keys: int,
        first_row: Any,
        first_key: Any,
        offset: Any,
        positions: tuple[jax.Array, jax.Array] | None,
        known_lengths: bool,
        dtype: Any,
    ) -> None:
        self.q_len, self.kv_len, self.rows, self.keys = q_len, kv_len, rows, keys
        self.first_row, self.first_key, self.offset, self.positions = first_row, first_key, offset, positions
        self.contiguous = positions is None and known_lengths
        self.dtype = dtype
        self._steps: list[Step] = []
        self._arrays: list[tuple[jax.Array, Form]] = []

    @classmethod
    def by_place(cls, dtype: Any) -> Lowering:
        """For steps that get the positions of each pair, where no array has them for all queries and keys."""
        return cls(
            q_len=0, kv_len=0, rows=0, keys=0, first_row=0, first_key=0, offset=0, positions=None, known_lengths=False,
            dtype=dtype,
        )  # fmt: skip

    def array(self, x: jax.Array, form: Form = "aligned") -> int:
        """Add an array; returns its number."""
        self._arrays.append((x.astype(self.dtype), form))
        return len(self._arrays) - 1

    def add(self, step: Step) -> None:
        """Add a step."""
        self._steps.append(step)

    def result(self) -> tuple[Steps, tuple[jax.Array, ...]]:
        """The steps and their arrays."""
        forms = tuple(form for _, form in self._arrays)
        return Steps(tuple(self._steps), forms, self.positions is not None), tuple(x for x, _ in self._arrays)

    def row_positions(self) -> jax.Array:
        """int32 [batch | 1, rows]."""
        if self.positions is not None:
            return self.positions[0]
        rows = lax.iota(np.int32, self.rows)[None] + self.first_row
        return rows + (self.offset if isinstance(self.offset, int) else self.offset[:, None])

    def distances(self) -> jax.Array:
        """int32 [batch | 1, q_len + kv_len - 1]: the distance that each number of a Diagonal's array is for."""
        first = jnp.asarray(1 - self.q_len - self.offset, jnp.int32)
        return lax.iota(np.int32, self.q_len + self.kv_len - 1)[None] + first.reshape(-1, 1)
