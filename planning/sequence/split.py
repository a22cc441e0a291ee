"""SequenceSplit: how queries see all keys if the sequence is split over devices, from what is declared and what fits."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from ..problem import AttentionProblem

__all__ = [
    "SequenceSplit",
    "is_triangular",
    "loop_from",
    "split_sequence",
]


@dataclass(frozen=True)
class SequenceSplit:
    """The split of a sequence, and how each query sees all keys.

    strategy: '' if nothing is split, a declared strategy other than 'auto', or 'split_kv': whole queries, keys stay split.
    axes: the mesh axes that split the queries outside the operation (for 'split_kv' the keys); shards: their size.
    ring_axes: the axes around which keys are sent; head_axes: those that split heads instead of the sequence inside.
    steps: the distances around the ring, in shards, at which some device may see some key; 0 comes first.
    zigzag: a device works on two chunks of the sequence, the k-th from the start and the k-th from the end.
    full_chunk_pairs: on a zigzag ring, every chunk of the queries sees all of every earlier chunk of the keys.
    gathers: keys enter the operation split like the queries, and are gathered inside.
    declared: the axes that the rules name for the queries' sequence, whether they fit or not.
    gathered_queries: for 'split_kv', the axes that split the queries outside; inside, queries are whole.
    """

    strategy: str = ""
    axes: tuple[str, ...] = ()
    shards: int = 1
    ring_axes: tuple[str, ...] = ()
    ring_size: int = 1
    head_axes: tuple[str, ...] = ()
    head_size: int = 1
    steps: tuple[int, ...] = ()
    zigzag: bool = False
    full_chunk_pairs: bool = False
    gathers: bool = False
    declared: tuple[str, ...] = ()
    gathered_queries: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """The number of chunks of a device's queries and keys."""
        return 2 if self.zigzag else 1

    def changes(self) -> tuple[str, ...]:
        """What happens to the tensors inside the operation, one line per step."""
        over, around, heads = ("+".join(axes) for axes in (self.axes, self.ring_axes, self.head_axes))
        lines = []
        if self.gathered_queries:
            gathered = "+".join(self.gathered_queries)
            lines.append(f"query: gathered along q_len over {gathered}: every query attends to each part of the keys")
        if self.strategy == "split_kv":
            lines.append(f"key, value: stay split over {over}; each device attends to its part, outputs merged by lse")
        if self.head_axes:
            lines.append(
                f"query, key, value: all-to-all over {heads}: each device gets {self._whole} of a share of the heads"
            )
        if self.ring_axes:
            skipped = self.ring_size - len(self.steps)
            seen = f"; {skipped} are left out, as the mask hides all their keys" if skipped else ""
            lines.append(
                f"key, value: travel around {around} in {len(self.steps) - 1} of {self.ring_size - 1} steps, outputs merged by "
                f"lse{seen}"
            )
        if self.zigzag:
            lines.append(
                f"query, key, value: in zigzag order around {around} (one piece from the start, one from the end), so that under "
                "the causal mask all devices have equal work"
            )
        return tuple(lines)

    @property
    def _whole(self) -> str:
        return "longer parts of the sequence" if self.ring_axes else "whole sequences"


def split_sequence(
    problem: AttentionProblem,
    strategy: str,
    order: str | None,
    query_axes: tuple[str, ...],
    key_axes: tuple[str, ...],
    declared: tuple[str, ...],
) -> SequenceSplit:
    """The split by the axes that fit the queries' and the keys' sequence; `declared` are all axes that the rules name.

    'ulysses_ring' splits heads over the last declared axis and sends keys around the others. 'split_kv' leaves keys in place,
    whether queries are split or not.
    """
    sizes = {axis.name: axis.size for axis in problem.mesh}

    def size(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[a] for a in axes)

    if not query_axes and not key_axes:
        return SequenceSplit(declared=declared)
    if strategy == "split_kv" or not query_axes:
        if strategy == "gather" or not key_axes:
            return SequenceSplit("gather", declared=declared)
        return SequenceSplit("split_kv", key_axes, size(key_axes), declared=declared, gathered_queries=query_axes)
    heads = {"ulysses": query_axes, "ulysses_ring": tuple(a for a in query_axes if a == declared[-1])}.get(strategy, ())
    ring = () if strategy == "gather" else tuple(a for a in query_axes if a not in heads)
    zigzag = bool(ring) and _zigzag(problem, size(ring), order)
    steps = _steps(problem, size(ring), zigzag=zigzag) if ring else ()
    return SequenceSplit(
        strategy,
        query_axes,
        size(query_axes),
        ring,
        size(ring),
        heads,
        size(heads),
        steps,
        zigzag,
        zigzag and problem.mask.is_static and is_triangular(problem, size(ring), whole=True),
        strategy == "gather" and key_axes == query_axes,
        declared,
    )


def loop_from(steps: tuple[int, ...]) -> int | None:
    """The step from which a ring's steps are alike and enough for a loop; None if they are compiled one by one."""
    moves = [after - before for before, after in itertools.pairwise(steps)]
    alike = next((i for i in range(len(moves)) if len(set(moves[i:])) == 1), len(moves))
    return alike if len(moves) - alike > 2 else None


def _steps(problem: AttentionProblem, shards: int, *, zigzag: bool) -> tuple[int, ...]:
    """The distances at which some device may see some key."""
    every = tuple(range(shards))
    chunks = 2 * shards if zigzag else shards
    if problem.dynamic_query_offset or "mask_function" in problem.features:
        return every
    if problem.kv_len % chunks or problem.q_len % chunks:
        return every
    rows, keys = np.nonzero(_block_mask(problem, chunks))
    if zigzag:  # of twice as many chunks, a device has one from the start and its counterpart from the end
        rows, keys = (np.minimum(x, chunks - 1 - x) for x in (rows, keys))
    return tuple(sorted({0, *((rows - keys) % shards).tolist()}))


def _zigzag(problem: AttentionProblem, shards: int, order: str | None) -> bool:
    """Whether to use zigzag order: if declared, or if unset and it balances the work, that is, if all steps are needed and later
    rows see more."""
    if order is not None:
        return order == "zigzag"
    if len(_steps(problem, shards, zigzag=False)) < shards or "mask_function" in problem.features:
        return False
    return is_triangular(problem, shards)


def is_triangular(problem: AttentionProblem, shards: int, *, whole: bool = False) -> bool:
    """Whether, of twice as many chunks as shards, no chunk sees a later one, for any values of the call's arrays. `whole`:
    and every chunk sees all of all earlier ones.
    """
    chunks = 2 * shards
    if problem.dynamic_query_offset or problem.q_len % chunks or problem.kv_len % chunks:
        return False
    block_mask = _block_mask(problem, chunks)
    return not np.triu(block_mask, 1).any() and (
        not whole or bool((block_mask[np.tril_indices(chunks, -1)] == 2).all())
    )


@functools.lru_cache(maxsize=256)
def _static_block_mask(mask: object, chunks: int, q_len: int, kv_len: int, offset: int) -> np.ndarray:
    static = mask.split_static()[0]  # type: ignore[attr-defined]
    return static.live_blocks(q_len // chunks, kv_len // chunks, q_len=q_len, kv_len=kv_len, query_offset=offset)


def _block_mask(problem: AttentionProblem, chunks: int) -> np.ndarray:
    """Which chunks of the queries see which chunks of the keys, by the static part of the mask."""
    return _static_block_mask(problem.mask, chunks, problem.q_len, problem.kv_len, problem.query_offset or 0)
