"""tokamax's call: against the float64 reference by the words of its docstrings, and against its own XLA implementation."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, ConfigError, InputError
from attnops import dot_product_attention as as_jax_nn
from attnops.adapters.tokamax import dot_product_attention
from attnops.errors import InputTypeError, UnknownNameError
from attnops.operators.kernels.default_promotion import default_promotion
from attnops.verify import reference_attention

tokamax = pytest.importorskip("tokamax")
qwix = pytest.importorskip("qwix")
# Its masks have no public name; the functions that take them do.
_base = pytest.importorskip("tokamax._src.ops.attention.base")
pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()  # otherwise tokamax parses pytest's arguments
BATCHES = [(), (3,), (2, 3), (2, 1, 2)]


def arrays(batch: tuple[int, ...], q: int = 5, kv: int = 7, heads: int = 4, kv_heads: int = 2) -> list[np.ndarray]:
    random = np.random.default_rng([len(batch), q])
    shapes = ((*batch, q, heads, 8), (*batch, kv, kv_heads, 8), (*batch, kv, kv_heads, 6))
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def wanted(given: list[np.ndarray], seen: Any, **call: Any) -> np.ndarray:
    """One batch row after the other, in float64. `seen` broadcasts to [*batch, heads, q, kv]."""
    query, key, value = given
    batch, (q, heads, _), kv = query.shape[:-3], query.shape[-3:], key.shape[-3]
    seen = np.broadcast_to(seen, (*batch, heads, q, kv))
    bias = call.pop("bias", None)
    bias = None if bias is None else np.broadcast_to(bias, seen.shape)
    out = np.zeros((*batch, q, heads, value.shape[-1]))
    for row in np.ndindex(batch):
        made = reference_attention(
            *(x[row][None] for x in given),
            scale=8**-0.5,
            mask=seen[row][None],
            bias=None if bias is None else bias[row][None],
            **call,
        )
        out[row] = made.output[0]
    return out


def test_the_signature_is_tokamaxs() -> None:
    ours, theirs = inspect.signature(dot_product_attention), inspect.signature(tokamax.dot_product_attention)
    assert [(p.name, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.kind) for p in theirs.parameters.values()
    ]
    defaults = {n: p.default for n, p in theirs.parameters.items()} | {"implementation": "vanilla"}
    assert {n: p.default for n, p in ours.parameters.items()} == defaults


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("jit", [False, True])
def test_any_number_of_batch_dimensions(batch: tuple[int, ...], jit: bool) -> None:
    given = arrays(batch)
    random = np.random.default_rng(1)
    mask = random.random((*batch[:1], *(1 for _ in batch[1:]), 1, 5, 7)) < 0.7
    bias = random.standard_normal((4, 1, 7)).astype(np.float32)
    call = {"mask": mask, "bias": bias, "is_causal": True, "local_window_size": (2, 1)}

    def ours(query: Any, key: Any, value: Any) -> Any:
        return dot_product_attention(query, key, value, **call)

    out = (jax.jit(ours) if jit else ours)(*given)
    i, j = np.arange(5)[:, None], np.arange(7)[None]
    seen = mask & (j <= i) & (j >= i - 2) & (j <= i + 1)
    np.testing.assert_allclose(out, wanted(given, seen, bias=bias), atol=2e-6)
    np.testing.assert_array_equal(out, as_jax_nn(*given, **call))
    square = [given[0], *(x[..., :5, :, :] for x in given[1:])]  # its window counts keys where it means queries
    call = {"is_causal": True, "local_window_size": (2, 1), "bias": jnp.asarray(bias[..., :5])}
    with default_promotion():
        own = tokamax.dot_product_attention(*map(jnp.asarray, square), **call, implementation="xla")
    np.testing.assert_allclose(dot_product_attention(*square, **call), own, atol=5e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_lengths_are_those_of_all_batch_rows(batch: tuple[int, ...]) -> None:
    given = arrays(batch)
    random = np.random.default_rng(2)
    kv_lengths, q_lengths = (random.integers(1, n, batch or (1,)).astype(np.int32) for n in (8, 6))
    call = {"query_seq_lengths": q_lengths, "key_value_seq_lengths": kv_lengths}
    shape = (*(batch or (1,)), 1, 1, 1)
    seen = (np.arange(7) < kv_lengths.reshape(shape)) & (np.arange(5)[:, None] < q_lengths.reshape(shape))
    want = wanted(given, seen if batch else seen[0])
    np.testing.assert_allclose(dot_product_attention(*given, **call), want, atol=2e-6)
    output, lse = as_jax_nn(*given, **call, return_residual=True)
    np.testing.assert_allclose(output, want, atol=2e-6)
    assert lse.shape == (*batch, 5, 4)
    assert (np.isneginf(lse) == (np.asarray(output) == 0).all(-1)).all()
    if len(batch) > 1:
        some = kv_lengths[:1]
        wide = np.broadcast_to(some, batch)
        np.testing.assert_array_equal(
            dot_product_attention(*given, key_value_seq_lengths=some),
            dot_product_attention(*given, key_value_seq_lengths=wide),
        )
        with pytest.raises(InputError, match=r"key_value_seq_lengths has shape \(2,\)"):
            dot_product_attention(*given, key_value_seq_lengths=np.ones(2, np.int32))
        with pytest.raises(InputError, match="one number per batch row"):
            as_jax_nn(*given, key_value_seq_lengths=some[..., :1, None])


RANGES = {
    "k_start": lambda random, batch: random.integers(-1, 6, (*batch, 1, 5)),
    "k_end": lambda random, batch: random.integers(2, 9, (*batch[-1:], 1, 5)),
    "q_start": lambda random, batch: random.integers(-1, 3, (1, 7)),
    "q_end": lambda random, batch: random.integers(2, 7, (*batch, 1, 1)),
}


@pytest.mark.parametrize("names", [("k_start",), ("k_end",), ("q_start",), ("q_end",), tuple(RANGES)], ids="-".join)
@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("kind", ["known", "traced"])
def test_ranges_become_positions(names: tuple[str, ...], batch: tuple[int, ...], kind: str) -> None:
    given = arrays(batch)
    random = np.random.default_rng(5)
    ranges = {name: RANGES[name](random, batch).astype(np.int32) for name in names}
    many = len(names) > 1
    extra = {"bool_mask": random.random((1, 5, 7)) < 0.8, "is_causal": True} if many else {}
    mask = _base.Mask(**extra, **ranges)
    i, j = np.arange(5)[:, None], np.arange(7)[None]
    seen = np.ones((5, 7), bool) & (j <= i if many else True) & extra.get("bool_mask", True)
    for name, x in ranges.items():
        bound = x[..., None] if name[0] == "k" else x[..., None, :]
        place = j if name[0] == "k" else i
        seen = seen & (place >= bound if name.endswith("start") else place < bound)

    def ours(given: Any, mask: Any) -> Any:
        return dot_product_attention(*given, mask=mask)

    out = (jax.jit(ours) if kind == "traced" else ours)(given, mask)
    np.testing.assert_allclose(out, wanted(given, seen), atol=2e-6)
    with default_promotion():
        theirs = np.asarray(mask.as_array(5, 7))
    np.testing.assert_array_equal(np.broadcast_to(theirs, (*batch, 4, 5, 7)), np.broadcast_to(seen, (*batch, 4, 5, 7)))


@pytest.mark.skipif(not hasattr(_base, "CausalMask"), reason="tokamax 0.0.12 has no CausalMask")
@pytest.mark.parametrize(("offset", "window"), [(0, None), (1, None), (-1, None), (1, 3), (2, 1), (0, 2)])
@pytest.mark.parametrize("kind", ["known", "traced"])
def test_the_diagonals_offset_and_window(offset: int, window: int | None, kind: str) -> None:
    given = arrays((2,))
    mask = _base.Mask(causal_mask=_base.CausalMask(offset=offset, window_size=window))
    i, j = np.arange(5)[:, None], np.arange(7)[None]
    seen = (j <= i + offset) & (j > i + offset - (window or 99))

    def ours(given: Any, mask: Any) -> Any:
        return dot_product_attention(*given, mask=mask)

    out = (jax.jit(ours) if kind == "traced" else ours)(given, mask)
    np.testing.assert_allclose(out, wanted(given, seen), atol=2e-6)
    with default_promotion():
        theirs = np.asarray(mask.as_array(5, 7))
    np.testing.assert_array_equal(theirs, np.broadcast_to(seen, theirs.shape))


def test_a_declared_causal_applies_beside_ranges() -> None:
    given = arrays((2,), kv=5)
    mask = _base.Mask(k_end=jnp.full((1, 5), 4, jnp.int32))
    i, j = np.arange(5)[:, None], np.arange(5)[None]
    for implementation, seen in (
        ("vanilla", j < 4),
        (Attention("vanilla", causal=True, query_offset=0), (j < 4) & (j <= i)),
        ({"operation": "vanilla", "metadata": {"causal": True}, "call": {"query_offset": 0}}, (j < 4) & (j <= i)),
    ):
        out = dot_product_attention(*given, mask=mask, implementation=implementation)
        np.testing.assert_allclose(out, wanted(given, seen), atol=2e-6)


def test_quantised_keys_and_values() -> None:
    query, key, value = arrays((2, 3))
    scales = [np.abs(x).max(axis=axes, keepdims=True) / 127 for x, axes in ((key, (-1,)), (value, (0, 1, 2, 4)))]
    whole = [np.round(x / scale).astype(np.int8) for x, scale in zip((key, value), scales, strict=True)]
    stored = [qwix.QArray(jnp.asarray(x), jnp.asarray(scale)) for x, scale in zip(whole, scales, strict=True)]
    out = dot_product_attention(query, *stored)
    plain = [x.astype(np.float64) * scale for x, scale in zip(whole, scales, strict=True)]
    np.testing.assert_allclose(out, wanted([query, *plain], True), atol=5e-6)
    for wrong, message in (
        (qwix.QArray(whole[0], scales[0], zero_point=jnp.ones_like(scales[0])), "zero point"),
        (qwix.QArray(whole[0], jnp.ones((2, 3, 7, 2, 2))), "key has scales of shape"),
    ):
        with pytest.raises(ConfigError, match=message):
            dot_product_attention(query, wrong, value)
    with pytest.raises(InputTypeError, match="the query isn't quantised here"):
        dot_product_attention(stored[0], key, value)


def test_what_cannot_be_carried_is_refused() -> None:
    given = arrays((2,))
    bias = np.zeros((5, 7), np.float32)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for call, error, message in (
        ({"bias": bias, "logits_soft_cap": 3.0}, ConfigError, "tokamax adds the bias before the cap"),
        (
            {"bias": bias, "implementation": Attention("vanilla", logits_soft_cap=3.0)},
            ConfigError,
            "bias with logits_soft_cap=3",
        ),
        ({"mask": _base.Mask(k_start=np.zeros((4, 5), np.int32))}, ConfigError, "a range for each of 4 heads"),
        ({"mask": _base.Mask(k_start=np.zeros((1, 6), np.int32))}, InputError, r"broadcasts to \(2, 1, 5\)"),
        ({"mask": _base.Mask(q_end=np.zeros((1, 7), np.float32))}, InputTypeError, "mask.q_end is float32"),
        ({"q_sharding": sharding}, ConfigError, "q_sharding"),
        ({"precision": jax.lax.Precision.HIGHEST}, ConfigError, "precision"),
        ({"implementation": ("mosaic", "xla")}, ConfigError, "wanted one"),
        ({"implementation": "mosaic"}, UnknownNameError, "'splash' has kernels for TPUs"),
        ({"mask": np.ones((5, 7), np.float32)}, InputTypeError, "mask is float32"),
    ):
        with pytest.raises(error, match=message):
            dot_product_attention(*given, **call)


def test_a_cap_alone_is_theirs() -> None:
    given = arrays((2, 2))
    out = dot_product_attention(*given, logits_soft_cap=2.0)
    np.testing.assert_allclose(out, wanted(given, True, soft_cap=2.0), atol=2e-6)


def test_disabled_is_tokamaxs_own() -> None:
    given = list(map(jnp.asarray, arrays((2,))))
    out = dot_product_attention(*given, is_causal=True, implementation={"operation": "vanilla", "enabled": False})
    np.testing.assert_array_equal(out, tokamax.dot_product_attention(*given, is_causal=True))
