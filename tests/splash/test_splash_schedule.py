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
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.splash.kernel.schedule import (
    FIRST,
    LAST,
    VARIANT,
    StaticMask,
    kv_block_of,
    live_tiles,
    max_steps,
    min_steps,
    q_block_of,
    tile_schedule,
    variant_of,
)
from attnops.operators.splash.kernel.schedule_rules import broken_rule
from attnops.operators.splash.kernel.variants import MASKED, WHOLE, KernelVariant, variants_of

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(0),
    "ahead": Causal(-90),  # the first rows see nothing
    "window": Causal(0) & SlidingWindow(30, 0, offset=0),
    "chunked": Chunked(70, offset=0),
    "prefix": Causal(0) | Prefix(40),
    "nobody": ~Full(),
}


def _brute(visible: np.ndarray, block_q: int, block_kv: int) -> dict[tuple[int, int], np.ndarray]:
    """(q block, kv block) -> the tile, of a bool [q, kv], where something is visible; padded keys aren't."""
    found = {}
    for i in range(0, visible.shape[0], block_q):
        for j in range(0, visible.shape[1], block_kv):
            tile = visible[i : i + block_q, j : j + block_kv]
            if tile.any():
                found[i // block_q, j // block_kv] = np.pad(tile, ((0, 0), (0, block_kv - tile.shape[1])))
    return found


def _check(
    words: np.ndarray,
    variants: tuple[KernelVariant, ...],
    want: dict[tuple[int, int], np.ndarray],
    slow: str,
    slow_blocks: int,
    block_q: int,
    subtile: tuple[int, int],
) -> None:
    places = [(int(q_block_of(w)), int(kv_block_of(w))) for w in words]
    numbers = {place: int(variant_of(w)) for place, w in zip(places, words, strict=True) if variant_of(w)}
    assert set(numbers) == set(want)
    for place, number in numbers.items():
        _check_variant(variants[number - 1], want[place], block_q, subtile)
    of_slow = [p[0 if slow == "q" else 1] for p in places]
    assert of_slow == sorted(of_slow)
    assert set(of_slow) == set(range(slow_blocks))  # each is visited: its output has to be written
    for block in range(slow_blocks):
        mine = [int(w) for w, b in zip(words, of_slow, strict=True) if b == block]
        assert [bool(w & FIRST) for w in mine] == [True] + [False] * (len(mine) - 1)
        assert [bool(w & LAST) for w in mine] == [False] * (len(mine) - 1) + [True]


def _check_variant(variant: KernelVariant, tile: np.ndarray, block_q: int, subtile: tuple[int, int]) -> None:
    """What a body leaves out nobody sees, and what it doesn't mask is seen whole."""
    for i in range(0, tile.shape[0], subtile[0]):
        for j in range(0, tile.shape[1], subtile[1]):
            kind = variant.kind(i, j, block_q, tile.shape[1])
            seen = tile[i : i + subtile[0], j : j + subtile[1]]
            assert kind == 1 or (seen.all() if kind == 2 else not seen.any())


@pytest.mark.parametrize("slow", ["q", "kv"])
@pytest.mark.parametrize("name", MASKS)
@given(
    q_len=st.integers(1, 200), kv_len=st.integers(1, 200), subtile=st.tuples(st.integers(4, 70), st.integers(4, 70)),
    subtiles=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_live_tile_once(
    name: str, slow: str, q_len: int, kv_len: int, subtile: tuple[int, int], subtiles: tuple[int, int]
) -> None:
    mask = MASKS[name]
    block_q, block_kv = subtile[0] * subtiles[0], subtile[1] * subtiles[1]
    schedule = tile_schedule(LocalMask(mask, 0, q_len, kv_len, None), block_q, block_kv, slow, subtile=subtile)
    visible = np.broadcast_to(mask.materialise(slice(0, q_len), slice(0, kv_len))[0, 0], (q_len, kv_len))
    want = _brute(visible, block_q, block_kv)
    blocks = -(-q_len // block_q) if slow == "q" else -(-kv_len // block_kv)
    _check(np.asarray(schedule.words), schedule.variants, want, slow, blocks, block_q, subtile)
    assert schedule.length == schedule.covered == len(schedule.words)
    assert broken_rule(schedule, slow) is None
    assert set(map(int, variant_of(schedule.words))) - {0} == set(range(1, len(schedule.variants) + 1))
    assert len(schedule.variants) <= 3


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

    variants: list[tuple[KernelVariant, ...]] = []

    def words(given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at: dict[str, Any] = {**places, **given}
        if "query_offset" in given:  # a number a batch row
            at["query_offset"] = at["query_offset"][None]
        schedule = tile_schedule(LocalMask(mask, q_len=150, kv_len=200, **at), 32, 48, slow, subtile=(16, 12))
        variants.append(schedule.variants)
        return jnp.asarray(schedule.words), jnp.asarray(schedule.covered)

    rows, keys = np.arange(60, 210)[:, None], np.arange(50, 250)[None]
    visible = np.broadcast_to(mask.test(rows, rows + 10, keys), (150, 200))
    known, _ = words({})
    _check(np.asarray(known), variants[0], _brute(visible, 32, 48), slow, 5, 32, (16, 12))
    found, covered = jax.jit(words)({place: jnp.int32(places[place]) for place in traced})
    np.testing.assert_array_equal(found[: int(covered)] & ~VARIANT, known & ~VARIANT)
    _check(np.asarray(found[: int(covered)]), variants[1], _brute(visible, 32, 48), slow, 5, 32, (16, 12))


@pytest.mark.parametrize("k_start", [0, 96, 130, 400])
@pytest.mark.parametrize("name", [*MASKS, "not_causal"])
def test_bounds_of_a_list_at_keys_that_lie_elsewhere(name: str, k_start: int) -> None:
    """The most are as many as there are; the fewest are those that first rows see."""
    mask = ~Causal() if name == "not_causal" else MASKS[name]
    known = StaticMask(mask, 150, 200, 60, k_start, 10)
    rows, keys = np.arange(60, 210)[:, None], np.arange(k_start, k_start + 200)[None]
    visible = np.broadcast_to(mask.test(rows, rows + 10, keys), (150, 200))
    wanted = np.zeros((5, 5), bool)
    for place in _brute(visible, 32, 48):
        wanted[place] = True
    np.testing.assert_array_equal(live_tiles(known, 32, 48), wanted)
    assert max_steps(wanted, "q") == np.maximum(wanted.sum(1), 1).sum()
    firsts = [np.unique(np.flatnonzero(visible[row]) // 48) for row in range(0, 150, 32)]
    assert min_steps(known, 32, 48) == sum(map(len, firsts))


def test_a_list_for_each_batch_row() -> None:
    lengths = np.array([0, 50, 200])
    variants: list[tuple[KernelVariant, ...]] = []

    def words(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        schedule = tile_schedule(
            LocalMask(Lengths(lengths) & Causal(0), 0, 150, 200, None), 32, 48, "q", subtile=(16, 12)
        )
        variants.append(schedule.variants)
        assert schedule.rows == 3
        assert schedule.length < 5 * 5  # what the static part rules out has no place
        return schedule.words.reshape(3, -1), schedule.covered

    lists, covered = jax.jit(words)(jnp.asarray(lengths))
    rows, keys = np.arange(150)[:, None], np.arange(200)
    most = 0
    for got, length in zip(np.asarray(lists), lengths, strict=True):
        want = _brute((keys <= rows) & (keys < length), 32, 48)
        used = len(want) + 5 - len({q for q, _ in want})  # and one for each block without keys
        _check(got[:used], variants[0], want, "q", 5, 32, (16, 12))
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
        (lambda w: w | VARIANT, "one of those there are"),
        (lambda w: np.append(w, w[-1]), "FIRST|LAST"),
        (lambda w: np.append(w, w[0] & ~(FIRST | LAST | VARIANT)), "what follows the end"),
    ],
)
def test_a_list_that_breaks_a_rule_is_found(change: Any, rule: str, slow: str) -> None:
    schedule = tile_schedule(LocalMask(Causal(0), 0, 96, 96, None), 32, 32, slow)
    assert broken_rule(schedule, slow) is None
    words = change(np.asarray(schedule.words)).astype(np.int32)
    broken = broken_rule(schedule._replace(words=words, length=len(words), covered=len(words)), slow)
    assert broken is not None
    assert re.search(rule, broken)


def test_128k_tokens_are_planned_from_a_closed_form() -> None:
    """No [q, kv] array, and as many words as there are live tiles."""
    mask = LocalMask(Causal(0), 0, 1 << 17, 1 << 17, None)
    assert tile_schedule(mask, 1024, 1024, "q").length == 128 * 129 // 2
    windowed = LocalMask(Causal(0) & SlidingWindow(4095, 0, offset=0), 0, 1 << 17, 1 << 17, None)
    assert tile_schedule(windowed, 1024, 1024, "kv").length == 128 * 5 - (1 + 2 + 3 + 4)


def _variants(mask: Mask, length: int, block: int, subtile: tuple[int, int]) -> dict[KernelVariant, int]:
    """Each body with the tiles that go through it."""
    schedule = tile_schedule(LocalMask(mask, 0, length, length, None), block, block, "q", subtile=subtile)
    numbers = variant_of(np.asarray(schedule.words))
    return {variant: int((numbers == number).sum()) for number, variant in enumerate(schedule.variants, 1)}


def test_a_causal_tile_on_the_diagonal_leaves_out_what_nobody_sees() -> None:
    """Of 4 x 2 units of 256 queries and 512 keys two lie above the diagonal and two below it."""
    diagonal = KernelVariant(((1, 0), (1, 0), (2, 1), (2, 1)))
    assert _variants(Causal(0), 4096, 1024, (256, 512)) == {WHOLE: 6, diagonal: 4}


def test_the_two_edges_of_a_window_have_a_body_each() -> None:
    window = Causal(0) & SlidingWindow(1023, 0, offset=0)
    diagonal = KernelVariant(((1, 0), (2, 1)))
    old = KernelVariant(((1, 2), (0, 1)))  # a key is seen by 1024 rows from its own on
    assert _variants(window, 4096, 1024, (512, 512)) == {diagonal: 4, old: 3}
    wide = Causal(0) & SlidingWindow(2047, 0, offset=0)
    assert _variants(wide, 8192, 1024, (512, 512)) == {WHOLE: 7, diagonal: 8, old: 6}


def test_tiles_of_many_kinds_share_three_bodies() -> None:
    """Chunks that fit no block: whatever is joined, no weight is lost."""
    mask = Causal(0) & Chunked(700, offset=0)
    variants = _variants(mask, 8192, 1024, (128, 128))
    assert len(variants) == 3
    whole = mask.live_blocks(128, 128, q_len=8192, kv_len=8192)
    computed = sum(count * round(variant.computed * 64) for variant, count in variants.items())
    assert (whole > 0).sum() <= computed < 64 * sum(variants.values())


def test_a_part_of_the_keys_has_the_bodies_of_its_own_tiles() -> None:
    """Causal: the last keys are seen from the diagonal alone."""
    mask = LocalMask(Causal(0), 0, 1024, 1024, 0)
    whole = tile_schedule(mask, 256, 256, "q", subtile=(128, 128))
    last = tile_schedule(mask, 256, 256, "q", slice(3, 4), subtile=(128, 128))
    assert [set(variant_of(x.words).tolist()) for x in (whole, last)] == [{1, 2}, {0, 1}]
    diagonal = next(variant for variant in whole.variants if variant != WHOLE)
    assert last.variants == (diagonal,)
    assert broken_rule(last, "q") is None


def test_a_body_that_saves_little_is_not_compiled() -> None:
    """One tile in 136 whose last key is padded goes the way of those on the diagonal."""
    assert len(_variants(Causal(0), 16 * 1024 - 1, 1024, (256, 512))) == 2
    assert _variants(Full(), 2047, 128, (128, 128)) == {WHOLE: 240, MASKED: 16}


def test_traced_rows_take_the_way_of_the_masks_edge() -> None:
    """A causal shard of a longer sequence whose blocks begin where keys' blocks do; elsewhere tiles are masked whole."""
    made: list[tuple[KernelVariant, ...]] = []

    def numbers(start: jax.Array) -> jax.Array:
        schedule = tile_schedule(LocalMask(Causal(0), start, 2048, 4096, None), 1024, 1024, "q", subtile=(256, 512))
        made.append(schedule.variants)
        return variant_of(schedule.words)

    diagonal = KernelVariant(((1, 0), (1, 0), (2, 1), (2, 1)))
    at_block = jax.jit(numbers)(jnp.int32(2048))
    assert made[0] == (WHOLE, diagonal, MASKED)
    assert list(at_block) == [1, 1, 2, 1, 1, 1, 2, 0]
    beside = jax.jit(numbers)(jnp.int32(2050))
    assert list(beside) == [1, 1, 3, 3, 1, 1, 1, 3]


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


@pytest.mark.slow
def test_bodies_of_many_different_tiles() -> None:
    """60,000 tiles, nearly all of a kind of their own: what a body leaves out or doesn't mask is so in all of its tiles."""
    tiles = np.random.default_rng(0).integers(0, 3, (60_000, 4, 4)).astype(np.int8)
    variants, numbers = variants_of(tiles)
    assert len(variants) <= 3
    for number, variant in enumerate(variants, 1):
        mine, kinds = tiles[numbers == number], np.broadcast_to(np.asarray(variant.kinds), (4, 4))
        assert ((kinds == 1) | (mine == kinds)).all()
