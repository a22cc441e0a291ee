"""flax linen: an attention_fn for MultiHeadDotProductAttention. Requires flax (`pip install 'attnops[flax]'`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError
from ..scores import Score
from .extra import extra
from .flax_call import FlaxAttention
from .front import Declared

with extra("flax"):
    from flax import linen
    from flax.linen import dtypes

__all__ = ["LinenAttention", "attention_fn"]


def attention_fn(declared: Declared, *, score: Score | None = None, **metadata: Any) -> LinenAttention:
    """The `attention_fn` of a linen.MultiHeadDotProductAttention that runs the declared attention.

    declared: an Attention, a Declaration, its dict, or the path of its JSON file. metadata: fields of OperationMetadata that
    replace the file's, such as mesh. score: of every call, with its arrays. With "enabled": false it is
    linen.dot_product_attention itself, which takes no score.
    """
    found: LinenAttention = LinenAttention.of(declared, metadata, score, linen.dot_product_attention)
    return found


class LinenAttention(FlaxAttention):
    """A declared attention with the signature of linen.dot_product_attention.

    The parameter names are exactly linen's: its module silently drops what a function doesn't name.
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: linen.Module | None = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., jax.Array] | None = None,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """Attend.

        Shapes: query [..., q, heads, dim], key and value [..., kv, heads, dim]; bias and mask broadcast to
        [..., heads, q, kv]. With `module` the weights before dropout are sown in 'intermediates'.
        """
        for name, function in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if function is not None:
                raise ConfigError(
                    f"{name} is given, but attnops' kernels compute their own products; construct the module without it "
                    "(attnops takes quantised keys and values as int8 or fp8 arrays)."
                )
        softmax = self.attention.operation.metadata.runtime_softmax_dtype
        if force_fp32_for_softmax and softmax != jnp.float32:
            raise ConfigError(
                f"force_fp32_for_softmax: the file's metadata declares runtime_softmax_dtype={softmax.name!r}; remove one of "
                "them."
            )
        self.check_dtype(dtype)
        query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
        result = self.attend(
            query, key, value, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
            dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, is_causal=False,
            weights=module is not None,
        )  # fmt: skip
        # linen then keeps float32 weights, and so its output is float32.
        dtype = jnp.float32 if force_fp32_for_softmax else result.output.dtype
        if module is not None and result.weights is not None:
            module.sow("intermediates", "attention_weights", result.weights.astype(dtype))
        return result.output.astype(dtype)
