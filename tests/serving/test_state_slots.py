"""The pool of slots: random calls against token lists and a pretended device, and each promise by itself."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pool_rules import IDS, PoolRules
from slot_mirror import Mirror

from attnops import KVCache
from attnops.errors import AttnOpsError, CapacityError, InputError, InputTypeError, UnknownNameError
from attnops.serving import PagePool, PagePools, SlotCounts, SlotGrowth, SlotMatch, StateSlots
from attnops.serving.slot_states import SlotStep
from attnops.serving.snapshot_index import Snapshot


class SlotMachine(PoolRules):
    """Any order of calls: each sequence reads the fold of its tokens, and a refused call changes nothing."""

    @initialize(
        slots=st.integers(1, 12),
        size=st.integers(1, 3),
        drafts=st.integers(0, 3),
        snapshots=st.none() | st.integers(1, 2),
        scrub=st.booleans(),
        pages=st.none() | st.integers(1, 14),
    )
    def start(self, slots: int, size: int, drafts: int, snapshots: int | None, scrub: bool, pages: int | None) -> None:
        self.mirror = Mirror(slots, size=size, drafts=drafts, snapshots=snapshots, scrub=scrub, pages=pages)

    @PoolRules.some
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.mirror.tokens)), min_size=1, max_size=4, unique=True))
        self.mirror.step({name: (data.draw(IDS), data.draw(st.booleans())) for name in names})

    @PoolRules.some
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = self.any(data)
        length = len(self.mirror.tokens[name])
        self.mirror.truncate(name, max(0, length - data.draw(st.integers(0, 4))))

    @PoolRules.some
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = self.any(data)
        tokens, known = list(self.mirror.tokens[name]), self.mirror.known[name]
        self.mirror.free(name)
        self.mirror.resume(self.new(), tokens, known)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(stateful_step_count=40)


def run_randomly(operations: int, every: int, seed: int, drafts: int, pages: int | None, slots: int = 60) -> Mirror:
    """A busy server: some 20 sequences, often too few slots; prompts share their beginnings, drafts are often rejected."""
    draw, names = random.Random(seed), 0
    mirror = Mirror(slots, size=2, drafts=drafts, snapshots=2, pages=pages)
    heads = [[draw.randint(1, 9) for _ in range(12)] for _ in range(3)]
    for number in range(operations):
        what, here = draw.random(), list(mirror.tokens)
        one = draw.choice(here) if here else None
        if one is None or (what < 0.15 and len(here) < 30):
            prompt = draw.choice(heads)[: draw.randint(0, 12)] + [draw.randint(1, 9) for _ in range(draw.randint(0, 3))]
            names += 1
            mirror.adopt(names, prompt, draw.randint(0, 4))
            if names in mirror.tokens:
                rest = prompt[len(mirror.tokens[names]) :]
                first = mirror.pools.tokens_to_snapshot(names)
                assert first is not None
                mirror.step({names: (rest[:first], True)})
                mirror.publish(names)
        elif what < 0.55:
            rows = draw.sample(here, draw.randint(1, min(6, len(here))))
            mirror.step(
                {
                    name: ([draw.randint(1, 9) for _ in range(draw.choice((1, 1, 2, 5)))], draw.random() < 0.9)
                    for name in rows
                }
            )
        elif what < 0.65:
            mirror.truncate(one, max(0, len(mirror.tokens[one]) - draw.randint(0, 3)))
        elif what < 0.72 and len(here) < 30:
            names += 1
            mirror.fork(one, names)
        elif what < 0.82:
            mirror.publish(one)
        elif what < 0.86:
            mirror.alloc(one, draw.randint(0, 6))
        elif what < 0.90:
            tokens, known = list(mirror.tokens[one]), mirror.known[one]
            mirror.free(one)
            names += 1
            mirror.resume(names, tokens, known)
        else:
            mirror.free(one)
        if number % every == 0:
            mirror.everything()
    mirror.everything()
    return mirror


@pytest.mark.parametrize(
    ("operations", "every"), [(700, 25), pytest.param(20_000, 100, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("drafts", "pages"), [(0, None), (3, None), (0, 120), (2, 120)])
def test_random_operations(operations: int, every: int, drafts: int, pages: int | None) -> None:
    mirror = run_randomly(
        operations, every, seed=operations + drafts, drafts=drafts, pages=pages, slots=26 + 14 * drafts
    )
    assert mirror.refused > operations / 1000
    assert mirror.copied > operations / 100
    assert mirror.matched > operations / 100
    for name in list(mirror.tokens):
        mirror.free(name)
    mirror.everything()
    used, free, cached, spare = mirror.states.counts()
    assert (used, spare) == (0, 0)
    assert free + cached == len(mirror.slots)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_planned_slots_are_enough(drafts: int) -> None:
    """max_sequences sequences grow in any way, forked and published, without one slot more than the plan has."""
    draw, most = random.Random(drafts), 5
    mirror = Mirror(most * (1 + drafts), drafts=drafts, snapshots=1)
    for name in range(most):
        mirror.alloc(name, 0)
    for _ in range(300):
        names = draw.sample(range(most), draw.randint(1, most))
        mirror.step({name: ([draw.randint(1, 2) for _ in range(draw.randint(1, 4))], True) for name in names})
        mirror.publish(draw.randrange(most))
        if draw.random() < 0.3:
            parent, child = draw.sample(range(most), 2)
            mirror.free(child)
            mirror.fork(parent, child)
        one = draw.randrange(most)
        mirror.truncate(one, draw.choice([0, *mirror.kept[one], len(mirror.tokens[one])]))
        mirror.everything()
    assert mirror.refused == 0


# -- growing and rolling back --------------------------------------------------------------------------------------------


def test_one_slot_for_a_sequence_of_any_length() -> None:
    pool = StateSlots(3, 4)
    assert pool.alloc("a", 0) == SlotGrowth()
    assert pool.append("a", range(100)) == SlotGrowth(new_slots=(0,))
    read, write = pool.slot_tables(["a", None], [100, 0])
    assert (read.tolist(), write.tolist()) == ([3, 3], [[0], [3]])  # from zeros
    assert read.dtype == write.dtype == np.int32
    assert pool.append("a", [7]) == SlotGrowth()
    read, write = pool.slot_tables(["a"], [1])
    assert (read.tolist(), write.tolist()) == ([0], [[0]])  # in place
    assert pool.kv_lens(["a", None]).tolist() == [101, 0]
    assert pool.counts() == SlotCounts(1, 2, 0, 0)
    pool.free("a")
    assert pool.counts() == SlotCounts(0, 3, 0, 0)
    assert repr(pool) == "StateSlots(3 slots: 0 used, 3 free, 0 cached; 0 sequences)"


def test_rejected_drafts_are_taken_back() -> None:
    pool = StateSlots(8, 4, drafts=3)
    pool.alloc("a", 0)
    pool.append("a", range(10))
    assert pool.slots_of("a") == {10: 0, 9: 1, 8: 2, 7: 3}
    pool.append("a", range(4))  # a token and three drafts
    read, write = pool.slot_tables(["a"], [4])
    assert read.tolist() == [0]
    assert set(write[0].tolist()) == {0, 1, 2, 3}  # the same four slots
    kept = pool.slots_of("a")
    assert sorted(kept) == [11, 12, 13, 14]
    pool.truncate("a", 12)
    read, write = pool.slot_tables(["a"], [0])
    assert read.tolist() == [kept[12]]
    with pytest.raises(InputError, match=r"cut to 10: states are kept of 11, 12 tokens. Hint: with drafts=3"):
        pool.truncate("a", 10)
    with pytest.raises(InputError, match="row 0: q_lens is 4, but sequence 'a' got 0 last"):
        pool.slot_tables(["a"], [4])
    pool.append("a", [1])
    assert pool.slot_tables(["a"], [1])[0].tolist() == [kept[12]]
    pool.truncate("a", 0)
    assert pool.counts() == SlotCounts(0, 8, 0, 0)
    pool.append("a", [1])
    assert pool.slot_tables(["a"], [1])[0].tolist() == [8]


def test_a_short_step_keeps_the_states_before_it() -> None:
    pool = StateSlots(4, 4, drafts=2)
    pool.alloc("a", 0)
    for token in range(4):
        pool.append("a", [token])
        read, write = pool.slot_tables(["a"], [1])
        assert (write[0, 1:] == 4).all()  # the states before it are there already
        assert read[0] == (4 if token == 0 else pool.slots_of("a")[token])
    assert sorted(pool.slots_of("a")) == [2, 3, 4]
    pool.truncate("a", 2)
    assert sorted(pool.slots_of("a")) == [2]


def test_room_is_kept() -> None:
    pool = StateSlots(4, 4, drafts=1)
    assert pool.alloc("a", 5).new_slots == (0, 1)
    assert pool.counts().spare == 2
    pool.alloc("b", 1)
    pool.alloc("c", 1)
    with pytest.raises(
        CapacityError, match=r"sequence 'd' needs 1 slot for 1 more tokens; 0 of 4 are available, and 4"
    ):
        pool.alloc("d", 1)
    assert "d" not in pool
    assert pool.append("a", [1, 2, 3]) == SlotGrowth()
    assert pool.counts() == SlotCounts(4, 0, 0, 2)


# -- copies before writes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["parent", "child"])
def test_the_first_to_grow_after_a_fork_gets_a_copy(first: str) -> None:
    pool = StateSlots(4, 4)
    pool.alloc("parent", 0)
    pool.append("parent", [1, 2])
    pool.fork("parent", "child")
    assert pool.counts().used == 1
    assert pool.append(first, [3]) == SlotGrowth(new_slots=(1,), copies=((0, 1),))
    assert pool.slot_tables([first], [1])[0].tolist() == [1]
    other = "child" if first == "parent" else "parent"
    assert pool.append(other, [4]) == SlotGrowth()
    assert pool.slot_tables([other], [1])[1].tolist() == [[0]]


def test_slots_are_scrubbed_for_their_next_owner() -> None:
    pool = StateSlots(2, 4, scrub_on_free=True)
    pool.alloc("a", 3)
    assert pool.append("a", [1]).to_scrub == ()
    pool.free("a")
    assert pool.alloc("b", 1).to_scrub == ()  # slot 1 was never used
    assert pool.alloc("c", 1) == SlotGrowth(new_slots=(0,), to_scrub=(0,))


# -- prefixes ------------------------------------------------------------------------------------------------------------


def test_states_are_found_where_steps_ended() -> None:
    pool = StateSlots(8, 2, snapshots=2)
    pool.alloc("a", 0)
    assert pool.tokens_to_snapshot("a") == 4
    pool.append("a", [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4]) == SlotMatch(0, None)  # not published
    pool.publish("a")
    assert pool.append("a", [5, 6, 7]).copies == ((0, 1),)  # the snapshot stays
    assert pool.tokens_to_snapshot("a") == 1
    pool.append("a", [8, 9, 10, 11, 12, 13])  # past 8 and 12: no step ended there
    pool.publish("a")
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == SlotMatch(4, 0)
    assert pool.match([1, 2, 3, 5]) == SlotMatch(0, None)
    assert pool.adopt("b", [1, 2, 3, 4, 9]).matched == 4
    assert pool.slot_tables(["b"], [0])[0].tolist() == [0]
    assert pool.append("b", [9]) == SlotGrowth(new_slots=(2,), copies=((0, 2),))
    pool.free("a")
    pool.free("b")
    assert pool.counts() == SlotCounts(0, 7, 1, 0)
    assert StateSlots(8, 2).tokens_to_snapshot  # without snapshots there is none
    without = StateSlots(8, 2)
    without.alloc("a", 0)
    without.append("a", [1, 2])
    without.publish("a")
    assert without.match([1, 2]) == (0, None)
    assert without.tokens_to_snapshot("a") is None


def test_a_draft_at_a_boundary_is_found_too() -> None:
    pool = StateSlots(8, 2, drafts=2, snapshots=1)
    pool.alloc("a", 0)
    pool.append("a", [1, 2, 3, 4, 5])
    pool.publish("a")
    assert pool.match([1, 2, 3, 4, 5]).tokens == 4
    assert pool.match([1, 2, 3]).tokens == 0  # the state after 2 wasn't kept


def test_the_state_that_was_left_first_goes_first() -> None:
    pool = StateSlots(4, 1, snapshots=1)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        pool.alloc(name, 0)
        pool.append(name, [token])
        pool.publish(name)
    for name in ("b", "a", "c"):
        pool.free(name)
    pool.adopt("again", [2])  # used once more, so a's is the oldest
    pool.free("again")
    left = []
    for number in range(4):
        pool.alloc(number, 1)
        left.append([pool.match([token]).tokens for token in (1, 2, 3)])
    assert left == [[1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]]


def test_pools_match_where_pages_and_a_state_are() -> None:
    pools = PagePools([PagePool(16, 2), StateSlots(8, 2, snapshots=2)])
    pools.alloc("a", 0)
    pools.append("a", [1, 2, 3, 4])
    pools.publish("a")
    pools.append("a", [5, 6])
    pools.publish("a")
    assert [match.tokens for match in pools.match([1, 2, 3, 4, 5, 6, 7])] == [4, 4]  # pages go to 6
    growths = pools.adopt("b", [1, 2, 3, 4, 5, 6, 7])
    assert [growth.matched for growth in growths] == [4, 4]
    assert pools.tokens_to_snapshot("b") == 4
    assert len(pools.page_tables(["b"], 4)) == len(pools.slot_tables(["b"], [0])) == 1
    pools.check()


def test_pools_as_a_plan_describes_them() -> None:
    state = {"operation": "gla", "sizes": {"heads": 2, "head_dim": 4, "value_dim": 4}}
    group = {"layers": [0, 1], "kind": "state", "states": [state], "drafts": 1, "snapshots": 2}
    cache = KVCache(
        layers=[group, {"layers": [2]}], kv_heads=2, head_dim=4, pages=32, page_size=4, max_sequences=4, max_length=16,
        scrub_on_free=True,
    )  # fmt: skip
    pools = PagePools.of(cache.plan())
    slots, pages = pools.pools
    assert isinstance(slots, StateSlots)
    assert (slots.slots, slots.drafts, slots.snapshots, slots.page_size) == (4 * 2 + 4 * 2, 1, 2, 4)
    assert slots.scrub_on_free
    assert isinstance(pages, PagePool)
    alone = PagePools.of(KVCache(layers=[group], max_sequences=4, max_length=16).plan())
    assert [type(pool) for pool in alone.pools] == [StateSlots]
    alone.alloc("a", 3)
    assert (alone.page_tables(["a"]), alone.kv_lens(["a"]).tolist()) == ((), [0])


# -- refusals: nothing has changed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda pool: pool.append("z", [1]), UnknownNameError, "no sequence 'z'"),
        (lambda pool: pool.append(None, [1]), InputTypeError, "id is None"),
        (lambda pool: pool.append(["a"], [1]), InputTypeError, "isn't hashable"),
        (lambda pool: pool.append("a", "12"), InputTypeError, "token_ids"),
        (lambda pool: pool.append_count("a", -1), InputError, "tokens=-1"),
        (lambda pool: pool.append_count("a", 2**31), InputError, "wanted less than"),
        (lambda pool: pool.truncate("a", 7), InputError, "length=7"),
        (lambda pool: pool.truncate("a", 2), InputError, "cut to 2: states are kept of 4, 5 tokens"),
        (lambda pool: pool.fork("a", "b"), InputError, "'b' is already in the pool"),
        (lambda pool: pool.fork("z", "c"), UnknownNameError, "no sequence 'z'"),
        (lambda pool: pool.free("z"), UnknownNameError, "no sequence 'z'"),
        (lambda pool: pool.adopt("a", [1]), InputError, "already in the pool"),
        (lambda pool: pool.resume("c", [1, 2], 1), InputError, "length=1"),
        (lambda pool: pool.alloc("c", 9), CapacityError, "needs 2 slots"),
        (lambda pool: pool.slot_tables(["a"], [2]), InputError, "row 0: q_lens is 2, but sequence 'a' got 5 last"),
        (lambda pool: pool.slot_tables(["a", "b"], [5]), InputError, "q_lens has 1 numbers for 2 sequences"),
        (lambda pool: pool.slot_tables([None], [1]), InputError, "row 0: q_lens is 1"),
        (lambda pool: pool.slot_tables(["a"], [1.5]), InputTypeError, r"q_lens\[0\]"),
    ],
)
def test_a_refused_call_changes_nothing(call: Callable[[Any], Any], error: type[Exception], said: str) -> None:
    mirror = Mirror(4, drafts=1)
    mirror.alloc(0, 0)
    pool = mirror.states
    pool.alloc("a", 0)
    pool.append("a", [1, 2, 3, 4, 5])
    pool.fork("a", "b")
    pool.publish("a")
    pool.alloc("b", 1)
    assert pool.available == 1
    words = []

    def run() -> None:
        try:
            call(pool)
        except error as raised:
            words.append(str(raised))
            raise

    mirror.refuses(error, run)
    assert said in words[0] or re.search(said, words[0])


@pytest.mark.parametrize(
    "fields", [{"slots": 0}, {"page_size": 0}, {"drafts": -1}, {"snapshots": 0}, {"slots": 2**31}, {"drafts": True}]
)
def test_a_pool_needs_sensible_sizes(fields: dict[str, Any]) -> None:
    with pytest.raises((InputError, InputTypeError), match=next(iter(fields))):
        StateSlots(**{"slots": 4, "page_size": 4} | fields)


# -- check finds what is wrong -------------------------------------------------------------------------------------------


def _lose(pool: StateSlots) -> None:
    pool._owners.returned[0].clear()


def _share(pool: StateSlots) -> None:
    pool._sequences["b"].kept[3] = pool._sequences["a"].kept[4]
    pool._sequences["b"].step = None


def _spare(pool: StateSlots) -> None:
    slot = pool._sequences["a"].kept[4]
    pool._sequences["b"].spare.append(slot)
    pool._owners.references[slot] += 1


BROKEN: dict[str, Callable[[StateSlots], Any]] = {
    "slots .* are neither free nor cached nor used": _lose,
    "slot 1 has 1 references but is in 2 tables": _share,
    "keeps no state of them": lambda pool: pool._sequences["a"].kept.pop(4),
    "keeps a state of 1 tokens": lambda pool: pool._sequences["a"].kept.update({1: 1}),
    "has slot 9 of 8": lambda pool: pool._sequences["b"].kept.update({3: 9}),
    "has slot .* 2 times": lambda pool: pool._sequences["a"].kept.update({3: pool._sequences["a"].kept[4]}),
    "tokens and 5 token ids": lambda pool: pool._sequences["a"].tokens.append(7),
    "wrote slots": lambda pool: setattr(pool._sequences["a"], "step", SlotStep(1, None, (7,))),
    "is spare in sequence 'b' and has 2 owners": _spare,
    "the key of cached slot": lambda pool: pool._index.slot_of.update(dict.fromkeys(pool._index.slot_of, 7)),
    "holds a state after 3 pages": lambda pool: pool._index.content.update(
        {slot: Snapshot(one.key, 3) for slot, one in pool._index.content.items()}
    ),
    "whose prefix isn't known": lambda pool: pool._index.slot_of.update({b"": 7}),
    "the keys of sequence 'a' don't match": lambda pool: pool._sequences["a"].keys.__setitem__(0, b""),
    "holds another state than that of 4 tokens": lambda pool: (
        pool._sequences["a"].tokens.__setitem__(0, 9), pool._sequences["a"].keys.clear(),
    ),
    "holds the state of 3 tokens of sequence 'b' and of 3 other tokens": lambda pool: (
        pool.fork("b", "c"), pool._sequences["c"].tokens.__setitem__(0, 8), pool._sequences["c"].keys.clear(),
    ),
    "is free but still found": lambda pool: (
        pool._index.content.update({7: Snapshot(b"7", 2)}), pool._index.slot_of.update({b"7": 7}),
    ),
}  # fmt: skip


def made() -> StateSlots:
    """Of eight slots, 'a' has two, one of which is found by its prefix; 'b' has two; one was returned."""
    pool = StateSlots(8, 2, drafts=1, snapshots=2)
    for name, ids in (("x", [5]), ("a", [1, 2, 3, 4]), ("b", [6, 7, 8])):
        pool.alloc(name, 0)
        pool.append(name, ids)
    pool.publish("a")
    pool.free("x")
    pool.check()
    return pool


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_wrong_is_said(words: str) -> None:
    pool = made()
    BROKEN[words](pool)
    with pytest.raises(AttnOpsError, match=f"contradicts itself: .*{words}"):
        pool.check()
