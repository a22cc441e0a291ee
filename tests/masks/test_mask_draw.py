"""Mask.draw: the tiles of a picture are those of the mask written out, at any length, whatever the mask is made of."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import (
    Blocks,
    Causal,
    Chunked,
    Dense,
    Full,
    Lengths,
    Mask,
    MaskFunction,
    Positions,
    Prefix,
    SegmentIds,
    SlidingWindow,
    register_mask_function,
)
from attnops.errors import MaskError


@register_mask_function("draw_tests.even", override=True)
def even(x: Any, j: Any) -> Any:
    return (x - j) % 2 == 0


STATIC = st.recursive(
    st.one_of(
        st.builds(Causal, st.integers(-6, 6)),
        st.builds(SlidingWindow, st.integers(0, 9), st.integers(0, 9)),
        st.builds(Chunked, st.integers(1, 9)),
        st.builds(Prefix, st.integers(0, 12)),
        st.just(Full()),
        st.just(MaskFunction("draw_tests.even")),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)


def written_out(mask: Mask, q_len: int, kv_len: int, offset: int = 0) -> np.ndarray:
    return np.asarray(mask.materialise(slice(0, q_len), slice(0, kv_len), query_offset=offset))


def tiles(seen: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """0, 1 or 2 for each tile of a bool matrix, tile by tile."""
    rows, columns = (range(0, n, b) for n, b in zip(seen.shape, (block_q, block_kv), strict=True))
    found = [[seen[i : i + block_q, j : j + block_kv] for j in columns] for i in rows]
    return np.array([[2 if x.all() else int(x.any()) for x in row] for row in found])


@settings(max_examples=30, deadline=None)
@given(STATIC, st.integers(1, 40), st.integers(1, 40), st.integers(-9, 9), st.integers(1, 9), st.integers(1, 9))
def test_tiles_of_static_masks(mask: Mask, q_len: int, kv_len: int, offset: int, block_q: int, block_kv: int) -> None:
    picture = mask.draw(q_len, kv_len, query_offset=offset, block=(block_q, block_kv))
    seen = written_out(mask, q_len, kv_len, offset)[0, 0]
    assert np.array_equal(picture.tiles, tiles(seen, block_q, block_kv))
    assert picture.visible is None or picture.visible == pytest.approx(seen.mean())
    assert sum(picture.counts.values()) == picture.tiles.size


ARRAYS = {
    "segments": lambda rng: SegmentIds(*np.sort(rng.integers(0, 3, (2, 2, 12)), axis=2)),
    "lengths": lambda rng: Lengths(jnp.array([5, 12])) & Prefix(12),
    "positions": lambda rng: Positions(rng.integers(0, 12, (2, 12)), rng.integers(0, 12, (2, 12)), left=3),
    "dense": lambda rng: Dense(rng.integers(0, 2, (2, 1, 12, 12)) > 0),
    "or": lambda rng: Causal() | SegmentIds(np.sort(rng.integers(0, 3, (2, 12)), axis=1), np.zeros((2, 12), int)),
    "not": lambda rng: ~Lengths(np.array([3, 9])) & Causal(),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("batch", [0, 1])
def test_masks_with_arrays(name: str, batch: int) -> None:
    mask = ARRAYS[name](np.random.default_rng(3))
    seen = written_out(mask, 12, 12)[batch, 0]
    exact = mask.draw(12, 12, block=1, batch=batch)
    assert np.array_equal(exact.tiles, tiles(seen, 1, 1))
    for block in (5, (12, 4)):
        blocks = block if isinstance(block, tuple) else (block, block)
        found, want = mask.draw(12, 12, block=block, batch=batch).tiles, tiles(seen, *blocks)
        assert ((found == want) | (found == 1)).all()  # dead and full are certain
    with pytest.raises(MaskError, match="batch=2; wanted 0 to 1"):
        mask.draw(12, 12, batch=2)


@pytest.mark.parametrize("heads", [1, 3])
def test_blocks(heads: int) -> None:
    """Of several heads a tile is full where all see all of it, dead where none sees any."""
    layout = np.random.default_rng(1).random((heads, 4, 6)) < 0.5
    for leaf in (Blocks(layout, 8, 4), Blocks(jnp.asarray(layout)[None], 8, 4)):
        picture = leaf.draw(block=4)
        assert (picture.q_len, picture.kv_len) == (32, 24)
        seen = written_out(leaf, 32, 24)[0]
        some, every = tiles(seen.any(axis=0), 4, 4), tiles(seen.all(axis=0), 4, 4)
        want = np.where(every == 2, 2, np.minimum(some, 1))
        exact = picture.tiles == want
        assert exact.all() if isinstance(leaf, Blocks) else (exact | (picture.tiles == 1)).all()
    chosen = Blocks(jnp.array([[[[0, 2], [1, -1], [2, 2], [3, 0]]]]), 8, 8)
    assert chosen.draw().q_len == 32
    shown = (chosen & Causal()).draw(32, 32, block=8)
    assert np.array_equal(shown.tiles, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [2, 0, 0, 1]])


def _joint(kind: str, kv_heads: int, heads: int, rows: int = 1) -> tuple[Mask, np.ndarray]:
    """(a mask of blocks for each kv head beside something for each head, its cells by hand [rows, heads, 32, 32])."""
    rng = np.random.default_rng(5)

    def chosen(n: int) -> tuple[Mask, np.ndarray]:
        table = rng.random((rows, n, 4, 4)) < 0.6
        return Blocks(jnp.asarray(table), 8, 8), table.repeat(heads // n, 1).repeat(8, 2).repeat(8, 3)

    def static(n: int) -> tuple[Mask, np.ndarray]:
        table = rng.random((n, 4, 4)) < 0.6
        return Blocks(table, 8, 8), table[None].repeat(heads // n, 1).repeat(8, 2).repeat(8, 3)

    array = rng.random((rows, heads, 1, 32)) < 0.8
    dense = Dense(array), np.broadcast_to(array, (rows, heads, 32, 32))
    of_heads = {"chosen": chosen, "static": static, "dense": lambda n: dense}
    first, join, second = kind.split()
    (one, seen), (other, also) = of_heads[first](kv_heads), of_heads[second](heads)
    return (one & other, seen & also) if join == "&" else (one | other, seen | also)


JOINED = ("chosen & chosen", "chosen & dense", "static & static", "static | chosen", "static & dense", "static | dense")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", JOINED)
def test_blocks_of_kv_heads_beside_something_of_each_head(kind: str, rows: int) -> None:
    mask, seen = _joint(kind, 2, 6, rows)
    assert np.array_equal(np.broadcast_to(written_out(mask, 32, 32), seen.shape), seen)
    for batch in range(rows if kind != "static & static" else 1):
        picture = mask.draw(32, 32, block=8, batch=batch)
        some, every = tiles(seen[batch].any(axis=0), 8, 8), tiles(seen[batch].all(axis=0), 8, 8)
        want = np.where(every == 2, 2, np.minimum(some, 1))
        exact = picture.tiles == want
        assert exact.all() if kind == "static & static" else (exact | (picture.tiles == 1)).all()
    assert picture.title == mask.describe()
    assert ET.fromstring(mask._repr_html_()) is not None
    found = mask.live_blocks_by_head(8, 8, q_len=32, kv_len=32)
    by_head = np.broadcast_to(found, (6, 4, 4))
    for row, head in np.ndindex(seen.shape[:2]):
        want = tiles(seen[row, head], 8, 8)
        assert ((by_head[head] == want) | (by_head[head] == 1)).all()
        if mask.is_static:
            assert np.array_equal(by_head[head], want)
    assert mask.live_blocks(8, 8, q_len=32, kv_len=32).shape == (4, 4)
    if mask.is_static:
        assert mask.may_have_dead_rows(32, 32) == (not seen.any(-1).all())


@pytest.mark.parametrize("use", ["draw", "_repr_html_", "live_blocks", "materialise", "may_have_dead_rows"])
def test_heads_that_do_not_fit_are_named(use: str) -> None:
    table = np.eye(4, dtype=bool)
    of_heads = lambda n: Blocks(np.stack([np.roll(table, i, 0) for i in range(n)]), 8, 8)  # noqa: E731
    calls = {
        "draw": lambda mask: mask.draw(32, 32),
        "_repr_html_": lambda mask: mask._repr_html_(),
        "live_blocks": lambda mask: mask.live_blocks(8, 8, q_len=32, kv_len=32),
        "materialise": lambda mask: mask.materialise(slice(0, 32), slice(0, 32)),
        "may_have_dead_rows": lambda mask: mask.may_have_dead_rows(32, 32),
    }
    for mask in (of_heads(2) & of_heads(3), of_heads(3) & Dense(np.ones((1, 2, 1, 32), bool))):
        with pytest.raises(MaskError, match=r"\b2\b.*\b3\b|\b3\b.*\b2\b"):
            calls[use](mask)


def test_batches_that_do_not_fit_are_named() -> None:
    mask = Lengths(np.array([3, 4])) & SegmentIds(np.ones((3, 8), np.int32), np.ones((3, 8), np.int32))
    for use in (
        lambda: mask.draw(8, 8),
        lambda: mask.materialise(slice(0, 8), slice(0, 8)),
        lambda: (Lengths(np.array([3, 4])) & Causal()).materialise(
            slice(0, 8), slice(0, 8), query_offset=np.arange(3, dtype=np.int32)
        ),
    ):
        with pytest.raises(MaskError, match=r"batch.*\b[23]\b.*batch.*\b[23]\b"):
            use()


def test_arrays_whose_values_nobody_knows() -> None:
    shapes = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    picture = (Causal() & SegmentIds(shapes, shapes)).draw()
    assert picture.tiles.shape == (16, 16)
    assert np.array_equal(picture.tiles, np.tril(np.ones((16, 16))))
    assert "this depends on the call's arrays" in picture.text()
    assert np.array_equal((Causal() & SegmentIds(shapes, shapes)).split()[0].draw(16).tiles, picture.tiles)


def test_lengths_that_are_not_given() -> None:
    assert Causal().draw().tiles.shape == (16, 16)
    window = (Causal() & SlidingWindow(left=127)).draw()
    assert (window.q_len, window.kv_len, window.block_q) == (512, 512, 16)  # four times the largest number
    assert Dense(np.ones((1, 1, 5, 9), bool)).draw().tiles.shape == (5, 9)
    assert Causal().draw(4).tiles.shape == (4, 4)
    assert SlidingWindow(left=2**30).draw().q_len == 131072  # a notebook must not wait for a large number
    assert Causal().draw(1, 4096, query_offset=4095).counts == {"dead": 0, "partial": 0, "full": 32}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"q_len": 0}, "q_len=0"),
        ({"q_len": 8, "block": 0}, "block=0"),
        ({"q_len": 8, "block": (1, 2, 3)}, "one of queries and one of keys"),
        ({"q_len": 131072, "block": 1}, "give a larger block"),
        ({"q_len": 2**25}, "at most 16777216 rows"),
        ({"q_len": 8, "batch": 1}, "batch=1"),
        ({"q_len": 8.5}, "q_len=8.5"),
    ],
)
def test_bad_input(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(MaskError, match=says):
        Causal().draw(**arguments)


def test_text() -> None:
    assert str((Causal() & SlidingWindow(left=2)).draw(4)).splitlines() == [
        "causal & window(left=2, right=0)",
        "4 queries (down) x 4 keys (across), a tile is 1 x 1",
        "9 of 16 visible",
        "",
        "      0",
        "   0  # . . .",
        "   1  # # . .",
        "   2  # # # .",
        "   3  . # # #",
        "",
        "# visible   . hidden",
    ]
    for mask, length in ((Causal(), 131072), (Chunked(4096) | Prefix(77), 100_000), (Full(), 7)):
        text = mask.draw(length, block=512).text()
        assert max(map(len, text.splitlines())) <= 80
        assert len(text.splitlines()) <= 42
        assert text.isascii()


def areas(svg: str) -> dict[str, float]:
    """The area of the rectangles of each class, over that of the plot."""
    root = ET.fromstring(svg)
    found: dict[str, float] = {}
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if float(box.get("width", 0)) != 12:  # not the legend's
            size = float(box.get("width", 0)) * float(box.get("height", 0))
            found[box.get("class", "")] = found.get(box.get("class", ""), 0.0) + size
    return {name: area / found["ao-dead"] for name, area in found.items()}


@pytest.mark.parametrize(("length", "block"), [(100, 7), (1000, 64), (131072, 512)])
def test_the_svg_shows_the_tiles(length: int, block: int, tmp_path: Path) -> None:
    picture = (Causal() & SlidingWindow(left=length // 3)).draw(length, block=block)
    svg = picture.svg()
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in svg
    drawn = areas(svg)
    # By the matrix: a tile counts by what it covers of it, the last ones less than the others.
    edges = np.minimum(np.arange(picture.tiles.shape[0] + 1) * block, length) / length
    size = np.outer(np.diff(edges), np.diff(edges))
    assert drawn["ao-full"] == pytest.approx(size[picture.tiles == 2].sum(), abs=2e-3)
    assert drawn["ao-part"] == pytest.approx(size[picture.tiles == 1].sum(), abs=2e-3)
    assert picture.save(tmp_path / "mask.svg").read_text() == svg
    assert picture.save(tmp_path / "mask.txt").read_text() == picture.text() + "\n"
    assert picture._repr_html_() == svg


def test_names_are_escaped() -> None:
    svg = Dense(np.ones((1, 1, 2, 2), bool)).draw().svg()
    ET.fromstring(svg)
    assert Causal()._repr_html_().startswith("<svg")


def test_a_long_mask_takes_milliseconds() -> None:
    masks = (Causal(), Causal() & SlidingWindow(left=4095), Chunked(8192) & Causal() | Prefix(1000))
    for mask in masks:
        mask.draw(131072).svg()
        began = time.perf_counter()
        picture = mask.draw(131072)
        str(picture), picture.svg()
        assert time.perf_counter() - began < 1.0  # about 0.03 s; a matrix of 17 billion cells would take minutes
