"""The page pool: random calls against token lists and a pretended device, and each promise by itself."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pool_mirror import Mirror, refuses
from pool_rules import IDS, PoolRules

from attnops.errors import CapacityError, InputError, InputTypeError, UnknownNameError
from attnops.serving import Growth, PageCounts, PagePool


class PoolMachine(PoolRules):
    """Any order of calls: the device holds what each sequence says, and a refused call changes nothing."""

    @initialize(
        pages=st.integers(1, 12),
        size=st.integers(1, 3),
        scrub=st.booleans(),
        sharing=st.booleans(),
        shards=st.sampled_from((1, 3)),
        window=st.none() | st.integers(1, 7),
    )
    def start(self, pages: int, size: int, scrub: bool, sharing: bool, shards: int, window: int | None) -> None:
        pages = -(-pages // shards) * shards
        self.mirror = Mirror(pages, size, strict=True, scrub=scrub, sharing=sharing, shards=shards, window=window)

    @PoolRules.some
    @rule(data=st.data(), ids=IDS)
    def append(self, data: st.DataObject, ids: list[int]) -> None:
        self.mirror.append(self.any(data), ids)

    @PoolRules.some
    @rule(data=st.data(), ids=IDS)
    def append_count(self, data: st.DataObject, ids: list[int]) -> None:
        self.mirror.append_count(self.any(data), ids)

    @PoolRules.some
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = self.any(data)
        self.mirror.truncate(name, data.draw(st.integers(0, len(self.mirror.tokens[name]))))

    @PoolRules.some
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.mirror.release(self.any(data))

    @rule(ids=IDS)
    def match(self, ids: list[int]) -> None:
        self.mirror.brute_match(ids)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)


def run_randomly(operations: int, every: int, seed: int, shards: int, window: int | None) -> Mirror:
    """A busy pool: some 30 sequences on 96 pages of 4, often too few; prompts share their beginnings."""
    draw = random.Random(seed)
    mirror, names = Mirror(96, 4, strict=False, shards=shards, window=window), 0
    heads = [[draw.randint(1, 9) for _ in range(24)] for _ in range(4)]
    for number in range(operations):
        what, here = draw.random(), list(mirror.tokens)
        one = draw.choice(here) if here else None
        if one is None or (what < 0.12 and len(here) < 40):
            prompt = draw.choice(heads)[: draw.randint(0, 24)] + [draw.randint(1, 9) for _ in range(draw.randint(0, 6))]
            names += 1
            mirror.adopt(names, prompt, draw.randint(0, 8))
            if names in mirror.tokens:
                mirror.append(names, prompt[len(mirror.tokens[names]) :])
        elif what < 0.50:
            mirror.append(one, [draw.randint(1, 9) for _ in range(draw.choice((1, 1, 1, 2, 7)))])
        elif what < 0.54:
            mirror.append_count(one, [draw.randint(1, 9)])
        elif what < 0.60:
            mirror.alloc(one, draw.randint(0, 6))
        elif what < 0.66 and len(here) < 40:
            names += 1
            mirror.fork(one, names)
        elif what < 0.78:
            mirror.publish(one)
        elif what < 0.82:
            mirror.release(one)
        elif what < 0.88:
            mirror.truncate(one, max(0, len(mirror.tokens[one]) - draw.randint(0, 5)))
        else:
            mirror.free(one)
        if number % every == 0:
            mirror.everything()
    mirror.everything()
    return mirror


@pytest.mark.parametrize(
    ("operations", "every"), [(10_000, 250), pytest.param(100_000, 250, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("shards", "window"), [(1, None), (3, None), (1, 9), (3, 9)])
def test_random_operations(operations: int, every: int, shards: int, window: int | None) -> None:
    mirror = run_randomly(operations, every, seed=operations, shards=shards, window=window)
    assert mirror.refused > operations / 1000  # it was too full now and then
    assert (mirror.given_back > operations / 50) == (window is not None)
    for name in list(mirror.tokens):
        mirror.free(name)
    mirror.everything()
    counts = mirror.pool.counts()
    assert (counts.used, counts.padding) == (0, 0)
    assert counts.free + counts.cached == 96


def test_pools_are_quick() -> None:
    """10,000 calls of serving in well below a second: 100,000 may take 10 s."""
    pool, start = PagePool(4096, 16), time.process_time()
    prompt = list(range(200))
    for number in range(500):
        growth = pool.adopt(number, prompt[:-1], 64)
        pool.append(number, prompt[growth.matched :])
        pool.publish(number)
        for token in range(16):
            pool.append(number, [token])
        if number >= 16:
            pool.free(number - 16)
    assert time.process_time() - start < 2


def test_no_jax_is_needed() -> None:
    code = "import sys, attnops.serving; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- growing -----------------------------------------------------------------------------------------------------------


def test_room_and_tokens() -> None:
    pool = PagePool(8, 4)
    assert pool.alloc("a", 5).new_pages == (0, 1)
    assert pool.counts() == PageCounts(used=2, free=6, cached=0, padding=8)
    assert pool.append("a", [7] * 5) == Growth()  # the room was there
    assert pool.alloc("a", 3) == Growth()
    assert pool.alloc("a", 4).new_pages == (2,)
    assert pool.append_count("a", 9).new_pages == (3,)
    assert pool.counts() == PageCounts(used=4, free=4, cached=0, padding=2)
    assert pool.kv_lens(["a"]).tolist() == [14]
    pool.truncate("a", 4)
    assert pool.pages_of("a") == (0,)
    pool.free("a")
    assert ("a" in pool, len(pool)) == (False, 0)
    assert pool.counts() == PageCounts(0, 8, 0, 0)
    assert repr(pool) == "PagePool(8 pages of 4: 0 used, 8 free, 0 cached; 0 sequences)"


def test_page_table() -> None:
    pool = PagePool(8, 4, max_pages_per_sequence=3)
    pool.alloc("a", 9)
    pool.alloc(("any", "id"), 1)
    table = pool.page_table(["a", None, ("any", "id"), "a"])
    assert table.dtype == np.int32
    assert table.tolist() == [[0, 1, 2], [8, 8, 8], [3, 8, 8], [0, 1, 2]]
    assert pool.page_table([], 2).shape == (0, 2)
    assert pool.kv_lens([None]).dtype == np.int32


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.int32), iter([1, 2])], ids=lambda ids: type(ids).__name__
)
def test_token_ids_may_be_any_integers(ids: object) -> None:
    pool = PagePool(2, 2)
    pool.alloc("a", 0)
    pool.append("a", ids)  # type: ignore[arg-type]
    pool.publish("a")
    assert pool.match([1, 2]).tokens == 2


# -- copies before writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["parent", "child"])
def test_the_first_to_grow_after_a_fork_gets_a_copy(first: str) -> None:
    pool = PagePool(8, 4)
    pool.alloc("parent", 12)
    pool.append("parent", range(6))
    pool.fork("parent", "child")
    assert pool.pages_of("child") == (0, 1)  # the room stays with the parent
    other = {"parent": "child", "child": "parent"}[first]
    before = pool.pages_of(other)
    growth = pool.append(first, [9])
    assert growth == Growth(new_pages=(3,), copies=((1, 3),))
    assert pool.pages_of(first)[:2] == (0, 3)
    assert pool.pages_of(other) == before
    assert pool.append(other, [8]).copies == ()  # it is alone on its page now
    pool.check()


def test_a_fork_between_pages_copies_nothing() -> None:
    pool = PagePool(8, 4)
    pool.alloc("a", 4)
    pool.append("a", range(4))
    pool.fork("a", "b")
    assert pool.append("b", [9]) == Growth(new_pages=(1,))
    assert pool.append("a", [9]) == Growth(new_pages=(2,))


def test_room_asked_for_brings_the_copy_with_it() -> None:
    pool = PagePool(4, 4)
    pool.alloc("a", 2)
    pool.append("a", [1, 2])
    pool.fork("a", "b")
    assert pool.alloc("b", 0) == Growth()
    assert pool.alloc("b", 2).copies == ((0, 1),)
    assert pool.append("b", [3, 4]) == Growth()


def test_a_cut_page_that_others_find_is_not_overwritten() -> None:
    pool = PagePool(8, 4)
    pool.alloc("a", 4)
    pool.append("a", [1, 2, 3, 4])
    pool.publish("a")
    pool.adopt("b", [1, 2, 3, 4])
    pool.truncate("b", 3)
    assert pool.append("b", [9]).copies == ((0, 1),)
    assert pool.match([1, 2, 3, 4]).pages == (0,)
    pool.truncate("a", 3)  # alone on its page: it is written in place, and found no more
    assert pool.append("a", [9]) == Growth()
    assert pool.match([1, 2, 3, 4]).tokens == 0
    pool.publish("a")
    pool.publish("b")
    assert pool.match([1, 2, 3, 9]).tokens == 4
    pool.check()


def test_pages_are_scrubbed_for_their_next_owner() -> None:
    pool = PagePool(3, 2, scrub_on_free=True)
    assert pool.alloc("a", 4).to_scrub == ()  # never used
    pool.append("a", [1, 2, 3])
    pool.publish("a")
    pool.free("a")
    assert pool.alloc("b", 3).to_scrub == (1,)  # page 2 was never used, page 1 was returned
    assert pool.adopt("c", [1, 2]).to_scrub == ()  # page 0 is taken over for what it holds
    pool.free("c")
    assert pool.alloc("c", 1).to_scrub == (0,)  # evicted
    pool.append("c", [5])
    pool.free("b")
    pool.fork("c", "d")
    growth = pool.append("d", [6, 7])
    assert growth.copies == ((0, growth.new_pages[0]),)
    assert growth.to_scrub == growth.new_pages[1:]  # a copy overwrites its whole page


# -- prefixes ----------------------------------------------------------------------------------------------------------


def test_only_published_whole_pages_match() -> None:
    pool = PagePool(8, 4)
    pool.alloc("a", 0)
    pool.append("a", range(10))
    assert pool.match(range(10)) == (0, ())
    pool.publish("a")
    assert pool.match(range(10)) == (8, (0, 1))
    assert pool.match(range(7)) == (4, (0,))
    assert pool.match([0, 1, 2, 3, 4, 5, 6, 0]) == (4, (0,))
    assert pool.match(range(4, 10)) == (0, ())  # the same tokens after other ones are another prefix
    growth = pool.adopt("b", range(10), tokens=2)
    assert growth == Growth(new_pages=(3,), matched=8)
    assert pool.pages_of("b") == (0, 1, 3)


def test_tokens_without_ids_end_what_can_be_matched() -> None:
    pool = PagePool(8, 2)
    pool.alloc("a", 0)
    pool.append("a", [1, 2])
    pool.append_count("a", 1)
    pool.append("a", [4, 5, 6])
    pool.publish("a")
    assert pool.match([1, 2, 3, 4]).tokens == 2
    pool.truncate("a", 2)
    pool.append("a", [3, 4])
    pool.publish("a")
    assert pool.match([1, 2, 3, 4]).tokens == 4


def test_without_sharing_nothing_matches() -> None:
    pool = PagePool(4, 2, prefix_sharing=False)
    pool.alloc("a", 0)
    pool.append("a", [1, 2])
    pool.publish("a")
    assert pool.match([1, 2]).tokens == 0
    assert pool.adopt("b", [1, 2]).matched == 0
    pool.free("a")
    assert pool.counts() == PageCounts(0, 4, 0, 0)


def test_the_prefix_that_was_left_first_goes_first_and_its_end_before_its_beginning() -> None:
    pool = PagePool(6, 1)
    for name, ids in (("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6])):
        pool.alloc(name, 0)
        pool.append(name, ids)
        pool.publish(name)
    for name in ("b", "a", "c"):
        pool.free(name)
    pool.adopt("again", [3, 4])  # b's pages are used once more, so a's are the oldest
    pool.free("again")
    assert pool.match([3, 4]).tokens == 2  # a question makes nothing younger
    left = []
    for number in range(6):
        pool.alloc(number, 1)
        left.append([pool.match(ids).tokens for ids in ([1, 2], [3, 4], [5, 6])])
    assert left == [[1, 2, 2], [0, 2, 2], [0, 2, 1], [0, 2, 0], [0, 1, 0], [0, 0, 0]]


def test_free_pages_go_before_cached_ones() -> None:
    pool = PagePool(4, 1)
    pool.alloc("a", 0)
    pool.append("a", [1])
    pool.publish("a")
    pool.free("a")
    pool.alloc("b", 3)
    assert pool.match([1]).tokens == 1
    pool.free("b")
    pool.alloc("c", 3)
    assert pool.match([1]).tokens == 1


# -- refusals: nothing has changed ---------------------------------------------------------------------------------------


@pytest.fixture
def full() -> PagePool:
    """Of five pages of two tokens, 'a' has three (the last shared with 'b'), one is cached, one is free."""
    pool = PagePool(5, 2, max_pages_per_sequence=4)
    pool.alloc("old", 0)
    pool.append("old", [7, 8])
    pool.publish("old")
    pool.free("old")
    pool.alloc("a", 0)
    pool.append("a", [1, 2, 3, 4, 5])
    pool.publish("a")
    pool.fork("a", "b")
    return pool


def test_too_few_pages(full: PagePool) -> None:
    assert full.counts() == PageCounts(used=3, free=1, cached=1, padding=1)
    words = r"sequence 'new' needs 3 pages for 5 more tokens; 2 of 5 are available, and 3 are in use\. Hint: free a sequence"
    refuses(CapacityError, words, lambda: full.alloc("new", 5), full)
    assert "new" not in full
    full.alloc("c", 2)
    refuses(CapacityError, "needs 2 pages", lambda: full.append("b", [1, 2]), full)  # the copy is one of them
    refuses(CapacityError, "needs 2 pages", lambda: full.append_count("a", 2), full)
    refuses(CapacityError, "needs 2 pages", lambda: full.adopt("d", [1, 2, 3, 4], 3), full)
    # What is adopted can't be given away as well.
    refuses(CapacityError, "needs 1 page .* 0 of 5", lambda: full.adopt("d", [7, 8], 1), full)
    with pytest.raises(CapacityError) as caught:
        full.alloc("c", 6)
    assert (caught.value.wanted, caught.value.available) == (2, 1)
    assert full.adopt("d", [7, 8]).matched == 2


def test_more_pages_than_a_table_has_columns(full: PagePool) -> None:
    words = "of 5 tokens would get 4 more and take 5 pages; max_pages_per_sequence is 4"
    refuses(InputError, words, lambda: full.append("a", [1] * 4), full)


def test_unknown_and_known_sequences(full: PagePool) -> None:
    full.free("b")
    for call in (
        lambda: full.free("b"),
        lambda: full.append("b", [1]),
        lambda: full.append_count("b", 1),
        lambda: full.truncate("b", 0),
        lambda: full.publish("b"),
        lambda: full.fork("b", "c"),
        lambda: full.pages_of("b"),
        lambda: full.kv_lens(["a", "b"]),
        lambda: full.page_table(["a", "b"]),
    ):
        refuses(UnknownNameError, r"no sequence 'b' is in the pool, which has 1\.", call, full)
    refuses(InputError, "sequence 'a' is already in the pool", lambda: full.fork("a", "a"), full)
    refuses(InputError, "sequence 'a' is already in the pool", lambda: full.adopt("a", [1]), full)
    refuses(InputTypeError, "id is None", lambda: full.alloc(None, 1), full)
    refuses(InputTypeError, r"sequence \[1\] isn't hashable", lambda: full.alloc([1], 1), full)  # type: ignore[arg-type]


def test_page_tables_that_are_too_narrow(full: PagePool) -> None:
    refuses(InputError, "'a' has 3 pages; the table's width is 2", lambda: full.page_table(["a"], 2), full)
    pool = PagePool(2, 2)
    refuses(InputError, "page_table has no width", lambda: pool.page_table([]), pool)


@pytest.mark.parametrize(
    ("error", "words", "tokens"),
    [
        (InputError, "tokens=-1; wanted 0 or more", -1),
        (InputTypeError, "tokens=1.5 is a float; wanted an integer", 1.5),
        (InputTypeError, "tokens is a bool", True),
        (InputTypeError, "is a list; wanted an integer", [1]),
    ],
)
def test_wrong_counts(full: PagePool, error: type[Exception], words: str, tokens: object) -> None:
    refuses(error, words, lambda: full.alloc("a", tokens), full)  # type: ignore[arg-type]
    refuses(error, words, lambda: full.append_count("a", tokens), full)  # type: ignore[arg-type]
    refuses(error, words, lambda: full.adopt("c", [1], tokens), full)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "words", "ids"),
    [
        (InputTypeError, r"token_ids=5 is an int; .*Hint: for one token give \[token\]", 5),
        (InputTypeError, "token_ids is a str; wanted integers", "text"),
        (InputTypeError, "token_ids is a bytes", b"12345678"),
        (InputTypeError, "wanted integers in one dimension", [1.0]),
        (InputTypeError, "wanted integers in one dimension", np.ones((2, 2), np.int32)),
        (InputTypeError, "wanted integers in one dimension", np.int32(3)),
        (InputError, "wanted 64-bit integers", [2**64]),
    ],
    ids=repr,
)
def test_wrong_token_ids(full: PagePool, error: type[Exception], words: str, ids: object) -> None:
    refuses(error, words, lambda: full.append("a", ids), full)  # type: ignore[arg-type]
    refuses(error, words, lambda: full.adopt("c", ids), full)  # type: ignore[arg-type]
    refuses(error, words, lambda: full.match(ids), full)  # type: ignore[arg-type]


def test_wrong_lengths_and_pools(full: PagePool) -> None:
    refuses(InputError, "length=6; wanted one of 0 to 5", lambda: full.truncate("a", 6), full)
    refuses(InputError, "length=-1", lambda: full.truncate("a", -1), full)
    for arguments, words in (
        ((0, 4), "pages=0; wanted 1 or more"),
        ((4, 0), "page_size=0"),
        ((2**20, 2**11), r"1048576 pages of 2048 tokens; wanted at most 2\*\*31 - 1 slots"),
    ):
        with pytest.raises(InputError, match=words):
            PagePool(*arguments)
    with pytest.raises(InputError, match="max_pages_per_sequence=0"):
        PagePool(4, 4, max_pages_per_sequence=0)
