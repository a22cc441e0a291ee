"""The list of tiles that splash visits: against the mask itself, and the traced list against the host's."""

from __future__ import annotations

import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, Prefix, SlidingWindow
from attnops.masks import Lengths
from attnops.operators.kernels.splash.schedule import (
    FIRST,
    LAST,
    LIVE,
    PARTIAL,
    Known,
    fewest_steps,
    kv_block_of,
    live_tiles,
    most_steps,
    q_block_of,
    tile_schedule,
)
from attnops.operators.kernels.splash.schedule_rules import broken_rule
from attnops.operators.local_mask import LocalMask

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(0),
    "ahead": Causal(-90),  # the first rows see nothing
    "window": Causal(0) & SlidingWindow(30, 0, offset=0),
    "chunked": Chunked(70, offset=0),
    "prefix": Causal(0) | Prefix(40),
    "nobody": ~Full(),
}


def _brute(visible: np.ndarray, block_q: int, block_kv: int) -> dict[tuple[int, int], int]:
    """(q block, kv block) -> flags LIVE and PARTIAL, of a bool [q, kv]; padded keys aren't visible."""
    found = {}
    for i in range(0, visible.shape[0], block_q):
        for j in range(0, visible.shape[1], block_kv):
            tile = visible[i : i + block_q, j : j + block_kv]
            if tile.any():
                whole = tile.all() and tile.shape[1] == block_kv
                found[i // block_q, j // block_kv] = LIVE | (0 if whole else PARTIAL)
    return found


def _check(words: np.ndarray, want: dict[tuple[int, int], int], slow: str, slow_blocks: int) -> None:
    places = [(int(q_block_of(w)), int(kv_block_of(w))) for w in words]
    flags = [int(w) & (LIVE | PARTIAL) for w in words]
    assert {p: f for p, f in zip(places, flags, strict=True) if f} == want
    of_slow = [p[0 if slow == "q" else 1] for p in places]
    assert of_slow == sorted(of_slow)
    assert set(of_slow) == set(range(slow_blocks))  # each is visited: its output has to be written
    for block in range(slow_blocks):
        mine = [int(w) for w, b in zip(words, of_slow, strict=True) if b == block]
        assert [bool(w & FIRST) for w in mine] == [True] + [False] * (len(mine) - 1)
        assert [bool(w & LAST) for w in mine] == [False] * (len(mine) - 1) + [True]


@pytest.mark.parametrize("slow", ["q", "kv"])
@pytest.mark.parametrize("name", MASKS)
@given(q_len=st.integers(1, 200), kv_len=st.integers(1, 200), block_q=st.integers(8, 70), block_kv=st.integers(8, 70))
@settings(max_examples=25, deadline=None)
def test_every_live_tile_once(name: str, slow: str, q_len: int, kv_len: int, block_q: int, block_kv: int) -> None:
    mask = MASKS[name]
    visits = tile_schedule(LocalMask(mask, 0, q_len, kv_len, None), block_q, block_kv, slow)
    visible = np.broadcast_to(mask.materialise(slice(0, q_len), slice(0, kv_len))[0, 0], (q_len, kv_len))
    want = _brute(visible, block_q, block_kv)
    blocks = -(-q_len // block_q) if slow == "q" else -(-kv_len // block_kv)
    _check(np.asarray(visits.words), want, slow, blocks)
    assert visits.length == visits.covered == len(visits.words)
    assert broken_rule(visits, slow) is None
    assert visits.some_partial == any(f & PARTIAL for f in want.values())
    assert visits.some_full == any(not f & PARTIAL for f in want.values())


# Masks of positions, for places that the call gives.
ELSEWHERE = {"causal": Causal(), "window": SlidingWindow(30, 5), "chunked": Causal() & Chunked(70), "not": ~Causal()}


@pytest.mark.parametrize(
    "traced", [("q_start",), ("k_start",), ("query_offset",), ("q_start", "k_start")], ids="-".join
)
@pytest.mark.parametrize("slow", ["q", "kv"])
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("prefix", "not_elsewhere") else pytest.param(n, marks=pytest.mark.slow)
        for n in (*(n for n in MASKS if n != "full"), *(f"{n}_elsewhere" for n in ELSEWHERE))
    ],
)
def test_a_traced_place_gives_the_same_list(name: str, slow: str, traced: tuple[str, ...]) -> None:
    mask = ELSEWHERE[name.removesuffix("_elsewhere")] if name.endswith("_elsewhere") else MASKS[name]
    places = {"q_start": 60, "k_start": 50, "query_offset": 10}

    def words(given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at: dict[str, Any] = {**places, **given}
        if "query_offset" in given:  # a number a batch row
            at["query_offset"] = at["query_offset"][None]
        visits = tile_schedule(LocalMask(mask, q_len=150, kv_len=200, **at), 32, 48, slow)
        return jnp.asarray(visits.words), jnp.asarray(visits.covered)

    rows, keys = np.arange(60, 210)[:, None], np.arange(50, 250)[None]
    visible = np.broadcast_to(mask.test(rows, rows + 10, keys), (150, 200))
    known, _ = words({})
    _check(np.asarray(known), _brute(visible, 32, 48), slow, 5)
    found, covered = jax.jit(words)({place: jnp.int32(places[place]) for place in traced})
    np.testing.assert_array_equal(found[: int(covered)], known)


@pytest.mark.parametrize("k_start", [0, 96, 130, 400])
@pytest.mark.parametrize("name", [*MASKS, "not_causal"])
def test_bounds_of_a_list_at_keys_that_lie_elsewhere(name: str, k_start: int) -> None:
    """The most are as many as there are; the fewest are those that first rows see."""
    mask = ~Causal() if name == "not_causal" else MASKS[name]
    known = Known(mask, 150, 200, 60, k_start, 10)
    rows, keys = np.arange(60, 210)[:, None], np.arange(k_start, k_start + 200)[None]
    visible = np.broadcast_to(mask.test(rows, rows + 10, keys), (150, 200))
    wanted = np.zeros((5, 5), bool)
    for place in _brute(visible, 32, 48):
        wanted[place] = True
    np.testing.assert_array_equal(live_tiles(known, 32, 48), wanted)
    assert most_steps(wanted, "q") == np.maximum(wanted.sum(1), 1).sum()
    firsts = [np.unique(np.flatnonzero(visible[row]) // 48) for row in range(0, 150, 32)]
    assert fewest_steps(known, 32, 48) == sum(map(len, firsts))


def test_a_list_for_each_batch_row() -> None:
    lengths = np.array([0, 50, 200])

    def words(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        visits = tile_schedule(LocalMask(Lengths(lengths) & Causal(0), 0, 150, 200, None), 32, 48, "q")
        assert visits.rows == 3
        assert visits.length < 5 * 5  # what the static part rules out has no place
        return visits.words.reshape(3, -1), visits.covered

    lists, covered = jax.jit(words)(jnp.asarray(lengths))
    rows, keys = np.arange(150)[:, None], np.arange(200)
    most = 0
    for got, length in zip(np.asarray(lists), lengths, strict=True):
        want = _brute((keys <= rows) & (keys < length), 32, 48)
        used = len(want) + 5 - len({q for q, _ in want})  # and one for each block without keys
        _check(got[:used], {p: LIVE | PARTIAL if f & PARTIAL else f for p, f in want.items()}, "q", 5)
        assert not (got[used:] & 15).any()
        assert set(got[used:] >> 4) <= {got[used - 1] >> 4}  # stays where it is, so nothing is fetched
        most = max(most, used)
    assert int(covered) == most


@pytest.mark.parametrize("slow", ["q", "kv"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda w: w[::-1], "ascending order"),
        (lambda w: w[[0, 2, 1, *range(3, len(w))]], "LAST|FIRST|ascending"),
        (lambda w: np.append(w[:1] & ~FIRST, w[1:]), "FIRST"),
        (lambda w: np.concatenate([w[:1], w[1:2] | LAST, w[2:]]), "LAST"),
        (lambda w: w[q_block_of(w) != 1], "without a gap|FIRST|LAST"),
        (lambda w: np.append(w[:1], w), "FIRST"),
        (lambda w: np.append(w[:-1], [w[-1] & ~LAST, w[-1] & ~FIRST]), "twice"),
        (lambda w: w & ~LIVE, "is live"),
        (lambda w: np.append(w, w[-1]), "FIRST|LAST"),
        (lambda w: np.append(w, w[0] & ~(FIRST | LAST | LIVE | PARTIAL)), "what follows the end"),
    ],
)
def test_a_list_that_breaks_a_rule_is_found(change: Any, rule: str, slow: str) -> None:
    visits = tile_schedule(LocalMask(Causal(0), 0, 96, 96, None), 32, 32, slow)
    assert broken_rule(visits, slow) is None
    words = change(np.asarray(visits.words)).astype(np.int32)
    broken = broken_rule(visits._replace(words=words, length=len(words), covered=len(words)), slow)
    assert broken is not None
    assert re.search(rule, broken)


def test_128k_tokens_are_planned_from_a_closed_form() -> None:
    """No [q, kv] array, and as many words as there are live tiles."""
    mask = LocalMask(Causal(0), 0, 1 << 17, 1 << 17, None)
    assert tile_schedule(mask, 1024, 1024, "q").length == 128 * 129 // 2
    windowed = LocalMask(Causal(0) & SlidingWindow(4095, 0, offset=0), 0, 1 << 17, 1 << 17, None)
    assert tile_schedule(windowed, 1024, 1024, "kv").length == 128 * 5 - (1 + 2 + 3 + 4)


def test_configs_and_plans_pickle() -> None:
    metadata = OperationMetadata(backend="tpu", operation_configs={"splash": {"heads_per_tile": 2}})
    x = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.bfloat16)
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x, mask=Causal() & SlidingWindow(left=9))
    again = pickle.loads(pickle.dumps(plan))
    assert (again.config, again.problem, again.padding) == (plan.config, plan.problem, plan.padding)


def test_planning_for_128k_tokens_looks_at_few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = Mask.live_blocks

    def counted(self: Mask, block_q: int, block_kv: int, **sizes: int) -> np.ndarray:
        found = whole(self, block_q, block_kv, **sizes)
        seen.append(found.size)
        return found

    monkeypatch.setattr(Mask, "live_blocks", counted)
    x = jax.ShapeDtypeStruct((1, 1 << 17, 8, 128), jnp.bfloat16)
    decided = OperationRegistry.create("splash", OperationMetadata(backend="tpu")).plan(x, x, x)
    assert decided.config.block_q == 1024
    # 128-blocks would be a million tiles for each pass; 1024-blocks are 16384, and a sample has as many 128-blocks.
    assert sum(seen) < 100_000
