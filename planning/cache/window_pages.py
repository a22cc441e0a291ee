"""Pages that sequences need in a group of layers with a window, if pages that no later query sees are freed after each step."""

from __future__ import annotations

from .cache_fields import CacheFields

__all__ = ["first_visible_page", "pages_of_all", "pages_of_one", "sequences_on"]


def first_visible_page(length: int, window: int | None, page: int) -> int:
    """The first page that a query at position `length` or later sees; earlier pages can be freed."""
    return 0 if window is None else max(0, length - window + 1) // page


def pages_of_one(cache: CacheFields, shards: int, along: int) -> int:
    """The maximum number of pages of one sequence, on all of its `along` sequence shards together.

    With a window: pages for the last window - 1 tokens and those of a step, in the worst alignment.
    """
    width = -(-cache.table_width // along) * along
    if cache.window_tokens is None or cache.max_tokens is None:
        return width
    spanned = _spanned(cache.window_tokens - 1 + max(1, cache.max_tokens // shards), cache.page_size)
    return min(width, -(-spanned // along) * along)


def pages_of_all(cache: CacheFields, shards: int, along: int) -> int:
    """The maximum number of pages of all sequences of a shard, which share the step's tokens."""
    rows = max(1, cache.max_sequences // shards)
    upper_bound = rows * pages_of_one(cache, shards, along)
    if (window_and_step := _window_and_step(cache, shards, along)) is None:
        return upper_bound
    per_sequence, step = window_and_step
    return min(upper_bound, -(-(rows * per_sequence + step) // along) * along)


def sequences_on(pages: int, cache: CacheFields, shards: int, along: int) -> int:
    """The number of sequences of max_length that fit in this many pages of a shard."""
    fit = pages // pages_of_one(cache, shards, along)
    if not fit or (window_and_step := _window_and_step(cache, shards, along)) is None:
        return fit
    per_sequence, step = window_and_step
    return max(fit, (pages - step) // per_sequence)


def _window_and_step(cache: CacheFields, shards: int, along: int) -> tuple[int, int] | None:
    """(pages of each sequence, pages of a step's tokens). Each sequence has its window, the page in which its part of the step
    ends, and, if pages are distributed round-robin, one page on each of the other devices for rounding."""
    if cache.window_tokens is None or cache.max_tokens is None:
        return None
    return _spanned(cache.window_tokens, cache.page_size) + along, max(1, cache.max_tokens // shards) // cache.page_size


def _spanned(tokens: int, page: int) -> int:
    """The maximum number of pages that this many consecutive tokens can span."""
    return (tokens + page - 2) // page + 1
