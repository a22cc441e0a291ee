"""A call's arrays with and without gradients, and the static parts of its mask and dropout, in the form that custom_vjp takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...masks import Mask
from ...scores.steps import Steps
from .local_mask import Dropout, LocalMask

__all__ = ["DynamicArgs", "Operands", "Results", "StaticArgs", "join_static", "no_gradients", "split_static"]


class Operands(NamedTuple):
    """The arrays with gradients. Key and value may be int8 or fp8, with scales float32 [batch, kv heads, kv]."""

    query: jax.Array
    key: jax.Array
    value: Any  # an array; None where it is a part of the key, as the kernel's `value_columns` says
    bias: jax.Array | None
    sinks: jax.Array | None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    captures: tuple[jax.Array, ...] = ()  # those that the score's steps read

    @property
    def of_keys(self) -> tuple[jax.Array | None, ...]:
        """Key, value and their scales."""
        return self.key, self.value, self.key_scale, self.value_scale


class Results(NamedTuple):
    """Of all keys: output and lse, and their gradients."""

    output: jax.Array
    lse: jax.Array
    d_output: jax.Array
    d_lse: jax.Array


class DynamicArgs(NamedTuple):
    """Arrays without gradients: those of the mask, and the places and the seed if they are traced."""

    leaves: tuple[jax.Array, ...]
    q_start: jax.Array | None
    query_offset: jax.Array | None
    seed: jax.Array | None
    starts: tuple[Any, Any] | None
    k_start: jax.Array | None
    batch_start: jax.Array | None = None
    head_start: jax.Array | None = None


@dataclass(frozen=True)
class StaticArgs:
    """What is known of the mask, the dropout and the score at trace time; starts and `query_offset` are None if traced."""

    mask: Mask
    q_len: int
    kv_len: int
    q_start: int | None
    query_offset: int | None
    dropout: float
    k_start: int | None = 0
    hides_keys: bool = True
    batch_start: int | None = 0
    head_start: int | None = 0
    score: Steps | None = None


def split_static(
    mask: LocalMask, dropout: Dropout | None, score: Steps | None = None
) -> tuple[StaticArgs, DynamicArgs]:
    """(static, dynamic) arguments of a mask and a dropout; `join_static` is the inverse."""
    structure, leaves = mask.mask.split()
    placed_q, placed_k = (isinstance(start, int) for start in (mask.q_start, mask.k_start))
    placed_offset = mask.query_offset is None or isinstance(mask.query_offset, int)
    static_args = StaticArgs(
        mask=structure,
        q_len=mask.q_len,
        kv_len=mask.kv_len,
        q_start=mask.q_start if placed_q else None,  # type: ignore[arg-type]
        query_offset=mask.query_offset if placed_offset else None,  # type: ignore[arg-type]
        dropout=0.0 if dropout is None else dropout.probability,
        k_start=mask.k_start if placed_k else None,  # type: ignore[arg-type]
        hides_keys=mask.hides_keys,
        batch_start=mask.batch_start if isinstance(mask.batch_start, int) else None,
        head_start=mask.head_start if isinstance(mask.head_start, int) else None,
        score=score,
    )
    dynamic = DynamicArgs(
        tuple(jnp.asarray(leaf.array) for leaf in leaves),
        None if placed_q else jnp.asarray(mask.q_start),
        None if placed_offset else jnp.asarray(mask.query_offset),
        None if dropout is None else dropout.seed,
        # Where the shard's own rows and heads begin; as arrays, since a traced and a plain number are treated alike here.
        None
        if dropout is None
        else tuple(jnp.asarray(x, jnp.int32) for x in (dropout.batch_start, dropout.head_start)),  # type: ignore[arg-type]
        None if placed_k else jnp.asarray(mask.k_start),
        None if isinstance(mask.batch_start, int) else jnp.asarray(mask.batch_start),
        None if isinstance(mask.head_start, int) else jnp.asarray(mask.head_start),
    )
    return static_args, dynamic


def join_static(static_args: StaticArgs, dynamic: DynamicArgs) -> tuple[LocalMask, Dropout | None]:
    """Reassemble the mask and the dropout."""
    mask = LocalMask(
        static_args.mask.merge(dynamic.leaves),
        static_args.q_start if dynamic.q_start is None else dynamic.q_start,  # type: ignore[arg-type]
        static_args.q_len,
        static_args.kv_len,
        static_args.query_offset if dynamic.query_offset is None else dynamic.query_offset,
        static_args.k_start if dynamic.k_start is None else dynamic.k_start,  # type: ignore[arg-type]
        static_args.hides_keys,
        static_args.batch_start if dynamic.batch_start is None else dynamic.batch_start,  # type: ignore[arg-type]
        static_args.head_start if dynamic.head_start is None else dynamic.head_start,  # type: ignore[arg-type]
    )
    if dynamic.seed is None or dynamic.starts is None:
        return mask, None
    return mask, Dropout(dynamic.seed, static_args.dropout, *dynamic.starts, mask.q_start, mask.k_start)


def no_gradients(dynamic: DynamicArgs) -> DynamicArgs:
    """The cotangents of arrays that have none."""

    def zero(x: jax.Array) -> Any:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.zeros_like(x) if floating else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(zero, dynamic)
