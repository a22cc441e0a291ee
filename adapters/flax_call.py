"""FlaxAttention: what flax's two attention modules share when they call an attention_fn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError, InputError
from ..operators.api.attention import Attention
from ..scores import Score
from .front import DEFAULT_PRECISIONS, Attended, Declared, attend, declared_attention, refuse_score

__all__ = ["FlaxAttention"]


class FlaxAttention:
    """A declared attention with flax's calling convention. Hashable by its declaration, as a module attribute must be.

    `attention` is the Attention: `attention.plans` holds the plans of the calls so far. `score` is that of every call; scores
    with arrays are equal if the arrays are the same ones.
    """

    def __init__(self, attention: Attention, score: Score | None = None) -> None:
        self.attention, self.score = attention, score

    @classmethod
    def of(cls, declared: Declared, metadata: Any, score: Score | None, own: Any) -> Any:
        """The declared attention with its score; with "enabled": false flax's own function, which takes no score."""
        attention = declared_attention(declared, metadata)
        if attention.enabled:
            return cls(attention, score)
        refuse_score(score)
        return own

    def check_dtype(self, dtype: Any) -> None:
        """Refuse a module's dtype that differs from the file's runtime_dtype, if both are given."""
        declared = self.attention.operation.metadata.runtime_dtype
        if dtype is not None and declared is not None and jnp.dtype(dtype) != declared:
            raise ConfigError(
                f"dtype: the file's metadata declares runtime_dtype={declared.name!r}, but the module has "
                f"{jnp.dtype(dtype).name!r}; remove one of them."
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
        """Attend to arrays of one dtype, [..., length, heads, dim]. Errors: ConfigError and InputError name what is refused."""
        if not all(
            name in DEFAULT_PRECISIONS for name in (precision if isinstance(precision, tuple) else (precision,))
        ):
            raise ConfigError(
                f"precision={precision!r}: attnops' products keep the full precision of their dtype, so runtime_dtype decides "
                "how exact they are; remove precision from the module. For its other layers, run the step under "
                "jax.default_matmul_precision(...)."
            )
        if dropout_rate > 0 and not deterministic and broadcast_dropout:
            raise ConfigError(
                "broadcast_dropout=True (flax's default) drops the same weights in every batch row and head; attnops draws "
                "each separately. Construct the module with broadcast_dropout=False."
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
            score=self.score,
        )

    def _aligned(self, query: jax.Array, key: jax.Array) -> int | None:
        """The position that is_causal gives the first query: that of the first key. Errors: InputError if that may not be
        meant."""
        q_len, kv_len = query.shape[-3], key.shape[-3]
        if q_len == kv_len:
            return 0
        declared_offset = self.attention.declaration.call.query_offset
        if declared_offset is None:
            raise InputError(
                f"is_causal=True with {q_len} queries and {kv_len} keys: flax's own would let the first query see the first "
                "key alone. Leave out is_causal if a cache's mask marks the written keys (decode=True), or declare in the "
                f"file call.query_offset: 0 for flax's behaviour, {kv_len - q_len} if the queries are the last tokens."
            )
        return declared_offset

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.attention == other.attention and self.score == other.score

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.attention, self.score))

    def __repr__(self) -> str:
        return f"{type(self).__module__}.attention_fn({self.attention.declaration.to_json(indent=None)})"
