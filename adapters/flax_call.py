"""FlaxAttention: what flax's two attention modules have in common in their calls of an attention_fn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError, InputError
from ..operators.attention import Attention
from .front import Attended, attend

__all__ = ["FlaxAttention"]

_DEFAULT_PRECISION = (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)


class FlaxAttention:
    """A declared attention with flax's calling convention. Hashable by what it declares, as a module's attribute has to be.

    `attention` is the Attention: `attention.plans` are the plans of the calls so far.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def check_dtype(self, dtype: Any) -> None:
        """Refuse a module's dtype that isn't the file's runtime_dtype, where both are said."""
        said = self.attention.operation.metadata.runtime_dtype
        if dtype is not None and said is not None and jnp.dtype(dtype) != said:
            raise ConfigError(
                f"dtype: the file's metadata declares runtime_dtype={said.name!r}, the module says {jnp.dtype(dtype).name!r}; "
                "leave one of them out."
            )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        bias: Any,
        mask: Any,
        broadcast_dropout: bool,
        dropout_rng: Any,
        dropout_rate: float,
        deterministic: bool,
        precision: Any,
        is_causal: bool,
        weights: bool,
    ) -> Attended:
        """Attend to arrays of one dtype, [..., length, heads, dim]. Errors: ConfigError, InputError say what is refused."""
        if not all(one in _DEFAULT_PRECISION for one in (precision if isinstance(precision, tuple) else (precision,))):
            raise ConfigError(
                f"precision={precision!r}: attnops' products keep all bits of their dtype, so that runtime_dtype says how exact "
                "they are; leave precision out of the module. For its other layers, run the step under "
                "jax.default_matmul_precision(...)."
            )
        if dropout_rate > 0 and not deterministic and broadcast_dropout:
            raise ConfigError(
                "broadcast_dropout=True (flax's default) drops the same weights in every batch row and head; attnops draws "
                "each by itself. Construct the module with broadcast_dropout=False."
            )
        return attend(
            self.attention,
            query,
            key,
            value,
            layout="bthd",
            causal=is_causal,
            query_offset=self._aligned(query, key) if is_causal else None,
            mask=mask,
            bias=bias,
            dropout_prob=dropout_rate,
            dropout_rng=dropout_rng,
            deterministic=deterministic,
            return_weights=weights,
        )

    def _aligned(self, query: jax.Array, key: jax.Array) -> int | None:
        """Where is_causal puts the first query: at the first key. Errors: InputError where that may not be what is meant."""
        q_len, kv_len = query.shape[-3], key.shape[-3]
        if q_len == kv_len:
            return 0
        said = self.attention.declaration.call.query_offset
        if said is None:
            raise InputError(
                f"is_causal=True with {q_len} queries and {kv_len} keys: flax's own would let the first query see the first "
                "key alone. Leave is_causal out where a cache's mask says what is written (decode=True), or declare in the "
                f"file call.query_offset: 0 for flax's way, {kv_len - q_len} for queries that are the last tokens."
            )
        return said

    def __eq__(self, other: object) -> bool:
        return self.attention == other.attention if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.attention))

    def __repr__(self) -> str:
        return f"{type(self).__module__}.attention_fn({self.attention.declaration.to_json(indent=None)})"
