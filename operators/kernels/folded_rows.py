"""The query heads of a kv head as the rows of one head, so that a few queries share one read of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...scores.steps import Steps
from .operands import Operands

__all__ = ["FoldedRows"]

_BY_PAIR = ("batch", "heads", "q", "kv")


@dataclass(frozen=True)
class FoldedRows:
    """The rows of a kv head: q_len of its first query head, then those of the next. group: query heads of a kv head. layout: of
    query and output."""

    layout: str
    kv_heads: int
    group: int
    q_len: int

    @classmethod
    def of(cls, layout: str, operands: Operands) -> FoldedRows:
        """Those of a call."""
        head, time = layout.index("h"), layout.index("t")
        heads, kv_heads = operands.query.shape[head], operands.key.shape[head]
        return cls(layout, kv_heads, heads // kv_heads, operands.query.shape[time])

    @property
    def rows(self) -> int:
        """Of a kv head."""
        return self.group * self.q_len

    def operands(self, operands: Operands, score: Steps | None) -> Operands:
        """A call's arrays with the queries, the bias and the score's arrays by row. Sinks are left as they are."""
        bias, captures = operands.bias, operands.captures
        if bias is not None:
            bias = self.array(bias, _BY_PAIR)
        if score is not None:
            forms = zip(captures, score.forms, strict=True)
            captures = tuple(self.array(x, _BY_PAIR) if form == "aligned" else x for x, form in forms)
        return operands._replace(query=self.query(operands.query), bias=bias, captures=captures)

    def query(self, x: jax.Array) -> jax.Array:
        """A query in the layout, with the rows."""
        x = x.swapaxes(1, 2) if self.layout == "bthd" else x
        x = x.reshape(x.shape[0], self.kv_heads, self.rows, x.shape[3])
        return x.swapaxes(1, 2) if self.layout == "bthd" else x

    def output(self, x: jax.Array) -> jax.Array:
        """The inverse, of an output."""
        x = x.swapaxes(1, 2) if self.layout == "bthd" else x
        x = x.reshape(x.shape[0], self.kv_heads * self.group, self.q_len, x.shape[3])
        return x.swapaxes(1, 2) if self.layout == "bthd" else x

    def numbers(self, x: jax.Array) -> jax.Array:
        """[batch, kv heads, rows] as [batch, heads, q]."""
        return x.reshape(x.shape[0], self.kv_heads * self.group, self.q_len)

    def sinks(self, x: jax.Array) -> jax.Array:
        """[heads] as [kv heads, rows]."""
        return jnp.repeat(x.reshape(self.kv_heads, self.group), self.q_len, axis=1)

    def array(self, x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
        """An array of the mask, or one by query and key: its rows once for each head of a group."""
        if len(dims) == 4 and "q_blocks" not in dims:
            batch, heads, rows, kv_len = x.shape
            if heads > 1:
                x = x.reshape(batch, self.kv_heads, self.group, rows, kv_len)
                x = jnp.broadcast_to(x, (batch, self.kv_heads, self.group, self.q_len, kv_len))
                return x.reshape(batch, self.kv_heads, self.rows, kv_len)
            return jnp.tile(x, (1, 1, self.group, 1)) if rows > 1 else x
        return jnp.tile(x, (1, self.group)) if "q" in dims else x

    def words(self, x: jax.Array) -> jax.Array:
        """Words of blocks [batch, heads | 1, tiles, words, q] by row."""
        batch, heads, tiles, words, _ = x.shape
        if heads == 1:
            return jnp.tile(x, (1, 1, 1, 1, self.group))
        x = x.reshape(batch, self.kv_heads, self.group, tiles, words, self.q_len).transpose(0, 1, 3, 4, 2, 5)
        return x.reshape(batch, self.kv_heads, tiles, words, self.rows)
