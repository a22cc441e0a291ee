"""check_visibility: the values of a step's arrays that say which keys its tokens see."""

from __future__ import annotations

from typing import Any

from .batch import RaggedBatch
from .check_draft_tree import check_draft_tree
from .check_selected import check_selected
from .check_spans import check_positions, check_spans

__all__ = ["check_visibility"]


def check_visibility(batch: RaggedBatch, arrays: Any, window_tokens: int | None, *, debug: bool) -> None:
    """Check `selected`, `draft_tree`, `spans`, `prefix_lengths` and `q_positions` of a step, each None if it isn't
    given. window_tokens: of the layer's group. Errors: InputError with the place."""
    if arrays.selected is not None:
        check_selected(batch, arrays.selected, debug=debug)
    if arrays.draft_tree is not None:
        check_draft_tree(batch, arrays.draft_tree, debug=debug)
    if arrays.spans is not None or arrays.prefix_lengths is not None:
        check_spans(batch, arrays.spans, arrays.prefix_lengths, arrays.draft_tree, window_tokens, debug=debug)
    if arrays.q_positions is not None:
        check_positions(batch, arrays.q_positions, debug=debug)
