"""The forward pass of a few queries against many keys: K and V are read once, without copies.

With K seen as [batch, kv, kv heads * dim], one product with a block-diagonal query gives the logits of all heads, so no
head is copied out of K or V. The keys are processed in a few chunks; a chunk that no row sees is skipped at run time: a mostly
empty cache costs only as much as its filled part. On a CPU decode_rows is faster for a large cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....scores.steps import Steps
from ...kernels.blocking import BlockwiseMethod
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.lse import LN2, LOG2E, divisor_and_lse, subtracted
from ...kernels.operands import Operands
from ...kernels.primitives import where
from ...kernels.scores import WholeScores, apply_steps
from ...kernels.varying import vary, varying
from .cpu_tuning import compute_dtype, exp2, few_rows_product, product

__all__ = ["decode_forward"]

# (sum of weights times values, greatest logit, sum of weights), the weights not yet divided by their sum
_Sums = tuple[jax.Array, jax.Array, jax.Array]


def decode_forward(
    method: BlockwiseMethod,
    operands: Operands,
    mask: LocalMask,
    dropout: Dropout | None,
    block_kv: int,
    score: Steps | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (output in the layout, lse [batch, heads, q]); not differentiable by itself."""
    query, key, value, bias, sinks, *_ = operands
    layout, scale, soft_cap = method.layout, method.scale, method.soft_cap
    softmax_dtype, platform = method.softmax_dtype, method.platform
    at = layout.index("h")
    batch, heads, kv_heads = query.shape[0], query.shape[at], key.shape[at]
    group, q_len, kv_len = heads // kv_heads, mask.q_len, mask.kv_len
    compute = compute_dtype(query.dtype, np.dtype(softmax_dtype), platform)
    by_head = query if at == 1 else query.swapaxes(1, 2)  # [batch, heads, q, dim]
    rows = by_head.astype(compute).reshape(batch, kv_heads, group * q_len, query.shape[-1])
    time = layout.index("t")
    flat = layout == "bthd"
    if flat:
        same_head = np.eye(kv_heads, dtype=bool)[None, :, None, :, None]
        rows_by_head = jnp.where(same_head, rows[:, :, :, None, :], 0).reshape(batch, kv_heads * group * q_len, -1)

    def logits_of(keys: jax.Array) -> jax.Array:
        """[batch, heads, q, keys of the piece]."""
        if flat:
            return few_rows_product(rows_by_head, keys.reshape(*keys.shape[:2], -1), softmax_dtype, platform).reshape(
                batch, heads, q_len, -1
            )
        return few_rows_product(rows, keys, softmax_dtype, platform).reshape(batch, heads, q_len, -1)

    def values_of(p: jax.Array, values: jax.Array) -> jax.Array:
        """Weights [batch, heads, q, keys] times values: [batch, kv heads * group * q, (kv heads *) dim]."""
        if flat:
            p = p.reshape(batch, heads * q_len, -1)
            return product("bns,bsx->bnx", p, values.reshape(*values.shape[:2], -1), softmax_dtype)
        p = p.reshape(batch, kv_heads, group * q_len, -1)
        return product("bhns,bhsx->bhnx", p, values, softmax_dtype).reshape(batch, heads * q_len, -1)

    # Of values that are a part of their keys, the product is with all columns: a slice of the keys would be copied.
    wide = method.value_columns is not None

    kinds = mask.kinds(q_len, block_kv)
    visible = None
    if isinstance(kinds, np.ndarray):
        chunks = _known_range(kinds, block_kv, kv_len)
    else:
        chunks = [(i * block_kv, min((i + 1) * block_kv, kv_len)) for i in range(kinds.shape[-1])]
        visible = (kinds > 0).any(axis=(0, 1))
    width = (key if wide else value).shape[-1] * (kv_heads if flat else 1)
    carry = _start((batch, heads, q_len), width, sinks, softmax_dtype, varying((query, key, value, sinks)))
    for index, (first, last) in enumerate(chunks):

        def visit(carry: _Sums, first: int = first, last: int = last) -> _Sums:
            acc, peak, total = carry
            seen = mask.array(slice(first, last))
            seen_keys = None
            if seen is not None:
                seen = jnp.asarray(seen)
                seen_keys = _seen_keys(seen, kv_heads, layout) if mask.hides_keys else None
            keys = lax.slice_in_dim(key, first, last, axis=time).astype(compute)
            if (
                seen_keys is not None and seen is not None and flat and seen.shape[1] != 1
            ):  # the other heads' rows are 0 here, and 0 times NaN is NaN
                keys = where(seen_keys, keys, 0)
            x = logits_of(keys)
            x = x * scale if soft_cap is None else soft_cap * jnp.tanh(x * (scale / soft_cap))
            if score is not None:
                tile = WholeScores(score, operands.captures, mask, softmax_dtype, slice(first, last))
                scored = apply_steps(score, x, 1.0, 1.0, tile)
                x = scored.x * scored.factor if scored.factor != 1 else scored.x
            x = x * LOG2E
            if bias is not None:
                columns = bias if bias.shape[-1] == 1 else bias[..., first:last]
                x = x + columns.astype(softmax_dtype) * LOG2E
            if seen is not None:
                x = where(seen, x, -jnp.inf)
            new_peak = jnp.maximum(peak, x.max(axis=-1))
            shift = subtracted(new_peak)
            p = exp2(x - shift[..., None], platform, accurate=compute.itemsize >= 4)
            shrink = jnp.exp2(peak - shift)
            total = total * shrink + p.sum(axis=-1)
            if dropout is not None:
                keep = dropout.keep_all(batch, heads, q_len, slice(first, last))
                p = where(keep, p, 0) / (1.0 - dropout.probability)
            values = keys if wide else lax.slice_in_dim(value, first, last, axis=time).astype(compute)
            if seen_keys is not None:
                values = where(seen_keys, values, 0)
            acc = acc * shrink.reshape(batch, -1, 1) + values_of(p.astype(compute), values)
            return acc, new_peak, total

        carry = visit(carry) if visible is None else lax.cond(visible[index], visit, lambda c: c, carry)
    acc, peak, total = carry
    safe, lse = divisor_and_lse(total, peak * LN2)
    if flat:  # select each row's own head
        acc = acc.reshape(batch, kv_heads, group * q_len, kv_heads, -1)
        own_parts = [
            lax.slice_in_dim(lax.slice_in_dim(acc, h, h + 1, axis=1), h, h + 1, axis=3) for h in range(kv_heads)
        ]
        acc = lax.concatenate(own_parts, 1)
    acc = acc.reshape(batch, heads, q_len, -1)
    acc = lax.slice_in_dim(acc, 0, method.value_columns, axis=3) if wide else acc
    output = (acc / safe[..., None]).astype(query.dtype)
    return output if at == 1 else output.swapaxes(1, 2), lse


def _seen_keys(seen: jax.Array, kv_heads: int, layout: str) -> jax.Array:
    """Which keys some query sees, in a shape that broadcasts to keys and values: the others count as zeros."""
    batch, heads, _, keys = seen.shape
    by_head = seen.any(2)
    if heads not in (1, kv_heads):
        by_head = by_head.reshape(batch, kv_heads, heads // kv_heads, keys).any(2)
    return (by_head if layout == "bhtd" else by_head.swapaxes(1, 2))[..., None]


def _known_range(kinds: np.ndarray, block_kv: int, kv_len: int) -> list[tuple[int, int]]:
    """The keys from the first live block to the last as one chunk: slicing K and V copies them."""
    visible = np.flatnonzero((kinds > 0).any(axis=(0, 1)))
    return [(int(visible[0]) * block_kv, min((int(visible[-1]) + 1) * block_kv, kv_len))] if len(visible) else []


def _start(
    shape: tuple[int, int, int], width: int, sinks: jax.Array | None, dtype: np.dtype, axes: frozenset[str]
) -> _Sums:
    """(sum of values, peak, total) before the first key. A sink is a key without a value."""
    batch, heads, q_len = shape
    peak = jnp.full(shape, -jnp.inf, dtype)
    if sinks is not None:
        peak = jnp.broadcast_to(sinks.astype(dtype)[None, :, None] * LOG2E, shape)
    start = jnp.zeros((batch, heads * q_len, width), dtype), peak, jnp.full(shape, sinks is not None, dtype)
    return jax.tree.map(lambda x: vary(x, axes), start)
