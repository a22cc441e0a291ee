"""Which page holds which tokens after which prefix, and which of those pages are unused, oldest first."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from .window import Window

__all__ = ["Content", "PrefixIndex", "chain_key", "chain_keys"]

_ROOT = b""


class Content(NamedTuple):
    """What a page holds: its key, the key of the page before it (empty for the first), and its own tokens."""

    key: bytes
    before: bytes
    tokens: bytes


def chain_key(before: bytes, tokens: bytes) -> bytes:
    """The key of a page: a hash of its tokens and, through the key of the page before it, of all tokens before them.

    256 bits, because two prefixes with the same key would read each other's cache.
    """
    return blake2b(before + tokens, digest_size=32).digest()


def chain_keys(tokens: array[int], size: int) -> Iterator[bytes]:
    """The keys of the whole pages of these tokens."""
    before = _ROOT
    for start in range(0, len(tokens) - size + 1, size):
        before = chain_key(before, tokens[start : start + size].tobytes())
        yield before


class PrefixIndex:
    """Pages whose contents can be found by their tokens.

    `unused` are the pages without a sequence, by shard (page g lies on shard g % shards), the one unused for longest first;
    `evict` takes it.
    """

    def __init__(self, page_size: int, shards: int = 1) -> None:
        self.page_size = page_size
        self.page_of: dict[bytes, int] = {}
        self.content: dict[int, Content] = {}
        self.unused: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(shards))

    def walk(self, tokens: array[int], window: Window) -> tuple[list[bytes], list[int]]:
        """Keys and pages of the longest published prefix of whole pages; only the pages that the next token sees."""
        keys, pages = [], []
        for key in chain_keys(tokens, self.page_size):
            page = self.page_of.get(key)
            if page is None and window.tokens is None:
                break
            keys.append(key)
            pages.append(page)
        count = max(self.lengths(keys, window))
        first = window.first_visible_page(count * self.page_size)
        return keys[:count], [page for page in pages[first:count] if page is not None]

    def lengths(self, keys: Iterable[bytes], window: Window) -> set[int]:
        """The numbers of pages (including 0) after which the next token finds all the pages that it sees."""
        counts, run = {0}, 0
        for count, key in enumerate(keys, 1):
            run = run + 1 if key in self.page_of else 0
            if run >= count - window.first_visible_page(count * self.page_size):
                counts.add(count)
        return counts

    def insert(self, tokens: array[int], keys: list[bytes], pages: array[int], released: int) -> None:
        """Let whole pages of `tokens` be found from now on; `keys` holds those of the first pages and gets the rest appended.

        Where another page already holds the same tokens, that page is still the one found. The first `released` pages are gone.
        """
        size = self.page_size
        for number in range(len(keys), len(tokens) // size):
            before = keys[-1] if keys else _ROOT
            token_bytes = tokens[number * size : (number + 1) * size].tobytes()
            key = chain_key(before, token_bytes)
            keys.append(key)
            if key not in self.page_of and number >= released:
                self.page_of[key] = pages[number]
                self.content[pages[number]] = Content(key, before, token_bytes)

    def remove(self, page: int) -> None:
        """Stop a page from being found: it is about to be written."""
        content = self.content.pop(page, None)
        if content is not None:
            del self.page_of[content.key]

    def evict(self, shard: int) -> int:
        """Take the shard's page that has been unused for longest, and forget its content."""
        page, _ = self.unused[shard].popitem(last=False)
        self.remove(page)
        return page
