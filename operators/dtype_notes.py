"""What a plan says of arrays that are computed in fewer bits than given."""

from __future__ import annotations

import jax
import numpy as np

from ..planning.notes import note
from ..registry import OperationMetadata
from .arguments import Arrays

__all__ = ["width_notes"]


def width_notes(arrays: Arrays, metadata: OperationMetadata) -> list[str]:
    """Notes on float64 arrays computed in float32; query, key and value are cast to the declared run-time dtype."""
    notes: list[str] = []
    softmax = f"{metadata.runtime_softmax_dtype.name} (runtime_softmax_dtype)"
    used = {"bias": softmax, "softmax_aux": softmax, "key_scale": "float32", "value_scale": "float32"}
    for name in ("query", "key", "value", *used):
        x = getattr(arrays, name)
        if x is None or x.dtype != np.float64:
            continue
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            notes.append(note("dtype.narrowed_x64", name=name))
        elif name in used and not used[name].startswith("float64"):
            notes.append(note("dtype.narrowed", name=name, dtype=used[name]))
    return notes
