"""materialise: evaluate a mask over a rectangle of rows and keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import MaskError, shown
from .checks import is_host, whole
from .int_arrays import beyond_int32, is_integer, min_and_max
from .node import Node

__all__ = ["materialise"]


def materialise(mask: Node[Any], q_slice: slice, kv_slice: slice, query_offset: Any) -> Any:
    """See Mask.materialise."""
    q_slice, kv_slice = _bounded(q_slice, "q_slice"), _bounded(kv_slice, "kv_slice")
    # int32 on both sides, the type of indices on devices, as strict dtype promotion requires equal dtypes.
    rows = np.arange(q_slice.start, q_slice.stop, dtype=np.int32)[None, None, :, None]
    cols = np.arange(kv_slice.start, kv_slice.stop, dtype=np.int32)[None, None, None, :]
    seen = mask.narrow(q_slice, kv_slice).test(rows, rows + _offset(query_offset), cols)
    shape = np.broadcast_shapes(seen.shape, (1, 1, rows.shape[2], cols.shape[3]))
    if seen.shape == shape:
        return seen
    return np.array(np.broadcast_to(seen, shape)) if is_host(seen) else jnp.broadcast_to(seen, shape)


def _offset(query_offset: Any) -> Any:
    """An int, or an array that broadcasts over [batch, heads, q, kv]."""
    if not hasattr(query_offset, "dtype") or isinstance(query_offset, np.generic):
        return whole(query_offset, "query_offset")
    shape = query_offset.shape
    if len(shape) > 1 or not is_integer(query_offset.dtype):
        got = f"{query_offset.dtype}{list(shape)}"
        raise MaskError(f"query_offset is {got}; wanted an int or an integer array [batch]: use Positions for more")
    reason = beyond_int32(query_offset, "query_offset")
    if reason:
        raise MaskError(reason)
    for number in min_and_max(query_offset) if is_host(query_offset) else ():
        whole(number, "query_offset")
    offset = query_offset.astype(np.int32)
    return offset[:, None, None, None] if shape else offset


def _bounded(bounds: slice, name: str) -> slice:
    if not isinstance(bounds, slice) or bounds.stop is None or bounds.step not in (None, 1):
        raise MaskError(f"{name}={shown(bounds)}; wanted slice(start, stop) of global indices, without a step")
    start = whole(bounds.start or 0, f"{name} start", minimum=0)
    stop = whole(bounds.stop, f"{name} stop", minimum=0)
    if stop < start:
        raise MaskError(f"{name}={shown(bounds)} ends before it starts; wanted start <= stop")
    return slice(start, stop)
