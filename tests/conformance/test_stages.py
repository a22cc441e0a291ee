"""The native path with long keys: those of one group of kv heads lie ready at a time, where short ones do together."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal
from attnops.operators.kernels.blocking import Blocking
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.operands import Operands
from attnops.operators.kernels.partial_attention import differentiable
from attnops.operators.vanilla.kernel import blockwise
from attnops.verify.reference import reference_attention, reference_gradients

from . import cases, harness

# As many of each as there are ways in and out of a stage: layouts, half precision, heads in groups, gradients of their own.
STAGED = [
    ("gqa", "bthd", "float32"),
    ("mqa", "bhtd", "float32"),
    ("segment_ids", "bhtd", "bfloat16"),
    ("causal_window", "bthd", "bfloat16"),
    ("kv_lengths", "bthd", "float32"),
    ("sinks_per_kv_head", "bthd", "float32"),
    ("value_dim", "bhtd", "float32"),
    ("bias_broadcast", "bthd", "float32"),
    ("cross", "thd", "float16"),
    ("int8_kv", "bhtd", "float32"),
]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is traced is kept by the call, of which the limit is no part."""
    jax.clear_caches()
    monkeypatch.setattr(blockwise, "_STAGED_TOGETHER", 0)
    yield
    jax.clear_caches()


@pytest.mark.parametrize(("name", "layout", "dtype"), STAGED)
def test_groups_one_by_one(name: str, layout: str, dtype: str) -> None:
    case, implementation = cases.build(name, layout), harness.RUNNABLE["vanilla.forward_native blockwise"]
    tensors = harness.draw(case, dtype)
    got = harness.run(implementation.make(dtype), case, tensors, dtype, layout)
    published = implementation.capability.tolerance[dtype]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_several_groups_of_several_heads(layout: str) -> None:
    """Which a route takes for many heads and short blocks."""
    shapes = {"query": (2, 100, 8, 16), "key": (2, 100, 4, 16), "value": (2, 100, 4, 16), "d_output": (2, 100, 8, 16)}
    rng = np.random.default_rng(4)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    laid_out = {name: jnp.asarray(x if layout == "bthd" else x.swapaxes(1, 2)) for name, x in arrays.items()}
    blocking = Blocking(48, 32, 2)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        kernel = blockwise.PartialBlockwise(layout, 0.25, None, np.dtype(np.float32), "cpu", blocking, blocking)
        operands = Operands(query, key, value, None, None)
        return differentiable(kernel, operands, LocalMask(Causal(), 0, 100, 100, 0), None)[0]

    output, gradient = jax.vjp(jax.jit(attend), *(laid_out[name] for name in ("query", "key", "value")))
    seen = np.tril(np.ones((100, 100), bool))
    call = [arrays[name] for name in ("query", "key", "value")]
    expected = reference_attention(*call, scale=0.25, mask=seen).output
    gradients = reference_gradients(*call, arrays["d_output"], None, scale=0.25, mask=seen)
    wanted = [expected, *(gradients[name] for name in ("query", "key", "value"))]
    for got, want in zip([output, *gradient(laid_out["d_output"])], wanted, strict=True):
        np.testing.assert_allclose(got if layout == "bthd" else got.swapaxes(1, 2), want, rtol=1e-5, atol=1e-5)
