"""tokamax.dot_product_attention on raw arrays, with the reference's semantics: its kernels in Mosaic GPU."""

from __future__ import annotations

from importlib import metadata, util

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...kernels.default_promotion import default_promotion
from ...kernels.derivatives import once_in_reverse
from ...kernels.library_attention import LibraryMask

__all__ = ["TRIED", "installed_version", "tokamax_attention"]

TRIED = ("0.0.17",)  # with jax 0.12.0


def installed_version() -> tuple[int, ...] | None:
    """The version of tokamax, if it is installed; checked without an import."""
    if util.find_spec("tokamax") is None:
        return None
    try:
        return tuple(int(part) for part in metadata.version("tokamax").split(".") if part.isdigit())
    except metadata.PackageNotFoundError:
        return None


def tokamax_attention(
    query: Float[Array, "batch q heads dim"],
    key: Float[Array, "batch kv kv_heads dim"],
    value: Float[Array, "batch kv kv_heads value_dim"],
    masked: LibraryMask,
    *,
    scale: float,
    soft_cap: float | None,
    is_causal: bool,
    window: tuple[int, int] | None,
    interpret: bool,
) -> Float[Array, "batch q heads value_dim"]:
    """Attend with tokamax's kernel, forward and gradient; with its function in XLA if `interpret`, as no kernel of it runs in
    Pallas' interpreter. Rows that see no key aren't left to it: they see all keys, and are 0 afterwards."""
    import tokamax  # an extra, imported only where it runs

    masked, dtype = masked.without_dead_rows(), query.dtype
    if interpret:  # XLA:CPU has no product of 16-bit numbers with a float32 result; the cast up is exact
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))

    def attend(arrays: tuple[Array, Array, Array, Array | None, Array | None]) -> Array:
        output: Array = tokamax.dot_product_attention(
            *arrays,
            scale=scale,
            is_causal=is_causal,
            local_window_size=window,
            logits_soft_cap=soft_cap,
            implementation="xla" if interpret else "mosaic",
        )
        return output

    arrays = query, key, value, masked.bias, masked.mask
    output = once_in_reverse(attend, arrays, "tokamax's attention", within=default_promotion)
    return masked.zero_dead_rows(output.astype(dtype))
