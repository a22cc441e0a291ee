"""Masks by brute force: specs are plain tuples, and `sees` is the definition in plain Python.

Nothing here uses the package but `build`, which makes the mask that a spec describes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from attnops import masks

OFFSETS = st.none() | st.integers(-12, 45)

LEAVES = st.one_of(
    st.just(("full",)),
    st.tuples(st.just("causal"), OFFSETS),
    st.tuples(st.just("window"), st.none() | st.integers(0, 12), st.none() | st.integers(0, 12), OFFSETS).filter(
        lambda spec: spec[1:3] != (None, None)
    ),
    st.tuples(st.just("chunked"), st.integers(1, 17), OFFSETS),
    st.tuples(st.just("prefix"), st.integers(0, 45)),
)
# Layouts that cover 96 rows: the blocks' sizes, the seed that fills them, and for how many heads.
BLOCKS = st.tuples(st.just("blocks"), st.integers(3, 17), st.integers(3, 17), st.integers(0, 99))
FUNCTIONS = st.tuples(st.just("function"), OFFSETS)


def trees(leaves: st.SearchStrategy[Any], depth: int = 3) -> st.SearchStrategy[Any]:
    """Specs of masks of at most this depth."""
    if depth == 0:
        return leaves
    below = trees(leaves, depth - 1)
    several, few = st.lists(below, min_size=2, max_size=3), st.lists(below, max_size=1)
    return st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), several),
        st.tuples(st.just("not"), below),
        leaves,
        st.tuples(st.sampled_from(["and", "or"]), few),
    )


def sees(spec: Any, i: int, j: int, query_offset: int = 0) -> bool:
    """Whether row i sees key j."""
    kind = spec[0]
    if kind in ("and", "or"):
        parts = [sees(part, i, j, query_offset) for part in spec[1]]
        return all(parts) if kind == "and" else any(parts)
    if kind == "not":
        return not sees(spec[1], i, j, query_offset)
    if kind == "full":
        return True
    if kind == "prefix":
        return j < spec[1]
    if kind == "blocks":
        row = layout(spec)[i // spec[1]]
        return j // spec[2] < len(row) and bool(row[j // spec[2]])
    x = i + (query_offset if spec[-1] is None else spec[-1])
    if kind == "causal":
        return j <= x
    if kind == "window":
        left, right = spec[1], spec[2]
        return (left is None or x - left <= j) and (right is None or j <= x + right)
    if kind == "chunked":
        return x // spec[1] == j // spec[1]
    assert kind == "function"
    return (x + 2 * j) % 3 != 0


def layout(spec: Any) -> list[list[bool]]:
    """The layout of a spec of blocks: its keys end before 50."""
    _, block_q, block_kv, seed = spec
    draw = random.Random(seed)
    share = draw.choice([0.1, 0.5, 0.9])
    return [[draw.random() < share for _ in range(50 // block_kv)] for _ in range(-(-96 // block_q))]


def dense(spec: Any, rows: range, cols: range, query_offset: int = 0) -> np.ndarray:
    """The same for a rectangle."""
    seen = [[sees(spec, i, j, query_offset) for j in cols] for i in rows]
    return np.array(seen, bool).reshape(len(rows), len(cols))


def build(spec: Any) -> masks.Mask:
    """The mask that the spec describes."""
    kind = spec[0]
    if kind == "and":
        return masks.And(tuple(build(part) for part in spec[1]))
    if kind == "or":
        return masks.Or(tuple(build(part) for part in spec[1]))
    if kind == "not":
        return masks.Not(build(spec[1]))
    if kind == "function":
        return masks.MaskFunction("test_thirds", spec[1])
    if kind == "blocks":
        return masks.Blocks(np.array(layout(spec)), *spec[1:3])
    leaves = {
        "full": masks.Full,
        "causal": masks.Causal,
        "window": masks.SlidingWindow,
        "chunked": masks.Chunked,
        "prefix": masks.Prefix,
    }
    return leaves[kind](*spec[1:])


def blocks(seen: np.ndarray, block_q: int, block_kv: int) -> list[list[int]]:
    """0 dead, 1 partial, 2 full, block by block."""
    table = []
    for i in range(0, seen.shape[0], block_q):
        row = []
        for j in range(0, seen.shape[1], block_kv):
            block = seen[i : i + block_q, j : j + block_kv]
            row.append(2 if block.all() else 1 if block.any() else 0)
        table.append(row)
    return table


@masks.register_mask_function("test_thirds", override=True)
def _thirds(x: Any, j: Any) -> Any:
    return (x + 2 * j) % 3 != 0
