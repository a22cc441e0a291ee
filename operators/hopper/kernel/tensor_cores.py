"""The products of a tile: on a GPU by wgmma, in Pallas' interpreter by reads and a dot.

The interpreter's wgmma takes no factor from registers, has no accumulator that starts from an array, and doesn't check its reads
for races. Plain reads are checked. Beside `gather`'s numbers of tables, all that a compiled kernel and an interpreted one don't
share is in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["Interpreted", "TensorCores", "tensor_cores"]

_Made = TypeVar("_Made")
Term = tuple[Any, ...]  # sums, and the pairs of factors whose products are added to them
_KEYS = 64  # of values that a product goes through at once


class TensorCores:
    """Products of a warpgroup, in float32. Those of one call are waited for together: they have ended, and read their factors,
    when it returns."""

    def logits(self, *factors: tuple[Any, Any]) -> tuple[jax.Array, ...]:
        """[rows, columns] of each pair of references [rows, dim] and [columns, dim] in shared memory."""
        return self.logits_beside(lambda: None, *factors)[0]

    def logits_beside(
        self, work: Callable[[], _Made], *factors: tuple[Any, Any]
    ) -> tuple[tuple[jax.Array, ...], _Made]:
        """The same, and what work() makes while the products run."""

        def multiply(*sums: Any) -> tuple[tuple[jax.Array, ...], _Made]:
            for to, (rows, keys) in zip(sums, factors, strict=True):
                plgpu.wgmma(to, rows, keys.transpose((1, 0)))
            made = work()
            return tuple(to[...] for to in sums), made

        places = (plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32) for a, b in factors)
        result: tuple[tuple[jax.Array, ...], _Made] = pl.run_scoped(multiply, *places)
        return result

    def add_values(self, *terms: Term) -> tuple[jax.Array, ...]:
        """sums + weights @ values + ... for each of these: [rows, dim], and pairs of [rows, keys] and a reference [keys, dim] in
        shared memory. Weights are in registers, in the dtype of the values. The compiler lets the products of the first keys run
        while the weights of others are computed."""

        def multiply(sums: Any) -> None:
            for to, (_, *factors) in zip(sums, terms, strict=True):
                for weights, values in factors:
                    some = min(_KEYS, weights.shape[1])
                    for first in range(0, weights.shape[1], some):
                        plgpu.wgmma(to, weights[:, first : first + some], values.at[pl.ds(first, some)])

        if not terms:  # of 32 columns one warpgroup has all
            return ()
        starts = tuple(plgpu.WGMMAAccumulatorRef.init(sums) for sums, *_ in terms)
        result: tuple[jax.Array, ...] = pl.run_state(multiply)(starts)
        return result

    def numbers(self, ref: Any, layout: Any) -> jax.Array:
        """Those of a reference in shared memory that TMA fills."""
        result: jax.Array = plgpu.load(ref, layout=layout)  # type: ignore[call-arg] # of jax 0.10
        return result


class Interpreted(TensorCores):
    """The same for the interpreter.

    These reads aren't of the proxy by which TMA writes the next tile in the same place, so they are committed, as wgmma's needn't
    be.
    """

    def logits_beside(
        self, work: Callable[[], _Made], *factors: tuple[Any, Any]
    ) -> tuple[tuple[jax.Array, ...], _Made]:
        return tuple(_dot(rows[...], self._read(keys), 1) for rows, keys in factors), work()

    def add_values(self, *terms: Term) -> tuple[jax.Array, ...]:
        return tuple(
            sum((_dot(weights, self._read(values), 0) for weights, values in factors), sums) for sums, *factors in terms
        )

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
