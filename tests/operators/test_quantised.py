"""int8 and fp8 keys and values: what is refused, what is told, whose gradient is what."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from attnops import InputError, OperationMetadata, OperationRegistry
from attnops.errors import InputTypeError
from attnops.planning.quantised import GRANULARITIES, QUANTISED, quantise
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

SHAPE = {"bthd": (2, 16, 2, 8), "bhtd": (2, 2, 16, 8), "thd": (16, 2, 8)}
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}


def _attend(operation: str = "vanilla", **metadata: Any) -> Any:
    return OperationRegistry.create(operation, OperationMetadata(**metadata))


def _struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _call(layout: str, dtype: str = "int8") -> tuple[list[Any], dict[str, Any]]:
    """Query, key and value, and a call with scales for every token and head."""
    shape = SHAPE[layout]
    scale = _struct((*shape[:-1], 1), "float32")
    call: dict[str, Any] = {"layout": layout, "key_scale": scale, "value_scale": scale}
    if layout == "thd":
        call["q_segment_ids"] = _struct((16,), "int32")
    return [_struct(shape, "bfloat16"), _struct(shape, dtype), _struct(shape, dtype)], call


@given(
    layout=st.sampled_from(list(SHAPE)),
    dtype=st.sampled_from(QUANTISED),
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 8, 16]), max_size=5),
    tensor=st.sampled_from(["key", "value"]),
)
def test_a_scale_broadcasts_to_its_tensor_or_is_refused(layout: str, dtype: str, sizes: list[int], tensor: str) -> None:
    tensors, call = _call(layout, dtype)
    call[f"{tensor}_scale"] = _struct(tuple(sizes), "bfloat16")
    fits = len(sizes) == len(layout) and all(n in (1, m) for n, m in zip(sizes, (*SHAPE[layout][:-1], 1), strict=True))
    if fits:
        assert _attend().plan(*tensors, **call).problem.scales[f"{tensor}_scale"] == tuple(sizes)
        return
    with pytest.raises(InputError, match=rf"{tensor}_scale has shape .*wanted .*kv_heads, "):
        _attend().plan(*tensors, **call)


@pytest.mark.parametrize("tensor", ["key", "value"])
@pytest.mark.parametrize(
    ("dtype", "scale", "error", "message"),
    [
        ("int8", None, InputError, r"\w+ is int8, but \w+_scale is missing; pass it"),
        ("bfloat16", "float32", InputError, r"\w+ is bfloat16, which isn't quantised; leave it out"),
        ("int8", "int32", InputTypeError, r"_scale has dtype int32; wanted floats"),
        ("uint8", None, InputTypeError, r"has dtype uint8; wanted .* quantised, int8, float8_e4m3fn, float8_e5m2"),
        ("int4", "float32", InputTypeError, r"has dtype int4; wanted"),
        ("float8_e4m3b11fnuz", None, InputTypeError, r"wanted float32, bfloat16 or float16; or, quantised"),
    ],
)
def test_refused(tensor: str, dtype: str, scale: str | None, error: type[Exception], message: str) -> None:
    q = _struct((2, 16, 2, 8), "bfloat16")
    tensors = {"key": q, "value": q, tensor: _struct(q.shape, dtype)}
    call = {} if scale is None else {f"{tensor}_scale": _struct((1, 1, 1, 1), scale)}
    with pytest.raises(error, match=message):
        _attend().plan(q, **tensors, **call)


def test_a_quantised_query_is_refused() -> None:
    x = _struct((2, 16, 2, 8), "float8_e4m3fn")
    with pytest.raises(InputTypeError, match="query has dtype float8_e4m3fn; wanted float32, bfloat16 or float16\\."):
        _attend().plan(x, x, x)


def test_a_scale_that_is_no_array() -> None:
    tensors, call = _call("bthd")
    with pytest.raises(InputTypeError, match="key_scale is a float"):
        _attend().plan(*tensors, **(call | {"key_scale": 0.5}))


def test_the_plan_tells_all() -> None:
    """Dtypes, shapes, bytes, where a scale lies, and the copy that the method works on."""
    mesh = {"fsdp": 2, "tp": 2}
    q, k = _struct((4, 32, 8, 16), "bfloat16"), _struct((4, 32, 4, 16), "int8")
    v = _struct((4, 32, 4, 16), "float8_e5m2")
    plan = _attend(mesh=mesh).plan(q, k, v, key_scale=_struct((4, 1, 4, 1), "float32"))
    assert (plan.problem.runtime_dtype, plan.problem.quantised) == ("bfloat16", {"key": "int8", "value": "float8_e5m2"})
    assert plan.placement.fitted["key"].local_bytes == 2 * 32 * 2 * 16
    assert plan.placement.fitted["key_scale"].local_shape == (2, 1, 2, 1)
    assert plan.placement.call_spec("key_scale", (4, 1, 4, 1)) == PartitionSpec("fsdp", None, "tp", None)
    assert plan.placement.spec("key_scale") == PartitionSpec("fsdp", "tp", None)
    assert "value is float8_e5m2 without value_scale: its values are used unscaled" in plan.notes
    assert any(
        "dequantised copy of key and value (bfloat16, 8.0 KiB per device, in addition to 4.0 KiB as given)" in n
        for n in plan.notes
    )
    told = plan.to_dict()
    assert told["dtypes"] == {"query": "bfloat16", "key": "int8", "value": "float8_e5m2"}
    assert told["tensors"]["key_scale"]["device_shape"] == [2, 1, 2, 1]
    assert "quantized_kv" in told["features"]
    assert "key int8, value float8_e5m2" in plan.problem.describe()
    assert "key_scale       as key -> P(fsdp, -, tp, -)  4x1x4x1 -> 2x1x2x1  16 B" in plan.explain(verbose=True)


def test_only_what_is_cast_is_said_to_be() -> None:
    tensors, call = _call("bthd")
    plan = _attend(runtime_dtype="float32").plan(tensors[0], tensors[1], tensors[0], key_scale=call["key_scale"])
    assert "query, value cast from bfloat16 to float32 (runtime_dtype)" in plan.notes


def test_splash_says_what_its_gradient_works_on() -> None:
    tensors, call = _call("bthd")
    plan = _attend("splash", backend="tpu").plan(*tensors, **call)
    assert plan.implementation == "splash.forward_tpu"
    assert any(n.startswith("the gradient works on a dequantised copy of key and value") for n in plan.notes)
    refused = _attend("splash", backend="tpu", operation_configs={"splash": {"kernel": "jax"}}, fallback="error")
    reasons = refused.plan(*tensors, **call).rejected[0].reasons
    assert [r.code for r in reasons] == ["splash.jax.quantized_kv"]


def test_blocks_count_what_is_loaded() -> None:
    """int8 blocks take half of bfloat16's VMEM, so that what is counted of a forward pass shrinks."""
    from attnops.operators.splash.kernel.splash_blocks import SplashBlocks
    from attnops.operators.splash.kernel.vmem import forward_parts
    from attnops.operators.splash.passes import blocks_of
    from attnops.operators.splash.vmem_count import _shape

    shape, scale = (1, 4096, 8, 128), _struct((1, 4096, 8, 1), "float32")
    attend, found = _attend("splash", backend="tpu"), {}
    for dtype, call in (("bfloat16", {}), ("int8", {"key_scale": scale, "value_scale": scale})):
        plan = attend.plan(_struct(shape, "bfloat16"), _struct(shape, dtype), _struct(shape, dtype), **call)
        moved = _shape(plan.problem, plan.placement, plan.config)
        found[dtype] = moved, blocks_of(plan.config, SplashBlocks)
    (whole, blocks), (quantised, same) = found.values()
    assert blocks == same
    keys, compute = blocks.forward.block_kv, blocks.forward.compute_kv
    saved = 2 * (2 * keys * 128 - 2 * keys * 8 * 4)  # twice, for the pipeline; each scale is 8 sublanes of float32
    before, after = (sum(forward_parts(shape, blocks).values()) for shape in (whole, quantised))
    assert before - after == saved - 2 * compute * 128 * (2 + 4)


@pytest.mark.parametrize("operation", ["vanilla", "sdpa", "splash"])
def test_integers_have_no_gradient_and_scales_have_one(operation: str) -> None:
    """Outside of any jit: float0 for int8, as JAX wants it; the scale's gradient is summed where it is shared."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 24, 4, 8)).astype(np.float32)
    k, v = (rng.integers(-127, 128, (2, 24, 2, 8)).astype(np.int8) for _ in range(2))
    scales = [(rng.uniform(0.5, 1.5, shape) / 80).astype(np.float32) for shape in ((2, 1, 2, 1), (1, 24, 1, 1))]
    configs = {"splash": {"interpret": True}} if operation == "splash" else {}
    attend = _attend(operation, operation_configs=configs, fallback="error" if configs else "allow")

    def out(q: Any, k: Any, v: Any, key_scale: Any, value_scale: Any) -> jax.Array:
        return attend(q, k, v, key_scale=key_scale, value_scale=value_scale, causal=False).attention_outputs

    made, back = jax.vjp(out, *map(jnp.asarray, (q, k, v, *scales)))
    d_output = rng.standard_normal(made.shape).astype(np.float32)
    d_q, d_k, d_v, *d_scales = back(jnp.asarray(d_output))
    whole = [x.astype(np.float64) * s for x, s in zip((k, v), scales, strict=True)]
    np.testing.assert_allclose(made, reference_attention(q, *whole, scale=8**-0.5).output, atol=3e-6)
    want, terms = (of(q, *whole, d_output, scale=8**-0.5) for of in (reference_gradients, term_sizes))
    assert row_error(d_q, want["query"], row_sizes(want["query"], terms["query"])) < 1e-5
    for name, d_x, d_scale, x, scale in zip(("key", "value"), (d_k, d_v), d_scales, (k, v), scales, strict=True):
        assert d_x.dtype == jax.dtypes.float0
        shared = tuple(i for i, n in enumerate(scale.shape) if n == 1)
        of_scale = (want[name] * x).sum(axis=shared, keepdims=True)
        size = np.sqrt(((terms[name] * x) ** 2).sum(axis=shared, keepdims=True))
        assert row_error(d_scale, of_scale, row_sizes(of_scale, size)) < 3e-5


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("layout", SHAPE)
def test_quantised_numbers_are_near(layout: str, dtype: str, granularity: str) -> None:
    """Half a step of the dtype at most, and the dtype's largest number is used wherever there is a scale."""
    x = np.random.default_rng(1).standard_normal(SHAPE[layout]).astype(np.float32)
    made, scale = quantise(x, dtype, granularity, layout)
    assert made.dtype == jnp.dtype(dtype)
    differ = {"tensor": "", "head": "h", "token": "bt", "token_head": "bth"}[granularity]
    assert scale.shape == tuple(n if axis in differ else 1 for axis, n in zip(layout, x.shape, strict=True))
    back = made.astype(np.float64) * scale
    step = 1.0 if dtype == "int8" else float(jnp.finfo(dtype).eps) * np.abs(x / scale)
    assert (np.abs(back - x) <= 0.501 * np.maximum(step, 2.0**-9 if dtype != "int8" else 1) * scale).all()
    shared = tuple(i for i, n in enumerate(scale.shape) if n == 1)
    assert (np.abs(made.astype(np.float64)).max(axis=shared) == LARGEST[dtype]).all()
    zeros, ones = quantise(np.zeros_like(x), dtype, granularity, layout)
    assert not zeros.astype(np.float32).any()
    assert (ones == 1).all()
