"""The same work with jax.nn.dot_product_attention, or why that can't express it. It never runs different work silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..masks.causal_window import causal_window
from ..operators.kernels.default_promotion import default_promotion
from ..planning import FEATURES, AttentionProblem, Plan
from .materials import materials

__all__ = ["Baseline", "NotExpressible", "baseline"]

_ABSENT = ("logits_soft_cap", "score", "sinks", "dropout", "return_weights", "return_lse", "value_dim", "quantized_kv")
_LARGEST_MASK = 2**30


class Baseline(NamedTuple):
    """A function that does the same work, its arrays, and how the mask is passed to it."""

    function: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    mask: str


class NotExpressible(NamedTuple):
    """Why there is no baseline."""

    reason: str


class _Flags(NamedTuple):
    is_causal: bool
    window: tuple[int, int] | None
    lengths: bool


def baseline(plan: Plan, arrays: Mapping[str, Any]) -> Baseline | NotExpressible:
    """Express the call in terms of jax.nn. `arrays` are placed as the operation needs them; the baseline uses the same
    placement."""
    problem = plan.problem
    if reason := _why_not(problem):
        return NotExpressible(reason)
    flags = _flags(problem)
    mask = None
    if flags is None:
        tensors = materials(problem, {name: x for name, x in arrays.items() if name != "dropout_rng"})
        heads = problem.q_heads if problem.operand("bias") else 1
        if problem.batch * heads * problem.q_len * problem.kv_len > _LARGEST_MASK:
            return NotExpressible("its mask would be an array of more than 1 GiB")
        mask = tensors.visible(slice(0, problem.q_len))
    dtype = jnp.dtype(problem.runtime_dtype)
    q, k, v = (_bthd(arrays[name], problem.layout).astype(dtype) for name in ("query", "key", "value"))
    keyword_flags = flags or _Flags(False, None, False)

    def attend(query: Any, key: Any, value: Any, bias: Any, visible: Any, lengths: Any) -> jax.Array:
        with default_promotion():
            return jax.nn.dot_product_attention(
                query, key, value, bias, visible, scale=problem.softmax_scale, is_causal=keyword_flags.is_causal,
                local_window_size=keyword_flags.window, key_value_seq_lengths=lengths,
            )  # fmt: skip

    lengths = arrays["kv_lengths"] if keyword_flags.lengths else None
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
    return Baseline(attend, (q, k, v, arrays.get("bias"), mask, lengths), _words(keyword_flags, mask))


def _why_not(problem: AttentionProblem) -> str:
    absent = [FEATURES[name] for name in _ABSENT if name in problem.features]
    absent += problem.own_operands
    if absent:
        return f"it lacks {'; '.join(absent)}"
    if problem.softmax_dtype != "float32":
        return f"its softmax is in float32, but this call's is in {problem.softmax_dtype}"
    if problem.platform == "cpu" and problem.runtime_dtype == "float16":
        return "XLA has no float16 product with a float32 result on CPU"
    return ""


def _flags(problem: AttentionProblem) -> _Flags | None:
    """The mask as arguments of jax.nn, or None if only an array can express it."""
    static, dynamic = problem.mask.split_static()
    if any(part.kind != "kv_lengths" for part in dynamic) or len(dynamic) > 1:
        return None
    window = causal_window(static, offset=0)
    if window is None:
        return None
    if window.left is None and window.right is None:
        return _Flags(window.causal, None, bool(dynamic))
    if window.left is None or window.right is None:
        return None
    return _Flags(window.causal, (window.left, window.right), bool(dynamic))


def _words(flags: _Flags, mask: np.ndarray | None) -> str:
    if mask is not None:
        return f"mask as an array {'x'.join(map(str, mask.shape))}"
    words = ["is_causal"] if flags.is_causal else []
    words += [f"local_window_size={flags.window}"] if flags.window else []
    words += ["key_value_seq_lengths"] if flags.lengths else []
    return ", ".join(words) or "no mask"


def _bthd(x: jax.Array, layout: str) -> jax.Array:
    # The baseline gets its own layout from the start, so that its time includes no transposition.
    return x[None] if layout == "thd" else x.swapaxes(1, 2) if layout == "bhtd" else x
