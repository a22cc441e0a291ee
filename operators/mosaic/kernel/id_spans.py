"""Segment ids as spans: where those of packed documents are, the ids that equal another one follow one another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["id_spans"]

_BLOCK = 128  # ids that are compared one by one, of as many as there are blocks
_MOST = np.uint32(2**32 - 1)


def id_spans(lines: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(begin, end, unordered): the first of the columns whose id is that of a line, the one after the last, int32 [batch, lines],
    and whether the columns' ids aren't in order, bool [batch]: then the others mean nothing. lines, columns: int32 ids [batch,
    count].

    They are in order if they rise, counted from the first one and around: 3 3 5 5 0 0 do, where 0 is for tokens that pad.
    """
    first = columns[:, :1]
    lines, columns = ((x - first).astype(jnp.uint32) for x in (lines, columns))
    unordered = (columns[:, 1:] < columns[:, :-1]).any(axis=1)
    return _count(columns, lines, jnp.less), _count(columns, lines, jnp.less_equal), unordered


def _count(rising: jax.Array, of: jax.Array, before: Any) -> jax.Array:
    """How many of the rising numbers lie before each of `of`: of whole blocks by their last numbers, then within one."""
    length = rising.shape[1]
    blocks = jnp.pad(rising, ((0, 0), (0, -length % _BLOCK)), constant_values=_MOST).reshape(
        rising.shape[0], -1, _BLOCK
    )
    whole = before(blocks[:, None, :, -1], of[:, :, None]).sum(axis=2, dtype=jnp.int32)
    rest = jnp.take_along_axis(blocks, jnp.minimum(whole, blocks.shape[1] - 1)[:, :, None], axis=1, mode="clip")
    within = before(rest, of[:, :, None]).sum(axis=2, dtype=jnp.int32)
    # Beyond the last block all of it is counted already, and padding is before none but the largest number.
    return jnp.minimum(jnp.where(whole == blocks.shape[1], length, whole * _BLOCK + within), length)
