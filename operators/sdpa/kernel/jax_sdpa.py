"""jax.nn.dot_product_attention on raw arrays, with the reference's semantics."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...kernels.default_promotion import default_promotion, is_strict
from ...kernels.derivatives import once_in_reverse
from ...kernels.library_attention import LibraryMask

__all__ = ["jax_sdpa"]


def jax_sdpa(
    query: Float[Array, "batch q heads dim"],
    key: Float[Array, "batch kv kv_heads dim"],
    value: Float[Array, "batch kv kv_heads dim"],
    masked: LibraryMask,
    *,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "batch q heads dim"]:
    """Attend with jax.nn.dot_product_attention.

    This corrects two differences: for a fully masked row it would give the mean of the values (0 here), and for a
    bias of -inf along a whole row NaN (treated as masked here).
    """
    dtype, mask, bias = query.dtype, masked.mask, masked.bias
    if implementation == "xla" and (dtype == jnp.float16 or (dtype == jnp.bfloat16 and is_strict())):
        # XLA:CPU has no float16 dot with a float32 result, and under strict promotion jax can't lower the gradient of its own
        # bfloat16 products. The cast up is exact.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    bias = None if bias is None else bias.astype(jnp.float32 if implementation == "xla" else dtype)
    heads = query.shape[2]
    if mask is not None and mask.shape[1] not in (1, heads):
        raise AssertionError(f"mask of {mask.shape[1]} heads for {heads}")
    if implementation == "cudnn":  # which broadcasts over batch and heads only
        whole = (query.shape[1], key.shape[1])
        bias, mask = (None if x is None else jnp.broadcast_to(x, (*x.shape[:2], *whole)) for x in (bias, mask))

    def attend(arrays: tuple[Array, Array, Array, Array | None, Array | None]) -> Array:
        return jax.nn.dot_product_attention(
            *arrays, scale=scale, is_causal=is_causal, local_window_size=window, implementation=implementation
        )

    arrays = query, key, value, bias, mask
    if implementation == "cudnn":
        output = once_in_reverse(attend, arrays, "cuDNN's attention", within=default_promotion)
    else:
        with default_promotion():
            output = attend(arrays)
    return masked.zero_dead_rows(output.astype(dtype))
