"""Which way forward_native takes, what the plan says of it, and that the program it makes stays small."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from versions import JAX_0_9

from attnops import Causal, Full, OperationMetadata, OperationRegistry, RefusedError, SegmentIds, SlidingWindow
from attnops.errors import InputTypeError
from attnops.verify import reference_attention, reference_gradients


def _attend(operation: str = "vanilla", **config):
    configs = {"vanilla": config} if config else {}
    metadata = OperationMetadata(operation_configs=configs, fallback="allow", backend="cpu")
    return OperationRegistry.create(operation, metadata)


def _shapes(q_len: int, kv_len: int, batch: int = 1, heads: int = 8, kv_heads: int = 8, dim: int = 64):
    query = jax.ShapeDtypeStruct((batch, q_len, heads, dim), jnp.float32)
    key = jax.ShapeDtypeStruct((batch, kv_len, kv_heads, dim), jnp.float32)
    return query, key, key


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"q_len": 64, "kv_len": 64}, "plain"),
        ({"q_len": 128, "kv_len": 128, "batch": 4}, "plain"),
        ({"q_len": 512, "kv_len": 512}, "blockwise"),
        ({"q_len": 197, "kv_len": 197, "batch": 16}, "blockwise"),
        ({"q_len": 8192, "kv_len": 8192}, "blockwise"),
        ({"q_len": 1, "kv_len": 4096, "kv_heads": 2}, "decode"),
        ({"q_len": 1, "kv_len": 4096}, "decode_rows"),
        ({"q_len": 2, "kv_len": 32768, "kv_heads": 2}, "decode_rows"),
        ({"q_len": 3, "kv_len": 32768, "kv_heads": 1}, "blockwise"),
        ({"q_len": 1, "kv_len": 1024, "batch": 8, "heads": 32, "dim": 128}, "decode_rows"),
        ({"q_len": 1, "kv_len": 128, "batch": 64, "heads": 8, "kv_heads": 2}, "plain"),
        ({"q_len": 1, "kv_len": 64}, "plain"),
    ],
)
def test_route_by_size(sizes: dict[str, int], name: str) -> None:
    plan = _attend().plan(*_shapes(**sizes), mask=Full())
    assert plan.route.name == name
    assert f"route     {name}" in plan.explain()
    assert plan.to_dict()["route"]["name"] == name
    # a fallback takes the same way and says so
    assert _attend("splash").plan(*_shapes(**sizes), mask=Full()).route == plan.route


@pytest.mark.parametrize(
    ("sizes", "mode", "name"),
    [
        ({"q_len": 1, "kv_len": 4096, "batch": 64, "heads": 32}, "autoregressive", "decode"),
        ({"q_len": 1, "kv_len": 1024, "batch": 64, "heads": 32}, "autoregressive", "plain"),
        ({"q_len": 2, "kv_len": 4096, "batch": 64, "heads": 32}, "autoregressive", "plain"),
        ({"q_len": 4, "kv_len": 32768, "batch": 64, "heads": 32}, "autoregressive", "blockwise"),
        ({"q_len": 512, "kv_len": 512, "batch": 4}, "prefill", "plain"),
        ({"q_len": 512, "kv_len": 512, "batch": 4}, "train", "blockwise"),
        ({"q_len": 8192, "kv_len": 8192}, "prefill", "blockwise"),
    ],
)
@pytest.mark.parametrize("backend", ["cuda", "rocm", "tpu"])
def test_route_on_an_accelerator(sizes: dict[str, int], mode: str, name: str, backend: str) -> None:
    """What one tile may hold is one product over all heads, if no backward pass keeps its weights."""
    attend = OperationRegistry.create("vanilla", OperationMetadata(backend=backend))
    assert attend.plan(*_shapes(**sizes), mask=Full(), mode=mode).route.name == name


def test_what_only_whole_logits_give() -> None:
    plan = _attend().plan(*_shapes(2048, 2048), return_weights=True)
    assert (plan.route.name, "weights" in plan.route.why) == ("plain", True)
    narrow = OperationRegistry.create("vanilla", OperationMetadata(runtime_softmax_dtype="bfloat16"))
    assert narrow.plan(*_shapes(2048, 2048)).route.name == "plain"


def test_declared_path_and_blocks() -> None:
    attend = _attend(path="blockwise", block_q=48, block_kv=80)
    route = attend.plan(*_shapes(96, 160), mask=Full()).route
    assert (route.name, route.block_q, route.block_kv) == ("blockwise", 48, 80)
    refused = attend.plan(*_shapes(96, 160), mask=Full(), return_weights=True)
    assert [r.code for r in refused.rejected[0].reasons] == ["vanilla.path"]
    with pytest.raises(RefusedError, match="path='blockwise' is declared"):
        refused.require()


def test_metadata_block_sizes_reach_the_route() -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata(blocksize_q=128, blocksize_k=64))
    route = attend.plan(*_shapes(1024, 1024)).route
    assert (route.block_q, route.block_kv) == (128, 64)


# -- the program -------------------------------------------------------------------------------------------------------


def _program(
    q_len: int, kv_len: int, *, kv_heads=2, gradient: bool = False, mask=None, segments: bool = False, dtype="float32"
):
    attend = OperationRegistry.create("vanilla", OperationMetadata(runtime_dtype=dtype))
    shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in _shapes(q_len, kv_len, kv_heads=kv_heads)]
    ids = jax.ShapeDtypeStruct((1, q_len), jnp.int32)

    def forward(q, k, v, ids):
        ids = {"q_segment_ids": ids, "kv_segment_ids": ids} if segments else {}
        return attend(q, k, v, mask=Full() if mask is None else mask, **ids).attention_outputs

    def both(q, k, v, ids):
        return jax.grad(lambda *x: forward(*x, ids).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    return jax.jit(both if gradient else forward).lower(*shapes, ids).compile()


def _instructions(program) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = ", program.as_text(), re.MULTILINE))


def _products(program) -> int:
    return len(re.findall(r" dot\(", program.as_text()))


# (arguments, products in the program, MiB of temporary memory). What whole logits take: 128 MiB at 2048, 512 at 4096.
PROGRAMS = {
    "full": ({"q_len": 2048, "kv_len": 2048}, 2, 8),
    "causal": ({"q_len": 2048, "kv_len": 2048, "mask": Causal()}, 4, 8),
    "window": ({"q_len": 4096, "kv_len": 4096, "mask": Causal() & SlidingWindow(left=1023)}, 4, 10),
    "packed": ({"q_len": 4096, "kv_len": 4096, "mask": Causal(), "segments": True}, 4, 10),
    "causal_gradient": ({"q_len": 2048, "kv_len": 2048, "mask": Causal(), "gradient": True}, 4 + 5, 24),
    "decode": ({"q_len": 1, "kv_len": 4096}, 2, 4),
    "decode_rows": ({"q_len": 1, "kv_len": 32768}, 1, 2),
    "decode_one_row_a_head": ({"q_len": 1, "kv_len": 32768, "kv_heads": 8}, 1, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_stays_small(name: str) -> None:
    """Not a timed test, but what slows the path down shows here: a product more, a plane of logits, a copied cache."""
    arguments, products, most = PROGRAMS[name]
    program = _program(**arguments)
    assert _products(program) == products
    if not JAX_0_9:  # whose XLA holds a product more
        assert program.memory_analysis().temp_size_in_bytes <= most << 20
    if name == "decode":
        # K and V are read once: 4 MiB in all, and little else
        assert program.cost_analysis()["bytes accessed"] < 1.5 * 2 * 4096 * 2 * 64 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_a_batch_is_read_in_place(layout: str, dtype: str) -> None:
    """Neither a copy of the cache nor its conversion to float32 is made: 64 MiB in float32."""
    shapes = (8, 1, 32, 128), (8, 1024, 8, 128), (8, 1024, 8, 128)
    if layout == "bhtd":
        shapes = tuple((b, h, t, d) for b, t, h, d in shapes)
    query, key, value = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    attend = OperationRegistry.create("vanilla", OperationMetadata(runtime_dtype=dtype))

    def step(q, k, v, lengths):
        return attend(q, k, v, mask=Full(), kv_lengths=lengths, layout=layout).attention_outputs

    program = jax.jit(step).lower(query, key, value, lengths).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 6 << 20


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_program_does_not_grow_with_the_length(gradient: bool) -> None:
    short, long = (_program(n, n, mask=Causal(), gradient=gradient) for n in (2048, 8192))
    assert _instructions(long) == _instructions(short)
    grown = long.memory_analysis().temp_size_in_bytes / short.memory_analysis().temp_size_in_bytes
    assert grown <= 4.1  # no faster than the length


# -- under transformations ---------------------------------------------------------------------------------------------


@pytest.fixture
def tensors() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (3, 1, 150, 4, 16), (3, 1, 150, 2, 16), (3, 1, 150, 2, 16)
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    ("segments", "path"),
    [
        pytest.param(
            *(segments, path),
            id=f"{name}-{path}",
            marks=[]
            if (path, segments) in (("blockwise", True), ("decode_rows", True), ("decode", False))
            else [pytest.mark.slow],
        )
        for segments, name in ((False, "static"), (True, "segments"))
        for path in ("plain", "blockwise", "decode", "decode_rows")
    ],
)
def test_vmap(tensors: list[jax.Array], path: str, segments: bool) -> None:
    attend = _attend(path=path, block_q=64, block_kv=64)
    ids = jnp.sort(jax.random.randint(jax.random.key(1), (3, 1, 150), 0, 4), axis=-1).astype(jnp.int32)

    def one(q, k, v, ids):
        mask = Causal() & SegmentIds(ids, ids) if segments else Causal()
        return attend(q, k, v, mask=mask).attention_outputs

    def loss(*x):
        return (jax.vmap(one)(*x, ids) ** 2).sum()

    got = jax.jit(jax.vmap(one))(*tensors, ids)
    positions = np.arange(150)
    visible = np.broadcast_to(positions[None, :] <= positions[:, None], (3, 1, 150, 150))
    if segments:
        visible = visible & (np.asarray(ids)[:, 0, :, None] == np.asarray(ids)[:, 0, None, :])[:, None]
    want = reference_attention(*(np.asarray(x[:, 0]) for x in tensors), scale=0.25, mask=visible).output
    np.testing.assert_allclose(got[:, 0], want, atol=1e-5)
    apart = [jax.grad(lambda *x, i=i: (one(*x, ids[i]) ** 2).sum())(*(x[i] for x in tensors)) for i in range(3)]
    np.testing.assert_allclose(jax.grad(loss)(*tensors), jnp.stack(apart), atol=1e-4)


def test_named_residuals_spare_the_second_forward_pass(tensors: list[jax.Array]) -> None:
    attend = _attend(path="blockwise", block_q=64, block_kv=64)
    q, k, v = (x[0] for x in tensors)

    def products(policy) -> int:
        layer = jax.checkpoint(lambda q, k, v: attend(q * 1.0, k, v, mask=Full()).attention_outputs, policy=policy)
        return _products(jax.jit(jax.grad(lambda *x: (layer(*x) ** 2).sum(), (0, 1, 2))).lower(q, k, v).compile())

    named = jax.checkpoint_policies.save_only_these_names("attnops_output", "attnops_lse")
    again = products(jax.checkpoint_policies.nothing_saveable)
    assert products(named) < again


def test_a_large_sink_and_a_block_that_is_padded(tensors: list[jax.Array]) -> None:
    """exp(100) is beyond float32: a padded row must have no weight, not one of exp(100) times 0."""
    q, k, v = (x[0] for x in tensors)
    sinks = jnp.array([100.0, 3.0, 0.0, -100.0], jnp.float32)
    blockwise = _attend(path="blockwise", block_q=64, block_kv=64)

    def loss(sinks):
        return blockwise(q, k, v, mask=Full(), softmax_aux=sinks).attention_outputs.sum()

    ones, given = np.ones(q.shape), (np.asarray(x) for x in (q, k, v))
    want = reference_gradients(*given, ones, scale=q.shape[-1] ** -0.5, sinks=np.asarray(sinks))["softmax_aux"]
    np.testing.assert_allclose(jax.grad(loss)(sinks), want, rtol=1e-5, atol=1e-30)


def test_forward_mode(tensors: list[jax.Array]) -> None:
    q, k, v = (x[0] for x in tensors)
    plain = _attend(path="plain")
    tangent = jax.jvp(lambda q: plain(q, k, v).attention_outputs, (q,), (q,))[1]
    step = 1e-2
    difference = plain((1 + step) * q, k, v).attention_outputs - plain((1 - step) * q, k, v).attention_outputs
    np.testing.assert_allclose(tangent, difference / (2 * step), atol=1e-3)
    blockwise = _attend(path="blockwise")
    with pytest.raises(InputTypeError, match="'path': 'plain'"):
        jax.jvp(lambda q: blockwise(q, k, v).attention_outputs, (q,), (q,))


@pytest.mark.parametrize("path", ["blockwise", "decode", "decode_rows"])
def test_error_is_at_most_twice_that_of_the_plain_formulation(path: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1024, 4, 64)).astype(np.float32) for _ in range(3))
    want = reference_attention(q, k, v, scale=0.125).output

    def error(path: str) -> float:
        out = _attend(path=path)(q, k, v, mask=Full()).attention_outputs
        return float(np.sqrt(np.mean((np.asarray(out, np.float64) - want) ** 2)))

    assert error(path) <= 2 * error("plain")


@pytest.mark.parametrize("path", [pytest.param("plain", marks=pytest.mark.slow), "blockwise", "decode", "decode_rows"])
def test_indices_under_x64(path: str) -> None:
    """Loops count in 64 bits there, and tables and ids hold 32."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 50, n, 16)).astype(np.float32) for n in (4, 2, 2))
    ids = np.sort(rng.integers(0, 3, (2, 50)), axis=-1).astype(np.int32)
    attend = _attend(path=path, block_q=16, block_kv=24)
    with jax.enable_x64(True):

        def loss(q, k, v):
            out = attend(q, k, v, mask=Causal(), q_segment_ids=ids, kv_segment_ids=ids).attention_outputs
            return (out**2).sum() / 2

        got = jax.grad(loss, (0, 1, 2))(*map(jnp.asarray, (q, k, v)))
    visible = np.tril(np.ones((50, 50), bool)) & (ids[:, :, None] == ids[:, None, :])
    want = reference_attention(q, k, v, scale=0.25, mask=visible[:, None]).output
    gradients = reference_gradients(q, k, v, d_output=want, scale=0.25, mask=visible[:, None])
    for ours, name in zip(got, ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(ours, gradients[name], atol=2e-5)


TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}
# kv_len, heads, kv heads, queries, head dim, value dim: lengths and dims that no slice divides, fewer keys than a block
CACHES = {
    "one row a head": (5003, 3, 3, 1, 32, 32),
    "groups": (1000, 8, 2, 3, 24, 40),
    "wide heads": (515, 2, 1, 1, 136, 16),
    "few keys": (5, 2, 1, 2, 8, 8),
    "long": (40000, 3, 3, 1, 32, 32),
}


@pytest.mark.parametrize(
    ("path", "cache", "dtype", "layout"),
    [
        pytest.param(
            *key,
            marks=[]
            if key[0] == "decode_rows" and key[1] != "long" and key[2:] in (("float32", "bthd"), ("bfloat16", "bhtd"))
            else [pytest.mark.slow],
        )
        for key in itertools.product(("decode", "decode_rows"), CACHES, TOLERANCE, ("bthd", "bhtd"))
    ],
)
def test_a_cache_filled_in_part(path: str, cache: str, dtype: str, layout: str) -> None:
    """Of full rows, of one filled in part and of an empty one; what lies beyond isn't a number."""
    kv_len, heads, kv_heads, q_len, dim, value_dim = CACHES[cache]
    rng = np.random.default_rng(0)
    shapes = (3, q_len, heads, dim), (3, kv_len, kv_heads, dim), (3, kv_len, kv_heads, value_dim)
    q, k, v = (np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64) for shape in shapes)
    lengths = np.array([kv_len, kv_len // 3, 0], np.int32)
    attend = OperationRegistry.create(
        "vanilla", OperationMetadata(runtime_dtype=dtype, operation_configs={"vanilla": {"path": path}})
    )
    for given in (None, jnp.asarray(lengths)):
        beyond = np.arange(kv_len) >= (lengths if given is not None else np.full(3, kv_len))[:, None]
        tensors = [q, *(np.where(beyond[..., None, None], np.nan, x) for x in (k, v))]
        turned = [jnp.asarray(x if layout == "bthd" else x.swapaxes(1, 2), dtype) for x in tensors]
        out = attend(*turned, mask=Full(), layout=layout, kv_lengths=given, return_lse=True)
        want = reference_attention(q, k, v, scale=dim**-0.5, mask=~beyond[:, None, None])
        got = out.attention_outputs if layout == "bthd" else out.attention_outputs.swapaxes(1, 2)
        np.testing.assert_allclose(np.asarray(got, np.float64), want.output, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(out.lse, want.lse, atol=TOLERANCE[dtype] * 5)


def test_hidden_keys_reach_no_gradient_of_decode() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (1, 40, 40))
    seen = np.arange(40) < np.array([17, 0])[:, None]
    dirty = [np.where(seen[..., None, None], x, np.nan) for x in (k, v)]
    want = reference_gradients(q, k, v, np.ones(q.shape), scale=0.25, mask=seen[:, None, None])
    for path in ("decode", "decode_rows"):
        attend = _attend(path=path, block_kv=16)

        def loss(q, k, v, attend=attend):
            return attend(q, k, v, mask=Full(), kv_lengths=np.array([17, 0], np.int32)).attention_outputs.sum()

        got = jax.jit(jax.grad(loss, (0, 1, 2)))(q, *dirty)
        for ours, name in zip(got, ("query", "key", "value"), strict=True):
            np.testing.assert_allclose(ours, want[name], atol=2e-5)


# -- numbers from outside ----------------------------------------------------------------------------------------------


def test_threefry_known_answers() -> None:
    """Random123's own vectors for threefry2x32: key, counter, rounds, words."""
    from attnops.operators.kernels.threefry import threefry

    ones, pi = 0xFFFFFFFF, (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3)
    for arguments, rounds, want in (
        ((0, 0, 0, 0), 13, (0x9D1C5EC6, 0x8BD50731)),
        ((ones,) * 4, 13, (0xFD36D048, 0x2D17272C)),
        (pi, 13, (0xBA3E4725, 0xF27D669E)),
        ((0, 0, 0, 0), 20, (0x6B200159, 0x99BA4EFE)),
        ((ones,) * 4, 20, (0x1CB996FC, 0xBB002BE7)),
        (pi, 20, (0xC4923A9C, 0x483DF7A0)),
    ):
        words = threefry(*(np.array([x], np.uint32) for x in arguments), rounds=rounds)
        assert tuple(int(w[0]) for w in words) == want


@pytest.mark.parametrize(("accurate", "tolerance"), [(True, 3e-7), (False, 2e-4)])
def test_exp2_on_cpu(accurate: bool, tolerance: float) -> None:
    from attnops.operators.vanilla.kernel.cpu_tuning import exp2

    x = np.concatenate([np.linspace(-125.9, 1, 100_001), [0, -0.5, -1, -125.5]]).astype(np.float32)
    got = np.asarray(jax.jit(lambda x: exp2(x, "cpu", accurate))(x), np.float64)
    want = np.exp2(x.astype(np.float64))
    assert (np.abs(got - want) / want).max() < tolerance
    special = exp2(jnp.asarray([-jnp.inf, -128.0, -1e30, jnp.nan]), "cpu", accurate)
    np.testing.assert_array_equal(special, [0, 0, 0, np.nan])
