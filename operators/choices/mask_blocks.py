"""Tiles for a mask of blocks: sizes that its blocks suggest, and what a plan says of the visited tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...masks import Blocks, ChosenBlocks, Full, Mask, Slot
from ...planning import AttentionProblem, Placement
from ...planning.notes import has_note, note

__all__ = ["block_remarks", "fitted_block", "has_blocks", "heads_differ", "in_whole_blocks"]

_MAX_TILES = 1 << 21  # the most tiles to count for a note


def heads_differ(problem: AttentionProblem) -> bool:
    """Whether heads have different blocks."""
    static = any(isinstance(atom, Blocks) and atom.heads > 1 for atom in problem.mask.leaves())
    return static or any("q_blocks" in leaf.dims and leaf.shape[1] > 1 for leaf in problem.leaves)


def has_blocks(problem: AttentionProblem) -> bool:
    """Whether a part of the mask defines visible blocks."""
    return bool(_leaves(problem.mask))


def in_whole_blocks(problem: AttentionProblem, block_q: int, block_kv: int) -> bool:
    """Whether the mask has blocks that each visible key passes, and each tile lies in one of them, the same for all heads."""
    leaves, parts = _leaves(problem.mask), problem.mask.conjuncts()
    whole = all(leaf.block_q % block_q == 0 and leaf.block_kv % block_kv == 0 for leaf in leaves)
    passed = all(any(leaf is part for part in parts) for leaf in leaves)
    return bool(leaves) and whole and passed and not heads_differ(problem)


def fitted_block(mask: Mask, axis: str, size: int, length: int, min_size: int) -> int:
    """A tile size of at most `size` along 'q' or 'kv' that the mask's blocks divide, or that divides them.

    It isn't below `min_size`: smaller blocks share a tile. A block that covers the whole length makes no demand.
    """
    for block in (getattr(leaf, f"block_{axis}") for leaf in _leaves(mask)):
        if block >= length:
            continue
        if block <= size:
            size = min(size, block * math.ceil(min_size / block))
            continue
        dividing = [n for n in range(min_size, size + 1) if block % n == 0]
        size = dividing[-1] if dividing else size
    return size


def block_remarks(
    problem: AttentionProblem, placement: Placement, block_q: int, block_kv: int, tables: int
) -> tuple[str, ...]:
    """What is visited, compared with the same mask without its blocks; what is rounded to tiles; which choices are merged.

    tables: groups of a device's heads whose tiles are visited separately.
    """
    leaves = _leaves(problem.mask)
    if not leaves or "length" in problem.symbolic:
        return ()
    notes = [note("blocks.density", density=_density(problem, leaf)) for leaf in leaves]
    tile = f"{block_q}x{block_kv}"
    counted = _counted(problem, placement, block_q, block_kv, tables)
    if counted is not None:
        visited, without, every, of = counted
        share = visited / max(without, 1)
        notes.append(note("blocks.visits", visited=visited, every=every, of=of, without=without, share=share))
    else:
        notes.append(note("blocks.chosen", tile=tile))
    cut = [f"{leaf.block_q}x{leaf.block_kv}" for leaf in leaves if leaf.block_q % block_q or leaf.block_kv % block_kv]
    if cut:
        notes.append(note("blocks.rounded", blocks=cut, tile=tile))
    heads_per_table = placement.local.q_heads // tables
    shared = has_note(problem.notes, "blocks.shared") and heads_per_table <= problem.q_heads // problem.kv_heads
    if heads_differ(problem) and heads_per_table > 1 and not shared:
        notes.append(note("blocks.together", heads=heads_per_table))
    return tuple(notes)


def _leaves(mask: Mask) -> list[Any]:
    return [a for a in mask.leaves() if isinstance(a, Blocks) or (isinstance(a, Slot) and a.kind == ChosenBlocks.kind)]


def _density(problem: AttentionProblem, leaf: Any) -> str:
    size = f"{leaf.block_q}x{leaf.block_kv}"
    if isinstance(leaf, Blocks):
        return f"a layout of {size} blocks, {leaf.density:.3g} of them seen"
    choices = [x for x in problem.leaves if "q_blocks" in x.dims]
    slots = [atom for atom in _leaves(problem.mask) if isinstance(atom, Slot)]
    shape, dtype = next((x.shape, x.dtype) for x, slot in zip(choices, slots, strict=True) if slot is leaf)
    if dtype == "bool":
        return f"{size} blocks, chosen at run time"
    count = math.ceil(problem.kv_len / leaf.block_kv)
    return f"{shape[3]} of {count} {size} blocks chosen at run time, at most {min(1.0, shape[3] / count):.3g} of them"


def _counted(
    problem: AttentionProblem, placement: Placement, block_q: int, block_kv: int, tables: int
) -> tuple[float, float, int, str] | None:
    """(what a head visits on average, what it would without the blocks, all, of what); None if it isn't known before the run."""
    mask, leaves = problem.mask, _leaves(problem.mask)
    known = all(isinstance(leaf, Blocks) for leaf in leaves)
    if not known or problem.dynamic_query_offset or "mask_function" in problem.features:
        return None
    heads = max(leaf.heads for leaf in leaves)
    of = "tiles"
    if heads * math.ceil(problem.q_len / block_q) * math.ceil(problem.kv_len / block_kv) > _MAX_TILES:
        # If there are many tiles, those in one block of the mask are counted as one.
        block_q, block_kv = (
            size * max(1, max(getattr(leaf, f"block_{axis}") for leaf in leaves) // size)
            for axis, size in (("q", block_q), ("kv", block_kv))
        )
        of = "groups of tiles"
    place = {"q_len": problem.q_len, "kv_len": problem.kv_len, "query_offset": problem.query_offset or 0}
    kinds = mask.live_blocks_by_head(block_q, block_kv, **place) > 0
    if len(kinds) > 1:
        every_table = problem.q_heads * tables // placement.local.q_heads  # over all devices
        kinds = np.array(kinds.reshape(every_table, -1, *kinds.shape[1:]).any(axis=1))
    without = mask.map_leaves(lambda atom: Full() if isinstance(atom, Blocks) else atom)
    dense = without.live_blocks(block_q, block_kv, **place) > 0
    visited = float(kinds.sum()) / len(kinds)
    return visited, float(dense.sum()), int(dense.size), f"{of} of {block_q}x{block_kv}"
