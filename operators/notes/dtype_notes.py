"""What a plan says of arrays that are computed in fewer bits than given."""

from __future__ import annotations

import jax
import numpy as np

from ...planning.notes import note
from ...registry import OperationMetadata
from ...sharding import ATTENTION
from ..call.arrays import Arrays

__all__ = ["width_notes"]


def width_notes(arrays: Arrays, metadata: OperationMetadata) -> list[str]:
    """Notes on float64 arrays computed in float32; query, key and value are cast to the declared run-time dtype."""
    notes: list[str] = []
    for name, x in arrays.by_name.items():
        operand = ATTENTION.get(name)
        if operand is None or operand.part != "operands" or x.dtype != np.float64:
            continue
        softmax = f"{metadata.runtime_softmax_dtype.name} (runtime_softmax_dtype)"
        used = softmax if operand.inside_dtype in ("given", "softmax") else operand.inside_dtype
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            notes.append(note("dtype.narrowed_x64", name=name))
        elif operand.optional and not used.startswith("float64"):
            notes.append(note("dtype.narrowed", name=name, dtype=used))
    return notes
