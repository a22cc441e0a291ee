"""Tiles that overlap are visited in the order in which a plain loop visits them: what loads them goes through that one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.operators.flash.kernel.tile_schedule import Masked, Overlapped, TileSchedule

Visits = list[tuple[str, int]]
PARTIAL, FULL = 1, 2  # kinds of tiles


class Row(NamedTuple):
    """A row of a table, and the numbers of its tiles in the order of the table."""

    entries: tuple[int, ...]
    partial: list[int]
    full: list[int]


class Table:
    """A table that has no place but its own."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        place = tuple(map(int, index))
        assert all(0 <= at < size for at, size in zip(place, self.entries.shape, strict=True)), place
        return jnp.int32(self.entries[place])


def _neighbours() -> Iterator[Row]:
    """Rows of so many partial tiles, full ones and partial ones; the last are without tiles."""
    for first in (0, 3):
        for before, full, after in np.ndindex(3, 4, 3):
            ends = np.cumsum([first, before, full, after]).tolist()
            partial = [*range(first, ends[1]), *range(ends[2], ends[3])]
            yield Row(tuple(ends), partial, [*range(ends[1], ends[2])])


def _listed() -> Iterator[Row]:
    """Rows of any tiles, those of full rows among them."""
    rng, tiles = np.random.default_rng(0), 6
    several = [np.full(tiles, kind) for kind in range(3)]
    for kinds in (*several, np.array([1, 2, 1, 2, 1, 2]), *rng.integers(0, 3, (16, tiles))):
        partial, full = (np.flatnonzero(kinds == kind).tolist() for kind in (PARTIAL, FULL))
        rest = np.flatnonzero(kinds == 0).tolist()
        yield Row((len(partial), len(partial) + len(full), *partial, *full, *rest), partial, full)


ROWS = {True: list(_neighbours()), False: list(_listed())}


def _schedule(neighbours: bool, some_partial: bool, some_full: bool) -> tuple[TileSchedule, list[Row]]:
    """A table of those rows that have no other tiles, as wide as its longest row."""
    rows = [row for row in ROWS[neighbours] if some_partial >= bool(row.partial) and some_full >= bool(row.full)]
    most = max(len(row.partial) + len(row.full) for row in rows)
    entries = np.array([row.entries for row in rows], np.int32)[:, : 4 if neighbours else 2 + most]
    return TileSchedule(entries[None, None], neighbours, some_partial, some_full), rows


def _visit(name: str) -> Any:
    """What notes a visit. The carry: how many there were, and each one's name and tile."""

    def visit(tile: Any, carry: Any, *masked: Masked) -> Any:
        count, names, tiles = carry
        number = NAMES.index(name if name != "visit" else NAMES[masked[0]])
        return count + 1, names.at[count].set(number), tiles.at[count].set(tile)

    return visit


NAMES = ("full", "partial", "begin", "next full", "next partial", "end", "other")
MOST = 24


def _start() -> Any:
    return jnp.int32(0), jnp.full(MOST, -1, jnp.int32), jnp.full(MOST, -1, jnp.int32)


def _visits(carry: Any) -> Visits:
    count, names, tiles = map(np.asarray, carry)
    return [(NAMES[name], int(tile)) for name, tile in zip(names[:count], tiles[:count], strict=True)]


def _overlapped(masked: bool) -> Overlapped:
    """begin's carry isn't that of other visits."""

    def begin(tile: Any, carry: Any) -> Any:
        return {"begun": _visit("begin")(tile, carry)}

    def following(tile: Any, carry: Any, kind: Masked) -> Any:
        return {"begun": _visit("next partial" if kind else "next full")(tile, carry["begun"])}

    def end(carry: Any) -> Any:
        return _visit("end")(-1, carry["begun"])

    return Overlapped(begin, following, end, masked)


def _wanted(row: Row, part: int, parts: int, other: bool, overlaps: bool, masked: bool) -> Visits:
    """Of the share of a row's tiles, of which partial ones come first in the table and last in the loops."""
    total, first = len(row.partial) + len(row.full), len(row.partial)
    share = range(total * part // parts, total * (part + 1) // parts)
    full = [row.full[n - first] for n in share if n >= first]
    partial = [row.partial[n] for n in share if n < first]
    plain = [("full", tile) for tile in full], [("other" if other else "partial", tile) for tile in partial]
    if not overlaps:
        return [*plain[0], *plain[1]]
    chained = masked and not other
    chain = [("next full", tile) for tile in full] + [("next partial", tile) for tile in partial if chained]
    if chain:
        chain = [("begin", chain[0][1]), *chain[1:], ("end", -1)]
    return chain if chained else [*chain, *plain[1]]


@pytest.mark.parametrize("neighbours", [True, False], ids=["neighbours", "listed"])
@pytest.mark.parametrize(("some_partial", "some_full"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("instead", [None, False, True], ids=["alone", "or_other", "other"])
@pytest.mark.parametrize("parts", [1, 3])
def test_order(neighbours: bool, some_partial: bool, some_full: bool, instead: bool | None, parts: int) -> None:
    """Every tile once, as a plain loop would; begin comes first, and end last."""
    table, rows = _schedule(neighbours, some_partial, some_full)
    other = None if instead is None else (jnp.array(instead), _visit("other"))

    def visits(ref: Any, block: Any, part: Any, overlapped: Overlapped | None) -> Any:
        place = (jnp.int32(0), jnp.int32(0), block, part)
        return table.fold_tiles(ref, *place, parts, _visit("visit"), _start(), other, overlapped)

    assert any(not row.partial + row.full for row in rows)
    ways = {"plain": None, "full": _overlapped(False), "all": _overlapped(True)}
    traced = {
        way: jax.jit(lambda ref, block, part, overlapped=overlapped: visits(ref, block, part, overlapped))
        for way, overlapped in ways.items()
    }
    for (block, row), part in ((one, part) for one in enumerate(rows) for part in range(parts)):
        made = {
            way: _visits(run(jnp.asarray(table.table), jnp.int32(block), jnp.int32(part)))
            for way, run in traced.items()
        }
        for way, found in made.items():
            assert found == _wanted(row, part, parts, bool(instead), way != "plain", way == "all"), (way, row)
            assert [tile for name, tile in found if name != "end"] == [tile for _, tile in made["plain"]]


@pytest.mark.parametrize("neighbours", [True, False], ids=["neighbours", "listed"])
@pytest.mark.parametrize(("some_partial", "some_full"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("masked", [True, False])
def test_a_table_is_read_where_it_has_places(
    neighbours: bool, some_partial: bool, some_full: bool, masked: bool
) -> None:
    """Of rows as long as the table too, and of those without tiles."""
    table, rows = _schedule(neighbours, some_partial, some_full)
    with jax.disable_jit():
        for block, row in enumerate(rows):
            ref = Table(table.table)
            given = (_visit("visit"), _start(), None, _overlapped(masked))
            found = table.fold_tiles(ref, 0, 0, block, 0, 1, *given)
            assert _visits(found) == _wanted(row, 0, 1, False, True, masked)


@pytest.mark.parametrize("neighbours", [True, False], ids=["neighbours", "listed"])
@pytest.mark.parametrize(("some_partial", "some_full"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_one_loop_goes_through_the_same_tiles(
    neighbours: bool, some_partial: bool, some_full: bool, parts: int, times: int
) -> None:
    """In the order of the loops by kind, each as often as it's asked for."""
    table, rows = _schedule(neighbours, some_partial, some_full)

    def visit(tile: Any, carry: Any) -> Any:
        return _visit("full")(tile if times == 1 else tile[0] * times + tile[1], carry)

    @jax.jit
    def tiles(ref: Any, block: Any, part: Any) -> Any:
        return table.each_tile(ref, jnp.int32(0), jnp.int32(0), block, part, parts, visit, _start(), times)

    for block, row in enumerate(rows):
        for part in range(parts):
            wanted = [tile for _, tile in _wanted(row, part, parts, False, False, False)]
            found = [tile for _, tile in _visits(tiles(jnp.asarray(table.table), block, part))]
            assert found == [tile * times + number if times > 1 else tile for tile in wanted for number in range(times)]
