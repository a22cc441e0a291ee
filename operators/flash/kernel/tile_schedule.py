"""Visits: which tiles a program of a kernel processes, in a table that it reads.

If the host knows that each row of the table consists of neighbours - some cut by the mask, then fully visible ones, then
some cut by the mask - the four ends are enough, and the next tile's place needs no load. Otherwise the row lists its tiles.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....masks import Full, Mask
from ....masks.static import SpanMask
from ...kernels.local_mask import LocalMask
from ...kernels.tiles import is_arithmetic

__all__ = ["Masked", "Overlapped", "TileSchedule", "tile_schedule"]

_FEW_PARTIAL = 8  # one of so many tiles


class Masked(enum.IntEnum):
    """Whether a visited tile has a mask: none, one, or one whose segment ids aren't in order, and have to be compared."""

    NO = 0
    YES = 1
    BY_IDS = 2


@dataclass(frozen=True)
class TileSchedule:
    """table: int32 [batch | 1, tables | 1, blocks of the slow axis, ...], one for each group of heads with its own table.

    neighbours: a row is (first, first full, after the last full, after the last). Otherwise it is (number of partial tiles,
    number of all), then the partial tiles, then the full ones. some_partial, some_full: False if there are no such tiles.
    many_partial: False if it's known that few are partial.
    """

    table: np.ndarray | jax.Array
    neighbours: bool
    some_partial: bool
    some_full: bool
    many_partial: bool = True

    @property
    def asked(self) -> bool:
        """Whether tiles that have no mask are visited as those that have one, which are few."""
        return self.some_partial and not self.some_full and not self.many_partial

    def fold_tiles(
        self,
        ref: Any,
        batch: Any,
        head: Any,
        block: Any,
        part: Any,
        parts: int,
        visit: Callable[[Any, Any, Masked], Any],
        carry: Any,
        instead: tuple[Any, Callable[[Any, Any, Masked], Any]] | None = None,
        overlapped: Overlapped | None = None,
        times: int = 1,
    ) -> Any:
        """visit(tile, carry, masked) for the `part`-th of `parts` shares of a row's tiles. head: one of those with a table.

        instead: whether another function is to visit the partial tiles, and that function. overlapped: what visits the full ones,
        and maybe the partial ones. times: visits of each tile, one after another; of several, visit's first argument is (tile,
        number of the visit).
        """
        tiles, of_full, of_partial = self._share(ref, batch, head, block, part, parts)
        of_other = of_partial
        if instead is not None:  # a loop of its own: a choice in the loop would cost time in each turn
            middle = jnp.where(instead[0], *of_partial)
            of_partial, of_other = (of_partial[0], middle), (middle, of_partial[1])
        if overlapped is not None:
            carry = self._overlap(tiles, of_full, of_partial, overlapped, carry)
        elif self.some_full:
            carry = tiles.of_full.fold_tiles(*of_full, visit, carry, Masked.NO, times)
        if self.some_partial and not (overlapped and overlapped.partial):
            carry = tiles.of_partial.fold_tiles(*of_partial, visit, carry, Masked.YES, times)
        if self.some_partial and instead is not None:
            carry = tiles.of_partial.fold_tiles(*of_other, instead[1], carry, Masked.YES, times)
        return carry

    def each_tile(
        self,
        ref: Any,
        batch: Any,
        head: Any,
        block: Any,
        part: Any,
        parts: int,
        visit: Callable[[Any, Any], Any],
        carry: Any,
        times: int = 1,
    ) -> Any:
        """visit(tile, carry) for the same tiles in the same order, in one loop: their kinds make no difference."""
        tiles, of_full, of_partial = self._share(ref, batch, head, block, part, parts)
        if not (self.some_full and self.some_partial):
            run, ends = (tiles.of_full, of_full) if self.some_full else (tiles.of_partial, of_partial)
        elif parts == 1:
            run, ends = tiles.in_order, (0, tiles.total)
        else:
            full, partial = (jnp.maximum(end - begin, 0) for begin, end in (of_full, of_partial))
            run = _Run(0, lambda n: tiles.either(n < full, of_full[0] + n, of_partial[0] + n - full))
            ends = 0, full + partial
        return run.fold_tiles(*ends, lambda tile, carry, _: visit(tile, carry), carry, Masked.NO, times)

    def _share(
        self, ref: Any, batch: Any, head: Any, block: Any, part: Any, parts: int
    ) -> tuple[_Row, tuple[Any, Any], tuple[Any, Any]]:
        """(a row's tiles, which of the full ones are in the `part`-th of `parts` shares, which of the partial ones)."""
        row = (batch if self.table.shape[0] > 1 else 0, head if self.table.shape[1] > 1 else 0, block)
        tiles = self._tiles(lambda i: ref[(*row, i)])
        partial, total = tiles.partial, tiles.total
        if parts == 1:
            return tiles, (0, total - partial), (0, partial)
        low, high = total * part // parts, total * (part + 1) // parts
        return tiles, (jnp.maximum(low - partial, 0), high - partial), (low, jnp.minimum(high, partial))

    def _overlap(
        self, tiles: _Row, of_full: tuple[Any, Any], of_partial: tuple[Any, Any], overlapped: Overlapped, carry: Any
    ) -> Any:
        """Full tiles and then, where they overlap too, partial ones, of which each visit ends the work of the tile before."""
        partial = overlapped.partial and self.some_partial
        some_full = of_full[0] < of_full[1] if self.some_full else False
        some = some_full | (of_partial[0] < of_partial[1]) if partial else some_full

        def run(carry: Any) -> Any:
            first = tiles.either(some_full, of_full[0], of_partial[0]) if partial else tiles.of_full.at(of_full[0])
            carry = overlapped.begin(first, carry)
            if self.some_full:
                carry = tiles.of_full.fold_tiles(of_full[0] + 1, of_full[1], overlapped.visit, carry, Masked.NO)
            if partial:
                start = of_partial[0] + jnp.where(some_full, 0, 1)
                carry = tiles.of_partial.fold_tiles(start, of_partial[1], overlapped.visit, carry, Masked.YES)
            return overlapped.end(carry)

        return carry if some is False else lax.cond(some, run, lambda carry: carry, carry)

    def count(self, ref: Any, batch: Any, head: Any, block: Any, part: Any, parts: int) -> Any:
        """The number of tiles in the `part`-th of `parts` shares of a row's."""
        row = (batch if self.table.shape[0] > 1 else 0, head if self.table.shape[1] > 1 else 0, block)
        total = self._tiles(lambda i: ref[(*row, i)]).total
        return total if parts == 1 else total * (part + 1) // parts - total * part // parts

    def _tiles(self, entry: Callable[[Any], Any]) -> _Row:
        """Those of a row with these entries."""
        if not self.neighbours:
            partial, total = entry(0), entry(1)
            in_order = _Run(2 + partial, lambda place: entry(jnp.where(place < 2 + total, place, place - total)))
            return _Row(partial, total, _Run(2, entry), _Run(2 + partial, entry), in_order)
        first, full, after_full, after = (entry(i) for i in range(4))
        before, partial = full - first, full - first + after - after_full
        masked = _Run(0, lambda n: jnp.where(n < before, first + n, after_full + n - before))

        def of_place(place: Any) -> Any:
            """The tile at a place: the full ones come first."""
            early = jnp.where(place < first + after_full - full, place + full - first, place - after_full + full)
            return jnp.where(place < after_full, early, place)

        return _Row(partial, after - first, masked, _Run(full), _Run(first, of_place))


class Overlapped(NamedTuple):
    """How tiles are visited where each visit ends the work of the tile before: begin(tile, carry), whose result is the carry of
    visit(tile, carry, masked) for the others, and end(carry). partial: whether partial tiles overlap too."""

    begin: Callable[[Any, Any], Any]
    visit: Callable[[Any, Any, Masked], Any]
    end: Callable[[Any], Any]
    partial: bool


class _Run(NamedTuple):
    """Tiles in a loop's order: the n-th has the place `first + n`, and `tile` gives the number of the tile at a place, by default
    the place itself. The loop goes over places: over n it would take more instructions.
    """

    first: Any
    tile: Callable[[Any], Any] = lambda place: place

    def at(self, number: Any) -> Any:
        """The number-th tile."""
        return self.tile(self.first + number)

    def fold_tiles(
        self,
        start: Any,
        end: Any,
        visit: Callable[[Any, Any, Masked], Any],
        carry: Any,
        masked: Masked,
        times: int = 1,
    ) -> Any:
        """visit(tile, carry, masked) for the tiles from the start-th to the end-th. times: see TileSchedule."""

        def turn(number: Any, carry: Any) -> Any:
            if times == 1:
                return visit(self.tile(number), carry, masked)
            tile, visits = lax.div(number, jnp.int32(times)), lax.rem(number, jnp.int32(times))
            return visit((self.tile(tile), visits), carry, masked)

        return lax.fori_loop((self.first + start) * times, (self.first + end) * times, turn, carry)


class _Row(NamedTuple):
    """A row's tiles: how many are partial, how many there are, the partial ones, the full ones, and the full ones before the
    partial ones."""

    partial: Any
    total: Any
    of_partial: _Run
    of_full: _Run
    in_order: _Run

    def either(self, is_full: Any, full: Any, partial: Any) -> Any:
        """The full-th of the full tiles or else the partial-th of the partial ones."""
        if is_full is False:
            return self.of_partial.at(partial)
        of_full, of_partial = self.of_full.first + full, self.of_partial.first + partial
        if self.of_full.tile is self.of_partial.tile:  # the table has no place after its last tile
            return self.of_full.tile(jnp.where(is_full, of_full, of_partial))
        return jnp.where(is_full, self.of_full.tile(of_full), self.of_partial.tile(of_partial))


def tile_schedule(
    mask: LocalMask, block_q: int, block_kv: int, slow: str, tables: int = 1, *, asks: bool = False
) -> TileSchedule:
    """The tiles of each query block (slow 'q') or of each kv block ('kv'), for each of `tables` groups of heads.

    asks: whether the kernel asks of a tile with a mask of spans what it hides. Where few tiles have one, all go through a single
    loop then, half of the program. A last kv block that is padded counts as partial.
    """
    kinds = mask.kinds_of_heads(block_q, block_kv, tables)
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    if mask.kv_len % block_kv:
        last = (np.arange(kinds.shape[-1]) == kinds.shape[-1] - 1)[None, None, None]
        kinds = xp.where(last, xp.minimum(kinds, 1), kinds)
    if slow == "kv":
        kinds = kinds.swapaxes(2, 3)
    if not isinstance(kinds, np.ndarray):
        return TileSchedule(_listed(kinds, jnp), False, True, True)
    partial, full = int((kinds == 1).sum()), int((kinds == 2).sum())
    asked = asks and 0 < _FEW_PARTIAL * partial <= partial + full and _only_spans(mask.mask)
    if asked or (2 * full <= partial and is_arithmetic(mask.mask)):  # then a single loop, half of the program
        kinds = np.minimum(kinds, 1)
    partial, full = int((kinds == 1).sum()), int((kinds == 2).sum())
    some = partial > 0, full > 0, not asked and _FEW_PARTIAL * partial > partial + full
    ends = _ends(kinds)
    if ends is not None:
        return TileSchedule(ends, True, *some)
    table = _listed(kinds, np)
    return TileSchedule(table[..., : 2 + int(table[..., 1].max())], False, *some)


def _only_spans(mask: Mask) -> bool:
    return all(isinstance(part, SpanMask | Full) for part in mask.conjuncts())


def _ends(kinds: np.ndarray) -> np.ndarray | None:
    """(first, first full, after the last full, after the last) of each row, or None if that isn't enough."""

    def run(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        some = flags.any(-1)
        first = np.where(some, flags.argmax(-1), 0)
        return first, np.where(some, flags.shape[-1] - flags[..., ::-1].argmax(-1), first)

    (first, after), (full, after_full) = run(kinds > 0), run(kinds == 2)
    none = full == after_full
    full, after_full = np.where(none, after, full), np.where(none, after, after_full)
    whole = ((kinds > 0).sum(-1) == after - first) & ((kinds == 2).sum(-1) == after_full - full)
    return np.stack([first, full, after_full, after], -1).astype(np.int32) if whole.all() else None


def _listed(kinds: Any, xp: Any) -> Any:
    rank = xp.where(kinds == 1, 0, xp.where(kinds == 2, 1, 2))
    order = xp.argsort(rank, axis=-1, stable=True).astype(np.int32)
    counts = [(kinds == 1).sum(-1, keepdims=True), (kinds > 0).sum(-1, keepdims=True)]
    return xp.concatenate([*(n.astype(np.int32) for n in counts), order], -1)
