"""The seam between a compiled and an interpreted Hopper kernel: its products and reads, in a kernel of one warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__} can't interpret a kernel of Mosaic GPU", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops.operators.hopper.kernel.tensor_cores import Interpreted, TensorCores, tensor_cores
from attnops.operators.hopper.kernel.tile import BY_COLUMN, TILE

ROWS, KEYS, DIM = 64, 64, 64


def test_which_is_which() -> None:
    assert type(tensor_cores(True)) is Interpreted
    assert type(tensor_cores(False)) is TensorCores


def _products(interpret: bool, dtype: Any) -> Any:
    """(query @ keys.T, keys @ values.T, 1 + weights @ values, 2 + weights @ keys, numbers along rows) of [64, dim], [keys, dim],
    [64, keys], [keys, dim], [keys]."""

    def kernel(*refs: Any) -> None:
        inputs, results, held, tiles, full = refs[:5], refs[5:10], refs[10:15], refs[15:20], refs[20]
        products = tensor_cores(interpret)
        for source, target in zip(inputs, held, strict=True):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)
        query, keys, weights, values, numbers = held
        made = list(products.logits((query, keys), (keys, values)))
        read = plgpu.load(weights, layout=TILE, optimized=False)
        starts = (plgpu.layout_cast(jnp.full((ROWS, DIM), n, jnp.float32), TILE) for n in (1, 2))
        made += products.add_values(*zip(starts, ((read, values), (read, keys)), strict=True))
        along = products.numbers(numbers, BY_COLUMN)
        made.append(plgpu.layout_cast(jnp.broadcast_to(along[None], (ROWS, KEYS)), TILE))
        for tile, x in zip(tiles, made, strict=True):
            tile[...] = x
        plgpu.commit_smem()
        for tile, result in zip(tiles, results, strict=True):
            plgpu.copy_smem_to_gmem(tile, result)
        plgpu.wait_smem_to_gmem(0)

    def places(rows: int, columns: int, of: Any = dtype) -> Any:
        bytes_of_row = min(128, columns * jnp.dtype(of).itemsize)
        tiling = plgpu.TilingTransform((8, bytes_of_row // jnp.dtype(of).itemsize))
        return plgpu.SMEM((rows, columns), of, transforms=(tiling, plgpu.SwizzleTransform(bytes_of_row)))

    return plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct((ROWS, 64), jnp.float32) for _ in range(5)),
        scratch_types=[
            places(ROWS, DIM), places(KEYS, DIM), places(ROWS, KEYS), places(KEYS, DIM), plgpu.SMEM((KEYS,), jnp.float32),
            *(places(ROWS, 64, jnp.float32) for _ in range(5)), plgpu.Barrier(num_arrivals=5),
        ],
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="products",
        **({"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}),
    )  # fmt: skip


SHAPES = (ROWS, DIM), (KEYS, DIM), (ROWS, KEYS), (KEYS, DIM)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreted_products(dtype: str) -> None:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
    given.append(rng.standard_normal(KEYS).astype(np.float32))
    query, keys, weights, values, numbers = (x.astype(np.float64) for x in given)
    want = query @ keys.T, keys @ values.T, 1 + weights @ values, 2 + weights @ keys, np.tile(numbers, (ROWS, 1))
    for got, expected in zip(_products(True, jnp.dtype(dtype))(*map(jnp.asarray, given)), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiled_products_are_lowered(dtype: str) -> None:
    given = [*(jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES), jax.ShapeDtypeStruct((KEYS,), "float32")]
    lowered = jax.jit(_products(False, jnp.dtype(dtype))).trace(*given).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
