"""Which slot holds the state of which prefix, and which of those slots are unused, oldest first."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from .prefix_index import chain_key, chain_keys

__all__ = ["Snapshot", "SnapshotIndex"]


class Snapshot(NamedTuple):
    """The prefix whose state a slot holds: the key of its last page, and how many pages it has."""

    key: bytes
    pages: int


class SnapshotIndex:
    """States that can be found by their tokens, at every `every` pages of a prefix; None: there are none.

    `unused` has the slots without a sequence, the one unused for longest first, as PrefixIndex has pages; `evict` takes it.
    """

    def __init__(self, page_size: int, every: int | None) -> None:
        self.page_size = page_size
        self.every = every
        self.slot_of: dict[bytes, int] = {}
        self.content: dict[int, Snapshot] = {}
        self.unused: tuple[OrderedDict[int, None]] = (OrderedDict(),)

    def lengths(self, keys: Iterable[bytes]) -> set[int]:
        """The numbers of pages (including 0) after which a state is kept."""
        return {0, *(count for count, key in enumerate(keys, 1) if key in self.slot_of)}

    def find(self, tokens: array[int]) -> tuple[list[bytes], int | None]:
        """(the keys of the longest prefix with a state, its slot); ([], None) for none."""
        keys = list(chain_keys(tokens, self.page_size))
        count = max(self.lengths(keys))
        return keys[:count], self.slot_of[keys[count - 1]] if count else None

    def at(self, length: int) -> bool:
        """Whether a prefix of this many tokens may be found."""
        return self.every is not None and length > 0 and length % (self.every * self.page_size) == 0

    def insert(self, tokens: array[int], keys: list[bytes], kept: dict[int, int]) -> None:
        """Let the states of prefixes be found from now on; `keys` holds those of the first pages and gets others appended. A
        prefix that another slot holds is still found there."""
        size = self.page_size
        for length, slot in kept.items():
            if not self.at(length) or length > len(tokens):
                continue
            for number in range(len(keys), length // size):
                page = tokens[number * size : (number + 1) * size].tobytes()
                keys.append(chain_key(keys[-1] if keys else b"", page))
            key = keys[length // size - 1]
            if key not in self.slot_of and slot not in self.content:
                self.slot_of[key] = slot
                self.content[slot] = Snapshot(key, length // size)

    def evict(self, shard: int = 0) -> int:
        """Take the slot that has been unused for longest, and forget its prefix."""
        slot, _ = self.unused[shard].popitem(last=False)
        self.remove(slot)
        return slot

    def remove(self, slot: int) -> None:
        """Stop a slot's state from being found: it is about to be written."""
        snapshot = self.content.pop(slot, None)
        if snapshot is not None:
            del self.slot_of[snapshot.key]
