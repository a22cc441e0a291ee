"""jax.nn: dot_product_attention with jax's signature, semantics and ranks, run by a declared attention. Requires only jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import InputError, InputTypeError, UnknownNameError, shown
from ..masks.int_arrays import least_and_most
from ..operators.arguments import is_array, read_flag, read_number, read_window, shaped
from ..operators.attention import Attention
from ..operators.call_values import at_hand
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from .front import attend, declared_attention

__all__ = ["Implementation", "dot_product_attention"]

Implementation: TypeAlias = str | Path | Attention | Declaration | OperationMetadata | Mapping[str, Any]
_ROWS = "[batch, q, heads, dim] or [q, heads, dim]"
_JAXS = {
    "xla": "'vanilla' is attention on plain XLA",
    "cudnn": "'sdpa' is jax.nn's own, which takes cuDNN on CUDA",
}


def dot_product_attention(
    query: Float[Array, "*batch q heads dim"],
    key: Float[Array, "*batch kv kv_heads dim"],
    value: Float[Array, "*batch kv kv_heads value_dim"],
    bias: Float[Array, ...] | None = None,
    mask: Bool[Array, ...] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " batch"] | None = None,
    key_value_seq_lengths: Int[Array, " batch"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = "vanilla",
    return_residual: bool = False,
) -> Any:
    """Attend as jax.nn.dot_product_attention does; `implementation` chooses what runs it.

    Shapes: query [batch, q, heads, dim] or [q, heads, dim]; key and value likewise, with as many heads or a divisor of them;
    bias and mask broadcast to [batch, heads, q, kv]; lengths int [batch]. Positions count from the first query and the first
    key. local_window_size is (left, right), inclusive, None for no limit, or one distance for both sides.
    implementation: an operation's name, an Attention, a Declaration or its dict, the path of a JSON file, an
    OperationMetadata for 'vanilla'; None is 'vanilla'. Returns an array as the query, [..., q, heads, value_dim], and with
    return_residual also the log-sum-exps [..., q, heads], in the key's dtype and, without a gradient, as in jax.
    A query that may see no key, or that lies beyond its row's length, has output 0 and a log-sum-exp of -inf.
    Errors: InputError, InputTypeError, ConfigError, RefusedError and UnknownNameError name what is refused.
    """
    attention = _attention(implementation)
    if not attention.enabled:
        own: Any = jax.nn.dot_product_attention
        return own(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            return_residual=return_residual,
        )  # fmt: skip
    causal, residual = read_flag("is_causal", is_causal), read_flag("return_residual", return_residual)
    given = {"query": query, "key": key, "value": value}
    query, key, value = (_four(name, x) for name, x in given.items())
    rows, q_len = query.shape[0], query.shape[1]
    bias, mask = _array(bias), _mask(mask)
    q_lengths = _lengths("query_seq_lengths", query_seq_lengths, rows, q_len)
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, rows, key.shape[1])
    window, scale = read_window("local_window_size", local_window_size), _scale(scale)
    said = attention.declaration.call.query_offset
    found = attend(
        attention,
        query,
        key,
        value,
        layout="bthd",
        mask=mask,
        bias=bias,
        causal=causal,
        sliding_window=window,
        query_offset=0 if said is None and (causal or window is not None) else None,
        softmax_scale=scale,
        kv_lengths=kv_lengths,
        return_lse=residual,
    )
    output, lse = found.output, found.lse
    if q_lengths is not None:
        counts = jnp.arange(q_len)[None] < jnp.asarray(q_lengths)[:, None]
        output = jnp.where(counts[:, :, None, None], output, 0)
        lse = None if lse is None else jnp.where(counts[:, None], lse, -jnp.inf)
    shape = jnp.shape(given["query"])[:-1]
    output = output.reshape(*shape, output.shape[-1])
    if lse is None:
        return output
    return output, jax.lax.stop_gradient(lse.swapaxes(1, 2).reshape(shape).astype(key.dtype))


def _attention(implementation: Any) -> Attention:
    """The Attention that an implementation names."""
    if implementation is None:
        implementation = "vanilla"
    if isinstance(implementation, OperationMetadata):
        return Attention("vanilla", metadata=implementation)
    try:
        return declared_attention(implementation, {})
    except UnknownNameError as error:
        if not isinstance(implementation, str) or implementation not in _JAXS:
            raise
        raise UnknownNameError(
            f"implementation={shown(implementation)} is a backend of jax.nn; here {_JAXS[implementation]}."
        ) from error


def _array(x: Any) -> Any:
    """An array as it is; anything else that numpy can convert, such as a list, as a numpy array."""
    return x if x is None or is_array(x) else np.asarray(x)


def _four(name: str, x: Any) -> Any:
    x = _array(x)
    shaped(name, x)
    if x.ndim not in (3, 4):
        raise InputError(f"{name} has shape {tuple(x.shape)}; wanted {_ROWS}.")
    return x if x.ndim == 4 else x[None]


def _mask(mask: Any) -> Any:
    mask = _array(mask)
    if mask is not None and mask.dtype != bool:
        raise InputTypeError(
            f"mask is {mask.dtype}; wanted bool, True where a query may attend. Hint: to add to the logits, pass bias."
        )
    return mask


def _lengths(name: str, lengths: Any, rows: int, most: int) -> Any:
    lengths = _array(lengths)
    if lengths is None:
        return None
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InputTypeError(f"{name} is {lengths.dtype}; wanted int32, one number per batch row.")
    if lengths.shape != (rows,):
        raise InputError(f"{name} has shape {tuple(lengths.shape)}; wanted {(rows,)}, one number per batch row.")
    values = at_hand(lengths)
    for number in () if values is None else least_and_most(values):
        if not 0 <= number <= most:
            raise InputError(f"{name} holds {number}; wanted 0 to {most}, the array's length.")
    return lengths


def _scale(scale: Any) -> float | None:
    if isinstance(scale, jax.core.Tracer):
        raise InputTypeError(
            "scale is traced; wanted a number, because it is a compile-time constant. Compute head_dim**-0.5 from Python or "
            "NumPy numbers, or multiply the query by it and pass scale=1."
        )
    if is_array(scale) and scale.ndim == 0:
        scale = float(scale)
    return read_number("scale", scale)
