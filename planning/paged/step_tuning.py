"""Tuned choices for steps over pages: what a choice depends on, which one a plan uses, and what a search tries."""

from __future__ import annotations

from typing import Any

from ..tuning import versions
from .paged_problem import PagedProblem

__all__ = ["step_candidates", "step_fields", "step_key"]

_KEYS = (64, 128, 256, 512, 1024)  # keys in a block of pages
_QUERIES = (8, 16, 32, 64, 128, 256)


def step_fields(problem: PagedProblem) -> tuple[str, ...]:
    """The config's unset sizes that the step uses. There are no blocks of queries with one per sequence, or where each names its
    keys."""
    alone = problem.max_q_len is not None or "selected" in problem.features
    names = ("pages_per_block",) if alone else ("pages_per_block", "queries_per_block")
    return () if problem.mode == "insert" else tuple(name for name in names if not problem.config.is_set(name))


def step_key(method: str, problem: PagedProblem) -> dict[str, Any]:
    """All that a measured choice depends on, as JSON values. Sequence lengths are traced, so they are not included."""
    cache = problem.cache.cache
    return {
        "operation": "paged" if problem.top_k is None else "paged_indexer",
        "method": method,
        "device": problem.device,
        "dtype": problem.runtime_dtype,
        "stored": cache.stored_dtype,
        "scale": None if cache.quantised is None else cache.quantised.scale,
        "layout": cache.layout,
        "tokens": problem.local_tokens,
        "heads": problem.local_heads,
        "dims": (problem.head_dim, problem.value_dim),
        "page_size": cache.page_size,
        "table": (problem.cache.local_sequences, problem.cache.table_width // problem.sequence_shards),
        "sequence_shards": problem.sequence_shards,
        "max_q_len": problem.max_q_len,
        **({} if problem.top_k is None else {"top_k": problem.top_k}),
        "writes": problem.update == "fused",  # a kernel that writes takes more memory and cycles
        "mask": problem.mask.describe(),
        "features": sorted(problem.features),
        "config": {
            name: value for name, value in problem.config.to_dict().items() if name not in ("operation", "update")
        },
        "versions": versions(),
    }


def step_candidates(problem: PagedProblem) -> tuple[dict[str, int], ...]:
    """What a search tries. The first candidate declares nothing and is the rule's choice."""
    names, width = step_fields(problem), problem.cache.table_width // problem.sequence_shards
    pages = dict.fromkeys(max(1, min(keys // problem.page_size, width)) for keys in _KEYS)
    queries = [n for n in _QUERIES if n < 2 * problem.local_tokens] or [_QUERIES[0]]
    sizes = {"pages_per_block": list(pages), "queries_per_block": queries}
    candidates: list[dict[str, int]] = [{}]
    for name in names:
        candidates = [candidate | {name: size} for candidate in candidates for size in sizes[name]]
    return ({}, *candidates) if names else ()
