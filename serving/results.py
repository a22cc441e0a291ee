"""Results of a pool's calls."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Growth", "PageCounts", "PrefixMatch", "SlotCounts", "SlotGrowth", "SlotMatch"]


class Growth(NamedTuple):
    """What a call gave a sequence, and what the device has to do before it writes there."""

    new_pages: tuple[int, ...] = ()
    """Pages that the sequence got, including the destinations of copies."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination): copy the whole page."""
    to_scrub: tuple[int, ...] = ()
    """Pages to zero, because they may hold another owner's tokens; empty unless the pool was made with scrub_on_free."""
    matched: int = 0
    """How many tokens the sequence took from cached pages; they need no prefill."""


class PrefixMatch(NamedTuple):
    """A cached prefix: how many tokens, a whole number of pages, and the pages that hold them."""

    tokens: int
    pages: tuple[int, ...]


class PageCounts(NamedTuple):
    """How many pages are in use, free, and cached (without a sequence, but still found by their prefix); and how many slots of
    pages in use are empty."""

    used: int
    free: int
    cached: int
    padding: int


class SlotGrowth(NamedTuple):
    """What a call gave a sequence of states, and what the device has to do before it writes there; as Growth, for slots."""

    new_slots: tuple[int, ...] = ()
    """Slots that the sequence got, including the destinations of copies."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination): copy the whole slot."""
    to_scrub: tuple[int, ...] = ()
    """Slots to zero, because they may hold another owner's state; empty unless the pool was made with scrub_on_free."""
    matched: int = 0
    """How many tokens the state that the sequence took over is of; they need no prefill."""


class SlotMatch(NamedTuple):
    """A prefix whose state is kept: how many tokens, and the slot that holds it; None for no tokens."""

    tokens: int
    slot: int | None


class SlotCounts(NamedTuple):
    """How many slots are in use, free, and cached (without a sequence, but still found by their prefix); and how many of those in
    use are reserved for later tokens."""

    used: int
    free: int
    cached: int
    spare: int
