"""Values that are the first numbers of their keys: no array of the call; kernels load them once and sum one gradient."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, InputError, LatentAttention
from attnops.compat import abstract_device
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify.topology import described_mesh

# Before jax 0.12 the kernel for Hopper is refused for that too.
HOPPER_LACKS = {"hopper.jax"} if jax.__version_info__ < JAX_NEEDED else set()
DIM, VALUE, Q, KV, HEADS = 40, 32, 24, 200, 4
SEGMENTS = (
    np.repeat([[0, 1]], (10, 14), axis=1).astype(np.int32),
    np.repeat([[0, 1]], (122, 78), axis=1).astype(np.int32),
)


def abstract_gpu() -> jax.sharding.AbstractMesh:
    device = abstract_device("NVIDIA H100 80GB HBM3", 1, "gpu")
    return jax.sharding.AbstractMesh((1,), ("fsdp",), abstract_device=device)


def _draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _formula(arrays: dict[str, Any], seen: np.ndarray, cap: float | None = None, value: int = VALUE) -> Any:
    """Output [batch, q, heads, value] by the definition; values are columns of keys [batch, kv, 1, dim]."""
    heads = arrays["query"].shape[2]
    key = arrays["key"][:, :, 0]
    x = jnp.einsum("bqhd,bkd->bhqk", arrays["query"], key) * 0.2
    x = x if cap is None else cap * jnp.tanh(x / cap)
    x = jnp.where(seen, x + arrays.get("bias", 0), -1e30)
    sinks = jnp.broadcast_to(
        arrays.get("softmax_aux", jnp.full((heads,), -jnp.inf))[None, :, None, None], (*x.shape[:3], 1)
    )
    p = jax.nn.softmax(jnp.concatenate([x, sinks], -1), -1)[..., :-1]
    return jnp.einsum("bhqk,bkd->bqhd", jnp.where(seen, p, 0), key[..., :value])


CAUSAL = (np.arange(Q)[:, None] + KV - Q >= np.arange(KV))[None, None]
SAME = (SEGMENTS[0][:, :, None] == SEGMENTS[1][:, None])[:, None]
# Every way in which the kernels hold keys, values and the sums of their gradients.
CONFIGS: dict[str, dict[str, Any]] = {
    "rule": {},
    "fused": {"use_fused_bwd_kernel": True, "stationary_weights": False},
    "stationary": {"use_fused_bwd_kernel": True, "stationary_weights": True},
    "two": {"use_fused_bwd_kernel": False, "stationary_weights": False},
    "two_stationary": {"use_fused_bwd_kernel": False, "stationary_weights": True},
    "parts": {"use_fused_bwd_kernel": True, "block_q_dkv": 128, "block_kv_dkv": 128, "block_kv_dkv_sums": 128},
    "minor": {"k_layout": "seq_minor", "q_layout": "seq_minor"},
    "transposed": {"transposed_tiles": True},
    "minor_transposed": {"k_layout": "seq_minor", "v_layout": "head_dim_minor", "transposed_tiles": True},
}


@pytest.mark.parametrize(
    "name", [x if x in ("rule", "two_stationary") else pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS]
)
@pytest.mark.parametrize("call", ["causal", pytest.param("segments", marks=pytest.mark.slow)])
def test_splash_sums_one_gradient(name: str, call: str) -> None:
    arrays: dict[str, Any] = {"query": _draw(1, Q, HEADS, DIM), "key": _draw(1, KV, 1, DIM)}
    options: dict[str, Any] = {"causal": True, "query_offset": KV - Q}
    seen, cap = CAUSAL, None
    if call == "segments":
        arrays |= {"bias": _draw(1, HEADS, Q, KV), "softmax_aux": _draw(HEADS)}
        options = {"causal": False, "q_segment_ids": SEGMENTS[0], "kv_segment_ids": SEGMENTS[1], "logits_soft_cap": 3.0}
        seen, cap = SAME, 3.0
    attend = Attention("splash", platform="tpu", interpret=True, softmax_scale=0.2, **CONFIGS[name])
    direction = _draw(1, Q, HEADS, VALUE)

    def run(arrays: Any) -> Any:
        further = {n: x for n, x in arrays.items() if n not in ("query", "key")}
        output = attend(arrays["query"], arrays["key"], KeyColumns(VALUE), **further, **options).attention_outputs
        return (output * direction).sum(), output

    gradients, output = jax.jit(jax.grad(run, has_aux=True))(arrays)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arrays)
        wanted = _formula(wide, seen, cap)
        exact = jax.grad(lambda arrays: (_formula(arrays, seen, cap) * direction.astype(np.float64)).sum())(wide)
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)
    for n, x in exact.items():
        np.testing.assert_allclose(gradients[n], x, rtol=0, atol=2e-5 * float(np.abs(x).max()), err_msg=n)


def _kernel_operands(run: Any, *arrays: Any) -> dict[str, tuple[list[Any], list[Any]]]:
    """Each kernel of a program: the shapes of its arrays in and out."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                name = str(equation.params.get("name") or equation.params["name_and_src_info"])
                shapes = ([v.aval.shape for v in side] for side in (equation.invars, equation.outvars))
                found[name.split(" ")[0]] = tuple(shapes)  # type: ignore[assignment]
                continue
            for value in jax.tree.leaves(
                tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(run)(*arrays).jaxpr)
    return found


def test_no_kernel_takes_or_returns_values() -> None:
    query, key = _draw(1, 128, HEADS, 96), _draw(1, 128, 1, 96)
    attend = Attention("splash", platform="tpu", interpret=True, softmax_scale=0.2)
    loss = lambda q, k, v: attend(q, k, v).attention_outputs.sum()  # noqa: E731
    of_columns = _kernel_operands(jax.grad(lambda q, k: loss(q, k, KeyColumns(64)), (0, 1)), query, key)
    of_array = _kernel_operands(jax.grad(loss, (0, 1, 2)), query, key, key[..., :64])
    assert set(of_columns) == set(of_array)
    assert len(of_columns) == 2
    value = (1, 1, 128, 64)
    assert all(value in ins for ins, _ in of_array.values())
    assert not any(value in ins + outs for ins, outs in of_columns.values())
    for name, (ins, outs) in of_array.items():
        backward = "backward" in name
        assert (len(ins) - len(of_columns[name][0]), len(outs) - len(of_columns[name][1])) == (1, int(backward))


def test_a_nan_in_a_hidden_key_reaches_nothing() -> None:
    query, key, lengths = _draw(1, Q, HEADS, DIM), _draw(1, KV, 1, DIM), np.asarray([30], np.int32)
    key[:, 30:] = np.nan
    attend = Attention("splash", platform="tpu", interpret=True, softmax_scale=0.2)
    run = lambda q, k: attend(q, k, KeyColumns(VALUE), causal=False, kv_lengths=lengths).attention_outputs  # noqa: E731
    output, gradients = jax.jit(lambda q, k: (run(q, k), jax.grad(lambda q, k: run(q, k).sum(), (0, 1))(q, k)))(
        query, key
    )
    arrays = {"query": query, "key": np.nan_to_num(key)}
    np.testing.assert_allclose(output, _formula(arrays, (np.arange(KV) < 30)[None, None, None]), rtol=0, atol=1e-4)
    assert all(np.isfinite(x).all() for x in gradients)
    assert not np.asarray(gradients[1])[:, 30:].any()


NATIVE = {
    "plain": {"path": "plain"},
    "blockwise": {"path": "blockwise", "block_q": 16, "block_kv": 64},
    "one_stage": {"path": "blockwise"},
    "decode": {"path": "decode", "block_kv": 96},
    "decode_rows": {"path": "decode_rows", "block_kv": 40},
}
FLASH = {
    "flash": {},
    "flash_small": {"block_q": 16, "block_kv": 32, "block_kv_dq": 16},
    "fold": {"fold": True, "block_q": 32},
}
CALLS = ("causal", "segments", "lengths", "dropped")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "name",
    [x if x in ("blockwise", "flash_small") else pytest.param(x, marks=pytest.mark.slow) for x in NATIVE | FLASH],
)
def test_native_and_gpu_kernels_sum_one_gradient(name: str, call: str) -> None:
    """Masks, sinks, a bias, a soft cap, lengths with hidden NaNs, packed heads and a key that is wider than its parts."""
    dim, value = (44, 24) if call == "lengths" else (DIM, VALUE)  # 24 is 16 and half of 16; 20 more are 16 and 4
    arrays: dict[str, Any] = {"query": _draw(2, Q, HEADS, dim), "key": _draw(2, KV, 1, dim)}
    options: dict[str, Any] = {"causal": True, "query_offset": KV - Q}
    seen, cap = np.broadcast_to(CAUSAL, (2, 1, Q, KV)), None
    if call == "segments":
        arrays |= {"bias": _draw(2, HEADS, Q, KV), "softmax_aux": _draw(HEADS)}
        both = [np.repeat(x, 2, axis=0) for x in SEGMENTS]
        options = {"causal": False, "q_segment_ids": both[0], "kv_segment_ids": both[1], "logits_soft_cap": 3.0}
        seen, cap = np.broadcast_to(SAME, (2, 1, Q, KV)), 3.0
    elif call == "lengths":
        lengths = np.asarray([30, 111], np.int32)
        options = {"causal": False, "kv_lengths": lengths}
        seen = np.broadcast_to((np.arange(KV) < lengths[:, None])[:, None, None], (2, 1, Q, KV))
    elif call == "dropped":
        options |= {"dropout_prob": 0.25, "deterministic": False, "dropout_rng": jax.random.key(3)}
    flash = {"platform": "cuda", "interpret": True}
    attend = (
        Attention("vanilla", softmax_scale=0.2, **NATIVE[name])
        if name in NATIVE
        else Attention("flash_attn2", softmax_scale=0.2, **flash, **FLASH[name])
    )
    direction = _draw(2, Q, HEADS, value)

    def run(arrays: Any, values: Any = None) -> Any:
        further = {n: x for n, x in arrays.items() if n not in ("query", "key")}
        values = KeyColumns(value) if values is None else values
        output = attend(arrays["query"], arrays["key"], values, **further, **options).attention_outputs
        return (output * direction).sum(), output

    if call == "lengths":
        for row, length in enumerate(options["kv_lengths"]):
            arrays["key"][row, length:] = np.nan
    gradients, output = jax.jit(jax.grad(run, has_aux=True))(arrays)
    if call == "dropped":  # which weights are dropped is the array's call's, by the same counters
        split = lambda arrays: run(arrays, arrays["key"][..., :value])  # noqa: E731
        exact, wanted = jax.jit(jax.grad(split, has_aux=True))(arrays)
    else:
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jnp.asarray(np.nan_to_num(x), jnp.float64), arrays)
            wanted = _formula(wide, seen, cap, value)
            exact = jax.grad(lambda arrays: (_formula(arrays, seen, cap, value) * direction.astype(np.float64)).sum())(
                wide
            )
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)
    for n, x in exact.items():
        np.testing.assert_allclose(gradients[n], x, rtol=0, atol=3e-5 * float(np.abs(x).max()), err_msg=n)


@pytest.mark.parametrize(
    ("dim", "value"),
    [pytest.param(576, 512, marks=pytest.mark.slow), pytest.param(320, 256, marks=pytest.mark.slow), (288, 256)],
)
def test_wide_latents_in_the_gpu_kernels(dim: int, value: int) -> None:
    """Two queries of 24 heads are 48 rows of tiles of 16: heads share tiles."""
    q_len, kv_len, heads = 2, 40, 24
    arrays = {"query": _draw(1, q_len, heads, dim), "key": _draw(1, kv_len, 1, dim) / 5}
    attend = Attention("flash_attn2", platform="cuda", interpret=True, softmax_scale=0.2)
    options = {"causal": True, "query_offset": kv_len - q_len}
    plan = attend.plan(arrays["query"], arrays["key"], KeyColumns(value), **options)
    assert (plan.kind, plan.config.fold, plan.config.block_q) == ("platform", True, 16)
    here = Attention("flash_attn2", mesh=abstract_gpu())
    planned = here.plan(
        arrays["query"].astype("bfloat16"), arrays["key"].astype("bfloat16"), KeyColumns(value), **options
    )
    assert planned.method == ("forward_cuda" if HOPPER_LACKS else "forward_hopper")
    rejected = {one.implementation: {reason.code for reason in one.reasons} for one in planned.rejected}
    assert rejected.get("flash_attn2.forward_hopper", set()) == set(HOPPER_LACKS)
    refused = attend.plan(arrays["query"], arrays["key"], arrays["key"][..., :value], **options)
    assert "flash.head_dim" in {reason.code for one in refused.rejected for reason in one.reasons}
    run = lambda q, k: attend(q, k, KeyColumns(value), **options).attention_outputs  # noqa: E731
    output = jax.jit(run)(arrays["query"], arrays["key"])
    seen = (np.arange(q_len)[:, None] + kv_len - q_len >= np.arange(kv_len))[None, None]
    np.testing.assert_allclose(output, _formula(arrays, seen, value=value), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "config", "mesh"),
    [
        ("vanilla", {}, {"sp": 2}),
        ("vanilla", {}, {"dp": 2, "tp": 2}),
        ("ring", {}, {"sp": 4}),
        ("ring", {"ring_order": "zigzag"}, {"sp": 2}),
        ("ulysses", {}, {"sp": 2}),
    ],
)
def test_on_meshes(name: str, config: Any, mesh: Any) -> None:
    """Keys are gathered, sent around a ring or exchanged by heads, and nothing is sent for values; kv heads are repeated."""
    kv_heads = 2 if name == "ulysses" else 1
    query, key = _draw(2, Q, HEADS, DIM), _draw(2, Q, kv_heads, DIM)
    attend = Attention(name, softmax_scale=0.2, **config, **({} if mesh is None else {"mesh": mesh}))
    direction = _draw(2, Q, HEADS, VALUE)
    plan = attend.plan(query, key, KeyColumns(VALUE), mode="train")
    assert plan.placement.fitted.get("value") is None
    run = lambda q, k: (attend(q, k, KeyColumns(VALUE), mode="train").attention_outputs * direction).sum()  # noqa: E731
    found = jax.jit(jax.value_and_grad(run, (0, 1)))(query, key)
    seen = np.tri(Q, dtype=bool)[None, None]

    def wanted(query: Any, key: Any) -> Any:
        groups = HEADS // kv_heads
        parts = [
            _formula({"query": query[:, :, h * groups : (h + 1) * groups], "key": key[:, :, h : h + 1]}, seen)
            for h in range(kv_heads)
        ]
        return (jnp.concatenate(parts, 2) * direction.astype(np.float64)).sum()

    with jax.enable_x64(True):
        exact = jax.value_and_grad(wanted, (0, 1))(*(jnp.asarray(x, jnp.float64) for x in (query, key)))
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-3, atol=1e-3)
    for x, y in zip(found[1], exact[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-5 * float(np.abs(y).max()))


def test_vmem_counts_values_once() -> None:
    """DeepSeek V3, absorbed: a block of 576 numbers of a key in 640 lanes, twice, and none of 512 of a value."""
    sizes = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512, "form": "absorbed"}
    shapes = (1, 512, 128, 128), (1, 512, 128, 64), (1, 512, 512), (1, 512, 64), (512, 128, 128), (512, 128, 128)
    arrays = [jax.ShapeDtypeStruct(x, "bfloat16") for x in shapes]
    parts = {}
    for mesh in (
        None,
        jax.sharding.AbstractMesh((2,), ("sp",)),
    ):  # on the second, keys are gathered
        served = LatentAttention(
            "splash", **sizes, backend="tpu", block_kv=256, **({} if mesh is None else {"mesh": mesh})
        )
        plan = served.plan(*arrays, causal=True, mode="prefill").inner
        parts[mesh is None] = plan.runs.memory(plan.problem, plan.placement, plan.config)["attnops_splash_forward"]
    for found in parts.values():
        assert found["key (block_kv)"] == 2 * 256 * 640 * 2
        assert "value (block_kv)" not in found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(("dim", "value"), [(576, 512), (320, 256), (288, 256)])
def test_compiles(topology: str, dim: int, value: int) -> None:
    """128 heads over one, with the gradient, with the sizes that the plan chooses."""
    devices = described_mesh(topology).devices.reshape(-1)[:1]
    mesh = jax.sharding.Mesh(devices, ("x",))
    attend = Attention("splash", mesh=mesh, softmax_scale=0.1, fallback="error")
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    query, key = (jax.ShapeDtypeStruct((1, 1024, heads, dim), "bfloat16", sharding=there) for heads in (128, 1))
    loss = lambda q, k: attend(q, k, KeyColumns(value)).attention_outputs.astype(jnp.float32).sum()  # noqa: E731
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(query, key)
    assert f"tensor<1x1x1024x{value}xbf16>" not in lowered.as_text()  # no array of values, nor of their gradients
    lowered.compile()


@pytest.mark.parametrize("count", [0, DIM + 1, True, 4.0])
def test_columns_that_are_refused(count: Any) -> None:
    with pytest.raises(InputError, match="KeyColumns"):
        Attention("vanilla")(_draw(1, Q, HEADS, DIM), _draw(1, Q, 1, DIM), KeyColumns(count))
