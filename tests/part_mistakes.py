"""Mistakes in what a warp knows of the parts of a tile, and in the order of tiles: see mosaic_mistakes.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from span_mistakes import Mistakes

from attnops.operators.flash.kernel import tile_schedule
from attnops.operators.flash.kernel.tile_schedule import TileSchedule
from attnops.operators.mosaic.kernel import seen_parts
from attnops.operators.mosaic.kernel import tile as mosaic_tile
from attnops.operators.mosaic.kernel.block import MosaicBlock
from attnops.operators.mosaic.kernel.seen_parts import SeenParts
from attnops.operators.mosaic.kernel.within import Span


def _as_the_first() -> None:
    """Each part of a tile is hidden as if it were the first."""
    Span.counted_from = lambda self, column: self  # type: ignore[method-assign]


def _parts(change: Callable[..., SeenParts]) -> None:
    """What is known of a tile's parts, changed. change: of what tells it, a tile's span, and how wide and how many parts are."""
    plain = mosaic_tile.seen_parts

    def made(span: Span, width: int, count: int, layout: Any, **more: Any) -> SeenParts:
        return change(lambda *given: plain(*given, layout, **more), span, width, count)

    mosaic_tile.seen_parts = made


def _of_both(parts: SeenParts, change: Callable[[Any, Any], tuple[Any, Any]]) -> SeenParts:
    seen, cut = change(parts.seen, parts.cut)
    return parts._replace(seen=seen, cut=cut)


def _parts_of(begin: int, end: int, which: str) -> None:
    """Which parts are seen, or cut, is told of spans that begin and end so many columns later."""

    def later(x: Any, columns: int) -> Any:
        return x if x is None else x + columns

    def of(plain: Any, span: Span, *sizes: int) -> SeenParts:
        made = plain(Span(later(span.begin, begin), later(span.end, end), span.zeros), *sizes)
        return plain(span, *sizes)._replace(**{which: getattr(made, which)})

    _parts(of)


def _ends_swapped() -> None:
    """The greatest of rows' numbers for the least."""
    plain = seen_parts.ends_in_warp
    seen_parts.ends_in_warp = lambda *given, **more: plain(*given, **more)[::-1]


def no_part_cut() -> None:
    """Nothing is hidden."""

    def of(plain: Any, *given: Any) -> SeenParts:
        made = plain(*given)
        return made._replace(cut=(jnp.bool_(False),) * len(made.cut))

    _parts(of)


def parts_as(which: str, number: int) -> None:
    """Each part of a tile is seen, or cut, as the part of this number is."""

    def of(plain: Any, *given: Any) -> SeenParts:
        made = plain(*given)
        parts = getattr(made, which)
        return made._replace(**{which: (parts[number],) * len(parts)})

    _parts(of)


def _some_in_warp(change: Callable[[Any, jax.Array], Any]) -> None:
    """Whether one of a warp's rows hides something of a tile, changed. change: of what tells it, and of how many columns that are
    at an end of the tile each row hides."""
    plain = mosaic_tile.any_in_warp
    mosaic_tile.any_in_warp = lambda numbers, *given, **more: change(lambda x: plain(x, *given, **more), numbers)


def cut_tiles(some: int) -> Mistakes:
    """The mistakes of which tiles a warp cuts that computes them whole, by name. some: a part of a tile's columns."""
    return {
        "no tile is cut": lambda: _some_in_warp(lambda plain, numbers: jnp.bool_(False)),
        "a tile is cut if all rows hide some of it": lambda: _some_in_warp(lambda plain, numbers: (numbers > 0).all()),
        "a tile with some columns hidden is whole": lambda: _some_in_warp(lambda plain, numbers: plain(numbers - some)),
    }


def cut_parts() -> Mistakes:
    """The mistakes of which parts of a tile are hidden, by name."""
    return {"the greatest of a warp for the least": _ends_swapped, "no part is cut": no_part_cut}


def barely_cut_parts(some: int) -> Mistakes:
    """The same where no more than some columns are hidden of a part."""
    return {
        "a part with some columns hidden at its start is whole": lambda: _parts_of(-some, 0, "cut"),
        "a part with some columns hidden at its end is whole": lambda: _parts_of(0, some, "cut"),
    }


def many_parts() -> Mistakes:
    """The mistakes of several parts of a tile, by name."""
    return {
        "each part of a tile as the first": _as_the_first,
        "parts in the reverse order": lambda: _parts(
            lambda plain, *given: _of_both(plain(*given), lambda seen, cut: (seen[::-1], cut[::-1]))
        ),
        "parts that are cut for those that are seen": lambda: _parts(
            lambda plain, *given: _of_both(plain(*given), lambda seen, cut: (cut, seen))
        ),
        "parts half as wide": lambda: _parts(lambda plain, span, width, count: plain(span, width // 2, count)),
    }


def at_edges() -> Mistakes:
    """Those of parts of which a row sees one column: the last or the first."""
    return {
        "none": lambda: None,
        "a part seen at its last column is passed over": lambda: _parts_of(1, 0, "seen"),
        "a part seen at its first column is passed over": lambda: _parts_of(0, -1, "seen"),
        "each part of a tile seen as the first": lambda: parts_as("seen", 0),
        "parts twice as wide": lambda: _parts(lambda plain, span, width, count: plain(span, 2 * width, count)),
    }


def loader_apart(kernel: type[MosaicBlock]) -> None:
    """What loads tiles goes through the partial ones first."""
    plain, each = kernel.load_keys, kernel.each_tile

    def partial_first(self: Any, refs: Any, row: Any, visit: Any, carry: Any, times: int = 1) -> Any:
        for other in ("some_full", "some_partial"):
            of_kind = dataclasses.replace(self, table=dataclasses.replace(self.table, **{other: False}))
            carry = each(of_kind, refs, row, visit, carry, times)
        return carry

    def load(self: Any, *given: Any) -> None:
        kernel.each_tile = partial_first  # type: ignore[method-assign, assignment]
        plain(self, *given)
        kernel.each_tile = each  # type: ignore[method-assign]

    kernel.load_keys = load  # type: ignore[method-assign, assignment]


def _next_partial(step: int) -> None:
    """Of listed tiles a partial one is visited twice, and the first or the last isn't."""
    plain = TileSchedule._overlap

    def overlap(self: Any, tiles: Any, *given: Any) -> Any:
        run, last = tiles.of_partial, tiles.of_partial.first + tiles.partial - 1

        def tile(place: Any) -> Any:
            return run.tile(jnp.where(place <= last, jnp.clip(place + step, run.first, last), place))

        runs = {name: getattr(tiles, name)._replace(tile=tile) for name in ("of_partial", "of_full")}
        return plain(self, tiles._replace(**runs), *given)

    TileSchedule._overlap = overlap  # type: ignore[method-assign]


def _first_of(which: Callable[[tile_schedule._Row, Any, Any], Any]) -> None:
    """A chain begins with a tile of this kind."""
    plain = TileSchedule._overlap

    class Row(tile_schedule._Row):
        def either(self, is_full: Any, full: Any, partial: Any) -> Any:
            return which(self, full, partial)

    TileSchedule._overlap = lambda self, tiles, *given: plain(self, Row(*tiles), *given)  # type: ignore[method-assign]


def chains() -> Mistakes:
    """The mistakes of partial tiles that overlap after the full ones, by name. Who visits one more tile waits forever."""
    return {
        "a partial tile twice and not the last": lambda: _next_partial(-1),
        "a partial tile twice and not the first": lambda: _next_partial(1),
        "the first tile is a full one": lambda: _first_of(lambda row, full, partial: row.of_full.at(full)),
        "the first tile is a partial one": lambda: _first_of(lambda row, full, partial: row.of_partial.at(partial)),
    }
