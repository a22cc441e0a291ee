"""What a kernel asks of its tile: the mask, the bias, the dropout, arrays and places.

A tile is [query rows, keys] or, with `transposed`, [keys, query rows], where the gradients of key and value are summed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...kernels.block_words import BlockWords
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.precision import tile_product
from ...kernels.seen_keys import Seen
from ...kernels.tile_mask import TileLogits, TileMask, traced_numbers
from .arrays import Along, Arrays, index

__all__ = ["Logits", "Tile", "Words", "add_arrays", "product", "seen_rows", "zeroing"]

Words = tuple[BlockWords | None, ...]


def product(a: list[jax.Array], b: list[jax.Array], a_axis: int, b_axis: int) -> jax.Array:
    """The sum of matrix products over an axis of each, in float32."""
    return functools.reduce(operator.add, (tile_product(x, y, a_axis, b_axis) for x, y in zip(a, b, strict=True)))


@dataclass(frozen=True)
class Logits(TileLogits):
    """interpret: no PTX."""

    interpret: bool

    def exp2(self, x: jax.Array, factor: float, shift: jax.Array) -> jax.Array:
        """2 ** (x * factor - shift), elementwise.

        On a GPU this is two instructions. XLA would have Triton make four: it doesn't contract product and sum, and scales what
        would give a subnormal power, for which 0 is good enough here.
        """
        if self.interpret:
            return jnp.exp2(x * factor - shift)
        shift = jnp.broadcast_to(shift, x.shape)
        # Negated here, where it is free: otherwise it would take a register besides the shift.
        lines = f"{{ .reg .f32 t; neg.f32 t, $2; fma.rn.ftz.f32 t, $1, {_ptx(factor)}, t; ex2.approx.ftz.f32 $0, t; }}"
        (power,) = plgpu.elementwise_inline_asm(
            lines,
            args=[x, shift],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return power


def _ptx(x: float) -> str:
    """A float32 constant in PTX."""
    return f"0f{np.float32(x).view(np.uint32):08X}"


def add_arrays(
    arrays: Arrays,
    mask: LocalMask,
    words: Words,
    bias: jax.Array | None,
    dropout: Dropout | None,
    seen: Seen | None,
) -> None:
    """Add what tiles need of the mask, the bias and the dropout; words: those of the mask's blocks; seen: keys by a query."""
    for name, x in traced_numbers(mask, dropout, seen).items():
        arrays.add(name, x, {})
    if seen is not None:
        arrays.row_numbers("seen", seen.keys.astype(jnp.int8), arrays.sizes.block_kv)
    block = {"q": arrays.sizes.block_q, "kv": arrays.sizes.block_kv}
    for number, leaf in enumerate(mask.mask.split()[1]):
        x = jnp.asarray(leaf.array)
        if "q_blocks" in leaf.dims:
            continue  # in words
        if len(leaf.dims) == 4:
            arrays.add_by_blocks(f"leaf{number}", x.astype(jnp.int8))
        else:
            along = {axis: block[dim] for axis, dim in enumerate(leaf.dims) if dim in block}
            arrays.add(f"leaf{number}", x.astype(jnp.int32), along)
    for number, leaf_words in enumerate(words):
        if leaf_words is not None:
            arrays.add(f"words{number}", leaf_words.words, {4: block["q"]})
    if bias is not None:
        arrays.add_by_blocks("bias", bias)


def zeroing(
    refs: dict[str, Any], visit: Callable[..., Any]
) -> tuple[Callable[..., Any], tuple[Any, Callable[..., Any]] | None]:
    """(how partial tiles are visited, and how instead where a tensor has something else than numbers).

    visit: of a tile, the carry, masked and zero: whether keys that no query sees are loaded as zeros.
    """
    with_zeros = functools.partial(visit, zero=True)
    if "clean" in refs:
        return functools.partial(visit, zero=False), (refs["clean"][0] == 0, with_zeros)
    return with_zeros, None


def seen_rows(refs: dict[str, Any], batch: Any, kv_head: Any, keys: Along) -> jax.Array | None:
    """Which of some keys a query sees, [keys]; None for all."""
    if "seen" not in refs:
        return None
    ref = refs["seen"]
    place = tuple(at if n > 1 else 0 for at, n in zip((batch, kv_head), ref.shape[:2], strict=False))
    return Arrays.numbers(ref, place, keys).astype(jnp.int32) != 0


class Tile(TileMask):
    """The tile of a query head at some rows and keys. transposed: [keys, rows].

    period: rows hold the queries of several heads, each with that many rows, one after the other; None: those of one head.
    """

    def __init__(
        self,
        logits: Logits,
        refs: dict[str, Any],
        batch: Any,
        head: Any,
        kv_head: Any,
        rows: Along,
        keys: Along,
        *,
        transposed: bool = False,
        period: int | None = None,
    ) -> None:
        super().__init__(logits.static_args, refs, batch)
        self.logits, self.head, self.kv_head = logits, head, kv_head
        self.rows, self.keys, self.transposed, self.period = rows, keys, transposed, period
        self.shape = (keys.count, rows.count) if transposed else (rows.count, keys.count)

    def keep(self) -> jax.Array | None:
        """Which weights dropout keeps; None without dropout."""
        if "dropout" not in self.refs:
            return None
        key = self._dropout_key(self.query_heads())
        rows, keys = self._global_rows(self.local_rows()), self._global_keys(self._local_keys())
        mask = Dropout.keep_mask(*key, rows, keys, self.static_args.dropout)
        return jnp.broadcast_to(mask, self.shape)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """One number per query row, in a shape that broadcasts to the tile."""
        return x[None] if self.transposed else x[:, None]

    def _of_keys(self, x: jax.Array) -> jax.Array:
        return x[:, None] if self.transposed else x[None]

    def key_scale(self) -> jax.Array:
        """The scale of each key, in a shape that broadcasts to the tile."""
        return self._of_keys(Arrays.numbers(self.refs["key_scale"], (self.batch, self.kv_head), self.keys))

    # -- where the tile lies -----------------------------------------------------------------------------------------

    def local_rows(self) -> jax.Array:
        """The queries' numbers on this device."""
        rows = self.rows.indices
        return self.of_rows(rows if self.period is None else rows % self.period)

    def query_heads(self) -> Any:
        """The numbers of the query heads."""
        return self.head if self.period is None else self.head + self.of_rows(self.rows.indices // self.period)

    def _local_keys(self) -> jax.Array:
        return self._of_keys(self.keys.indices)

    def global_places(self) -> tuple[Any, Any]:
        """Rows and keys of the whole problem, in shapes that broadcast to the tile."""
        return self._global_rows(self.local_rows()), self._global_keys(self._local_keys())

    def positions(self) -> tuple[Any, Any]:
        """Positions of queries and keys, in shapes that broadcast to the tile."""
        leaf = self.positions_leaf()
        if leaf is not None:
            return self._along(f"leaf{leaf}", "q"), self._along(f"leaf{leaf + 1}", "kv")
        rows, keys = self.global_places()
        return self.position(rows), keys

    def row_and_head(self) -> tuple[Any, Any]:
        """The batch row and the query heads in the whole problem."""
        return self.global_row_and_head(self.batch, self.query_heads())

    def diagonal(self, name: str, rows: int) -> jax.Array:
        """Numbers of a Diagonal's array, for so many rows of the whole problem."""
        of_tile, keys = self.global_places()
        return self._gathered(name, keys - of_tile + (rows - 1))

    def of_table(self, name: str, index: jax.Array) -> jax.Array:
        """Numbers of a Lookup's array, by their places in a head's."""
        return self._gathered(name, index)

    def of_columns(self, name: str, index: jax.Array) -> jax.Array:
        """Numbers of a Product's array, by their places in a row's."""
        return self._gathered(name, self.local_rows(), index)

    def _gathered(self, name: str, *last: Any) -> jax.Array:
        """Numbers of an array, by their places in its last axes; those beyond an end read what is there."""
        ref = self.refs[name]
        leading = (self.batch, self.query_heads())[2 - (len(ref.shape) - len(last)) :]
        places = [
            jnp.broadcast_to(jnp.clip(jnp.asarray(at, jnp.int32), 0, size - 1), self.shape)
            for at, size in zip((*leading, *last), ref.shape, strict=True)
        ]
        return plgpu.load(ref.at[tuple(places)])

    # -- the mask ----------------------------------------------------------------------------------------------------

    def visible(self) -> list[jax.Array]:
        """The tests that a visible key passes. `weigh` selects by one after the other, which makes fewer stalls than by all."""
        seen = self._tests(self.static_args.mask, self.local_rows(), self._global_keys(self._local_keys()))
        if self.keys.beyond:
            seen.append(self._of_keys(self.keys.indices < self.keys.length))
        return seen

    def _words(self, ref: Any, *where: Any) -> tuple[list[jax.Array], Any]:
        """See TileMask."""
        head = self.head if self.period is None else self.kv_head
        place = tuple(at if n > 1 else 0 for at, n in zip((self.batch, head), ref.shape[:2], strict=True))
        keys = self.keys.whole
        tile = lax.div(jnp.asarray(keys.start, jnp.int32), keys.count)
        rows = [self.of_rows(Arrays.numbers(ref, (*place, tile, word), self.rows)) for word in range(ref.shape[3])]
        return rows, keys.start

    def _along(self, name: str, dim: str, *where: Any) -> jax.Array:
        """See TileMask."""
        ref = self.refs[name]
        place = (self.batch if ref.shape[0] > 1 else 0,)
        if dim == "q":
            return self.of_rows(Arrays.numbers(ref, place, self.rows))
        return self._of_keys(Arrays.numbers(ref, place, self.keys))

    def _dense(self, name: str, *where: Any) -> jax.Array:
        """See TileMask."""
        return self.dense(name)

    def dense(self, name: str) -> jax.Array:
        """The tile of an array [batch, heads, q, kv], any of them 1, in a shape that broadcasts to it."""
        ref = self.refs[name]
        head = self.head if self.period is None else self.kv_head
        place: list[Any] = [index(at if n > 1 else 0) for at, n in zip((self.batch, head), ref.shape[:2], strict=True)]
        cut: list[Along] = []
        for along, many in ((self.rows, ref.shape[2] > 1), (self.keys, ref.shape[3] > 1)):
            place.append(pl.ds(along.start, along.count) if many else index(0))
            cut += [along] if many else []
        if not cut:
            return ref[tuple(place)]
        shape, inside = tuple(along.count for along in cut), None
        for axis, along in enumerate(cut):
            if along.beyond:
                within = along.indices < along.length
                within = jnp.broadcast_to(within[:, None] if axis == 0 and len(cut) == 2 else within, shape)
                inside = within if inside is None else inside & within
        values = plgpu.load(ref.at[tuple(place)], mask=inside, other=None if inside is None else 0)
        if len(cut) == 2:
            return values.T if self.transposed else values
        return self.of_rows(values) if ref.shape[2] > 1 else self._of_keys(values)
