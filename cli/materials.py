"""What check and baseline need from a call: arrays as [batch, time, heads, dim], and the merged mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from ..masks import Mask
from ..planning import AttentionProblem
from ..verify.selection_error import chosen_keys

__all__ = ["Materials", "canonical", "materials"]


class Materials(NamedTuple):
    """A call's host arrays in canonical form and the run-time dtype. A quantised key or value is multiplied by its scale in
    float64. `query_offset` is an int or an array [batch]; `selected` are the positions [batch, q, n] that queries attend to, None
    for all."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    sinks: np.ndarray | None
    mask: Mask
    query_offset: int | np.ndarray
    selected: np.ndarray | None = None

    def visible(self, rows: slice) -> np.ndarray:
        """The mask for some query rows and all keys, bool [batch | 1, heads | 1, rows, kv]."""
        kv_len = self.key.shape[1]
        visible = np.asarray(self.mask.materialise(rows, slice(0, kv_len), query_offset=self.query_offset))
        return visible if self.selected is None else visible & chosen_keys(self.selected[:, rows], kv_len)[:, None]


def materials(problem: AttentionProblem, arrays: Mapping[str, Any]) -> Materials:
    """Collect the materials. The mask is the problem's, with the arrays in its slots."""
    if further := set(problem.own_operands) - {"selected"}:
        raise InputError(
            f"the float64 reference is one of attention and doesn't know {', '.join(sorted(further))}; run without --check."
        )
    dtype = jnp.dtype(problem.runtime_dtype)

    def tensor(name: str) -> np.ndarray:
        x = canonical(np.asarray(arrays[name]), problem.layout)
        if name not in problem.quantised:
            return x.astype(dtype)
        scale = arrays.get(f"{name}_scale")
        wide = x.astype(np.float64)
        return wide if scale is None else wide * canonical(np.asarray(scale), problem.layout).astype(np.float64)

    q, k, v = (tensor(name) for name in ("query", "key", "value"))
    mask = problem.mask.merge([_leaf(leaf.name, problem, arrays) for leaf in problem.leaves])
    offset: int | np.ndarray = 0 if problem.query_offset is None else problem.query_offset
    if problem.dynamic_query_offset:
        query_offset = arrays.get("query_offset")
        offset = np.asarray(arrays["kv_lengths"]) - problem.q_len if query_offset is None else np.asarray(query_offset)
    bias = None if "bias" not in arrays else np.asarray(arrays["bias"])
    selected = None
    if "selected" in problem.own_operands:
        selected = np.asarray(arrays["selected"])
        selected = selected[None] if problem.layout == "thd" else selected
    return Materials(q, k, v, bias, _sinks(problem, arrays), mask, offset, selected)


def canonical(x: np.ndarray, layout: str) -> np.ndarray:
    """An array of any layout as [batch, time, heads, dim]."""
    return x[None] if layout == "thd" else x.swapaxes(1, 2) if layout == "bhtd" else x


def _leaf(name: str, problem: AttentionProblem, arrays: Mapping[str, Any]) -> np.ndarray:
    other = {"q_segment_ids": "kv_segment_ids", "kv_segment_ids": "q_segment_ids"}.get(name, name)
    array = np.asarray(arrays[name] if name in arrays else arrays[other])
    return array[None] if problem.layout == "thd" and name.endswith("segment_ids") else array


def _sinks(problem: AttentionProblem, arrays: Mapping[str, Any]) -> np.ndarray | None:
    """[heads, sinks]: one row per query head."""
    if "softmax_aux" not in arrays:
        return None
    sinks = np.asarray(arrays["softmax_aux"], np.float64)
    sinks = sinks.reshape(len(sinks), -1)
    return np.repeat(sinks, problem.q_heads // len(sinks), axis=0)
