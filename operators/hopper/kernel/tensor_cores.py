"""The two products of a tile: on a GPU by wgmma, in Pallas' interpreter by reads and a dot.

The interpreter's wgmma takes no factor from registers, has no accumulator that starts from an array, and doesn't check its reads
for races. Plain reads are checked. All that a compiled kernel and an interpreted one don't share is in this file.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["Interpreted", "TensorCores", "tensor_cores"]


class TensorCores:
    """Products of a warpgroup, in float32. Each has ended, and read its factors, when it returns."""

    def logits(self, query: Any, keys: Any) -> jax.Array:
        """[rows, keys] of references [rows, dim] and [keys, dim] in shared memory."""

        def multiply(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, query, keys.transpose((1, 0)))
            return sums[...]

        result: jax.Array = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((query.shape[0], keys.shape[0]), jnp.float32)
        )
        return result

    def add_values(self, sums: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        """sums [rows, dim] + weights [rows, keys] @ values, a reference [keys, dim] in shared memory. Weights are in registers,
        in the dtype of the values."""

        def multiply(added: Any) -> None:
            plgpu.wgmma(added, weights, values)

        result: jax.Array = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sums))
        return result


class Interpreted(TensorCores):
    """The same for the interpreter.

    These reads aren't of the proxy by which TMA writes the next tile in the same place, so they are committed, as wgmma's needn't
    be.
    """

    def logits(self, query: Any, keys: Any) -> jax.Array:
        return _dot(query[...], self._read(keys), 1)

    def add_values(self, sums: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        return sums + _dot(weights, self._read(values), 0)

    def _read(self, ref: Any) -> jax.Array:
        read: jax.Array = ref[...]
        plgpu.commit_smem()
        return read


def tensor_cores(interpret: bool) -> TensorCores:
    """Those that a kernel uses."""
    return Interpreted() if interpret else TensorCores()


def _dot(a: jax.Array, b: jax.Array, b_axis: int) -> jax.Array:
    sizes = (((1,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, sizes, preferred_element_type=jnp.float32)
