"""sdpa's rules for cuDNN against what jax itself refuses when it traces a call for a GPU that isn't here, in both directions.

jax asks the GPU that is here for its generation, and takes the oldest if there is none. So the rules are held for an A100; what
Hopper adds (head dims up to 256) isn't.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import covering

from attnops import Causal, Full, Mask, OperationMetadata, OperationRegistry, RefusedError, SlidingWindow
from attnops.errors import InputTypeError
from attnops.operators import Operation
from attnops.verify.devices import lowered_for, tracing_on
from attnops.verify.gpu.gpu_mesh import described_gpus, has_cuda_plugin

if not has_cuda_plugin() or importlib.util.find_spec("nvidia.cudnn") is None:
    pytest.skip("pip install 'attnops[cuda-compile]' nvidia-cudnn-cu13", allow_module_level=True)

HEADS, KV_HEADS = 4, 2
KINDS = ("full", "causal", "window", "array", "bias")
CASES = list(
    itertools.product(
        ("bfloat16", "float16", "float32"), (64, 72, 100, 128, 136, 256), ((64, 64), (63, 63), (64, 62), (64, 61)), KINDS,
        ("train", "prefill"),
    )
)  # fmt: skip


def _mask(kind: str) -> Mask | jax.ShapeDtypeStruct:
    return {"causal": Causal(), "window": Causal() & SlidingWindow(7)}.get(kind, Full())


@functools.cache
def _sdpa(dtype: str) -> Operation:
    metadata = OperationMetadata(mesh=described_gpus("a100"), fallback="error", runtime_dtype=dtype, causal=False)
    return OperationRegistry.create("sdpa", metadata)


def _traced(function: Any, *shapes: Any, gradient: bool) -> Any:
    """The function, or its gradient, traced and lowered for an A100."""
    mesh = described_gpus("a100")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]

    def loss(*arrays: jax.Array) -> jax.Array:
        return function(*arrays).astype(jnp.float32).sum()

    made = jax.jit(jax.grad(loss, (0, 1, 2)) if gradient else function, out_shardings=sharding)
    with tracing_on(mesh, "cuda"):
        return lowered_for(made.trace(*arrays), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dim", "lengths", "kind", "mode"), covering(CASES, 3), ids=str)
def test_a_plan_refuses_what_jax_refuses(dtype: str, dim: int, lengths: tuple[int, int], kind: str, mode: str) -> None:
    q_len, kv_len = lengths
    if kind in ("causal", "window") and q_len != kv_len:
        pytest.skip("jax's flags count from the first row, a plan asks how they are aligned")
    q, k = (jax.ShapeDtypeStruct((2, n, heads, dim), dtype) for n, heads in ((q_len, HEADS), (kv_len, KV_HEADS)))
    seen = jax.ShapeDtypeStruct((2, 1, q_len, kv_len), jnp.bool_)
    bias = jax.ShapeDtypeStruct((1, HEADS, q_len, kv_len), dtype)
    extra = {"array": (seen,), "bias": (bias,)}.get(kind, ())

    def of_jax(q: Any, k: Any, v: Any, *extra: Any) -> jax.Array:
        given = {} if not extra else {"mask" if kind == "array" else "bias": extra[0]}
        window = (7, 0) if kind == "window" else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=kind in ("causal", "window"), local_window_size=window, implementation="cudnn", **given
        )

    def of_attnops(q: Any, k: Any, v: Any, *extra: Any) -> jax.Array:
        given: dict[str, Any] = {"bias": extra[0]} if kind == "bias" else {}
        mask = extra[0] if kind == "array" else _mask(kind)
        return _sdpa(dtype)(q, k, v, mask=mask, mode=mode, **given).attention_outputs

    given = {"bias": bias} if kind == "bias" else {}
    plan = _sdpa(dtype).plan(q, k, k, mask=seen if kind == "array" else _mask(kind), mode=mode, **given)
    try:
        _traced(of_jax, q, k, k, *extra, gradient=mode == "train")
        refused = None
    except (NotImplementedError, ValueError) as error:
        refused = str(error)
    assert (plan.implementation == "sdpa.forward_cuda") == (refused is None), (plan.rejected, refused)
    if refused is None:
        _traced(of_attnops, q, k, k, *extra, gradient=mode == "train")


def test_derivatives_that_cudnn_lacks() -> None:
    """The first in reverse mode is lowered to cuDNN's calls; the others are refused as attnops' own kernels refuse them."""
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 64), jnp.bfloat16) for heads in (HEADS, KV_HEADS))

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return _sdpa("bfloat16")(q, k, v, mask=Causal(), mode="train").attention_outputs

    def product(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.jvp(lambda q: jax.grad(lambda q: attend(q, k, v).astype(jnp.float32).sum())(q), (q,), (q,))[1]

    text = _traced(attend, q, k, k, gradient=True).as_text()
    assert text.count("__cudnn$fmhaSoftmax") == 2
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 1
    with pytest.raises(InputTypeError, match="'path': 'plain'"):
        _traced(lambda q, k, v: jax.jvp(lambda q: attend(q, k, v), (q,), (q,))[1], q, k, k, gradient=False)
    with pytest.raises(RefusedError, match="'path': 'plain'"):
        _traced(product, q, k, k, gradient=False)
