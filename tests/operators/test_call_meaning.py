"""One meaning, whichever way a thing is said; and no guess where it can't be known."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnops import (
    Causal,
    FallbackWarning,
    InputError,
    Lengths,
    MaskFunction,
    OperationMetadata,
    OperationRegistry,
    SlidingWindow,
    register_mask_function,
)
from attnops.errors import InputTypeError, UnknownNameError
from attnops.planning.notes import has_note
from attnops.verify import reference_attention

INTERPRETED = {"splash": {"interpret": True}}


def _attend(operation: str = "vanilla", **metadata: Any) -> Any:
    return OperationRegistry.create(operation, OperationMetadata(**metadata))


def _qkv(q_len: int = 16, kv_len: int = 16, batch: int = 2, heads: int = 2, kv_heads: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((batch, q_len, heads, 8), (batch, kv_len, kv_heads, 8), (batch, kv_len, kv_heads, 8))
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def _close(result: Any, qkv: list[np.ndarray], visible: np.ndarray) -> None:
    want = reference_attention(*qkv, scale=8**-0.5, mask=visible).output
    np.testing.assert_allclose(result.attention_outputs, want, atol=3e-6)


def test_lengths_say_the_same_as_an_argument_and_inside_the_mask() -> None:
    qkv, lengths = _qkv(q_len=1), np.array([5, 12], np.int32)
    j = np.arange(16)
    at = (lengths - 1)[:, None, None, None]
    visible = (j <= at) & (j >= at - 2)
    _close(_attend()(*qkv, kv_lengths=lengths, sliding_window=(2, 0)), qkv, visible)
    _close(_attend()(*qkv, mask=Causal() & SlidingWindow(2) & Lengths(lengths)), qkv, visible)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_narrow_lengths_do_not_wrap(dtype: str) -> None:
    qkv, lengths = _qkv(q_len=5), np.array([3, 9])
    i, j = np.arange(5)[:, None], np.arange(16)[None, :]
    visible = ((j <= i + (lengths - 5)[:, None, None]) & (j < lengths[:, None, None]))[:, None]
    _close(_attend()(*qkv, kv_lengths=lengths.astype(dtype), mode="insert"), qkv, visible)


@pytest.mark.parametrize("operation", ["vanilla", "splash"])
def test_a_replaced_mask_function_is_the_one_that_runs(operation: str) -> None:
    register_mask_function("meaning_replaced", override=True)(lambda x, j: j <= x)
    i, j = np.arange(16)[:, None], np.arange(16)[None, :]
    qkv = _qkv()
    _close(_attend(operation, operation_configs=INTERPRETED)(*qkv, mask=MaskFunction("meaning_replaced")), qkv, j <= i)
    register_mask_function("meaning_replaced", override=True)(lambda x, j: j >= x)
    _close(_attend(operation, operation_configs=INTERPRETED)(*qkv, mask=MaskFunction("meaning_replaced")), qkv, j >= i)


@pytest.mark.parametrize("sink", [-np.inf, -3e38])
def test_sinks_of_nothing_leave_dead_rows_dead(sink: float) -> None:
    qkv = _qkv()
    attend = _attend("splash", operation_configs=INTERPRETED, fallback="error")
    out = attend(*qkv, causal=False, kv_lengths=np.array([0, 16]), softmax_aux=np.full(2, sink, np.float32))
    assert not out.attention_outputs[0].any()
    _close(out, qkv, np.array([False, True])[:, None, None, None] & np.ones((16, 16), bool))


@pytest.mark.parametrize("operation", ["vanilla", "splash"])
def test_sinks_of_nothing_have_finite_gradients(operation: str) -> None:
    configs = {"splash": {"interpret": True}, "vanilla": {"path": "blockwise"}}
    attend = _attend(operation, operation_configs=configs, fallback="error" if operation == "splash" else "warn")
    qkv = [jnp.asarray(x) for x in _qkv()]

    def total(sinks: jax.Array, *qkv: jax.Array) -> jax.Array:
        lengths = jnp.array([0, 16])
        return attend(*qkv, causal=False, kv_lengths=lengths, softmax_aux=sinks).attention_outputs.sum()

    for gradient in jax.grad(total, (0, 1, 2, 3))(jnp.full(2, -jnp.inf), *qkv):
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("offset", [np.int32(3), np.array(3), jnp.array(3)], ids=["scalar", "numpy", "jax"])
def test_a_scalar_offset_counts_for_every_row(offset: Any) -> None:
    i, j = np.arange(16)[:, None], np.arange(16)[None, :]
    qkv = _qkv()
    _close(_attend()(*qkv, query_offset=offset), qkv, j <= i + 3)
    _close(jax.jit(lambda *x: _attend()(*x[:3], query_offset=x[3]))(*qkv, jnp.asarray(offset)), qkv, j <= i + 3)


def test_x64_is_not_forgotten() -> None:
    attend, qkv = _attend(), [x.astype(np.float64) for x in _qkv()]
    assert attend(*qkv).attention_outputs.dtype == jnp.float32
    with jax.enable_x64(True):
        assert attend(*qkv).attention_outputs.dtype == jnp.float64


@pytest.mark.parametrize("call", [{"kv_lengths": np.full(1, 64)}, {}], ids=["lengths", "no lengths"])
@pytest.mark.parametrize("mode", ["train", "autoregressive"])
def test_a_manual_sequence_needs_an_offset_in_every_mode(mode: str, call: dict[str, Any]) -> None:
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(AxisType.Auto,))
    x = jnp.ones((1, 64, 2, 8))
    split = PartitionSpec(None, "sp")

    def local(q: jax.Array, k: jax.Array) -> jax.Array:
        return _attend(mesh=mesh)(q, k, k, mode=mode, **call).attention_outputs

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split)
    with pytest.raises(InputError, match="pass query_offset"):
        jax.jit(sharded)(x, x)


@pytest.mark.parametrize("shape", [(8,), (8, 3), (2, 3)], ids=str)
def test_explicit_sinks_and_keys_laid_out_as_declared(shape: tuple[int, ...]) -> None:
    mesh = jax.make_mesh((2, 4), ("sp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    q, k, v = _qkv(heads=8, kv_heads=2, batch=1)
    sinks = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    laid = place(q, None, "sp", "tp"), place(k, None, "sp"), place(v, None, "sp")
    got = _attend(mesh=mesh)(*laid, softmax_aux=place(sinks, "tp" if shape[0] == 8 else None), causal=False)
    want = reference_attention(q, k, v, scale=8**-0.5, sinks=sinks).output
    np.testing.assert_allclose(got.attention_outputs, want, atol=3e-6)


def test_a_declared_auto_mesh_inside_the_same_explicit_one() -> None:
    qkv = _qkv(heads=4, kv_heads=4)
    i, j = np.arange(16)[:, None], np.arange(16)[None, :]
    with jax.set_mesh(jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))):
        _close(_attend(mesh={"tp": 4})(*qkv), qkv, j <= i)
    with (
        jax.set_mesh(jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))),
        pytest.raises(InputError, match=r"declared mesh tp=4, but the context's .* tp=2"),
    ):
        _attend(mesh={"tp": 4})(*qkv)


def test_committed_sinks_that_do_not_divide() -> None:
    q, k, v = _qkv(heads=8, kv_heads=2)
    sinks = jax.device_put(jnp.ones((2, 3)), jax.devices()[0])
    got = _attend(mesh={"tp": 4})(q, k, v, softmax_aux=sinks, causal=False)
    want = reference_attention(q, k, v, scale=8**-0.5, sinks=np.ones((2, 3))).output
    np.testing.assert_allclose(got.attention_outputs, want, atol=3e-6)


def test_a_warning_made_an_error_stays_one() -> None:
    attend = _attend("splash", operation_configs=INTERPRETED)
    qkv = _qkv(q_len=13, kv_len=13)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for _ in range(2):
            with pytest.raises(FallbackWarning):
                attend(*qkv, return_weights=True)
    with pytest.warns(FallbackWarning, match="attention weights"):
        attend(*qkv, return_weights=True)
    attend(*qkv, return_weights=True)  # told once


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"mode": ["train"]}, InputTypeError, "mode is a list"),
        ({"layout": ["bthd"]}, InputTypeError, "layout is a list"),
        ({"softmax_scale": 10**400}, InputError, "401 digits"),
        ({"sliding_window": 3.0}, InputTypeError, "wanted an integer or \\(left, right\\)"),
        ({"mask": [[True]]}, InputTypeError, "mask is a list"),
        ({"mask": np.ones((16, 16), bool)}, ValueError, "rank"),
        ({"bias": np.ones((1, 1, 16, 16), bool)}, InputTypeError, "goes to mask="),
        ({"kv_lengths": [3, 4]}, InputTypeError, "kv_lengths is a list"),
        ({"dropout_prob": 0.5, "deterministic": False, "dropout_rng": np.ones(3)}, InputTypeError, "wanted one key"),
        (
            {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.split(jax.random.key(0))},
            InputTypeError,
            "wanted one key",
        ),
        ({"logits_soft_cap": 0}, InputError, "positive"),
        ({"softmax_aux": np.ones(3, np.float32)}, InputError, "softmax_aux has shape"),
        ({"causal": 1}, InputTypeError, "causal is 1"),
    ],
)
def test_wrong_arguments(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _attend()(*_qkv(), **call)


def test_no_values() -> None:
    q, k, v = _qkv()
    with pytest.raises(InputTypeError, match="query is None"):
        _attend()(None, k, v)
    with pytest.raises(InputTypeError, match=r"call plan\(\)"):
        _attend()(jax.ShapeDtypeStruct(q.shape, q.dtype), k, v)
    with pytest.raises(UnknownNameError, match="got a list"):
        OperationRegistry.get(["splash"])  # type: ignore[arg-type]


def test_planned_for_another_platform() -> None:
    with pytest.raises(InputError, match=r"planned for tpu \(from metadata.backend\)"):
        _attend("splash", backend="tpu")(*_qkv())


def test_a_gpu_of_unknown_vendor_is_told() -> None:
    plan = _attend("sdpa", backend="gpu", runtime_dtype="bfloat16").plan(*_qkv())
    assert has_note(plan.notes, "platform.unknown_gpu_vendor")
    assert _attend("sdpa", backend="cuda", runtime_dtype="bfloat16").plan(*_qkv()).method == "forward_cuda"


def test_the_ways_to_align_are_those_that_work() -> None:
    """30 queries and 64 keys: each way that the refusal names, and what it means."""
    qkv = _qkv(q_len=30, kv_len=64)
    with pytest.raises(InputError) as caught:
        _attend()(*qkv)
    ahead = np.arange(64) - np.arange(30)[:, None]
    for named, call, offset in (
        ("query_offset=0", {"query_offset": 0}, 0),
        ("query_offset=34", {"query_offset": 34}, 34),
        ("mode='insert'", {"mode": "insert"}, 34),
    ):
        assert named in str(caught.value)
        _close(_attend()(*qkv, **call), qkv, np.broadcast_to(ahead <= offset, (1, 1, 30, 64)))
    with pytest.raises(InputError, match="mode='autoregressive'"):  # with one query that is a step of decoding
        _attend()(*_qkv(q_len=1, kv_len=64), mode="train")


def test_an_output_is_no_tuple() -> None:
    """It can be unpacked into its arrays, but an index is refused: the first would be easily taken for a batch row."""
    output = _attend()(*_qkv())
    with pytest.raises(InputTypeError, match=r"isn't a tuple.*\.attention_outputs"):
        output[0]
    first, weights, lse = output
    assert first is output.attention_outputs
    assert (weights, lse) == (None, None)
