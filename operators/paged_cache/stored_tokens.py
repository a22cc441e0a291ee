"""Tokens in the form in which pages store them: quantised here, or by the caller."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...errors import InputError, InputTypeError, a_type
from ...page_layouts import LAYOUTS
from ...planning.cache.kv_cache import KVCache
from .layer_arrays import LayerPages

__all__ = ["as_stored", "check_no_values", "check_token_scale", "quantised_tokens"]


def check_no_values(value: Any, scale: Any) -> None:
    """Refuse values, and their scale, for a cache of latents. Errors: InputError."""
    for name, x in (("value", value), ("value_scale", scale)):
        if x is not None:
            raise InputError(f"{name} is given for a cache of latents, whose values are in its keys; wanted None.")


def check_token_scale(cache: KVCache, name: str, tokens: Any, scale: Any) -> None:
    """Check the dtype of tokens [tokens, heads, dim], and the scale of tokens that come quantised.

    Errors: InputTypeError for a dtype that is neither the declared one nor that of quantised pages; InputError for a scale that
    is missing, has no place in the cache, or has another shape than [tokens, heads].
    """
    quantised, dtype = cache.quantised, jnp.dtype(tokens.dtype)
    comes_quantised = quantised is not None and dtype == jnp.dtype(quantised.dtype)
    if comes_quantised and cache.rope_size:
        raise InputTypeError(
            f"{name} is {dtype}, but the cache stores rotary keys in {cache.rope_dtype}, apart from their latents; pass it as "
            f"{cache.dtype}, to be quantised here."
        )
    if dtype != jnp.dtype(cache.dtype) and not comes_quantised:
        or_stored = "" if quantised is None else f" and stores {quantised.dtype}"
        raise InputTypeError(
            f"{name} is {dtype}, but the cache is declared {cache.dtype}{or_stored}; convert it, or declare that dtype for the "
            "cache."
        )
    scale_name = f"{name}_scale"
    if not comes_quantised or quantised is None or quantised.scale != "token_head":
        if scale is not None:
            why = (
                f"the cache has one {scale_name} per {quantised.scale}, which its state holds"
                if comes_quantised and quantised is not None
                else f"{name} doesn't come quantised"
            )
            raise InputError(f"{scale_name} is given, but {why}; leave it out.")
        return
    if scale is None:
        raise InputError(
            f"{scale_name} is missing: {name} comes as {dtype}, and the cache has a scale per token and head; pass it, "
            f"[tokens, kv_heads], or pass {name} as {cache.dtype}, to be quantised here."
        )
    if not hasattr(scale, "dtype") or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise InputTypeError(
            f"{scale_name} is {getattr(scale, 'dtype', a_type(scale))}; wanted floating point, [tokens, kv_heads]."
        )
    if tuple(scale.shape) != tuple(tokens.shape[:2]):
        raise InputError(
            f"{scale_name} has shape {tuple(scale.shape)}; wanted {tuple(tokens.shape[:2])}, [tokens, kv_heads]."
        )


def as_stored(
    cache: KVCache,
    pages: LayerPages,
    kv_heads: int,
    key: Any,
    value: Any,
    key_scale: Any = None,
    value_scale: Any = None,
) -> LayerPages:
    """Tokens as the pages store them, [tokens, kv_heads, ...] for each array of a layer; None for what isn't stored by token.

    Tokens in the dtype of quantised pages are stored as they are, with their scales [tokens, heads] if pages have such.
    """

    def stored(tokens: Any, fixed: jax.Array | None, scales: Any) -> tuple[jax.Array, jax.Array | None]:
        tokens = jnp.asarray(tokens)
        repeat = kv_heads // tokens.shape[1]
        if repeat > 1:
            tokens = jnp.repeat(tokens, repeat, axis=1)
        if cache.quantised is None:
            return tokens, None
        by_token = cache.quantised.scale == "token_head"
        if tokens.dtype == jnp.dtype(cache.quantised.dtype):
            scale = None if scales is None else jnp.repeat(jnp.asarray(scales, jnp.float32), repeat, axis=1)
            return tokens, scale
        if not by_token:
            return quantised_tokens(tokens, cache.quantised.dtype, fixed)[0], None
        return quantised_tokens(tokens, cache.quantised.dtype)

    form, rope = LAYOUTS[cache.layout], None
    if cache.rope_size:
        key = jnp.asarray(key)
        rope = jnp.repeat(key[..., cache.key_size :].astype(cache.rope_dtype), kv_heads // key.shape[1], axis=1)
        key, rope = key[..., : cache.key_size], form.joined(rope, None)
    key, key_scale = stored(key, pages.key_scale, key_scale)
    if cache.values_in_keys:
        return LayerPages(form.joined(key, None), None, key_scale, None, rope)
    value, value_scale = stored(value, pages.value_scale, value_scale)
    if pages.value is None:
        return LayerPages(form.joined(key, value), None, key_scale, value_scale)
    return LayerPages(key, value, key_scale, value_scale)


def quantised_tokens(
    tokens: Float[Array, "tokens heads dim"], dtype: str, scale: Any = None
) -> tuple[jax.Array, Float[Array, "tokens heads"]]:
    """(tokens divided by their scale in `dtype`, the scale). The scale is per token and head, so that the largest value is the
    dtype's largest, or a given one, [] or [heads]. Values out of range for a given scale become the dtype's least or largest."""
    kind = jnp.dtype(dtype)
    max_value = float(jnp.iinfo(kind).max if dtype == "int8" else jnp.finfo(kind).max)
    wide = tokens.astype(jnp.float32)
    if scale is None:
        largest = jnp.abs(wide).max(axis=-1)
        scale = jnp.where(largest == 0, 1, largest / max_value)
    quantised = jnp.clip(wide / jnp.broadcast_to(scale, wide.shape[:-1])[..., None], -max_value, max_value)
    return (jnp.round(quantised) if dtype == "int8" else quantised).astype(kind), scale
