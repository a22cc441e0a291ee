"""What a warp knows of the parts of a tile from its rows' spans, against every row and column."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__} has no layouts of registers in public", allow_module_level=True)

from attnops.operators.hopper.kernel.tile import TILE, HopperTile
from attnops.operators.mosaic.kernel.seen_parts import ALL_SEEN, SeenParts, seen_parts
from attnops.operators.mosaic.kernel.within import Span

FAR = 2**30
ROWS = 32
SIZES = pytest.mark.parametrize(
    ("width", "count"), [(width, count) for width in (16, 32, 64) for count in (1, 2, 4, 8)], ids=str
)
BOUNDS = pytest.mark.parametrize("bounds", [("begin",), ("end",), ("begin", "end")], ids="_".join)
Spans = dict[str, np.ndarray]


def _found(spans: Spans, width: int, count: int) -> list[np.ndarray]:
    """(seen, cut) of the parts of each tile. spans: int32 [tiles, rows]."""

    @jax.jit
    @jax.vmap
    def of_tile(spans: dict[str, jax.Array]) -> tuple[Any, Any]:
        span = Span(spans.get("begin"), spans.get("end"), jnp.zeros((), jnp.int32))
        made = seen_parts(span, width, count, TILE, interpret=True)
        return jnp.stack(made.seen), jnp.stack(made.cut)

    return [np.asarray(x) for x in of_tile({name: jnp.asarray(x, jnp.int32) for name, x in spans.items()})]


def _wanted(spans: Spans, width: int, count: int) -> list[np.ndarray]:
    """(whether a row sees a column, whether one doesn't see one) of the parts of each tile."""
    at, some = np.arange(width * count), next(iter(spans.values()))
    visible = np.ones((*some.shape, len(at)), bool)
    if "begin" in spans:
        visible &= at >= spans["begin"][..., None]
    if "end" in spans:
        visible &= at < spans["end"][..., None]
    of_parts = visible.reshape(*some.shape, count, width)
    return [of_parts.any((1, 3)), ~of_parts.all((1, 3))]


def _some(rng: np.random.Generator, columns: int, shape: tuple[int, ...]) -> Spans:
    """Some are empty, or have bounds far beyond the tile."""
    bounds = rng.integers(-9, columns + 10, (2, *shape))
    bounds = np.where(rng.random(bounds.shape) < 0.1, rng.choice([-FAR, FAR], bounds.shape), bounds)
    return dict(zip(("begin", "end"), bounds, strict=True))


@SIZES
@BOUNDS
def test_rows_that_see_the_same(width: int, count: int, bounds: tuple[str, ...]) -> None:
    """Every span that isn't empty, of the tile and of its neighbourhood: nothing is taken for seen or for cut that isn't."""
    at = np.r_[-FAR, np.arange(-width - 1, width * count + width + 2), FAR]
    if width * count > 128:  # those beside the ends of parts
        at = at[(np.abs(at) == FAR) | np.isin(at % width, (0, 1, 2, width // 2, width - 2, width - 1))]
    begin, end = (x.ravel() for x in np.meshgrid(at, at, indexing="ij"))
    some = begin < end
    tiles = {"begin": begin[some], "end": end[some]}
    spans = {name: np.repeat(tiles[name][:, None], 3, axis=1) for name in bounds}
    for found, want in zip(_found(spans, width, count), _wanted(spans, width, count), strict=True):
        np.testing.assert_array_equal(found, want)
        assert 0 < want.mean() < 1


@SIZES
@BOUNDS
def test_a_band(width: int, count: int, bounds: tuple[str, ...]) -> None:
    """Rows whose spans are one column later each, in either order: no columns between them that none sees."""
    columns, rows = width * count, np.arange(ROWS)
    first, wide = (x.ravel() for x in np.meshgrid(np.arange(-ROWS - 3, columns + 4), [1, 2, 5, width - 1, columns + 9]))
    begin = first[:, None] + rows
    tiles = {"begin": begin, "end": begin + wide[:, None]}
    for order in (slice(None), slice(None, None, -1)):
        spans = {name: tiles[name][:, order] for name in bounds}
        for found, want in zip(_found(spans, width, count), _wanted(spans, width, count), strict=True):
            np.testing.assert_array_equal(found, want)


@SIZES
@BOUNDS
def test_any_spans(width: int, count: int, bounds: tuple[str, ...]) -> None:
    """Between rows' spans a warp may take columns for seen, and where rows see none. Nothing is missed."""
    rng, columns = np.random.default_rng(width + count), width * count
    tiles = [_some(rng, columns, (200, rows)) for rows in (1, 2, ROWS)]
    near = _some(rng, columns, (200, 1))
    tiles.append({name: x + rng.integers(-3, 4, (200, ROWS)) for name, x in near.items()})
    for one in tiles:
        spans = {name: one[name] for name in bounds}
        (seen, cut), (want_seen, want_cut) = _found(spans, width, count), _wanted(spans, width, count)
        np.testing.assert_array_equal(seen | want_seen, seen)
        np.testing.assert_array_equal(cut, want_cut)
        if len(bounds) == 1:
            np.testing.assert_array_equal(seen, want_seen)


@pytest.mark.parametrize("width", [64, 128])
@BOUNDS
def test_a_tile_that_is_computed_whole(width: int, bounds: tuple[str, ...]) -> None:
    """A warp asks only whether one of its rows doesn't see all of it."""
    rng, lines = np.random.default_rng(width), HopperTile.lines
    near, tiles = _some(rng, width, (200, lines)), list[Spans]()
    for share in (0, 1 / lines, 1):  # rows that don't see all
        some = rng.random((200, lines)) < share
        tiles.append({name: np.where(some, x, -1 if name == "begin" else width + 1) for name, x in near.items()})

    @jax.jit
    @jax.vmap
    def of_tile(spans: dict[str, jax.Array]) -> Any:
        span = Span(spans.get("begin"), spans.get("end"), jnp.zeros((), jnp.int32))
        here = SimpleNamespace(
            span=lambda words: span, shape=(lines, width), in_registers=TILE, logits=SimpleNamespace(interpret=True)
        )
        made = HopperTile.cut(here)
        assert made.seen is None
        assert made.span is span
        return made.cut[0]

    for one in tiles:
        spans = {name: one[name] for name in bounds}
        want = _wanted(spans, width, 1)[1][:, 0]
        np.testing.assert_array_equal(of_tile({name: jnp.asarray(x, jnp.int32) for name, x in spans.items()}), want)
    assert want.mean() > 0


def test_what_is_done() -> None:
    """By part; where all is seen nothing is tested."""
    works = [functools.partial(jnp.float32, n) for n in (1, 2)]
    for flag in (False, True):
        flags = jnp.array([not flag, flag, not flag])
        apart = SeenParts(tuple(flags), tuple(~flags))
        assert apart.where_seen(1, *works) == (1 if flag else 2)
        assert apart.where_cut(1, *works) == (2 if flag else 1)
    assert ALL_SEEN.where_seen(7, lambda: "work", lambda: "instead") == "work"
    assert ALL_SEEN.where_cut(7, lambda: "work", lambda: "instead") == "instead"
    unasked = SeenParts(None, (True,))
    assert unasked.where_seen(0, lambda: "work", lambda: "instead") == "work"
    assert unasked.where_cut(0, lambda: "work", lambda: "instead") == "work"
    assert not unasked.everything
