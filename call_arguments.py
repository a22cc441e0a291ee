"""CallArguments: the arguments of a call other than query, key and value, defined only here, with the accepted types."""

from __future__ import annotations

from typing import TypeAlias, TypedDict

import jax
import numpy as np

from .masks import Mask
from .scores import Score

__all__ = ["CALL_ARGUMENTS", "CALL_OPTIONS", "CallArguments", "CallArray", "CallOptions", "PlainArguments"]

# A ShapeDtypeStruct is for planning only.
CallArray: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class _CallArrays(TypedDict, total=False):
    mask: Mask | CallArray | None
    score: Score | None
    bias: CallArray | None
    q_segment_ids: CallArray | None
    kv_segment_ids: CallArray | None
    kv_lengths: CallArray | None
    kv_starts: CallArray | None
    softmax_aux: CallArray | None
    key_scale: CallArray | None
    value_scale: CallArray | None
    dropout_rng: CallArray | None


class _OtherOptions(TypedDict, total=False):
    causal: bool | None
    sliding_window: int | tuple[int | None, int | None] | None
    query_offset: int | CallArray | None  # an array, with one value per row, isn't static
    softmax_scale: float | None
    logits_soft_cap: float | None
    dropout_prob: float | None
    deterministic: bool
    mode: str | None
    layout: str


class CallOptions(_OtherOptions, total=False):
    """The static arguments, which are compiled in. A declaration file has a field for each."""

    return_weights: bool
    return_lse: bool


class PlainArguments(_CallArrays, _OtherOptions, total=False):
    """The keyword arguments of a call, less those that say what it returns."""


class CallArguments(_CallArrays, CallOptions, total=False):
    """The keyword arguments of a call, and of `plan` and `explain`."""


CALL_OPTIONS = tuple(CallOptions.__annotations__)
CALL_ARGUMENTS = ("query", "key", "value", *CallArguments.__annotations__)
