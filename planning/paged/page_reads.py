"""PageReads: the pages that a known batch must read in a layer, and their bytes. No implementation can read less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...masks.page_mask import ANY_PAGE_MASK, PageMask, page_mask
from ..cache.window_pages import first_visible_page
from ..text import bytes_text
from .paged_problem import PagedProblem

__all__ = [
    "PageReads", "SequenceReads", "page_bytes", "page_reads", "selected_bytes", "sequence_reads", "step_flops", "visible_pages",
]  # fmt: skip


class PageReads(NamedTuple):
    """For one layer, summed over the sequences of all shards: pages that some query sees, pages that hold keys, and bytes of
    the former on the device that reads the most."""

    sequences: int
    queries: int
    live: int
    held: int
    device_bytes: int

    def describe(self) -> str:
        """The reads in one line."""
        share = "" if self.live == self.held else f" of {self.held} that hold keys"
        return (
            f"{self.queries} queries of {self.sequences} sequences: {self.live} pages{share}, "
            f"{bytes_text(self.device_bytes)} per device and layer"
        )


def visible_pages(q_len: int, kv_len: int, page: int, mask: PageMask) -> tuple[int, int]:
    """(first, one past the last) page with a key that one of the last `q_len` positions of a sequence of `kv_len` sees.

    The last query is at the last key, so no mask leaves out the last page.
    """
    if not q_len:
        return 0, 0
    first = kv_len - q_len
    begin = 0 if mask.left is None else max(first - mask.left, 0)
    begin = begin if mask.chunk is None else max(begin, first // mask.chunk * mask.chunk)
    end = kv_len
    return (begin // page, -(-end // page)) if end > begin else (0, 0)


def _pages_with_keys(q_len: int, kv_len: int, problem: PagedProblem) -> int:
    """The number of pages that hold keys of a sequence; pages that the cache's window has passed don't."""
    page = problem.page_size
    return math.ceil(kv_len / page) - first_visible_page(kv_len - q_len, problem.cache.window_tokens, page)


def page_bytes(problem: PagedProblem) -> int:
    """Bytes of a page's keys, values and scales in one layer on a device, as stored."""
    plan = problem.cache
    names = ("key_pages", "value_pages", "kv_pages", "rope_pages", "key_scale", "value_scale")
    arrays = [array for name in names if (array := plan.get(name)) is not None and len(array.fitted.shape) > 2]
    return sum(array.device_bytes // max(1, array.fitted.local_shape[0]) for array in arrays)


def selected_bytes(problem: PagedProblem) -> int:
    """Bytes of the selected keys that all tokens of a device gather at most, in one layer; 0 where none are selected."""
    selected = problem.operand("selected")
    count = 0 if selected is None else selected.shape[1]
    return page_bytes(problem) // problem.page_size * count * problem.local_tokens


class SequenceReads(NamedTuple):
    """A sequence's row in a batch: its shard, the step's own tokens, all its tokens, and the pages that some query sees."""

    shard: int
    queries: int
    length: int
    first_page: int
    end_page: int


def sequence_reads(problem: PagedProblem, batch: Any) -> list[SequenceReads]:
    """The reads of each sequence of a batch with known values."""
    mask = page_mask(problem.mask) or ANY_PAGE_MASK
    return [
        SequenceReads(shard, int(q), int(length), *visible_pages(int(q), int(length), problem.page_size, mask))
        for shard, (starts, lens, count) in enumerate(_by_shard(batch))
        for q, length in zip(np.diff(starts)[:count], lens[:count], strict=True)
        if q
    ]


def page_reads(problem: PagedProblem, batch: Any) -> PageReads:
    """The reads of a batch (cu_q_lens, kv_lens, num_seqs) with known values."""
    mask = page_mask(problem.mask) or ANY_PAGE_MASK
    n = problem.sequence_shards
    live, held, sequences, queries, max_pages = 0, 0, 0, 0, 0
    for starts, lens, count in _by_shard(batch):
        rows = [(int(q), int(length)) for q, length in zip(np.diff(starts)[:count], lens[:count], strict=True)]
        seen = [visible_pages(q, length, problem.page_size, mask) for q, length in rows]
        live += sum(end - first for first, end in seen)
        max_pages = max(
            max_pages, *(sum(len(range(first + (at - first) % n, end, n)) for first, end in seen) for at in range(n)), 0
        )
        held += sum(_pages_with_keys(q, length, problem) for q, length in rows if q)
        sequences += sum(1 for q, _ in rows if q)
        queries += sum(q for q, _ in rows)
    return PageReads(sequences, queries, live, held, max_pages * page_bytes(problem))


def step_flops(problem: PagedProblem, batch: Any) -> float:
    """Operations in the products with visible keys and values, on the device that has the most; of selected ones, with as many of
    them as can be."""
    selected = problem.operand("selected")
    causal, left, right, chunk = page_mask(problem.mask) or ANY_PAGE_MASK
    max_pairs, shards = 0, problem.sequence_shards
    for starts, lens, count in _by_shard(batch):
        pairs = np.zeros(shards, np.int64)
        for q, n in zip(np.diff(starts)[:count], lens[:count], strict=True):
            place = np.arange(int(n) - int(q), int(n), dtype=np.int64)
            last = np.minimum(int(n) - 1, place if causal else int(n) - 1)
            last = last if right is None else np.minimum(last, place + right)
            first = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
            if chunk is not None:
                begin = place // chunk * chunk
                first, last = np.maximum(first, begin), np.minimum(last, begin + (chunk - 1))
            end = np.maximum(last + 1, first)
            end = end if selected is None else np.minimum(end, first + selected.shape[1])
            pairs += [
                int((_keys_below(end, at, problem) - _keys_below(first, at, problem)).sum()) for at in range(shards)
            ]
        max_pairs = max(max_pairs, int(pairs.max()))
    if problem.top_k is not None:  # a score is a product with the key, and a weight
        return 2.0 * max_pairs * problem.q_heads * (problem.head_dim + 1)
    return 2.0 * max_pairs * problem.local_heads[0] * (problem.head_dim + problem.value_dim)


def _keys_below(position: np.ndarray, shard: int, problem: PagedProblem) -> np.ndarray:
    """The number of keys before each position that are in pages of a sequence shard."""
    page, turn = problem.page_size, problem.page_size * problem.sequence_shards
    return position // turn * page + np.clip(position % turn - shard * page, 0, page)


def _by_shard(batch: Any) -> Sequence[tuple[np.ndarray, np.ndarray, int]]:
    starts, lens, counts = (np.asarray(getattr(batch, name)) for name in ("cu_q_lens", "kv_lens", "num_seqs"))
    if lens.ndim == 1:
        return [(starts, lens, int(counts.reshape(())))]
    return [(starts[n], lens[n], int(counts[n])) for n in range(len(lens))]
