"""Shapes and dtypes of a step's arrays that say which keys its tokens see; their values are checked with the batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...errors import InputError
from ..call.arrays import shaped
from .step_arguments import Step, StepArrays

__all__ = ["check_shapes"]


def check_shapes(step: Step, arrays: StepArrays, tokens: int) -> None:
    """Refuse what a step of so many tokens can't use. Errors: InputError."""
    for name, array, check in (
        ("selected", arrays.selected, _check_selected),
        ("draft_tree", arrays.draft_tree, _check_tree),
        ("spans", arrays.spans, _check_spans),
        ("prefix_lengths", arrays.prefix_lengths, _check_prefix),
        ("q_positions", arrays.q_positions, _check_positions),
    ):
        if array is None:
            continue
        if step.mode == "insert":
            raise InputError(f"{name} is given in mode 'insert', which attends to nothing; leave it out.")
        check(shaped(name, array), tokens)


def _check_selected(selected: Any, tokens: int) -> None:
    if not jnp.issubdtype(selected.dtype, jnp.integer):
        raise InputError(f"selected is {selected.dtype}; wanted int32: positions in each token's sequence.")
    if len(selected.shape) != 2 or selected.shape[0] != tokens or not selected.shape[1]:
        raise InputError(
            f"selected has shape {tuple(selected.shape)}; wanted [tokens, n] with {tokens} tokens and n from 1 on."
        )


def _check_tree(tree: Any, tokens: int) -> None:
    if tree.dtype != bool:
        raise InputError(f"draft_tree is {tree.dtype}; wanted bool: which drafts each draft sees.")
    shape = tuple(tree.shape)
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        raise InputError(
            f"draft_tree has shape {shape}; wanted [rows, drafts, drafts], a square matrix for each row of the batch."
        )


def _check_spans(spans: Any, tokens: int) -> None:
    if not jnp.issubdtype(spans.dtype, jnp.integer):
        raise InputError(f"spans is {spans.dtype}; wanted int32: positions in each token's sequence.")
    if tuple(spans.shape) != (tokens, 2):
        raise InputError(
            f"spans has shape {tuple(spans.shape)}; wanted [tokens, 2] = ({tokens}, 2): the first position of each token's span, "
            "and one past the last."
        )


def _check_prefix(lengths: Any, tokens: int) -> None:
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InputError(f"prefix_lengths is {lengths.dtype}; wanted int32: tokens of each row's prefix.")
    if len(lengths.shape) != 1 or not lengths.shape[0]:
        raise InputError(
            f"prefix_lengths has shape {tuple(lengths.shape)}; wanted [rows], a number for each row of the batch."
        )


def _check_positions(positions: Any, tokens: int) -> None:
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise InputError(f"q_positions is {positions.dtype}; wanted int32: one of each token.")
    if tuple(positions.shape) != (tokens,):
        raise InputError(f"q_positions has shape {tuple(positions.shape)}; wanted [tokens] = ({tokens},).")
