"""How many pages of a group of layers sequences need, where pages that no later query sees are given back after each step."""

from __future__ import annotations

from .cache_fields import CacheFields

__all__ = ["first_kept", "pages_of_all", "pages_of_one", "sequences_on"]


def first_kept(length: int, window: int | None, page: int) -> int:
    """The first page number that a query at position `length`, or a later one, sees; those before it may be given back."""
    return 0 if window is None else max(0, length - window + 1) // page


def pages_of_one(cache: CacheFields, shards: int, along: int) -> int:
    """Pages that one sequence has at most, on all of its `along` sequence shards together.

    With a window: the last window - 1 tokens and those of a step, as they may lie across pages.
    """
    width = -(-cache.table_width // along) * along
    if cache.window_tokens is None or cache.max_tokens is None:
        return width
    spanned = _spanned(cache.window_tokens - 1 + max(1, cache.max_tokens // shards), cache.page_size)
    return min(width, -(-spanned // along) * along)


def pages_of_all(cache: CacheFields, shards: int, along: int) -> int:
    """Pages that all sequences of a shard have at most: the step's tokens are divided between them."""
    rows = max(1, cache.max_sequences // shards)
    most = rows * pages_of_one(cache, shards, along)
    if (found := _window_and_step(cache, shards, along)) is None:
        return most
    each, step = found
    return min(most, -(-(rows * each + step) // along) * along)


def sequences_on(pages: int, cache: CacheFields, shards: int, along: int) -> int:
    """Sequences of max_length that fit on so many pages of a shard."""
    fit = pages // pages_of_one(cache, shards, along)
    if not fit or (found := _window_and_step(cache, shards, along)) is None:
        return fit
    each, step = found
    return max(fit, (pages - step) // each)


def _window_and_step(cache: CacheFields, shards: int, along: int) -> tuple[int, int] | None:
    """(pages of each sequence, pages of a step's tokens): of each the window, a page that its part of the step ends in, and
    where devices have pages in turn, one on each of the others for the rounding."""
    if cache.window_tokens is None or cache.max_tokens is None:
        return None
    return _spanned(cache.window_tokens, cache.page_size) + along, max(1, cache.max_tokens // shards) // cache.page_size


def _spanned(tokens: int, page: int) -> int:
    """Pages that so many consecutive tokens lie in at most."""
    return (tokens + page - 2) // page + 1
