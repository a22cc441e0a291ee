"""CallArguments: what a call takes beside query, key and value, written here once; the types are what a caller may give."""

from __future__ import annotations

from typing import TypeAlias, TypedDict

import jax
import numpy as np

from ..masks import Mask

__all__ = ["CALL_ARGUMENTS", "CALL_OPTIONS", "CallArguments", "CallArray"]

# A ShapeDtypeStruct can be planned with, not attended to.
CallArray: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class _CallArrays(TypedDict, total=False):
    mask: Mask | CallArray | None
    bias: CallArray | None
    q_segment_ids: CallArray | None
    kv_segment_ids: CallArray | None
    kv_lengths: CallArray | None
    kv_starts: CallArray | None
    softmax_aux: CallArray | None
    key_scale: CallArray | None
    value_scale: CallArray | None
    dropout_rng: CallArray | None


class CallOptions(TypedDict, total=False):
    """The static ones, part of what gets compiled; a declaration file has a field for each."""

    causal: bool | None
    sliding_window: int | tuple[int | None, int | None] | None
    query_offset: int | CallArray | None  # an array of one a row isn't static
    softmax_scale: float | None
    logits_soft_cap: float | None
    dropout_prob: float | None
    deterministic: bool
    return_weights: bool
    return_lse: bool
    mode: str | None
    layout: str


class CallArguments(_CallArrays, CallOptions, total=False):
    """The keywords of a call, of its plan and of its explanation."""


CALL_OPTIONS = tuple(CallOptions.__annotations__)
CALL_ARGUMENTS = ("query", "key", "value", *CallArguments.__annotations__)
