"""Blocks: a leaf that makes whole blocks of keys visible to blocks of queries. ChosenBlocks: the same with a traced choice.

Query block i has the rows from i * block_q up to (i + 1) * block_q, by the row's own index, as in Dense. Key blocks are
counted likewise. The last block of a sequence may be short.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..errors import MaskError, a_type, shown
from .algebra import Mask, raw
from .block_tables import counted, counted_bounds, runs
from .bounds import BlockBounds
from .bounds import Blocks as BlockGrid
from .checks import is_host, whole
from .int_arrays import int_array, is_integer, same_rank
from .intervals import Intervals
from .slots import DynamicMask, Slot

__all__ = ["Blocks", "ChosenBlocks"]

_STATIC = "a NumPy bool array, [q blocks, kv blocks] or [heads, q blocks, kv blocks]"
_TRACED = "integers [batch, heads, q blocks, k], the chosen kv blocks, or bools [batch, heads, q blocks, kv blocks]"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Blocks(Mask):
    """Key j is visible to row i where layout[i // block_q, j // block_kv] is True.

    layout: bool, [q blocks, kv blocks] for all heads or [heads, q blocks, kv blocks], heads those of the query or of the key.
    It must cover all rows; keys beyond it are not visible. An array of rank 4, which may be traced, makes a ChosenBlocks
    instead. Errors: MaskError.
    """

    kind: ClassVar[str] = "blocks"
    layout: NDArray[np.bool_]
    block_q: int
    block_kv: int

    # __new__ instead of __init__, because an array of rank 4 makes a mask of another class.
    def __new__(cls, layout: Any, block_q: Any, block_kv: Any) -> Any:
        sizes = [whole(n, f"Blocks {name}", minimum=1) for name, n in (("block_q", block_q), ("block_kv", block_kv))]
        if len(getattr(layout, "shape", ())) == 4:
            return ChosenBlocks(layout, *sizes)
        table = _table(layout)
        if table.ndim not in (2, 3) or not table.size:
            raise MaskError(f"Blocks layout has shape {table.shape}; wanted {_STATIC}, or {_TRACED}")
        table = table.reshape((-1, *table.shape[-2:]))
        if (table == table[:1]).all():
            table = table[:1]  # so that equal masks compare equal
        table = np.ascontiguousarray(table)
        table.flags.writeable = False
        mask = raw(cls, layout=table, block_q=sizes[0], block_kv=sizes[1])
        object.__setattr__(mask, "_content", (table.shape, sizes[0], sizes[1], np.packbits(table).tobytes()))
        return mask

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.layout, self.block_q, self.block_kv

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks):
            return NotImplemented
        return bool(vars(self)["_content"] == vars(other)["_content"])

    def __hash__(self) -> int:
        return hash(vars(self)["_content"])

    def __repr__(self) -> str:
        return f"Blocks({self.describe()})"

    @property
    def heads(self) -> int:
        """The number of heads with their own layout; 1 if all heads share one."""
        return int(self.layout.shape[0])

    def of_heads(self, heads: slice | list[int]) -> Blocks:
        """This leaf for some of the heads only."""
        return type(self)(self.layout[heads], self.block_q, self.block_kv) if self.heads > 1 else self

    def repeated(self, times: int) -> Blocks:
        """This leaf with each head's layout repeated `times` times in a row."""
        layout = np.repeat(self.layout, times, axis=0)
        return type(self)(layout, self.block_q, self.block_kv) if self.heads > 1 else self

    def from_head(self, first: Any, count: int) -> Mask:
        """This leaf for `count` heads, starting at `first`, which may be traced."""
        part = jax.lax.dynamic_slice_in_dim(jnp.asarray(self.layout), first, count)
        return ChosenBlocks(part[None], self.block_q, self.block_kv)

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        q_block, kv_block = rows // self.block_q, cols // self.block_kv
        if is_host(rows) and np.size(rows) and int(np.max(q_block)) >= self.layout.shape[1]:
            self._check_rows(int(np.max(rows)) + 1)
        layout: Any = self.layout if is_host(rows, cols) else jnp.asarray(self.layout)
        xp: Any = np if is_host(rows, cols) else jnp
        last = self.layout.shape[2] - 1
        inside = kv_block <= last
        at = xp.minimum(q_block, self.layout.shape[1] - 1), xp.minimum(kv_block, last)
        if self.heads == 1:
            return layout[0][at] & inside
        head = np.arange(self.heads, dtype=np.int32).reshape(-1, 1, 1)
        return operator.and_(*same_rank(layout[same_rank(head, *at)], inside))

    def table(self, first: Any, count: int) -> Any:
        """bool [1, heads, q blocks, count]: the kv blocks starting at `first`, which may be traced; False beyond the last."""
        layout = self.layout[None]
        if isinstance(first, int | np.integer):
            part = layout[..., first : first + count]
            return np.pad(part, [(0, 0)] * 3 + [(0, count - part.shape[-1])])
        padded = jnp.pad(jnp.asarray(layout), [(0, 0)] * 3 + [(0, count)])
        return jax.lax.dynamic_slice_in_dim(padded, jnp.minimum(first, layout.shape[-1]), count, axis=3)

    def block_mask(self, rows: tuple[Any, Any], cols: tuple[Any, Any]) -> NDArray[np.int8]:
        """0 dead, 1 partial, 2 full, int8 [heads, q, kv], for blocks bounded by rows and by keys (both inclusive)."""
        self._check_rows(int(rows[1].max()) + 1)
        first = int(cols[0][0]) // self.block_kv
        count = int(cols[1][-1]) // self.block_kv + 1 - first
        kv = [edge // self.block_kv - first for edge in cols]
        return counted(self.table(first, count)[0], [edge // self.block_q for edge in rows], kv)

    def block_bounds(self, blocks: BlockGrid) -> BlockBounds:
        return counted_bounds(self, blocks)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        if self.heads > 1:
            return None
        if len(rows):
            self._check_rows(int(rows.max()) + 1)
        return runs(self.layout[0], self.block_kv, rows // self.block_q, kv_len)

    def fixed_lengths(self) -> tuple[int | None, int | None]:
        return self.layout.shape[1] * self.block_q, self.layout.shape[2] * self.block_kv

    def _check_rows(self, rows: int) -> None:
        covered = self.layout.shape[1] * self.block_q
        if rows > covered:
            got = f"{self.layout.shape[1]} blocks of {self.block_q}"
            raise MaskError(
                f"Blocks layout has {got}, {covered} rows; wanted {rows}: add a row for each block of queries"
            )

    @property
    def density(self) -> float:
        """The share of blocks that are True."""
        return float(self.layout.mean())

    def describe(self) -> str:
        heads = f"{self.heads} heads of " if self.heads > 1 else ""
        size = "x".join(map(str, self.layout.shape[1:]))
        return f"blocks({heads}{size}, block_q={self.block_q}, block_kv={self.block_kv}, density={self.density:.3g})"

    def to_dict(self) -> dict[str, Any]:
        rows = [["".join("01"[cell] for cell in row) for row in head] for head in self.layout.astype(int).tolist()]
        layout = rows[0] if self.heads == 1 else rows
        return {"kind": self.kind, "layout": layout, "block_q": self.block_q, "block_kv": self.block_kv}


@dataclass(frozen=True, eq=False)
class ChosenBlocks(DynamicMask):
    """Key j is visible to row i where j // block_kv is among choice[b, h, i // block_q].

    choice: int [batch | 1, heads | 1, q blocks, k], heads those of the query or of the key. A number that is not a kv block,
    such as -1, chooses nothing; a duplicate counts once. Or bool [.., kv blocks], True where a block is chosen. `Blocks`
    creates it from an array of rank 4.
    """

    kind: ClassVar[str] = "chosen_blocks"
    parts = (("choice", "block_choice", ("batch", "heads", "q_blocks", "chosen")),)
    choice: Any
    block_q: int
    block_kv: int

    def check(self) -> None:
        dtype = getattr(self.choice, "dtype", None)
        if dtype is not None and dtype != np.bool_ and not is_integer(dtype):
            raise MaskError(f"Blocks choice has dtype {dtype}; wanted {_TRACED}")
        if dtype != np.bool_:
            int_array(self.choice, "Blocks choice", self.parts[0][2])
        if len(self.choice.shape) != 4 or 0 in self.choice.shape[:3]:
            raise MaskError(f"Blocks choice has shape {tuple(self.choice.shape)}; wanted {_TRACED}")

    def fixed_lengths(self) -> tuple[int | None, int | None]:
        keys = self.choice.shape[3] * self.block_kv if self.choice.dtype == np.bool_ else None
        return self.choice.shape[2] * self.block_q, keys

    def slot(self) -> Slot:
        return Slot(self.kind, block_q=self.block_q, block_kv=self.block_kv)

    @classmethod
    def from_slot(cls, slot: Slot, arrays: Sequence[Any]) -> Mask:
        return raw(cls, choice=arrays[0], block_q=slot.block_q, block_kv=slot.block_kv)

    @property
    def heads(self) -> int:
        """The number of heads with their own choice."""
        return int(self.choice.shape[1])

    def repeated(self, times: int) -> Mask:
        """This leaf with each head's choice repeated `times` times in a row."""
        choice = self.choice
        if self.heads == 1:
            return self
        if isinstance(choice, jax.ShapeDtypeStruct):
            shape = choice.shape[0], self.heads * times, *choice.shape[2:]
            choice = jax.ShapeDtypeStruct(shape, choice.dtype)
        else:
            choice = (np if is_host(choice) else jnp).repeat(choice, times, axis=1)
        return ChosenBlocks(choice, self.block_q, self.block_kv)

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        self.usable()
        host = is_host(rows, cols, self.choice)
        xp: Any = np if host else jnp
        q_block = xp.minimum(xp.asarray(rows).reshape(-1) // self.block_q, self.choice.shape[2] - 1)
        chosen = xp.take(xp.asarray(self.choice), q_block, axis=2)
        kv_block = xp.asarray(cols).reshape(1, 1, 1, -1) // self.block_kv
        if chosen.dtype == np.bool_:
            last = chosen.shape[3] - 1
            return xp.take(chosen, xp.minimum(kv_block.reshape(-1), last), axis=3) & (kv_block <= last)
        return (chosen.astype(np.int32)[..., None, :] == kv_block[..., None]).any(-1)

    def table(self, first: Any, count: int) -> Any:
        """bool [batch | 1, heads | 1, q blocks, count]: the kv blocks starting at `first`, which may be traced."""
        choice = jnp.asarray(self.choice)
        if choice.dtype == np.bool_:
            padded = jnp.pad(choice, [(0, 0)] * 3 + [(0, count)])
            return jax.lax.dynamic_slice_in_dim(padded, jnp.minimum(first, choice.shape[3]), count, axis=3)
        choice = choice.astype(np.int32) - first
        choice = jnp.where((choice >= 0) & (choice < count), choice, count)
        at = np.ix_(*(np.arange(n) for n in (*choice.shape[:3], 1)))[:3]
        nothing = jnp.zeros((*choice.shape[:3], count), bool)
        return nothing.at[(*at, choice)].set(True, mode="drop")

    def block_bounds(self, blocks: BlockGrid) -> BlockBounds:
        self.usable()
        return counted_bounds(self, blocks)

    def describe(self) -> str:
        return self.slot().describe()


def _table(layout: Any) -> NDArray[np.bool_]:
    """Read a layout: a bool array, nested lists of bools, or rows of text as in JSON."""
    if isinstance(layout, jax.Array | jax.ShapeDtypeStruct):
        hint = "pass np.asarray(layout) if the layout is known before the program runs, else an array of rank 4"
        raise MaskError(
            f"Blocks layout is {layout.dtype}{list(layout.shape)} from jax; wanted {_STATIC}, or {_TRACED}: {hint}"
        )
    if isinstance(layout, list | tuple):
        layout = _read_rows(layout)
    if not isinstance(layout, np.ndarray) or layout.dtype != np.bool_:
        got = f"an array of {layout.dtype}" if hasattr(layout, "dtype") else a_type(layout)
        raise MaskError(f"Blocks layout is {got}; wanted {_STATIC}, or {_TRACED}: for 0 and 1 use layout.astype(bool)")
    return layout


def _read_rows(rows: Sequence[Any]) -> Any:
    """Make an array from nested lists. A row may be a string of 0 and 1."""

    def read_row(row: Any) -> Any:
        return [digit == "1" for digit in row] if isinstance(row, str) else row

    for row in rows:
        for text in row if isinstance(row, list | tuple) else (row,):
            if isinstance(text, str) and set(text) - {"0", "1"}:
                raise MaskError(
                    f"Blocks layout has a row {shown(text)}; wanted a string of 0 and 1, one for each kv block"
                )
    try:
        table = np.array(
            [[read_row(part) for part in row] if isinstance(row, list | tuple) else read_row(row) for row in rows]
        )
    except ValueError:
        raise MaskError(
            "Blocks layout has rows of different lengths; wanted the same number of kv blocks in each"
        ) from None
    return table
