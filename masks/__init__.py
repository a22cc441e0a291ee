"""Masks: which query may attend to which key, as a small closed algebra.

Static leaves: Full, Causal, SlidingWindow, Chunked, Prefix, MaskFunction, Blocks. Dynamic leaves: SegmentIds,
Lengths, Positions, Dense, ChosenBlocks. `&`, `|` and `~` combine masks into And, Or and Not. See Mask for the methods.
"""

from __future__ import annotations

from . import pytrees as pytrees  # registers the pytrees
from .algebra import And, Full, Mask, Not, Or
from .block_sparse import Blocks, ChosenBlocks
from .dynamic import Dense, Lengths, Positions, SegmentIds
from .functions import MaskFunction, mask_function_names, register_mask_function
from .node import Leaf
from .patterns import a_shape, bigbird, dilated_blocks, local_blocks, longformer, strided_blocks
from .pydantic_field import mask_json_schema
from .registration import register_mask
from .serial import mask_from_dict
from .slots import SEGMENT_IDS, DynamicMask, Slot, has_place
from .spans import span_ids
from .static import Causal, Chunked, OffsetMask, Prefix, SlidingWindow, window_tokens

__all__ = [
    "SEGMENT_IDS",
    "And",
    "Blocks",
    "Causal",
    "ChosenBlocks",
    "Chunked",
    "Dense",
    "DynamicMask",
    "Full",
    "Leaf",
    "Lengths",
    "Mask",
    "MaskFunction",
    "Not",
    "OffsetMask",
    "Or",
    "Positions",
    "Prefix",
    "SegmentIds",
    "SlidingWindow",
    "Slot",
    "a_shape",
    "bigbird",
    "dilated_blocks",
    "has_place",
    "local_blocks",
    "longformer",
    "mask_from_dict",
    "mask_function_names",
    "mask_json_schema",
    "register_mask",
    "register_mask_function",
    "span_ids",
    "strided_blocks",
    "window_tokens",
]
