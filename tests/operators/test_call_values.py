"""Integers of a call: each array is refused, or means what exact integers say; at its first call and at every other."""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax.sharding import AxisType, PartitionSpec

from attnops import (
    AttnOpsError,
    Causal,
    ConfigError,
    InputError,
    Lengths,
    OperationMetadata,
    OperationRegistry,
    Positions,
    SegmentIds,
)
from attnops.errors import InputTypeError
from attnops.verify import reference_attention

B, Q, K = 2, 4, 6
QKV = [np.random.default_rng(n).standard_normal((B, t, 1, 8)).astype(np.float32) for n, t in enumerate((Q, K, K))]
SHAPES = {"ids": (B, Q), "mask_ids": (B, Q), "positions": (B, Q), "lengths": (B,), "mask_lengths": (B,), "offset": (B,)}
SMALL = {name: np.ones(shape, np.int64) for name, shape in SHAPES.items()}
KV = np.tile(np.arange(K, dtype=np.int32), (B, 1))
EDGES = [n + i for n in (0, K, 2**30, 2**31, 2**32, 2**63) for i in (-1, 0, 1, 3)]


def _create(operation: str = "vanilla", **metadata: Any) -> Any:
    return OperationRegistry.create(operation, OperationMetadata(**metadata))


WARM = _create()


def _call(name: str, x: Any) -> dict[str, Any]:
    """The call in which one array stands in one place."""
    made = {
        "ids": lambda: {"q_segment_ids": x, "kv_segment_ids": KV, "causal": False},
        "mask_ids": lambda: {"mask": SegmentIds(x, KV)},
        "positions": lambda: {"mask": Positions(x, KV, left=2)},
        "lengths": lambda: {"kv_lengths": x, "causal": False},
        "mask_lengths": lambda: {"mask": Lengths(x)},
        "offset": lambda: {"query_offset": x},
    }
    return made[name]()


def _visible(name: str, x: np.ndarray) -> np.ndarray:
    """In Python's integers."""
    x, i, j = x.astype(object), np.arange(Q)[:, None], np.arange(K)[None, :]
    if "ids" in name:
        seen = x[:, :, None] == j
    elif name == "positions":
        seen = (j <= x[:, :, None]) & (j >= x[:, :, None] - 2)
    else:
        x = x[:, None, None]
        seen = j <= i + x if name == "offset" else np.broadcast_to(j < x, (B, Q, K))
    return seen.astype(bool)[:, None]


def _means_something(name: str, x: np.ndarray) -> bool:
    low, high = {"lengths": (0, K), "mask_lengths": (0, K), "offset": (-(2**30), 2**30)}.get(
        name, (-(2**31), 2**31 - 1)
    )
    return x.dtype.kind in "iu" and all(low <= n <= high for n in x.ravel().tolist())


def _check(attend: Any, name: str, x: np.ndarray) -> None:
    if not _means_something(name, x):
        for ask in (attend, attend.plan):
            with pytest.raises(AttnOpsError):
                ask(*QKV, **_call(name, x))
        return
    got = attend(*QKV, **_call(name, x)).attention_outputs
    want = reference_attention(*QKV, scale=8**-0.5, mask=_visible(name, x)).output
    np.testing.assert_allclose(got, want, atol=3e-6)


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    name = draw(st.sampled_from(sorted(SHAPES)))
    dtype = np.dtype(draw(st.sampled_from(["i1", "u2", "i4", ">i4", "u4", "i8", "u8", "?", "f4", "m8[s]"])))
    bounds = np.iinfo(dtype if dtype.kind in "iu" else np.int8)
    edges = [n for n in (*EDGES, *(-n for n in EDGES)) if bounds.min <= n <= bounds.max]
    number = st.sampled_from(edges) | st.integers(0, K)
    count = int(np.prod(SHAPES[name]))
    return name, np.array(draw(st.lists(number, min_size=count, max_size=count))).astype(dtype).reshape(SHAPES[name])


@settings(max_examples=100, deadline=None)
@given(_arrays())
@example(("ids", np.array([[0, 2**32, 0, 2**32], [2**32, 1, 2, 3]])))
@example(("lengths", np.array([2**32 + 3, 4])))
@example(("offset", np.array([2**31 - 1, 0], np.int32)))
@example(("positions", np.array([[-(2**31), 2**31 - 1, 3, 4], [0, 1, 2, 3]], np.int32)))
def test_refused_or_exact(case: tuple[str, np.ndarray]) -> None:
    """On one operation: most calls find a plan and a program that calls of other values have made."""
    _check(WARM, *case)


def _traced(attend: Any, *qkv: np.ndarray, **call: Any) -> jax.Array:
    """The rest of the call as constants of a traced function."""
    return jax.jit(lambda *x: attend(*x, **call).attention_outputs)(*qkv)


WRONG = [
    ("ids", np.full((B, Q), 2**32), InputError, "q_segment_ids holds 4294967296; .* int32, .*: renumber the ids from 0"),
    ("lengths", np.array([2**32 + 3, 4]), InputError, "kv_lengths holds 4294967299; .* int32"),
    ("lengths", np.array([-1, 4], np.int32), InputError, "kv_lengths holds -1; wanted 0 to 6"),
    ("lengths", np.array([0, 7], np.uint8), InputError, "kv_lengths holds 7; wanted 0 to 6"),
    ("mask_lengths", np.array([0, 7], np.int32), InputError, "kv_lengths holds 7; wanted 0 to 6"),
    ("offset", np.array([2**30 + 1, 0], np.int32), InputError, r"query_offset holds 1073741825; wanted at most 2\*\*30"),
    ("offset", np.array([0, -(2**31)], np.int32), InputError, "query_offset holds -2147483648"),
    ("offset", 2**30 + 1, InputError, r"query_offset=1073741825; wanted at most 2\*\*30"),
    ("offset", 10**5000, InputError, r"query_offset=\(an int of about 5001 digits\)"),
    ("offset", np.array([1.0, 0.0]), InputTypeError, "query_offset has dtype float64; wanted integers"),
    ("ids", np.ones((B, Q), bool), InputTypeError, "q_segment_ids has dtype bool; wanted integers"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "x", "error", "message"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_values(name: str, x: Any, error: type[Exception], message: str) -> None:
    """Cold and warm, in plans, and as constants of a traced function; of jax on a CPU as of NumPy."""
    cold, calls = _create(), [_call(name, x)]
    if isinstance(x, np.ndarray) and x.dtype.itemsize <= 4:
        calls.append(_call(name, jnp.asarray(x)))
    for attend in (cold, cold, WARM):
        for call in calls:
            for ask in (attend, attend.plan, partial(_traced, attend)):
                with pytest.raises(error, match=message):
                    ask(*QKV, **call)
    WARM(*QKV, **_call(name, SMALL[name]))  # what comes after is no worse for it
    with pytest.raises(error, match=message):
        WARM(*QKV, **_call(name, x))


@pytest.mark.parametrize("name", ["ids", "lengths", "offset"])
def test_integers_whose_values_are_not_known(name: str) -> None:
    shape = jax.ShapeDtypeStruct(SHAPES[name], np.int64)
    argument = {"ids": "q_segment_ids", "lengths": "kv_lengths", "offset": "query_offset"}[name]
    for dtype in (np.int64, np.uint32):
        shape = jax.ShapeDtypeStruct(SHAPES[name], dtype)
        with pytest.raises(
            InputTypeError, match=rf"{argument} has dtype u?int\d+ and unknown values; .*astype\('int32'\)"
        ):
            WARM.plan(*QKV, **_call(name, shape))
    narrow = jax.ShapeDtypeStruct(SHAPES[name], np.int16)
    assert WARM.plan(*QKV, **_call(name, narrow)).kind != "refused"
    WARM(*QKV, **_call(name, SMALL[name]))
    for dtype in (np.int32, np.int64):
        with pytest.raises(InputTypeError, match="values"):
            _create()(*QKV, **_call(name, jax.ShapeDtypeStruct(SHAPES[name], dtype)))


def test_known_integers_of_64_bits_where_jax_has_them() -> None:
    """They are brought to int32, so that each kernel takes them."""
    splash = _create("splash", operation_configs={"splash": {"interpret": True}})
    given = {"ids": np.array([[0, 1, 5, 3], [2, 2, -1, 0]]), "lengths": np.array([0, 6]), "offset": np.array([3, -2])}
    seen = np.logical_and.reduce([_visible(name, x) for name, x in given.items()])
    want = reference_attention(*QKV, scale=8**-0.5, mask=seen).output
    with jax.enable_x64(True):
        for array in (np.asarray, jnp.asarray):
            call: dict[str, Any] = {}
            for name, x in given.items():
                call |= _call(name, array(x, np.int64))
            assert {x.dtype for x in call.values() if hasattr(x, "dtype")} == {np.dtype("int64"), np.dtype("int32")}
            got = WARM(*QKV, **call | {"causal": True})
            assert {leaf.dtype for leaf in got.plan.problem.leaves} == {"int32"}
            np.testing.assert_allclose(got.attention_outputs, want, atol=3e-6)
            assert splash.plan(*QKV, **call).implementation == "splash.forward_tpu"


def test_traced_integers_of_64_bits() -> None:
    with jax.enable_x64(True):
        for name, x in SMALL.items():
            with pytest.raises(AttnOpsError, match=r"has dtype int64 and unknown values; .*astype\('int32'\)"):
                jax.jit(lambda x, name=name: WARM(*QKV, **_call(name, x)).attention_outputs)(x)
            jax.eval_shape(lambda x, name=name: WARM(*QKV, **_call(name, x.astype("int32"))).attention_outputs, x)


def test_lengths_of_the_whole_in_the_callers_part() -> None:
    """Inside the caller's own shard_map keys may be a part: lengths count those of all, also as a constant."""
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(AxisType.Auto,))
    split, lengths = PartitionSpec(None, "sp"), np.array([5, 8])
    attend = _create(mesh=mesh, sequence_parallel="ring", causal=False)
    q, k, v = (np.random.default_rng(n).standard_normal((B, 8, 1, 8)).astype(np.float32) for n in range(3))

    def local(*qkv: jax.Array, at: Any = lengths) -> jax.Array:
        return attend(*qkv, kv_lengths=at).attention_outputs

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))(q, k, v)
    seen = (np.arange(8) < lengths[:, None])[:, None, None, :]
    want = reference_attention(q, k, v, scale=8**-0.5, mask=np.broadcast_to(seen, (B, 1, 8, 8))).output
    np.testing.assert_allclose(got, want, atol=3e-6)
    with pytest.raises(InputError, match="kv_lengths holds -1"):
        jax.jit(jax.shard_map(lambda *x: local(*x, at=-lengths // 8), mesh=mesh, in_specs=split, out_specs=split))(
            q, k, v
        )


@pytest.mark.parametrize("field", ["runtime_dtype", "runtime_softmax_dtype"])
def test_float64_needs_x64(field: str) -> None:
    attend = _create(**{field: "float64"})  # made before x64 is turned on, as a module's constant may be
    for _ in range(2):
        for ask in (attend, attend.plan, jax.jit(lambda *x: attend(*x).attention_outputs)):
            with pytest.raises(ConfigError, match=f"{field}='float64', but jax_enable_x64 is off, .*jax_enable_x64"):
                ask(*QKV[:1] * 3)
        with jax.enable_x64(True):
            problem = attend(*QKV[:1] * 3).plan.problem
            assert (problem.runtime_dtype, problem.softmax_dtype)[field != "runtime_dtype"] == "float64"


def test_float64_that_becomes_float32_is_told() -> None:
    attend, q = _create(), QKV[0]
    k8 = np.ones(q.shape, np.int8)
    extras = {
        "bias": np.zeros((1, 1, Q, Q)), "softmax_aux": np.zeros(1), "key_scale": np.ones((1, 1, 1, 1)),
        "value_scale": np.ones((1, 1, 1, 1)),
    }  # fmt: skip
    said = lambda attend, q, **call: {n for n in attend(q, k8, k8, **call).plan.notes if "is float64" in n}  # noqa: E731
    off = "{} is float64, computed in float32: jax_enable_x64 is off".format
    narrow = {name: x.astype(np.float32) for name, x in extras.items()}
    for _ in range(2):  # the plan of one is not the other's
        assert said(attend, q, **narrow) == set()
        assert said(attend, q.astype(np.float64), **extras) == set(map(off, ("query", *extras)))
        assert said(attend, q, **narrow | {"bias": extras["bias"]}) == {off("bias")}
    with jax.enable_x64(True):
        rounded = {
            f"{name} is float64, computed in float32 (runtime_softmax_dtype)" for name in ("bias", "softmax_aux")
        }
        scales = {f"{name}_scale is float64, computed in float32" for name in ("key", "value")}
        assert said(attend, q.astype(np.float64), **extras) == rounded | scales
        assert said(_create(runtime_softmax_dtype="float64"), q.astype(np.float64), **extras) == scales
    shapes = [jax.ShapeDtypeStruct(q.shape, np.float64)] * 3
    assert set(map(off, ("query", "key", "value"))) <= set(attend.plan(*shapes).notes)


@pytest.mark.parametrize(
    "dtype", ["O", "U3", "S3", "V4", ">f4", "longdouble", "clongdouble", "m8[s]", "M8[s]", "complex64"]
)
def test_dtypes_that_jax_does_not_have(dtype: str) -> None:
    x = np.zeros(QKV[0].shape, dtype)
    for call in ({}, {"bias": x[:1, :1, :1, :1]}, {"softmax_aux": x[0, 0, 0, :1]}, {"kv_lengths": x[:, 0, 0, 0]}):
        q = QKV[0] if call else x
        for _ in range(2):
            with pytest.raises(InputTypeError, match="has dtype"):
                WARM(q, *QKV[1:], **call)


@pytest.mark.parametrize("kind", [np.asarray, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)], ids=["array", "shape"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "int64") for name in ("query", "key", "value", "bias", "softmax_aux", "key_scale")),
        *((name, "float64") for name in ("q_segment_ids", "kv_lengths", "kv_starts", "query_offset")),
        ("kv_lengths", "complex128"),
    ],
)
def test_a_refused_dtype_is_the_one_that_was_passed(name: str, dtype: str, kind: Any) -> None:
    """jax has no 64 bits here, but the array does."""
    call: dict[str, Any] = dict(zip(("query", "key", "value"), QKV, strict=True)) | {"causal": False}
    shapes = {"bias": (1, 1, Q, K), "softmax_aux": (1,), "key_scale": (1, 1, 1, 1), "q_segment_ids": (B, Q)}
    if name == "key_scale":
        call["key"] = call["key"].astype(np.int8)
    if name == "q_segment_ids":
        call["kv_segment_ids"] = KV
    call[name] = kind(np.ones(call[name].shape if name in call else shapes.get(name, (B,)), dtype))
    with pytest.raises(InputTypeError, match=f"{name} has dtype {dtype}"):
        WARM.plan(**call)


def test_a_dropout_key_of_64_bits_is_not_cut() -> None:
    call = {"dropout_prob": 0.5, "deterministic": False}
    for key in (np.array([0, 1], np.uint32), np.array([2**32, 1], np.uint64), np.array([2**32, 1])):
        if key.dtype == np.uint32:
            WARM(*QKV, causal=False, dropout_rng=key, **call)
            continue
        with pytest.raises(InputTypeError, match=r"dropout_rng has dtype u?int64"):
            WARM(*QKV, causal=False, dropout_rng=key, **call)


def test_a_mask_of_a_traced_tree_is_held_to_the_same() -> None:
    """jax rebuilds masks without a word; the call looks at what they hold by then."""
    mask = Causal(offset=3) & Lengths(np.array([2, 4], np.int32))
    wrong = jax.tree.map(lambda x: x.astype(np.int64) + 2**40, mask)
    with pytest.raises(AttnOpsError, match="kv_lengths holds 1099511627778"):
        WARM(*QKV, mask=wrong)
