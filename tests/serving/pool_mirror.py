"""A page pool beside what it stands for: token lists, and a device whose pages hold token ids; each step compares them."""

from __future__ import annotations

from collections.abc import Callable, Set
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from attnops.errors import CapacityError, InputError
from attnops.serving import Growth, PagePool


def insides(pool: PagePool) -> Any:
    """All that a pool keeps, to compare before and after."""
    owners, index = pool._owners, pool._index
    parts = (
        owners.references,
        owners.used,
        owners.next_new,
        owners.returned,
        [*map(list, index.unused)],
        index.content,
        index.page_of,
    )
    return deepcopy((parts, pool._sequences))


class Mirror:
    """The same calls on a pool and on plain dictionaries. Ids are positive: 0 is a slot that was never written, or scrubbed."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        strict: bool,
        scrub: bool = True,
        sharing: bool = True,
        shards: int = 1,
        window: int | None = None,
    ) -> None:
        self.pool = PagePool(
            pages,
            page_size,
            scrub_on_free=scrub,
            prefix_sharing=sharing,
            sequence_shards=shards,
            window_tokens=window,
        )
        self.window, self.given_back = window, 0
        self.gone: dict[int, int] = {}  # how many of the first pages were released
        self.shards = shards
        self.device = np.zeros((pages, page_size), np.int64)
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}  # how many of the first tokens have ids that the pool was told
        self.done: dict[int, int] = {}  # how many pages were published or adopted
        self.cached: dict[tuple[int, ...], int] = {}  # whole prefixes
        self.unused: list[int] = []
        self.strict, self.size, self.refused = strict, page_size, 0

    # -- calls --------------------------------------------------------------------------------------------------------

    def alloc(self, name: int, tokens: int) -> None:
        if self._grow(name, tokens, lambda: self.pool.alloc(name, tokens)) and name not in self.tokens:
            self.tokens[name], self.known[name], self.done[name], self.gone[name] = [], 0, 0, 0

    def append(self, name: int, ids: list[int]) -> None:
        if self._grow(name, len(ids), lambda: self.pool.append(name, ids)):
            if self.known[name] == len(self.tokens[name]):
                self.known[name] += len(ids)
            self._write(name, ids)

    def append_count(self, name: int, ids: list[int]) -> None:
        if self._grow(name, len(ids), lambda: self.pool.append_count(name, len(ids))):
            self._write(name, ids)

    def adopt(self, name: int, ids: list[int], tokens: int) -> None:
        count, pages = self.brute_match(ids)
        growth = self._grow(name, 0, lambda: self.pool.adopt(name, ids, tokens), held=frozenset(pages))
        if growth:
            matched = growth.matched
            assert matched == count * self.size
            self.gone[name] = count - len(pages)
            assert list(self.pool.pages_of(name)[:count]) == [self.pool.pages] * self.gone[name] + pages
            self.tokens[name], self.known[name], self.done[name] = ids[:matched], matched, count
            self.holds(name)

    def fork(self, parent: int, child: int) -> None:
        self.pool.fork(parent, child)
        for book in (self.tokens, self.known, self.done, self.gone):
            book[child] = deepcopy(book[parent])
        self.holds(child)

    def truncate(self, name: int, length: int) -> None:
        before = self.pool.pages_of(name)
        if self._first_seen(length) < self.gone[name]:
            refuses(InputError, "pages that were released", lambda: self.pool.truncate(name, length), self.pool)
            return
        self.pool.truncate(name, length)
        del self.tokens[name][length:]
        self.known[name] = min(self.known[name], length)
        self.done[name] = min(self.done[name], length // self.size)
        self._left(before[-(-length // self.size) :])
        self.holds(name)

    def free(self, name: int) -> None:
        pages = self.pool.pages_of(name)
        self.pool.free(name)
        for book in (self.tokens, self.known, self.done, self.gone):
            del book[name]
        self._left(pages)

    def release(self, name: int) -> None:
        pages, first = self.pool.pages_of(name), self._first_seen(len(self.tokens[name]))
        left = pages[self.gone[name] : first]
        assert self.pool.release(name) == len(left)
        self.gone[name] = max(first, self.gone[name])
        self.given_back += len(left)
        self._left(left)
        self.holds(name)

    def publish(self, name: int) -> None:
        self.pool.publish(name)
        if not self.pool.prefix_sharing:
            return
        whole, pages = self.known[name] // self.size, self.pool.pages_of(name)
        for number in range(max(self.done[name], self.gone[name]), whole):
            self.cached.setdefault(tuple(self.tokens[name][: (number + 1) * self.size]), pages[number])
        self.done[name] = whole

    # -- comparisons --------------------------------------------------------------------------------------------------

    def brute_match(self, ids: list[int]) -> tuple[int, list[int]]:
        """(pages of the longest published prefix, those that its next token sees), by trying each length; the pool's answer is
        held against it."""
        count, pages = 0, []
        for end in range(1, len(ids) // self.size + 1):
            first = self._first_seen(end * self.size)
            own = [self.cached.get(tuple(ids[: (number + 1) * self.size])) for number in range(first, end)]
            if None not in own:
                count, pages = end, own
        assert self.pool.match(ids) == (count * self.size, tuple(pages))
        held = self.device[pages].reshape(-1)
        assert held.tolist() == ids[(count - len(pages)) * self.size : count * self.size]
        return count, pages

    def _first_seen(self, length: int) -> int:
        """The first page with a token that a query at position `length` sees, by going through them."""
        if self.window is None:
            return 0
        return sum((number + 1) * self.size <= length - self.window + 1 for number in range(length // self.size))

    def holds(self, name: int) -> None:
        """What the device finds by the page table is what the sequence says."""
        pages = self.pool.pages_of(name)
        table = self.pool.page_table([None, name], len(pages) + 1)
        assert table.dtype == np.int32
        assert (table[0] == self.pool.pages).all()
        assert table[1].tolist() == [*pages, self.pool.pages]
        gone, length = self.gone[name], len(self.tokens[name])
        assert pages[:gone] == (self.pool.pages,) * gone
        assert gone <= self._first_seen(length)
        assert all(page % self.shards == number % self.shards for number, page in enumerate(pages) if number >= gone)
        assert self.pool.kv_lens([name, None]).tolist() == [length, 0]
        here = self.device[table[1, gone:-1]].reshape(-1)[: length - gone * self.size]
        assert here.tolist() == self.tokens[name][gone * self.size :]

    def everything(self) -> None:
        self.pool.check()
        for name in self.tokens:
            self.holds(name)
        tables = [self.pool.pages_of(name) for name in self.tokens]
        used = self._used()
        filled = {
            (table[place // self.size], place % self.size)
            for table, (name, tokens) in zip(tables, self.tokens.items(), strict=True)
            for place in range(self.gone[name] * self.size, len(tokens))
        }
        counts = self.pool.counts()
        assert (counts.used, counts.cached) == (len(used), len(self.unused))
        assert counts.used + counts.free + counts.cached == self.pool.pages
        assert counts.padding == len(used) * self.size - len(filled)
        assert self.pool.available == counts.free + counts.cached
        for shard, unused in enumerate(self.pool._index.unused):
            assert [*unused] == [page for page in self.unused if page % self.shards == shard]
        assert len(self.pool) == len(self.tokens)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _grow(self, name: int, tokens: int, call: Callable[[], Growth], held: Set[int] = frozenset()) -> Growth | None:
        """Call, and carry out what comes; None if there were too few pages, and then nothing may have changed."""
        before = insides(self.pool) if self.strict else repr(self.pool)
        old = self.pool.pages_of(name) if name in self.pool else ()
        free = self._free() if self.strict else None
        growth, refused = Growth(), None
        try:
            growth = call()
        except CapacityError as error:
            refused = error
        if refused:
            available, kept = self._available(), held & set(self.unused)
            left = [own - sum(page % self.shards == shard for page in kept) for shard, own in enumerate(available)]
            assert refused.wanted > refused.available
            assert refused.available in left
            assert before == (insides(self.pool) if self.strict else repr(self.pool))
            self.refused += 1
            return None
        self.unused = [page for page in self.unused if page not in held]
        self._carry_out(growth, free)
        new = self.pool.pages_of(name)
        replaced = [pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]]
        assert tuple(replaced) == growth.copies
        kept = [sum(page != self.pool.pages for page in pages) for pages in (old, new)]
        assert kept[1] == kept[0] + len(held) + len(growth.new_pages) - len(growth.copies)
        length = len(self.tokens.get(name, ()))
        if tokens and length % self.size:
            self._unpublish(new[length // self.size])
        return growth

    def _used(self) -> set[int]:
        return {page for name in self.tokens for page in self.pool.pages_of(name) if page != self.pool.pages}

    def _available(self) -> list[int]:
        """Pages of each shard that nobody has."""
        used = self._used()
        return [
            sum(page not in used for page in range(shard, self.pool.pages, self.shards)) for shard in range(self.shards)
        ]

    def _free(self) -> list[int]:
        return [
            own - sum(page % self.shards == shard for page in self.unused)
            for shard, own in enumerate(self._available())
        ]

    def _carry_out(self, growth: Growth, free: list[int] | None) -> None:
        given = [0] * self.shards
        for page in growth.new_pages:
            shard = page % self.shards
            if page in self.unused:  # the one of its shard that was left first, and only when nothing is free there
                assert page == next(other for other in self.unused if other % self.shards == shard)
                self.unused.remove(page)
                assert free is None or given[shard] >= free[shard]
            given[shard] += 1
            self._unpublish(page)
        self.device[list(growth.to_scrub)] = 0
        for source, destination in growth.copies:
            self.device[destination] = self.device[source]
        copied = {destination for _, destination in growth.copies}
        if self.pool.scrub_on_free:
            assert not self.device[[page for page in growth.new_pages if page not in copied]].any()
        else:
            assert growth.to_scrub == ()

    def _write(self, name: int, ids: list[int]) -> None:
        pages, start = self.pool.pages_of(name), len(self.tokens[name])
        for place, token in enumerate(ids, start):
            self.device[pages[place // self.size], place % self.size] = token
        self.tokens[name] += ids
        self.holds(name)

    def _left(self, pages: tuple[int, ...]) -> None:
        """Published pages that nobody has any more, the last one first."""
        used = {page for name in self.tokens for page in self.pool.pages_of(name)} if pages else set()
        published = set(self.cached.values()) if pages else set()
        self.unused += [page for page in reversed(pages) if page not in used and page in published]

    def _unpublish(self, page: int) -> None:
        self.cached = {prefix: other for prefix, other in self.cached.items() if other != page}


def refuses(error: type[Exception], match: str, call: Callable[[], Any], pool: PagePool) -> None:
    """The call raises this, and the pool is as it was."""
    before = insides(pool)
    with pytest.raises(error, match=match):
        call()
    assert insides(pool) == before
    pool.check()
