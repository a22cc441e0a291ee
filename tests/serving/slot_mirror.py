"""Pools of slots and pages beside what they stand for: token lists, and a device whose slots hold the tokens folded into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from attnops.errors import CapacityError, InputError
from attnops.serving import PagePool, PagePools, StateSlots

Tokens = list[int]


def insides(pools: PagePools) -> Any:
    """All that the pools keep, to compare before and after."""
    parts = []
    for pool in pools.pools:
        owners, index = pool._owners, pool._index
        found = index.page_of if isinstance(pool, PagePool) else index.slot_of
        kept = owners.references, owners.used, owners.next_new, owners.returned
        parts.append((kept, [*map(list, index.unused)], index.content, found, pool._sequences))
    return deepcopy(parts)


class Mirror:
    """The same calls on pools and on plain dictionaries. A slot's content is a tuple of tokens: the state's fold."""

    def __init__(
        self,
        slots: int,
        *,
        size: int = 2,
        drafts: int = 0,
        snapshots: int | None = 1,
        scrub: bool = False,
        pages: int | None = None,
    ) -> None:
        self.states = StateSlots(slots, size, drafts=drafts, snapshots=snapshots, scrub_on_free=scrub)
        with_pages = [] if pages is None else [PagePool(pages, size, scrub_on_free=scrub)]
        self.pools = PagePools([*with_pages, self.states])
        self.size, self.drafts, self.snapshots, self.scrub = size, drafts, snapshots, scrub
        self.slots: list[tuple[int, ...] | None] = [None] * slots
        self.pages = None if pages is None else np.zeros((pages, size), np.int64)
        self.tokens: dict[int, Tokens] = {}
        self.known: dict[int, int] = {}  # how many of the first tokens have ids that the pools were told
        self.kept: dict[int, set[int]] = {}  # lengths of which the state is kept
        self.calls = self.refused = self.copied = self.matched = 0

    # -- calls --------------------------------------------------------------------------------------------------------

    def alloc(self, name: int, tokens: int) -> None:
        if self.call(lambda: self.pools.alloc(name, tokens)) and name not in self.tokens:
            self.tokens[name], self.known[name], self.kept[name] = [], 0, set()

    def adopt(self, name: int, ids: Tokens, tokens: int = 0) -> None:
        before = [match.tokens for match in self.pools.match(ids)]
        if not self.call(lambda: self.pools.adopt(name, ids, tokens)):
            return
        matched = self.growths[-1].matched
        assert {growth.matched for growth in self.growths} == {matched} == set(before)
        assert matched <= len(ids)
        assert matched == 0 or (self.snapshots is not None and matched % (self.snapshots * self.size) == 0)
        self.tokens[name], self.known[name] = ids[:matched], matched
        self.kept[name] = {matched} - {0}
        self.matched += matched

    def step(self, rows: dict[int, tuple[Tokens, bool]]) -> None:
        """One step of several sequences, as a server makes it: all grow, then copies are made, then all run in any order."""
        running: dict[int, Tokens] = {}
        for name, (ids, told) in rows.items():
            grow = self.pools.append if told else lambda name, ids: self.pools.append_count(name, len(ids))
            if self.call(lambda name=name, ids=ids, grow=grow: grow(name, ids)):  # type: ignore[misc]
                running[name] = ids
                if told and self.known[name] == len(self.tokens[name]):
                    self.known[name] += len(ids)
        names: list[int | None] = [*running, None]
        q_lens = [len(running.get(name, [])) for name in names]  # type: ignore[arg-type]
        read, write = self.pools.slot_tables(names, q_lens)[0]
        padding = len(self.slots)
        assert read[-1] == padding
        assert (write[-1] == padding).all()
        self._no_two(read, write, q_lens, padding)
        order = np.random.default_rng(len(self.tokens)).permutation(len(running))
        for row in order:
            name, ids = list(running.items())[row]
            before = self.tokens[name]
            if ids and before:
                assert self.slots[read[row]] == tuple(before), f"row {row} of {name} reads another state"
            for back in range(1 + self.drafts):
                if (slot := write[row, back]) != padding:
                    self.slots[slot] = tuple([*before, *ids][: len(before) + len(ids) - back])
                    assert back < len(ids)
        for name, ids in running.items():
            before, tokens = len(self.tokens[name]), [*self.tokens[name], *ids]
            written = set(range(before + 1, len(tokens) + 1))
            self.kept[name] = (
                {n for n in self.kept[name] | written if n >= len(tokens) - self.drafts} if ids else self.kept[name]
            )
            self.tokens[name] = tokens
            self._write_pages(name, before)

    def resume(self, name: int, ids: Tokens, known: int) -> None:
        if self.call(lambda: self.pools.resume(name, ids[:known], len(ids))):
            self.tokens[name], self.known[name], self.kept[name] = list(ids), known, {len(ids)} - {0}
            read, _ = self.pools.slot_tables([name], [0])[0]
            if ids:
                self.slots[read[0]] = tuple(ids)  # restored
            self._write_pages(name, 0)

    def truncate(self, name: int, length: int) -> None:
        tokens = self.tokens[name]
        if length and length != len(tokens) and length not in self.kept[name]:
            self.refuses(InputError, lambda: self.pools.truncate(name, length))
            return
        self.pools.truncate(name, length)
        del tokens[length:]
        self.known[name] = min(self.known[name], length)
        self.kept[name] = {n for n in self.kept[name] if n <= length}

    def fork(self, parent: int, child: int) -> None:
        self.pools.fork(parent, child)
        self.tokens[child], self.known[child] = list(self.tokens[parent]), self.known[parent]
        self.kept[child] = {len(self.tokens[parent])} - {0}

    def free(self, name: int) -> None:
        self.pools.free(name)
        del self.tokens[name], self.known[name], self.kept[name]

    def publish(self, name: int) -> None:
        self.pools.publish(name)
        if self.snapshots is None:
            return
        every = self.snapshots * self.size
        for length in sorted(self.kept[name]):
            if length % every == 0 and length <= self.known[name]:
                assert self.states.match(self.tokens[name][:length]).tokens == length

    # -- comparisons --------------------------------------------------------------------------------------------------

    def call(self, grow: Callable[[], Sequence[Any]]) -> bool:
        """A call that may lack slots or pages; then nothing has changed."""
        self.calls += 1
        before = insides(self.pools) if self.calls % 4 == 0 else None  # copies take the most time
        try:
            growths = grow()
        except CapacityError as error:
            refused: CapacityError | None = error
        else:
            refused = None
        if refused is not None:
            assert refused.wanted > refused.available
            assert before is None or insides(self.pools) == before
            self.refused += 1
            return False
        self.growths = growths
        for pool, growth in zip(self.pools.pools, growths, strict=True):
            device: Any = self.slots if isinstance(pool, StateSlots) else self.pages
            for old in growth.to_scrub:
                device[old] = None if isinstance(pool, StateSlots) else 0
            assert not growth.to_scrub or self.scrub
            for source, target in growth.copies:
                assert source != target
                device[target] = device[source]
                self.copied += isinstance(pool, StateSlots)
        return True

    def refuses(self, error: type[Exception], call: Callable[[], Any]) -> str:
        before = insides(self.pools)
        try:
            call()
        except error as raised:
            said = str(raised)
        else:
            raise AssertionError("not refused")
        assert insides(self.pools) == before
        return said

    def everything(self) -> None:
        """Each sequence reads the fold of its tokens, and each kept state is that of its tokens; no slot is lost."""
        self.pools.check()
        used, free, cached, spare = self.states.counts()
        assert used + free + cached == len(self.slots)
        assert 0 <= spare <= used
        for name, tokens in self.tokens.items():
            held = self.states.slots_of(name)
            assert set(held) == self.kept[name]
            for length, slot in held.items():
                assert self.slots[slot] == tuple(tokens[:length])
            read, write = self.pools.slot_tables([name], [0])[0]
            assert (self.slots[read[0]] == tuple(tokens)) if tokens else read[0] == len(self.slots)
            assert (write == len(self.slots)).all()
            if self.pages is not None:
                ids = self.pools.pools[0].pages_of(name)  # type: ignore[union-attr]
                assert self.pages[list(ids)].reshape(-1)[: len(tokens)].tolist() == tokens
        assert self.pools.kv_lens([*self.tokens]).tolist() == [len(tokens) for tokens in self.tokens.values()]
        for slot, snapshot in self.states._index.content.items():
            content = self.slots[slot]
            assert content is not None
            assert len(content) == snapshot.pages * self.size
            assert self.states.match(content) == (len(content), slot)

    def _no_two(self, read: np.ndarray, write: np.ndarray, q_lens: Sequence[int], padding: int) -> None:
        """No slot is written twice, and none is written by one row and read by another."""
        slots = write[write != padding]
        assert len(set(slots.tolist())) == len(slots)
        for row, slot in enumerate(read):
            others = np.delete(write, row, axis=0)
            assert slot == padding or not q_lens[row] or slot not in others

    def _write_pages(self, name: int, before: int) -> None:
        if self.pages is None:
            return
        ids = self.pools.pools[0].pages_of(name)  # type: ignore[union-attr]
        for position in range(before, len(self.tokens[name])):
            self.pages[ids[position // self.size], position % self.size] = self.tokens[name][position]
