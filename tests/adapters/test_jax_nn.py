"""dot_product_attention with jax.nn's signature, against jax.nn's own and against the float64 reference."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnops
from attnops import ALiBi, Attention, ConfigError, Declaration, InputError, OperationMetadata, dot_product_attention
from attnops.errors import InputTypeError, UnknownNameError
from attnops.verify import reference_attention

OWN = jax.nn.dot_product_attention


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _arrays(
    batch: int = 2, q: int = 5, kv: int = 7, heads: int = 4, kv_heads: int = 2, dim: int = 8
) -> list[np.ndarray]:
    shapes = ((batch, q, heads, dim), (batch, kv, kv_heads, dim), (batch, kv, kv_heads, dim))
    return [_draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def _visible(q: int, kv: int, call: dict[str, Any]) -> np.ndarray:
    """Who sees whom by the words of jax's docstring, [batch or 1, heads or 1, q, kv]."""
    i, j = np.arange(q)[:, None], np.arange(kv)[None, :]
    seen = np.ones((1, 1, q, kv), bool)
    if call.get("is_causal"):
        seen = seen & (j <= i)
    if call.get("local_window_size") is not None:
        window = call["local_window_size"]
        left, right = window if isinstance(window, tuple) else (window, window)
        seen = seen & (j >= i - left) & (j <= i + right)
    if call.get("key_value_seq_lengths") is not None:
        seen = seen & (j < call["key_value_seq_lengths"][:, None, None, None])
    if call.get("query_seq_lengths") is not None:
        seen = seen & (i < call["query_seq_lengths"][:, None, None, None])
    mask = call.get("mask")
    return seen if mask is None else seen & mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _wanted(arrays: list[np.ndarray], **call: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse [batch, q, heads] in float64; a row that sees nothing is 0 and -inf."""
    bias, scale = call.get("bias"), call.get("scale")
    found = reference_attention(
        *arrays,
        scale=arrays[0].shape[-1] ** -0.5 if scale is None else scale,
        mask=_visible(arrays[0].shape[1], arrays[1].shape[1], call),
        bias=bias if bias is None else bias.reshape((1,) * (4 - bias.ndim) + bias.shape),
    )
    return found.output, found.lse.swapaxes(1, 2)


def test_the_signature_is_jaxs() -> None:
    ours, theirs = inspect.signature(dot_product_attention), inspect.signature(OWN)
    *same, (last, _) = [(p.name, p.kind) for p in ours.parameters.values()]
    assert same == [(p.name, p.kind) for p in theirs.parameters.values()]
    assert last == "score"
    defaults = {n: p.default for n, p in theirs.parameters.items()} | {"implementation": "vanilla", "score": None}
    assert {n: p.default for n, p in ours.parameters.items()} == defaults
    assert attnops.dot_product_attention is dot_product_attention


def test_a_score_is_a_bias_that_nobody_builds() -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((2, 9, 4, 8)).astype(np.float32) for n in range(3))
    slopes = jnp.asarray([0.5, 0.25, 0.125, 1.0])
    distance = jnp.abs(jnp.arange(9)[:, None] - jnp.arange(9)[None]).astype(jnp.float32)

    def by_bias(slopes: jax.Array) -> jax.Array:
        return OWN(q, k, v, -slopes[None, :, None, None] * distance[None, None], is_causal=True)

    def by_score(slopes: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, is_causal=True, score=ALiBi(slopes))

    np.testing.assert_allclose(by_score(slopes), by_bias(slopes), atol=2e-6)
    ours, theirs = (jax.grad(lambda s, f=f: (f(s) ** 2).sum())(slopes) for f in (by_score, by_bias))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    fewer = dot_product_attention(q[:, :4], k, v, score=ALiBi(slopes))  # from the first query and the first key
    np.testing.assert_allclose(
        fewer, OWN(q[:, :4], k, v, -slopes[None, :, None, None] * distance[None, None, :4]), atol=2e-6
    )
    with pytest.raises(ConfigError, match="takes no score"):
        dot_product_attention(q, k, v, implementation={"operation": "vanilla", "enabled": False}, score=ALiBi())


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Arrays of one of a few shapes, so that few are compiled, with any of the options."""
    batch, q, kv, (heads, kv_heads) = (
        draw(st.sampled_from(options)) for options in ((2,), (5,), (3, 6), ((2, 2), (4, 2)))
    )
    arrays, call = _arrays(batch, q, kv, heads, kv_heads, 4), {}
    if draw(st.booleans()):
        call["is_causal"] = True
    if draw(st.booleans()):
        near = st.integers(0, 3)
        call["local_window_size"] = draw(near | st.tuples(near, near))
    for name, most in (("query_seq_lengths", q), ("key_value_seq_lengths", kv)):
        if draw(st.booleans()):
            lengths = draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
            call[name] = np.array(lengths, np.int32)
    if draw(st.booleans()):
        call["scale"] = 0.3
    cells = (batch, heads, q, kv)
    for name in ("mask", "bias"):
        rank = draw(st.sampled_from([0, 1, 2, 4]))
        if rank:
            whole = draw(st.tuples(*[st.booleans()] * rank))
            shape = tuple(n if own else 1 for n, own in zip(cells[4 - rank :], whole, strict=True))
            call[name] = _draw(*shape) > -0.5 if name == "mask" else _draw(*shape, seed=5)
    return arrays, call


@settings(max_examples=8)  # each is three programs
@given(calls())
def test_it_means_what_jax_means(drawn: tuple[list[np.ndarray], dict[str, Any]]) -> None:
    arrays, call = drawn
    output, lse = _wanted(arrays, **call)
    got, got_lse = dot_product_attention(*arrays, **call, return_residual=True)
    np.testing.assert_allclose(got, output, atol=3e-6)
    np.testing.assert_allclose(got_lse, lse, atol=3e-6)
    theirs, their_lse = OWN(*arrays, **call, return_residual=True)
    sees = np.isfinite(lse)  # elsewhere jax has the mean of the values
    np.testing.assert_allclose(np.asarray(got)[sees], np.asarray(theirs)[sees], atol=3e-6)
    np.testing.assert_allclose(np.asarray(got_lse)[sees], np.asarray(their_lse)[sees], atol=3e-6)


@pytest.mark.default_promotion("jax.nn itself promotes bfloat16 and float64")
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"is_causal": True, "local_window_size": 2, "scale": 0.7},
        {"query_seq_lengths": np.array([3, 5], np.int32), "key_value_seq_lengths": np.array([7, 4], np.int32)},
        {"bias": _draw(1, 4, 5, 7), "mask": _draw(2, 1, 5, 7) > -1},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_dtypes_and_shapes_are_jaxs(call: dict[str, Any], dtype: str) -> None:
    arrays = [jnp.asarray(x, dtype) for x in _arrays()]
    bias = call.get("bias")

    def results(function: Any, **more: Any) -> Any:
        def loss(arrays: Any, bias: Any) -> Any:
            output, lse = function(*arrays, **call | {"bias": bias}, **more, return_residual=True)
            kept = jnp.where(jnp.isfinite(lse) & (lse > -1e30), lse, 0)  # the gradient of a residual is 0 in jax
            return (output.astype(jnp.float32) ** 2).sum() + kept.astype(jnp.float32).sum(), (output, lse)

        return jax.jit(jax.value_and_grad(loss, argnums=(0,) if bias is None else (0, 1), has_aux=True))(arrays, bias)

    ours, theirs = results(dot_product_attention), results(OWN)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for got, wanted in zip(
        jax.tree.leaves((ours[0][1][0], ours[1])), jax.tree.leaves((theirs[0][1][0], theirs[1])), strict=True
    ):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        most = max(1.0, float(abs(wanted.astype(jnp.float32)).max()))
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), atol=tolerance * most)
    assert (ours[0][1][1].shape, ours[0][1][1].dtype) == (theirs[0][1][1].shape, theirs[0][1][1].dtype)


@pytest.mark.default_promotion("jax.nn itself promotes bfloat16 and float64")
def test_float64_as_in_jax() -> None:
    with jax.enable_x64(True):
        arrays = [x.astype(np.float64) for x in _arrays()]
        got, wanted = dot_product_attention(*arrays, is_causal=True), OWN(*arrays, is_causal=True)
        assert got.dtype == wanted.dtype == np.float64  # both have the softmax in float32
        np.testing.assert_allclose(got, _wanted(arrays, is_causal=True)[0], atol=1e-6)
        whole = Attention("vanilla", runtime_dtype="float64", runtime_softmax_dtype="float64")
        exact = dot_product_attention(*arrays, is_causal=True, implementation=whole)
        np.testing.assert_allclose(exact, _wanted(arrays, is_causal=True)[0], atol=1e-14)


def test_without_a_batch() -> None:
    arrays, bias = _arrays(1), _draw(4, 5, 7)
    call: dict[str, Any] = {"bias": bias, "is_causal": True, "key_value_seq_lengths": np.array([6])}
    output, lse = dot_product_attention(*(x[0] for x in arrays), **call, return_residual=True)
    wanted = _wanted(arrays, **call)
    assert output.shape == (5, 4, 8)
    np.testing.assert_allclose(output, wanted[0][0], atol=3e-6)
    np.testing.assert_allclose(lse, wanted[1][0], atol=3e-6)


def test_under_vmap_and_strict_ranks_and_dtypes() -> None:
    arrays, lengths = _arrays(3), np.array([2, 4, 7], np.int32)
    wanted = _wanted(arrays, is_causal=True, key_value_seq_lengths=lengths, query_seq_lengths=lengths - 2)[0]

    def one(query: Any, key: Any, value: Any, length: Any) -> Any:
        return dot_product_attention(
            query, key, value, is_causal=True, key_value_seq_lengths=length[None], query_seq_lengths=length[None] - 2
        )

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(jax.vmap(one)(*arrays, lengths), wanted, atol=3e-6)
        whole = dot_product_attention(
            *arrays, is_causal=True, key_value_seq_lengths=lengths, query_seq_lengths=lengths - 2
        )
    np.testing.assert_allclose(whole, wanted, atol=3e-6)


def test_lists_and_numbers_of_numpy_are_taken_as_in_jax() -> None:
    arrays = _arrays(2)
    call: dict[str, Any] = {"key_value_seq_lengths": [3, 7], "scale": jnp.float32(0.5), "mask": [[True] * 7] * 5}
    wanted = _wanted(arrays, key_value_seq_lengths=np.array([3, 7]), scale=0.5)[0]
    np.testing.assert_allclose(dot_product_attention(*arrays, **call), wanted, atol=3e-6)


def test_what_an_implementation_is(tmp_path: Path) -> None:
    arrays, path = _arrays(), tmp_path / "attention.json"
    data = {"operation": "sdpa", "call": {"sliding_window": [2, 0], "query_offset": 2}}
    path.write_text(json.dumps(data))
    wide, tight = _wanted(arrays)[0], _wanted(arrays, mask=_visible(7, 7, {"local_window_size": (2, 0)})[0, 0, 2:])[0]
    for plain in (
        None,
        "vanilla",
        "sdpa",
        "splash",
        Attention("vanilla"),
        OperationMetadata(),
        {"operation": "vanilla"},
    ):
        np.testing.assert_allclose(dot_product_attention(*arrays, implementation=plain), wide, atol=5e-6)
    for declared in (path, str(path), data, Declaration.load(path), Attention(path)):
        np.testing.assert_allclose(dot_product_attention(*arrays, implementation=declared), tight, atol=5e-6)
    assert (
        dot_product_attention(*arrays, implementation=OperationMetadata(runtime_dtype="bfloat16")).dtype == "bfloat16"
    )
    # The file's query_offset says where the queries stand; without one they stand at the first key, as in jax.
    aligned = dot_product_attention(*arrays, is_causal=True, implementation=Attention("vanilla", query_offset=2))
    mask = np.tril(np.ones((5, 7), bool), 2)
    np.testing.assert_allclose(aligned, _wanted(arrays, mask=mask)[0], atol=5e-6)


def test_a_disabled_file_is_jaxs_own() -> None:
    arrays, call = _arrays(), {"is_causal": True, "local_window_size": (2, 1)}
    off = {"operation": "splash", "enabled": False}
    ours = jax.make_jaxpr(lambda *x: dot_product_attention(*x, **call, implementation=off))(*arrays)
    assert str(ours) == str(jax.make_jaxpr(lambda *x: OWN(*x, **call))(*arrays))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"implementation": "cudnn"}, UnknownNameError, "'cudnn' is a backend of jax.nn; here 'sdpa' is jax.nn's own"),
        ({"implementation": "xla"}, UnknownNameError, "'xla' is a backend of jax.nn; here 'vanilla' is"),
        ({"implementation": "vanila"}, UnknownNameError, "'vanila' is not registered.*Did you mean 'vanilla'"),
        ({"implementation": "nowhere.json"}, ConfigError, "nowhere.json: No such file"),
        ({"implementation": 3}, ConfigError, "got an int; wanted an object"),
        (
            {"implementation": "paged"},
            InputTypeError,
            "'paged' attends to a cache's pages, and the call has no state, layer, batch",
        ),
        ({"mask": np.ones((5, 7))}, InputTypeError, "mask is float64; wanted bool.*to add to the logits, pass bias"),
        (
            {"mask": np.ones((3, 7), bool)},
            InputError,
            r"mask has shape \(3, 7\); wanted one that broadcasts to \(2, 4, 5, 7\)",
        ),
        (
            {"bias": np.ones((1, 2, 5, 7), "f")},
            InputError,
            r"bias has shape \(1, 2, 5, 7\); wanted one that broadcasts",
        ),
        ({"scale": "large"}, InputTypeError, "scale='large'; wanted a number"),
        ({"scale": np.ones(3)}, InputTypeError, "scale is an array; wanted a Python number"),
        ({"is_causal": 2}, InputTypeError, "is_causal is 2; wanted True or False"),
        ({"return_residual": None}, InputTypeError, "return_residual is None; wanted True or False"),
        ({"local_window_size": -1}, InputError, "local_window_size=-1; wanted distances of 0 or more"),
        (
            {"local_window_size": (1, 2, 3)},
            InputError,
            r"local_window_size=\(1, 2, 3\); wanted an integer or \(left, right\)",
        ),
        ({"query_seq_lengths": np.array([1, 9])}, InputError, "query_seq_lengths holds 9; wanted 0 to 5"),
        ({"key_value_seq_lengths": np.array([-1, 9])}, InputError, "key_value_seq_lengths holds -1; wanted 0 to 7"),
        (
            {"key_value_seq_lengths": np.array([3])},
            InputError,
            r"key_value_seq_lengths has shape \(1,\); wanted \(2,\)",
        ),
        ({"query_seq_lengths": np.array([1.0, 2.0])}, InputTypeError, "query_seq_lengths is float64; wanted int32"),
        (
            {"query": np.ones((5, 8), "f")},
            InputError,
            r"query has shape \(5, 8\); wanted \[\*batch, length, heads, dim\]",
        ),
        ({"query": np.ones((3, 5, 4, 8), "f")}, InputError, r"key has batch dimensions \(2,\), query has \(3,\)"),
        ({"query": np.ones((2, 5, 3, 8), "f")}, InputError, "3"),
        ({"key": "key"}, InputTypeError, "key has dtype <U3, which jax doesn't have"),
        ({"dropout_rate": 0.1}, TypeError, "unexpected keyword argument 'dropout_rate'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: Any, match: str) -> None:
    call = dict(zip(("query", "key", "value"), _arrays(), strict=True)) | change
    with pytest.raises(error, match=match):
        dot_product_attention(**call)


def test_a_traced_scale_is_refused() -> None:
    with pytest.raises(InputTypeError, match=r"scale is traced; wanted a number.*scale=1"):
        jax.jit(lambda s: dot_product_attention(*_arrays(), scale=s))(0.5)


def test_a_file_with_dropout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dropout_prob: the file's metadata declares 0\.5"):
        dot_product_attention(*_arrays(), implementation=OperationMetadata(dropout_prob=0.5))
