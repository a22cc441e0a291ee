"""What a page pool answers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Growth", "PageCounts", "PrefixMatch"]


class Growth(NamedTuple):
    """What a call gave a sequence, and what the device has to do about it before it writes there."""

    new_pages: tuple[int, ...] = ()
    """Pages that the sequence got, destinations of copies among them."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination): the whole page is to be copied."""
    to_scrub: tuple[int, ...] = ()
    """Pages to be zeroed, as somebody else's tokens may lie there; empty unless the pool was made with scrub_on_free."""
    matched: int = 0
    """How many tokens the sequence took over from cached pages; they need no prefill."""


class PrefixMatch(NamedTuple):
    """A cached prefix: how many tokens, a whole number of pages, and the pages that hold them."""

    tokens: int
    pages: tuple[int, ...]


class PageCounts(NamedTuple):
    """How many pages are in use, free, and cached (of no sequence, but still found by their prefix); and the slots of pages in
    use that hold no token."""

    used: int
    free: int
    cached: int
    padding: int
