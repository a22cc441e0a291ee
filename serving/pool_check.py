"""The check that a page pool's records are right: no page leaks, none is shared wrongly, every prefix matches its content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from ..errors import AttnOpsError, shown
from .page_owners import PageOwners
from .prefix_index import PrefixIndex, chain_key
from .sequence_state import SequenceState
from .window import Window

__all__ = ["check_places", "check_pool", "must"]


def check_pool(owners: PageOwners[PrefixIndex], sequences: Mapping[Hashable, SequenceState], window: Window) -> None:
    """Raise an AttnOpsError that names the page or the sequence unless all records agree."""
    index, tables = owners.index, Counter[int]()
    for name, state in sequences.items():
        _check_sequence(name, state, owners, window)
        tables.update(state.current_pages)
    check_places(owners, tables)
    _check_index(index)
    for name, state in sequences.items():
        _check_contents(name, state, tables, index)


def must(holds: bool, what: str) -> None:
    """Errors: AttnOpsError that says what contradicts itself unless it holds."""
    if not holds:
        raise AttnOpsError(
            f"the page pool contradicts itself: {what}. This is a bug in attnops, or its internal state was changed."
        )


def _check_sequence(name: Hashable, state: SequenceState, owners: PageOwners[PrefixIndex], window: Window) -> None:
    """Pages exist, lie on the shard of their page number, occur once in the table, and are enough; no page that the next token
    sees was released."""
    n, size, released = owners.shards, window.page_size, state.released
    first = window.first_visible_page(state.length)
    must(
        0 <= released <= first,
        f"sequence {shown(name)} has released {released} pages, and its next token sees page {first}",
    )
    gone = set(state.pages[:released]) - {owners.pages}
    must(not gone, f"sequence {shown(name)} has released page {min(gone, default=0)}, but it is still in its table")
    for number, page in enumerate(state.current_pages, released):
        must(0 <= page < owners.pages, f"sequence {shown(name)} has page {page} of {owners.pages}")
        where = f"page {page} of shard {page % n} as number {number}, of shard {number % n}"
        must(page % n == number % n, f"sequence {shown(name)} has {where}")
    for page, count in Counter(state.current_pages).items():
        must(count == 1, f"sequence {shown(name)} has page {page} {count} times")
    room = len(state.pages) * size
    must(0 <= state.length <= room, f"sequence {shown(name)} has {state.length} tokens in {room} slots")
    known = len(state.tokens)
    must(known <= state.length, f"sequence {shown(name)} has {state.length} tokens and {known} token ids")
    must(len(state.keys) <= known // size, f"sequence {shown(name)} has {len(state.keys)} keys for {known} token ids")


def check_places(owners: PageOwners[Any], tables: Counter[int], what: str = "page") -> None:
    """Reference counts match the tables, and each page, or slot, is in one place: used, free or cached."""
    pages, references, index, n = owners.pages, owners.references, owners.index, owners.shards
    cached = {page: shard for shard, shard_pages in enumerate(index.unused) for page in shard_pages}
    free = [page for start in owners.next_new for page in range(start, pages, n)]
    free += [page for shard_pages in owners.returned for page in shard_pages]
    for shard in range(n):
        used = sum(page % n == shard for page in references)
        must(owners.used[shard] == used, f"shard {shard} counts {owners.used[shard]} used {what}s, but has {used}")
        wrong = [page for page in (owners.next_new[shard], *owners.returned[shard]) if page % n != shard]
        must(not wrong, f"{what}s {shown(wrong)} are free on shard {shard}, where they don't belong")
    for page in references.keys() | tables.keys():
        counted = references.get(page, 0)
        must(counted == tables[page], f"{what} {page} has {counted} references but is in {tables[page]} tables")
    for page, count in Counter(free).items():
        must(count == 1, f"{what} {page} is free {count} times")
        must(page not in references, f"{what} {page} is both free and used")
        must(page not in cached, f"{what} {page} is both free and cached")
        must(page not in index.content, f"{what} {page} is free but still found by its prefix")
    for page, shard in cached.items():
        must(page % n == shard, f"{what} {page} is cached on shard {shard}, where it doesn't belong")
        must(page not in references, f"{what} {page} is both cached and used")
        must(page in index.content, f"{what} {page} is cached, but no prefix leads to it")
    for page in index.content:
        must(
            page in references or page in cached,
            f"{what} {page} is found by its prefix, but neither cached nor used",
        )
    places = free, cached, references
    missing = sorted(set(range(pages)).difference(*places))
    must(not missing, f"{what}s {shown(missing)} are neither free nor cached nor used")
    total = sum(map(len, places))
    must(total == pages, f"free, cached and used {what}s are {total} in all, of {pages}")


def _check_index(index: PrefixIndex) -> None:
    """Every cached prefix page has the key of its content, and that key leads to it."""
    for page, content in index.content.items():
        expected = 8 * index.page_size
        must(
            len(content.tokens) == expected,
            f"cached page {page} isn't whole: {len(content.tokens)} of {expected} bytes of ids",
        )
        right = content.key == chain_key(content.before, content.tokens)
        must(right, f"cached page {page} has a key that doesn't match its tokens and prefix")
        must(index.page_of.get(content.key) == page, f"the key of cached page {page} doesn't lead to it")
    for page in index.page_of.values():
        must(page in index.content, f"a key leads to page {page}, whose content isn't known")


def _check_contents(name: Hashable, state: SequenceState, tables: Counter[int], index: PrefixIndex) -> None:
    """A sequence's keys match its tokens, its cached pages hold its tokens, and its room belongs to it alone."""
    size, before = index.page_size, b""
    for number, page in enumerate(state.pages):
        token_bytes = state.tokens[number * size : (number + 1) * size].tobytes()
        content = None if number < state.released else index.content.get(page)
        if content is not None:
            same = content.tokens.startswith(token_bytes) and content.before == before
            must(same, f"cached page {page} holds other tokens than sequence {shown(name)}, which uses it")
        if number * size >= state.length:
            many = f"page {page} is room of sequence {shown(name)} and has {tables[page]} owners"
            must(tables[page] == 1, f"{many}; a page that may be written must have one")
            must(content is None, f"page {page} is room of sequence {shown(name)} but is found by a prefix")
        before = chain_key(before, token_bytes) if len(token_bytes) == 8 * size else b"-"
        if number < len(state.keys):
            must(state.keys[number] == before, f"key {number} of sequence {shown(name)} doesn't match its tokens")
