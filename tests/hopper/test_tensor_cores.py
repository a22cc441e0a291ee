"""The seam between a compiled and an interpreted Hopper kernel: both products, each alone in a kernel of one warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.operators.hopper.hopper_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__} can't interpret a kernel of Mosaic GPU", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops.operators.hopper.kernel.tensor_cores import Interpreted, TensorCores, tensor_cores
from attnops.operators.hopper.kernel.tile import TILE

ROWS, KEYS, DIM = 64, 64, 64


def test_which_is_which() -> None:
    assert type(tensor_cores(True)) is Interpreted
    assert type(tensor_cores(False)) is TensorCores


def _products(interpret: bool, dtype: Any) -> Any:
    """(query @ keys.T, ones + weights @ values) of [64, dim], [keys, dim], [64, keys], [keys, dim]."""

    def kernel(*refs: Any) -> None:
        *inputs, logits, sums, query, keys, weights, values, logits_tile, sums_tile, full = refs
        products = tensor_cores(interpret)
        for source, target in zip(inputs, (query, keys, weights, values), strict=True):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)
        logits_tile[...] = products.logits(query, keys)
        ones = plgpu.layout_cast(jnp.ones((ROWS, DIM), jnp.float32), TILE)
        held = plgpu.load(weights, layout=TILE, optimized=False)
        sums_tile[...] = products.add_values(ones, held, values)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(logits_tile, logits)
        plgpu.copy_smem_to_gmem(sums_tile, sums)
        plgpu.wait_smem_to_gmem(0)

    def places(rows: int, columns: int, of: Any = dtype) -> Any:
        bytes_of_row = min(128, columns * jnp.dtype(of).itemsize)
        tiling = plgpu.TilingTransform((8, bytes_of_row // jnp.dtype(of).itemsize))
        return plgpu.SMEM((rows, columns), of, transforms=(tiling, plgpu.SwizzleTransform(bytes_of_row)))

    return plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct((ROWS, n), jnp.float32) for n in (KEYS, DIM)),
        scratch_types=[
            places(ROWS, DIM), places(KEYS, DIM), places(ROWS, KEYS), places(KEYS, DIM), places(ROWS, KEYS, jnp.float32),
            places(ROWS, DIM, jnp.float32), plgpu.Barrier(num_arrivals=4),
        ],
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="products",
        **({"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreted_products(dtype: str) -> None:
    rng = np.random.default_rng(0)
    given = [
        rng.standard_normal(shape).astype(dtype) for shape in ((ROWS, DIM), (KEYS, DIM), (ROWS, KEYS), (KEYS, DIM))
    ]
    logits, sums = _products(True, jnp.dtype(dtype))(*map(jnp.asarray, given))
    query, keys, weights, values = (x.astype(np.float64) for x in given)
    np.testing.assert_allclose(np.asarray(logits), query @ keys.T, atol=1e-4)
    np.testing.assert_allclose(np.asarray(sums), 1 + weights @ values, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiled_products_are_lowered(dtype: str) -> None:
    given = [jax.ShapeDtypeStruct(s, dtype) for s in ((ROWS, DIM), (KEYS, DIM), (ROWS, KEYS), (KEYS, DIM))]
    lowered = jax.jit(_products(False, jnp.dtype(dtype))).trace(*given).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
