"""PartialGpu: what kernels for GPUs have in common, whatever they are written in: their arrays, and the rest of the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ...kernels.blocking import Blocking
from ...kernels.dequantise import dequantised, quantised_gradients
from ...kernels.lse import LOG2E
from ...kernels.operands import DynamicArgs, Operands, Results, StaticArgs
from ...kernels.partial_attention import residual_names
from ...vanilla.kernel.blockwise import blockwise_gradients

__all__ = ["Gradients", "PartialGpu"]


class Gradients(Protocol):
    """The gradients of a call's tensors, each by a kernel of its own."""

    def of_query(self) -> jax.Array:
        """The gradient of the query."""
        ...

    def of_keys(self) -> tuple[jax.Array, jax.Array | None]:
        """The gradients of key and value; None where that is a part of the key's."""
        ...


@dataclass(frozen=True)
class PartialGpu:
    """Kernels as a PartialAttention; a subclass has `attend` and `gradients`.

    query [batch, q, heads, dim], key [batch, kv, kv_heads, dim], value [batch, kv, kv_heads, value_dim] in bthd, of any
    lengths; bias broadcasts to [batch, heads, q, kv]; sinks float32 [heads]. Key and value may be int8 or fp8, unscaled or
    with scales, float32 [batch, kv_heads, kv]; the output has the query's dtype. value_columns: values are the first so many
    numbers of their keys, which aren't quantised; `value` is None, and its gradient a part of the key's. Fully masked rows give
    output 0, lse -inf (or that of the sink) and zero gradients.
    """

    layout: str
    scale: float
    soft_cap: float | None
    platform: str
    interpret: bool
    residual_checkpoint_name: str | None
    value_columns: int | None = None

    @property
    def names(self) -> tuple[str, str]:
        """See PartialAttention."""
        return residual_names(self.residual_checkpoint_name)

    def gradients(
        self,
        static_args: StaticArgs,
        operands: Operands,
        dynamic: DynamicArgs,
        d_output: jax.Array,
        shift: jax.Array,
        delta: jax.Array,
    ) -> Gradients:
        """Of the tensors, by the kernels. shift: of a row's logits in base 2; delta: its sum of weights times their gradients."""
        raise NotImplementedError

    def differentiate(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
    ) -> Operands:
        """See PartialAttention."""
        output, lse, d_output, d_lse = results
        declared, dtype = operands, operands.query.dtype
        key = dequantised(declared.key, declared.key_scale, self.layout, dtype)
        value = declared.value
        value = None if value is None else dequantised(value, declared.value_scale, self.layout, dtype)
        operands = declared._replace(key=key, value=value, key_scale=None, value_scale=None)
        product = output.astype(jnp.float32) * d_output.astype(jnp.float32)
        delta = product.sum(-1)
        delta = (delta.swapaxes(1, 2) if self.layout == "bthd" else delta) - d_lse
        # A row without keys has no weights: 2 ** (x - inf) is 0.
        shift = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
        backward = self.gradients(static_args, operands, dynamic, d_output.astype(dtype), shift, delta)
        d_key, d_value = backward.of_keys()
        d_key, d_key_scale = self._of_quantised(declared.key, declared.key_scale, d_key)
        d_value_scale = None
        if d_value is not None:
            d_value, d_value_scale = self._of_quantised(declared.value, declared.value_scale, d_value)
        d_sinks = d_bias = None
        if operands.sinks is not None:
            d_sinks = -(jnp.exp(operands.sinks[None, :, None] - jnp.where(lse == -jnp.inf, jnp.inf, lse)) * delta).sum(
                (0, 2)
            )
        if operands.bias is not None:
            d_bias = self._in_xla(static_args, operands, dynamic, results).bias
        captures: tuple[jax.Array, ...] = ()
        if operands.captures:
            # A kernel has no sums over tiles in a fixed order but by another pass over all of them; XLA's is one.
            captures = self._in_xla(static_args, operands, dynamic, results).captures
        d_query = backward.of_query()
        return Operands(d_query, d_key, d_value, d_bias, d_sinks, d_key_scale, d_value_scale, captures)

    def _of_quantised(self, x: jax.Array, scale: jax.Array | None, gradient: jax.Array) -> tuple[Any, Any]:
        if self.layout == "bhtd":
            return quantised_gradients(x, scale, gradient)
        d_x, d_scale = quantised_gradients(x.swapaxes(1, 2), scale, gradient.swapaxes(1, 2))
        return d_x.swapaxes(1, 2), d_scale

    def _in_xla(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results) -> Operands:
        """All gradients by the blockwise pass, those of the tensors in bhtd, for what no kernel sums. The compiler drops what
        isn't used."""
        if self.layout == "bthd":
            operands = operands._replace(
                query=operands.query.swapaxes(1, 2),
                key=operands.key.swapaxes(1, 2),
                value=None if operands.value is None else operands.value.swapaxes(1, 2),
            )
            results = results._replace(output=results.output.swapaxes(1, 2), d_output=results.d_output.swapaxes(1, 2))
        return blockwise_gradients(
            static_args,
            operands,
            dynamic,
            results,
            scale=self.scale,
            soft_cap=self.soft_cap,
            platform=self.platform,
            blocking=Blocking(min(512, static_args.q_len), min(512, static_args.kv_len), 1),
            value_columns=self.value_columns,
        )
