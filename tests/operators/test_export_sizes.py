"""jax.export with symbolic sizes: one exported function gives the reference's numbers for several sizes, or it is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnops import (
    Attention,
    Blocks,
    Causal,
    FallbackWarning,
    InputError,
    KVCache,
    OperationRegistry,
    Prefix,
    RefusedError,
    SegmentIds,
    SlidingWindow,
)
from attnops.operators.paged_cache import RaggedBatch, dense_insert, init, insert
from attnops.operators.paged_cache import attend as paged_attention
from attnops.verify import reference_attention, reference_gradients

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5
Sizes = tuple[Any, Any, Any]  # batch, q_len, kv_len


def _shapes(sizes: Sizes) -> list[tuple[Any, ...]]:
    batch, q_len, kv_len = sizes
    return [(batch, q_len, HEADS, DIM), *[(batch, kv_len, KV_HEADS, DIM)] * 2]


def _structs(sizes: Sizes) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, np.float32) for shape in _shapes(sizes)]


def _arrays(sizes: Sizes, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in _shapes(sizes)]


def _symbols(text: str, constraints: Sequence[str] = ()) -> Sizes:
    return export.symbolic_shape(text, constraints=constraints)


def _exported(function: Callable[..., Any], *shapes: Any) -> Any:
    return export.export(jax.jit(function))(*shapes)


def _causal(sizes: Sizes) -> np.ndarray:
    """The queries are the last of the keys."""
    _, q_len, kv_len = sizes
    return np.tril(np.ones((q_len, kv_len), bool), kv_len - q_len)[None, None]


def _cases(first: Iterable[str], paths: Iterable[str], quick: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """All pairs; those that aren't quick are slow."""
    pairs = [
        pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in itertools.product(first, paths)
    ]
    return pytest.mark.parametrize(("which", "path"), pairs)


# -- the native path, as declared and as chosen ----------------------------------------------------------------------------

PATHS = {
    "chosen": {},
    "plain": {"path": "plain"},
    "blockwise": {"path": "blockwise"},
    "small blocks": {"path": "blockwise", "block_q": 8, "block_kv": 16},
}
ROUTES = ("plain", "small blocks")
SIZES: dict[str, tuple[str, list[Sizes]]] = {
    "batch": ("b, 9, 9", [(1, 9, 9), (3, 9, 9)]),
    "length": ("2, s, s", [(2, 1, 1), (2, 9, 9), (2, 150, 150)]),
    "batch and lengths": ("b, s, t", [(1, 9, 20), (3, 20, 41)]),
    "cache": ("b, 1, t", [(2, 1, 1), (3, 1, 70)]),
}


@_cases(SIZES, PATHS, {("batch", "chosen"), ("batch and lengths", "small blocks"), ("cache", "small blocks")})
def test_one_function_for_all_sizes(which: str, path: str) -> None:
    text, tried = SIZES[which]
    attend = Attention("vanilla", causal=True, **PATHS[path])
    mode = "train" if text.endswith("s, s") or "9" in text else "autoregressive"
    made = _exported(lambda *x: attend(*x, mode=mode).attention_outputs, *_structs(_symbols(text)))
    for sizes in tried:
        arrays = _arrays(sizes)
        wanted = reference_attention(*arrays, scale=SCALE, mask=_causal(sizes)).output
        np.testing.assert_allclose(made.call(*arrays), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("path", [pytest.param("plain", marks=pytest.mark.slow), "small blocks"])
def test_gradients(path: str) -> None:
    attend = Attention("vanilla", causal=True, **PATHS[path])

    def gradients(*arrays: jax.Array) -> Any:
        return jax.grad(lambda *x: (attend(*x[:3]).attention_outputs * x[3]).sum(), (0, 1, 2))(*arrays)

    symbols = _symbols("b, s, s")
    made = _exported(gradients, *_structs(symbols), _structs(symbols)[0])
    for sizes in [(2, 9, 9), (1, 37, 37)]:
        arrays = [*_arrays(sizes), _arrays(sizes, 1)[0]]
        wanted = reference_gradients(*arrays[:3], d_output=arrays[3], scale=SCALE, mask=_causal(sizes))
        for got, want in zip(made.call(*arrays), (wanted[n] for n in ("query", "key", "value")), strict=True):
            np.testing.assert_allclose(got, want, atol=5e-6, rtol=2e-5)


def test_the_gradient_is_exported_with_the_function() -> None:
    pytest.importorskip("flatbuffers")
    attend = Attention("vanilla", causal=True)
    made = _exported(lambda *x: attend(*x).attention_outputs, *_structs(_symbols("b, s, s")))
    again = export.deserialize(made.serialize(vjp_order=1))
    arrays, d_output = _arrays((2, 9, 9)), _arrays((2, 9, 9), 1)[0]
    got = jax.vjp(again.call, *arrays)[1](jnp.asarray(d_output))
    wanted = reference_gradients(*arrays, d_output=d_output, scale=SCALE, mask=_causal((2, 9, 9)))
    for one, want in zip(got, (wanted[n] for n in ("query", "key", "value")), strict=True):
        np.testing.assert_allclose(one, want, atol=5e-6, rtol=2e-5)


# -- what masks, and what else a call has ----------------------------------------------------------------------------------


def _segments(batch: Any, q_len: Any, kv_len: Any) -> dict[str, Any]:
    return {"q_segment_ids": (batch, q_len), "kv_segment_ids": (batch, kv_len)}


# name -> (static arguments, shapes of integer arrays, of float arrays) of a call
CALLS: dict[str, tuple[dict[str, Any], Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]] = {
    "full": ({"causal": False}, lambda *n: {}, lambda *n: {}),
    "window": ({"sliding_window": (4, 2), "causal": False}, lambda *n: {}, lambda *n: {}),
    "prefix": ({"mask": Causal() | Prefix(3)}, lambda *n: {}, lambda *n: {}),
    "segments": ({}, _segments, lambda *n: {}),
    "lengths": ({"causal": False}, lambda b, q, k: {"kv_lengths": (b,)}, lambda *n: {}),
    "bias and cap": ({"logits_soft_cap": 5.0}, lambda *n: {}, lambda b, q, k: {"bias": (b, 1, q, k)}),
    "sinks": ({}, lambda *n: {}, lambda *n: {"softmax_aux": (HEADS,)}),
}


def _mask_of(call: str, sizes: Sizes, given: dict[str, np.ndarray]) -> np.ndarray:
    batch, q_len, kv_len = sizes
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    seen = np.broadcast_to(j <= i, (batch, 1, q_len, kv_len))
    if call == "segments":
        return seen & (given["q_segment_ids"][:, None, :, None] == given["kv_segment_ids"][:, None, None])
    return np.broadcast_to(
        {
            "full": True,
            "window": (j >= i - 4) & (j <= i + 2),
            "prefix": (j <= i) | (j < 3),
            "lengths": j < given.get("kv_lengths", np.zeros(batch, int))[:, None, None, None],
        }.get(call, seen),
        seen.shape,
    )


@_cases(CALLS, ROUTES, {("segments", "small blocks"), ("bias and cap", "small blocks"), ("sinks", "plain")})
def test_masks_and_arguments(which: str, path: str) -> None:
    static, integers, floats = CALLS[which]
    attend = Attention("vanilla", **PATHS[path])
    symbols = _symbols("b, s, s")
    names = {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in integers(*symbols).items()}
    names |= {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in floats(*symbols).items()}
    made = _exported(
        lambda q, k, v, rest: attend(q, k, v, **static, **rest).attention_outputs, *_structs(symbols), names
    )
    for sizes in [(2, 9, 9), (1, 37, 37)]:
        rng, arrays = np.random.default_rng(3), _arrays(sizes)
        given: dict[str, Any] = {n: rng.integers(0, 3, x).astype(np.int32) for n, x in integers(*sizes).items()}
        given |= {n: rng.standard_normal(x).astype(np.float32) for n, x in floats(*sizes).items()}
        wanted = reference_attention(
            *arrays,
            scale=SCALE,
            mask=_mask_of(which, sizes, given),
            bias=given.get("bias"),
            sinks=given.get("softmax_aux"),
            soft_cap=static.get("logits_soft_cap"),
        )
        np.testing.assert_allclose(made.call(*arrays, given), wanted.output, atol=5e-6, rtol=1e-5)


def test_weights_and_lse() -> None:
    attend = Attention("vanilla", causal=True)
    made = _exported(lambda *x: tuple(attend(*x, return_weights=True, return_lse=True)), *_structs(_symbols("b, s, s")))
    arrays = _arrays((3, 11, 11))
    wanted = reference_attention(*arrays, scale=SCALE, mask=_causal((3, 11, 11)))
    for got, want in zip(made.call(*arrays), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("path", [pytest.param("plain", marks=pytest.mark.slow), "small blocks"])
def test_dropout_drops_the_same_weights(path: str) -> None:
    """As a call of these sizes does, whose dropout test_dropout.py holds against the reference."""
    attend = Attention("vanilla", dropout_prob=0.4, **PATHS[path])

    def call(*x: jax.Array) -> Any:
        return attend(*x, deterministic=False, dropout_rng=jax.random.key(5)).attention_outputs

    arrays = _arrays((2, 21, 21))
    got = _exported(call, *_structs(_symbols("b, s, s"))).call(*arrays)
    np.testing.assert_allclose(got, call(*map(jnp.asarray, arrays)), atol=2e-6)


def test_an_offset_may_be_an_expression_of_lengths() -> None:
    attend = Attention("vanilla", causal=True)

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attend(q, k, v, mode="train", query_offset=k.shape[1] - q.shape[1]).attention_outputs

    arrays = _arrays((2, 5, 30))
    wanted = reference_attention(*arrays, scale=SCALE, mask=_causal((2, 5, 30))).output
    np.testing.assert_allclose(_exported(call, *_structs(_symbols("b, s, t"))).call(*arrays), wanted, atol=2e-6)


def test_packed_tokens() -> None:
    attend = Attention("vanilla", causal=True)
    (tokens,) = export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct((tokens, h, DIM), np.float32) for h in (HEADS, KV_HEADS, KV_HEADS)]
    ids = jax.ShapeDtypeStruct((tokens,), np.int32)
    made = _exported(lambda q, k, v, i: attend(q, k, v, layout="thd", q_segment_ids=i).attention_outputs, *shapes, ids)
    arrays, given = _arrays((1, 23, 23)), np.repeat([0, 1, 2], [4, 9, 10]).astype(np.int32)
    seen = _causal((1, 23, 23)) & (given[:, None] == given)
    wanted = reference_attention(*arrays, scale=SCALE, mask=seen).output[0]
    np.testing.assert_allclose(made.call(*(x[0] for x in arrays), given), wanted, atol=2e-6, rtol=1e-5)


def test_masks_as_arguments() -> None:
    attend = Attention("vanilla", **PATHS["small blocks"])
    batch, length, _ = symbols = _symbols("b, s, s")
    ids = jax.ShapeDtypeStruct((batch, length), np.int32)
    made = _exported(
        lambda q, k, v, m: attend(q, k, v, mask=m).attention_outputs,
        *_structs(symbols),
        SegmentIds(ids, ids) & SlidingWindow(3),
    )
    arrays, given = _arrays((2, 9, 9)), np.repeat([[0, 1], [2, 0]], [4, 5], axis=1).astype(np.int32)
    i, j = np.arange(9)[:, None], np.arange(9)[None]
    seen = (given[:, None, :, None] == given[:, None, None]) & (j <= i) & (j >= i - 3)
    wanted = reference_attention(*arrays, scale=SCALE, mask=seen).output
    got = made.call(*arrays, SegmentIds(given, given) & SlidingWindow(3))
    np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=1e-5)


def test_sdpa() -> None:
    attend = Attention("sdpa", causal=True)
    made = _exported(lambda *x: attend(*x).attention_outputs, *_structs(_symbols("b, s, s")))
    for sizes in [(2, 9, 9), (1, 37, 37)]:
        arrays = _arrays(sizes)
        wanted = reference_attention(*arrays, scale=SCALE, mask=_causal(sizes)).output
        np.testing.assert_allclose(made.call(*arrays), wanted, atol=5e-6, rtol=1e-5)


# -- what isn't known is said, and refused where it matters ------------------------------------------------------------------


def test_a_plan_names_the_sizes() -> None:
    attend = Attention("vanilla", causal=True)
    plan = attend.plan(*_structs(_symbols("b, s, s")))
    assert plan.problem.symbolic == {"batch", "length"}
    assert "batch b, q s, kv s" in plan.explain()
    assert "b*s" in plan.explain(verbose=True)
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["tensors"]["query"]["shape"] == ["b", "s", HEADS, DIM]
    assert told["tensors"]["query"]["device_bytes"] == str(plan.placement.fitted["query"].local_bytes)
    assert told["device_problem"]["q_len"] == "s"


def test_routes() -> None:
    attend = Attention("vanilla", causal=True)

    def route(text: str, *constraints: str) -> str:
        return attend.plan(*_structs(_symbols(text, constraints))).route.name

    assert route("b, 9, 9") == "plain"  # judged by the logits of a batch row
    assert route("b, 4096, 4096") == "blockwise"
    assert route("2, s, s") == "blockwise"  # whole logits may be of any size
    assert route("2, s, s", "s <= 64") == "plain"
    assert route("b, 1, 4096") == "decode_rows"
    assert route("b, 1, t", "t >= 4096") == "blockwise"  # the pieces of a cache are counted beforehand


@pytest.mark.parametrize("config", [{"interpret": True}, {}])
@pytest.mark.parametrize("operation", ["splash", "flash_attn2"])
def test_kernels_refuse(operation: str, config: dict[str, Any]) -> None:
    """Where their platform is planned for, or where they are interpreted; elsewhere the native path serves."""
    where = {} if config else {"backend": {"splash": "tpu", "flash_attn2": "cuda"}[operation]}
    attend = Attention(operation, causal=True, **config, **where)
    for text, codes in (("b, 128, 128", ["symbolic.batch"]), ("2, s, s", ["symbolic.length"])):
        plan = attend.plan(*_structs(_symbols(text)))
        assert plan.kind == "fallback"
        assert [reason.code for reason in plan.rejected[0].reasons] == codes
    assert Attention(operation, causal=True).plan(*_structs(_symbols("b, s, s"))).kind == "native"


def test_a_refusing_kernel_warns_or_raises() -> None:
    shapes = _structs(_symbols("b, 128, 128"))
    with pytest.warns(FallbackWarning, match="symbolic batch"):
        _exported(lambda *x: Attention("splash", interpret=True)(*x).attention_outputs, *shapes)
    with pytest.raises(RefusedError, match=r"symbolic\.batch"):
        _exported(lambda *x: Attention("splash", interpret=True, fallback="error")(*x).attention_outputs, *shapes)


@pytest.mark.parametrize("path", ["decode", "decode_rows"])
def test_a_declared_decode_route_needs_a_known_cache(path: str) -> None:
    plan = Attention("vanilla", path=path).plan(*_structs(_symbols("b, 1, t")))
    assert [reason.code for reason in plan.rejected[0].reasons] == ["vanilla.symbolic_length"]


def test_heads_and_different_lengths_are_refused() -> None:
    heads, s, t = export.symbolic_shape("h, s, t")
    attend = Attention("vanilla", causal=True)
    with pytest.raises(InputError, match="not the symbolic h"):
        attend.plan(*[jax.ShapeDtypeStruct((2, 9, heads, DIM), np.float32)] * 3)
    with pytest.raises(InputError, match="q_len=s and kv_len=t differ"):
        attend.plan(*_structs((2, s, t)), mode="train")
    query, key, _ = _structs((2, s, s))
    value = jax.ShapeDtypeStruct((2, t, KV_HEADS, DIM), np.float32)
    with pytest.raises(InputError, match="key and value differ in length: s and t"):
        attend.plan(query, key, value)


def test_a_layout_of_blocks_must_cover_every_length() -> None:
    mask = Blocks(np.eye(4, dtype=bool), 8, 8)
    attend = Attention("vanilla")
    with pytest.raises(InputError, match="constrain it, such as 's <= 32'"):
        attend.plan(*_structs(_symbols("2, s, s")), mask=mask)
    structs = _structs(_symbols("2, s, s", ["s <= 32"]))
    plan = Attention("vanilla", path="blockwise").plan(*structs, mask=mask)
    assert [reason.code for reason in plan.rejected[0].reasons] == ["vanilla.symbolic_length"]
    made = _exported(lambda *x: attend(*x, mask=mask).attention_outputs, *structs)
    for length in (9, 32):
        arrays, i = _arrays((2, length, length)), np.arange(length) // 8
        wanted = reference_attention(*arrays, scale=SCALE, mask=(i[:, None] == i)[None, None]).output
        np.testing.assert_allclose(made.call(*arrays), wanted, atol=2e-6, rtol=1e-5)


def test_lengths_known_at_export() -> None:
    attend = Attention("vanilla", causal=False)
    structs = _structs(_symbols("2, s, s", ["s <= 32"]))
    with pytest.raises(InputError, match="kv_lengths holds 33"):
        attend.plan(*structs, kv_lengths=np.array([3, 33]))
    made = _exported(lambda *x: attend(*x, kv_lengths=np.array([3, 9])).attention_outputs, *structs)
    arrays = _arrays((2, 12, 12))
    seen = (np.arange(12) < np.array([[3], [9]]))[:, None, None]
    wanted = reference_attention(*arrays, scale=SCALE, mask=seen).output
    np.testing.assert_allclose(made.call(*arrays), wanted, atol=2e-6, rtol=1e-5)


# -- on a mesh -----------------------------------------------------------------------------------------------------------------


def test_a_mesh_is_refused() -> None:
    """jax can't run what it exports then; without a symbolic size it can."""
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    attend = Attention("vanilla", causal=True, mesh=mesh)
    for text in ("2*b, 8, 8", "2, 2*s, 2*s", "b, 1, 64", "b, 1, t"):
        plan = attend.plan(*_structs(_symbols(text)))  # of one query: a cache
        assert [reason.code for one in plan.rejected for reason in one.reasons] == ["symbolic.mesh"], text
        assert json.dumps(plan.to_dict())
        assert plan.explain(verbose=True)
    ring = Attention("vanilla", causal=True, mesh=mesh, sequence_parallel="ring").plan(*_structs(_symbols("2, s, s")))
    assert {"symbolic.mesh", "ring.q_len"} == {reason.code for one in ring.rejected for reason in one.reasons}
    one = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    assert Attention("vanilla", causal=True, mesh=one).plan(*_structs(_symbols("b, 8, 8"))).kind == "native"


# -- around attention ------------------------------------------------------------------------------------------------------------


def test_a_step_over_pages_takes_numbers() -> None:
    cache = KVCache(
        layers=1, kv_heads=2, head_dim=64, dtype="float32", page_size=4, pages=8, max_sequences=2, max_length=16
    )
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[2, 7]])
    (tokens,) = export.symbolic_shape("n")
    query, key = (jax.ShapeDtypeStruct((tokens, heads, 64), np.float32) for heads in (4, 2))
    paged, state = OperationRegistry.create("paged"), init(cache)
    steps: list[Callable[..., Any]] = [
        lambda q, k: paged(q, k, k, state=state, layer=0, batch=batch).attention_outputs,
        lambda q, k: insert(state, 0, batch, k, k),
        lambda q, k: paged_attention(state, 0, batch, q, update="none").output,
    ]
    for step in steps:
        with pytest.raises(InputError, match=r"has shape \(n, [24], 64\); wanted numbers"):
            _exported(step, query, key)


def test_writing_into_a_dense_cache() -> None:
    batch, room = export.symbolic_shape("b, s")
    of_cache, of_token = (jax.ShapeDtypeStruct((batch, n, 2, 8), np.float32) for n in (room, 1))
    made = _exported(
        lambda c, x, at: dense_insert(c, c, x, x, start=at)[0],
        of_cache,
        of_token,
        jax.ShapeDtypeStruct((batch,), np.int32),
    )
    got = made.call(np.zeros((2, 9, 2, 8), np.float32), np.ones((2, 1, 2, 8), np.float32), np.array([3, 8], np.int32))
    wanted = np.zeros((2, 9, 2, 8))
    wanted[[0, 1], [3, 8]] = 1
    np.testing.assert_array_equal(got, wanted)
