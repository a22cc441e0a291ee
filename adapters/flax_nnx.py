"""flax nnx: an attention_fn for nnx.MultiHeadAttention. Requires flax (`pip install 'attnops[flax]'`)."""

from __future__ import annotations

from typing import Any

import jax

from ..scores import Score
from .extra import extra
from .flax_call import FlaxAttention
from .front import Declared

with extra("flax"):
    from flax import nnx
    from flax.nnx.nn import dtypes

__all__ = ["NnxAttention", "attention_fn"]


def attention_fn(declared: Declared, *, score: Score | None = None, **metadata: Any) -> NnxAttention:
    """The `attention_fn` of an nnx.MultiHeadAttention that runs the declared attention.

    declared: an Attention, a Declaration, its dict, or the path of its JSON file. metadata: fields of OperationMetadata that
    replace the file's, such as mesh. score: of every call, with its arrays. With "enabled": false it is
    nnx.dot_product_attention itself, which takes no score.
    """
    found: NnxAttention = NnxAttention.of(declared, metadata, score, nnx.dot_product_attention)
    return found


class NnxAttention(FlaxAttention):
    """A declared attention with the signature of nnx.dot_product_attention."""

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
        module: nnx.Module | None = None,
        promote_dtype: Any = dtypes.promote_dtype,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attend.

        Shapes: query [..., q, heads, dim], key and value [..., kv, kv_heads, dim]; bias and mask broadcast to
        [..., heads, q, kv]. With `module` the weights before dropout are sown as nnx.Intermediate 'attention_weights'.
        """
        self.check_dtype(dtype)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        result = self.attend(
            query, key, value, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
            dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, is_causal=is_causal,
            weights=module is not None,
        )  # fmt: skip
        if module is not None and result.weights is not None:
            module.sow(nnx.Intermediate, "attention_weights", result.weights.astype(result.output.dtype))
        return result.output
