"""Applies bias, cap, mask and dropout to the raw logits of a tile, inside a kernel.

A tile is held as [query rows, keys] or, across, as [keys, query rows]. Across, the numbers that belong to a row (log-sum-exp,
delta) lie along the lanes, as they are stored. The forward pass supports both, the backward passes are across.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ....masks import Slot
from ...kernels.block_words import BlockWords
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.lse import LOG2E
from ...kernels.seen_keys import Seen
from ...kernels.tile_mask import TileLogits, TileMask, traced_numbers
from .band import EVERYTHING, band_of
from .bodies import Body
from .frame import Frame, Input, Step
from .schedule import body_of
from .units import Unit, rows_of

__all__ = ["HeadKey", "Logits", "Tile", "add_to_frame", "columns", "turned"]

_LANES = 128  # of a register

# Two words; None without dropout.
HeadKey = tuple[jax.Array, jax.Array] | None


@dataclass(frozen=True)
class Logits(TileLogits):
    """base2: logits are multiplied by log2 e, and exponentials are powers of two."""

    base2: bool

    @property
    def unit(self) -> float:
        return LOG2E if self.base2 else 1.0

    def exp(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(x) if self.base2 else jnp.exp(x)


def add_to_frame(
    frame: Frame,
    mask: LocalMask,
    words: tuple[BlockWords | None, ...],
    bias: jax.Array | None,
    dropout: Dropout | None,
    seen: Seen | None,
) -> None:
    """Add what a tile needs of the mask, the bias and the dropout to the kernel's operands.

    words: those of the mask's blocks; seen: keys by a query.
    """
    frame.scalars |= traced_numbers(mask, dropout, seen)
    for number, leaf in enumerate(mask.mask.split()[1]):
        array = jnp.asarray(leaf.array)
        if "q_blocks" in leaf.dims:
            continue  # in words
        if leaf.dims == ("batch",):
            frame.scalars[f"leaf{number}"] = array.astype(jnp.int32)
        elif len(leaf.dims) == 2:
            along = leaf.dims[1]
            size = frame.block_q if along == "q" else frame.block_kv
            array = _padded(array.astype(jnp.int32), {1: size})[:, None]
            spec = frame.leaf_block(array.shape[0], along)  # type: ignore[arg-type]
            frame.inputs[f"leaf{number}"] = Input(array, spec, along)
        else:
            # As bytes: a bool array would take four bytes per weight.
            array = _by_group(array.astype(jnp.int8), frame)
            frame.inputs[f"leaf{number}"] = Input(array, frame.dense_block(array.shape), "both")
    for number, held in enumerate(words):
        if held is not None:
            batch, heads, *rest = held.words.shape
            split = (1, 1) if heads == 1 else (frame.heads.kv_heads, frame.heads.group)
            array = held.words.reshape(batch, *split, *rest)
            frame.inputs[f"words{number}"] = Input(array, frame.words_block(array.shape), "both")
    if bias is not None:
        bias = _by_group(bias if bias.dtype in (jnp.float32, jnp.bfloat16) else bias.astype(jnp.float32), frame)
        frame.inputs["bias"] = Input(bias, frame.dense_block(bias.shape), "both")
    if seen is not None:
        _add_seen(frame, seen)


def _add_seen(frame: Frame, seen: Seen) -> None:
    rows = _padded(seen.keys.astype(jnp.int32), {2: frame.block_kv})
    if rows.shape[1] == 1:
        frame.inputs["seen"] = Input(rows, frame.leaf_block(rows.shape[0], "kv"), "kv")
        return
    rows = jnp.broadcast_to(rows, (frame.batch, *rows.shape[1:]))[:, :, None]
    frame.inputs["seen"] = Input(rows, frame.key_block(1, "seq_minor"), "kv")


def _padded(x: jax.Array, blocks: dict[int, int]) -> jax.Array:
    """Pad dimensions to whole blocks."""
    short = [(0, -n % blocks.get(i, 1)) for i, n in enumerate(x.shape)]
    return jnp.pad(x, short) if any(n for _, n in short) else x


def _by_group(x: jax.Array, frame: Frame) -> jax.Array:
    """[batch, heads, q, kv], each of them or 1, as [batch, kv heads, group, q, kv], padded."""
    batch, heads, q_len, kv_len = x.shape
    split = (1, 1) if heads == 1 else (frame.heads.kv_heads, frame.heads.group)
    x = x.reshape(batch, *split, q_len, kv_len)
    return _padded(x, {i: n for i, n in ((3, frame.block_q), (4, frame.block_kv)) if x.shape[i] > 1})


class Tile(TileMask):
    """A kernel's current tile, asked for in units. `across`: keys are rows and queries are lanes."""

    def __init__(self, frame: Frame, logits: Logits, refs: dict[str, Any], across: bool) -> None:
        self.frame, self.logits, self.across = frame, logits, across
        self.step: Step = frame.here(refs)
        super().__init__(logits.static_part, refs, self.step.batch)
        self._seen: dict[Any, Any] = {}
        self._scales: dict[Any, jax.Array] = {}
        self._clean: dict[Any, jax.Array] = {}
        self._distance: int | None = None
        self._band, self._others = EVERYTHING, logits.static_part.mask

    def says(self, flag: int) -> Any:
        """Whether the visit's word has a flag."""
        return (self.step.word & flag) != 0

    def enter(self, number: int) -> Body:
        """Start a body, by its number: one body's values don't exist in the next."""
        self._seen.clear()
        self._scales.clear()
        self._clean.clear()
        static_part = self.static_part
        self._distance = self.frame.visits.distances[number - 1]
        self._band, self._others = EVERYTHING, static_part.mask
        if self._distance is not None:
            self._band, self._others = band_of(static_part.mask)
        return self.frame.visits.bodies[number - 1]

    @property
    def body(self) -> Any:
        """The number of the tile's body."""
        return body_of(self.step.word)

    def weigh(self, raw: jax.Array, unit: Unit) -> tuple[jax.Array, Any]:
        """(logits, times log2 e if base2, and the cap's tanh for its gradient) from a unit's products."""
        logits = self.logits
        capped = None
        # The scale of a quantised key goes into the factor, one number per key: logits need no extra work.
        of_keys = self._key_scale(unit) if "key_scale" in self.refs else 1.0
        if logits.soft_cap is None:
            x = raw * (of_keys * (logits.scale * logits.unit))
        else:
            capped = jnp.tanh(raw * (of_keys * (logits.scale / logits.soft_cap)))
            x = capped * (logits.soft_cap * logits.unit)
        if "bias" in self.refs:
            x = x + self._dense("bias", unit).astype(jnp.float32) * logits.unit
        return (self._hide(x, unit) if unit.masked else x), capped

    def _hide(self, x: jax.Array, unit: Unit) -> jax.Array:
        """-inf where keys aren't visible."""
        seen = self._visible(unit)
        if seen is not None:
            x = jnp.where(seen, x, -jnp.inf)
        if self._distance is None:
            return x
        return self._band.hide(x, self._distance + unit.queries.start - unit.keys.start, self.across)

    def _key_scale(self, unit: Unit) -> jax.Array:
        """The scales of a unit's keys: a row or, across, a square of columns, as wide as the unit's queries."""
        scale = self.refs["key_scale"][unit.head[0], :, unit.keys]
        if not self.across:
            return scale
        at = unit.head[0], unit.keys.start
        if at not in self._scales:  # otherwise each use would spread a single column over the lanes
            self._scales[at] = jnp.broadcast_to(scale, (128, scale.shape[1])).T
        return jnp.tile(self._scales[at], (1, unit.shape[0] // 128))

    def zero_hidden(self, body: Body, names: dict[str, int]) -> None:
        """Make zeros, in the tile's own copies, of the keys that no query sees, if there is anything but numbers in the tensors.

        names: 'key' and 'value' -> the axis of their keys. A weight of 0 wouldn't remove a NaN.
        """
        if "clean" not in self.refs or not body.masked:
            return

        @pl.when(self.refs["clean"][0] == 0)
        def _zero() -> None:
            for name, seq_minor in names.items():
                if self._in_place(name):
                    self._zero_in_place(self.refs[name], seq_minor)

    def _in_place(self, name: str) -> bool:
        """Whether `zero_hidden` does it: where it is seldom needed. Not in fp8, which not every TPU selects from."""
        return "clean" in self.refs and self.refs[name].dtype.itemsize > 1

    def _zero_in_place(self, ref: Any, seq_minor: int) -> None:
        size = self.frame.block_kv
        step = _LANES if size % _LANES == 0 else size

        def part(number: Any, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(lax.rem(number, np.int32(size // step)) * np.int32(step), step), step)
            head = lax.div(number, np.int32(size // step))
            at = (head, slice(None), rows) if seq_minor else (head, rows, slice(None))
            ref[at] = self._kept(ref[at], head, rows, seq_minor)

        lax.fori_loop(np.int32(0), np.int32(ref.shape[0] * (size // step)), part, None)

    def _kept(self, x: jax.Array, head: Any, keys: Any, seq_minor: int) -> jax.Array:
        """A head's keys or values, with zeros for those that no query sees."""
        row = self._seen_row(head, keys)
        kept = row if seq_minor else columns(row, x.shape[1])
        return jnp.where(kept != 0, x, jnp.zeros((), x.dtype))

    def _seen_row(self, head: Any, keys: Any) -> jax.Array:
        """Which keys a query sees, int32 [1, keys]."""
        ref = self.refs["seen"]
        return ref[:, keys] if len(ref.shape) == 2 else ref[head, :, keys]

    def clean(self, name: str, unit: Unit, seq_minor: int) -> Any:
        """A unit's keys or values as they are stored, with zeros for keys that no query sees; these are made once per visit."""
        at = name, unit.head[0], unit.keys.start, unit.keys.stop
        if at in self._clean:
            return self._clean[at]
        x = rows_of(self.refs[name], unit.head[:1], unit.keys, seq_minor)
        if "seen" not in self.refs or not unit.masked or self._in_place(name) or x.dtype == jnp.int8:
            return x
        self._clean[at] = self._kept(x, unit.head[0], unit.keys, seq_minor)
        return self._clean[at]

    def value_scale(self, unit: Unit) -> jax.Array:
        """The scales of a unit's values, [1, keys], 0 for keys that no query sees."""
        scale = self.refs["value_scale"][unit.head[0], :, unit.keys]
        if "seen" not in self.refs or not unit.masked:
            return scale
        return jnp.where(self._seen_row(unit.head[0], unit.keys) != 0, scale, 0.0)

    def dropout_keys(self) -> list[HeadKey]:
        """Dropout's key of each head of the tile, computed once per visit."""
        if "dropout" not in self.refs:
            return [None] * len(self.frame.heads.in_tile)
        return [self._dropout_key(self.head(head)) for head in self.frame.heads.in_tile]

    def keep(self, key: HeadKey, unit: Unit) -> jax.Array | None:
        """Which weights dropout keeps; None without dropout."""
        if key is None:
            return None
        rows, cols = self._indices(unit)
        return Dropout.kept(*key, self._global_rows(rows), self._global_keys(cols), self.static_part.dropout)

    def head(self, head: tuple[int, int]) -> Any:
        """The query head's number."""
        heads = self.frame.heads
        kv_head = self.step.kv_tile * heads.kv_tile + head[0]
        return kv_head * heads.group + self.step.group_tile * heads.group_tile + head[1]

    def _indices(self, unit: Unit) -> tuple[jax.Array, jax.Array]:
        """Local rows and keys, both in the unit's shape."""
        shape = unit.shape[::-1] if self.across else unit.shape
        first_row = self.step.q_block * self.frame.block_q + unit.queries.start
        first_key = self.step.kv_block * self.frame.block_kv + unit.keys.start
        rows = lax.broadcasted_iota(jnp.int32, shape, 1 if self.across else 0) + first_row
        cols = lax.broadcasted_iota(jnp.int32, shape, 0 if self.across else 1) + first_key
        return rows, cols

    def _visible(self, unit: Unit) -> Any:
        """Which weights are visible; None for all. Computed once for all heads, unless a mask has a plane for each."""
        key = (unit.queries.start, unit.keys.start, unit.shape, unit.head if self._by_head() else None)
        if key not in self._seen:
            self._seen[key] = self._test(unit)
        return self._seen[key]

    def _by_head(self) -> bool:
        words = (ref for name, ref in self.refs.items() if name.startswith("words"))
        return any(ref.shape[0] > 1 or ref.shape[1] > 1 for ref in words) or any(
            isinstance(atom, Slot) and atom.broadcast and not atom.broadcast[1]
            for atom in self.static_part.mask.leaves()
        )

    def _test(self, unit: Unit) -> Any:
        rows, cols = self._indices(unit)
        seen = self._tests(self._others, rows, self._global_keys(cols), unit)
        if unit.keys.stop > (self.static_part.kv_len % self.frame.block_kv or self.frame.block_kv):
            seen.append(cols < self.static_part.kv_len)
        return functools.reduce(operator.and_, seen) if seen else None

    def _words(self, ref: Any, *where: Any) -> tuple[list[jax.Array], Any]:
        """See TileMask."""
        (unit,) = where
        kv_head, of_group = (i if n > 1 else 0 for i, n in zip(unit.head, ref.shape[:2], strict=True))
        rows = [ref[kv_head, of_group, word : word + 1, unit.queries] for word in range(ref.shape[2])]
        return rows if self.across else [turned(row) for row in rows], self.step.kv_block * self.frame.block_kv

    def _along(self, name: str, dim: str, *where: Any) -> jax.Array:
        """See TileMask."""
        (unit,) = where
        values = self.refs[name][:, unit.queries if dim == "q" else unit.keys]
        return turned(values) if (dim == "q") != self.across else values

    def _dense(self, name: str, *where: Any) -> jax.Array:
        """See TileMask: [queries | 1, keys | 1], or across."""
        (unit,) = where
        ref = self.refs[name]
        kv_head, of_group = (i if n > 1 else 0 for i, n in zip(unit.head, ref.shape[:2], strict=True))
        rows, keys = (
            slice(None) if n == 1 else at for n, at in zip(ref.shape[2:], (unit.queries, unit.keys), strict=True)
        )
        part = ref[kv_head, of_group, rows, keys]
        if not self.across:
            return part
        return turned(part.astype(jnp.int32) if part.dtype == jnp.int8 else part.astype(jnp.float32))


def columns(row: jax.Array, width: int) -> jax.Array:
    """A row of numbers [1, n] as columns, [n, width]: by a whole square, as spreading a single column over the lanes costs
    three times as much."""
    square = jnp.broadcast_to(row, (_LANES, row.shape[1])).T
    return jnp.tile(square, (1, -(-width // _LANES)))[:, :width]


def turned(x: jax.Array) -> jax.Array:
    """The transpose. A single row or column is repeated first, because Mosaic transposes whole registers."""
    rows, lanes = x.shape
    x = jnp.broadcast_to(x, (8 if rows == 1 else rows, 128 if lanes == 1 else lanes))
    return x.T[: 1 if lanes == 1 else lanes, : 1 if rows == 1 else rows]
