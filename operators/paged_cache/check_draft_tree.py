"""check_draft_tree: whether the matrices of a step's drafts are trees of the batch's rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ...errors import InputError
from ...masks.int_arrays import known_values
from .batch import RaggedBatch

__all__ = ["check_draft_tree"]


def check_draft_tree(batch: RaggedBatch, tree: Any, *, debug: bool) -> None:
    """Refuse a tree [rows, drafts, drafts] that isn't one: each token sees itself, its parent, and what the parent sees. Traced
    ones are checked while the step runs, with `debug`. Errors: InputError with the row and the draft."""
    rows = int(np.prod(batch.kv_lens.shape))
    if len(tree) != rows:
        raise InputError(f"draft_tree has {len(tree)} matrices; wanted {rows}, one for each row of the batch.")
    arrays = (tree, batch.cu_q_lens, batch.num_seqs)
    known = [known_values(x) for x in arrays]
    if all(x is not None for x in known):
        _check(*known)
    elif debug:
        jax.debug.callback(_check, *arrays)


def _check(tree: Any, starts: Any, counts: Any) -> None:
    tree, starts, counts = np.asarray(tree), np.asarray(starts), np.atleast_1d(counts)
    drafts = tree.shape[1]
    q_lens = np.diff(starts.reshape(len(counts), -1))
    used = np.arange(q_lens.shape[1]) < counts[:, None]
    for row in np.flatnonzero(used & (q_lens > 0)):
        matrix, q_len = tree[row], int(q_lens.flat[row])
        if not matrix.any():
            continue
        where = f"draft_tree[{row}]"
        if q_len > drafts:
            raise InputError(
                f"{where} is a tree of {drafts} drafts, but the row has {q_len} tokens; wanted a matrix for all of them, or one "
                "without a True, for a row without a tree."
            )
        for draft in range(q_len):
            if problem := _problem(matrix, draft):
                raise InputError(f"{where}: draft {draft} {problem}.")


def _problem(matrix: np.ndarray, draft: int) -> str:
    """What is wrong with a draft's row of a matrix, if those before it are right."""
    seen = np.flatnonzero(matrix[draft])
    if not matrix[draft, draft]:
        return "doesn't see itself; wanted True on the diagonal"
    if seen[-1] > draft:
        return f"sees draft {seen[-1]}, which comes after it; wanted a lower triangular matrix, parents before children"
    if len(seen) == 1:
        return ""
    parent = seen[-2]
    extra = np.flatnonzero(matrix[parent, :draft] != matrix[draft, :draft])
    if extra.size:
        verb = "doesn't see" if matrix[parent, extra[0]] else "sees"
        return f"{verb} draft {extra[0]}, unlike its parent {parent}; wanted all that the parent sees, and itself"
    return ""
