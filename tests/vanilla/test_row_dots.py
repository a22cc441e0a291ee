"""The sums of products over the last axis, which a CPU computes in another way than other platforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.operators.kernels.primitives import row_dots


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 0, 3, 16), (2, 5, 3, 80), (1, 7, 256)])
def test_against_float64(shape: tuple[int, ...], platform: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    a[..., :1] = 1e4  # beside which a factor rounded to bfloat16 would show
    wanted = (a.astype(np.float64) * b).sum(-1)
    found = row_dots(jnp.asarray(a), jnp.asarray(b), platform)
    assert found.dtype == jnp.float32
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_cpu_makes_no_reduction() -> None:
    """A product, of factors that no device may round."""
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32)
    made = jax.make_jaxpr(lambda a, b: row_dots(a, b, "cpu"))(x, x).eqns
    assert [one.primitive.name for one in made] == ["dot_general"]
    assert made[0].params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
