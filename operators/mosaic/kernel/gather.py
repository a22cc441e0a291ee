"""A number of an array for each element of a tile: on a GPU by a load of its own, in Pallas' interpreter by an index.

Pallas has no such load for Mosaic GPU, so it is made of MLIR, which the interpreter can't run. All that a compiled kernel and an
interpreted one don't share of it is in this file.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

__all__ = ["gathered"]


def gathered(ref: Any, places: jax.Array, layout: Any, interpret: bool) -> jax.Array:
    """Of a reference in global memory, counted over all of its axes. places: int32, none beyond an end, in this layout."""
    if interpret:
        return ref[...].reshape(-1)[places]
    rank = len(ref.shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout), return_type=plgpu.ShapeDtypeStruct(places.shape, ref.dtype, layout=layout)
    )
    def load(context: Any, numbers: Any, at: Any) -> Any:
        del context
        line, index = mgpu.memref_fold(numbers, 0, rank), ir.IndexType.get()
        return at.foreach(lambda n, _: memref.load(line, [arith.index_cast(index, n)]), create_array=True)

    return load(ref, places)
