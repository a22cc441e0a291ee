"""jax.nn: dot_product_attention with jax's signature, semantics and ranks, run by a declared attention. Requires only jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import InputError, InputTypeError, UnknownNameError, shown
from ..masks.int_arrays import min_and_max
from ..operators.api.attention import Attention
from ..operators.api.read_option import read_flag, read_number, read_window
from ..operators.call.arrays import is_array, shaped
from ..operators.call.call_values import at_hand
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..scores import Score
from .front import Attended, attend, declared_attention, refuse_score

__all__ = ["Implementation", "as_jax_nn", "attention_named", "dot_product_attention"]

Implementation: TypeAlias = str | Path | Attention | Declaration | OperationMetadata | Mapping[str, Any]
_JAXS = {
    "xla": "'vanilla' is attention on plain XLA",
    "cudnn": "'sdpa' is jax.nn's own, which takes cuDNN on CUDA",
}


class _Options(TypedDict, total=False):
    """The keywords of dot_product_attention less return_residual, for its overloads."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Int[Array, "*batch"] | None
    key_value_seq_lengths: Int[Array, "*batch"] | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: Implementation | None
    score: Score | None


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = ...,
    mask: jax.Array | None = ...,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = ...,
    mask: jax.Array | None = ...,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: Float[Array, "*batch q heads dim"],
    key: Float[Array, "*batch kv kv_heads dim"],
    value: Float[Array, "*batch kv kv_heads value_dim"],
    bias: Float[Array, "*bias_shape"] | None = None,
    mask: Bool[Array, "*mask_shape"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*batch"] | None = None,
    key_value_seq_lengths: Int[Array, "*batch"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = "vanilla",
    return_residual: bool = False,
    score: Score | None = None,
) -> Any:
    """Attend as jax.nn.dot_product_attention does; `implementation` chooses what runs it.

    Shapes: query [*batch, q, heads, dim] with any number of batch dimensions; key and value likewise, with as many heads or a
    divisor of them; bias and mask broadcast to [*batch, heads, q, kv]; lengths int [*batch], [1] without a batch. Positions count
    from the first query and the first key. local_window_size is (left, right), inclusive, None for no limit, or one distance
    for both sides. implementation: an operation's name, an Attention, a Declaration or its dict, the path of a JSON file, an
    OperationMetadata for 'vanilla'; None is 'vanilla'. score: applied to the logits, with its arrays, whose batch dimensions are
    one; jax.nn has no such argument. Returns an array as the query, [*batch, q, heads, value_dim], and with
    return_residual also the log-sum-exps [*batch, q, heads], in the key's dtype and, without a gradient, as in jax.
    A query that may see no key, or that lies beyond its row's length, has output 0 and a log-sum-exp of -inf.
    Errors: InputError, InputTypeError, ConfigError, RefusedError and UnknownNameError name what is refused.
    """
    attention = attention_named(implementation, "jax.nn", _JAXS)
    if not attention.enabled:
        refuse_score(score)
        original: Any = jax.nn.dot_product_attention
        return original(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            return_residual=return_residual,
        )  # fmt: skip
    residual = read_flag("return_residual", return_residual)
    result = as_jax_nn(
        attention,
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        return_lse=residual,
        score=score,
    )
    if result.lse is None:
        return result.output
    return result.output, jax.lax.stop_gradient(result.lse.swapaxes(-1, -2).astype(_array(key).dtype))


def as_jax_nn(
    attention: Attention,
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    return_lse: bool = False,
    score: Any = None,
    **call: Any,
) -> Attended:
    """The call of `dot_product_attention`, with what else `attend` of the adapters takes; lse [*batch, heads, q]."""
    query, key, value = (_rows(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    batch, q_len = query.shape[:-3], query.shape[-3]
    bias, mask, causal = _array(bias), _mask(mask), read_flag("is_causal", is_causal)
    q_lengths = _lengths("query_seq_lengths", query_seq_lengths, batch, q_len)
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, key.shape[-3])
    window, scale = read_window("local_window_size", local_window_size), _scale(scale)
    declared_offset = attention.declaration.call.query_offset
    placed = causal or window is not None or (isinstance(score, Score) and score.needs_positions)
    result = attend(
        attention,
        query,
        key,
        value,
        layout="bthd",
        mask=mask,
        bias=bias,
        causal=causal,
        sliding_window=window,
        query_offset=0 if declared_offset is None and placed else None,
        softmax_scale=scale,
        kv_lengths=kv_lengths,
        return_lse=return_lse,
        score=score,
        **call,
    )
    output, lse = result.output, result.lse
    if q_lengths is not None:
        counts = jnp.arange(q_len, dtype=jnp.int32)[None] < jnp.asarray(q_lengths, jnp.int32)[:, None]
        output = jnp.where(counts.reshape(*batch, q_len, 1, 1), output, 0)
        lse = None if lse is None else jnp.where(counts.reshape(*batch, 1, q_len), lse, -jnp.inf)
    return result._replace(output=output, lse=lse)


def attention_named(implementation: Any, library: str, backends: Mapping[str, str]) -> Attention:
    """The Attention that an implementation names. `backends`: what to use here instead of the library's own, by name."""
    if implementation is None:
        implementation = "vanilla"
    if isinstance(implementation, OperationMetadata):
        return Attention("vanilla", metadata=implementation)
    try:
        return declared_attention(implementation, {})
    except UnknownNameError as error:
        if not isinstance(implementation, str) or implementation not in backends:
            raise
        raise UnknownNameError(
            f"implementation={shown(implementation)} is a backend of {library}; here {backends[implementation]}."
        ) from error


def _array(x: Any) -> Any:
    """An array as it is; anything else that numpy can convert, such as a list, as a numpy array."""
    return x if x is None or is_array(x) else np.asarray(x)


def _rows(name: str, x: Any) -> Any:
    x = _array(x)
    shaped(name, x)
    if x.ndim < 3:
        raise InputError(f"{name} has shape {tuple(x.shape)}; wanted [*batch, length, heads, dim].")
    return x


def _mask(mask: Any) -> Any:
    mask = _array(mask)
    if mask is not None and mask.dtype != bool:
        raise InputTypeError(
            f"mask is {mask.dtype}; wanted bool, True where a query may attend. Hint: to add to the logits, pass bias."
        )
    return mask


def _lengths(name: str, lengths: Any, batch: tuple[int, ...], max_length: int) -> Any:
    """Lengths of all rows, in one dimension."""
    lengths, expected = _array(lengths), batch or (1,)
    if lengths is None:
        return None
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InputTypeError(f"{name} is {lengths.dtype}; wanted int32, one number per batch row.")
    if lengths.shape != expected:
        raise InputError(f"{name} has shape {tuple(lengths.shape)}; wanted {expected}, one number per batch row.")
    values = at_hand(lengths)
    for number in () if values is None else min_and_max(values):
        if not 0 <= number <= max_length:
            raise InputError(f"{name} holds {number}; wanted 0 to {max_length}, the array's length.")
    return lengths.reshape(-1)


def _scale(scale: Any) -> float | None:
    if isinstance(scale, jax.core.Tracer):
        raise InputTypeError(
            "scale is traced; wanted a number, because it is a compile-time constant. Compute head_dim**-0.5 from Python or "
            "NumPy numbers, or multiply the query by it and pass scale=1."
        )
    if is_array(scale) and scale.ndim == 0:
        scale = float(scale)
    return read_number("scale", scale)
