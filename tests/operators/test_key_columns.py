"""Values that are the first numbers of their keys: splash loads them once and sums one gradient; others get them as an array."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, InputError, LatentAttention
from attnops.operators.call.key_columns import KeyColumns
from attnops.verify.topology import described_mesh

DIM, VALUE, Q, KV, HEADS = 40, 32, 24, 200, 4
SEGMENTS = (
    np.repeat([[0, 1]], (10, 14), axis=1).astype(np.int32),
    np.repeat([[0, 1]], (122, 78), axis=1).astype(np.int32),
)


def _draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _formula(arrays: dict[str, Any], seen: np.ndarray, cap: float | None = None) -> Any:
    """Output [batch, q, heads, value] by the definition; values are columns of keys [batch, kv, 1, dim]."""
    key = arrays["key"][:, :, 0]
    x = jnp.einsum("bqhd,bkd->bhqk", arrays["query"], key) * 0.2
    x = x if cap is None else cap * jnp.tanh(x / cap)
    x = jnp.where(seen, x + arrays.get("bias", 0), -1e30)
    sinks = jnp.broadcast_to(
        arrays.get("softmax_aux", jnp.full((HEADS,), -jnp.inf))[None, :, None, None], (*x.shape[:3], 1)
    )
    p = jax.nn.softmax(jnp.concatenate([x, sinks], -1), -1)[..., :-1]
    return jnp.einsum("bhqk,bkd->bqhd", jnp.where(seen, p, 0), key[..., :VALUE])


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


@pytest.mark.parametrize(("name", "mesh"), [("vanilla", None), ("ring", {"sp": 2}), ("vanilla", {"sp": 2})])
def test_others_get_an_array(name: str, mesh: Any) -> None:
    query, key = _draw(2, Q, HEADS, DIM), _draw(2, Q, 1, DIM)
    attend = Attention(name, softmax_scale=0.2, **({} if mesh is None else {"mesh": mesh}))
    output = attend(query, key, KeyColumns(VALUE)).attention_outputs
    seen = np.tri(Q, dtype=bool)[None, None]
    np.testing.assert_allclose(output, _formula({"query": query, "key": key}, seen), rtol=0, atol=1e-4)


def test_vmem_counts_values_once() -> None:
    """DeepSeek V3, absorbed: a block of 576 numbers of a key in 640 lanes, twice, and none of 512 of a value."""
    sizes = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512, "form": "absorbed"}
    shapes = (1, 512, 128, 128), (1, 512, 128, 64), (1, 512, 512), (1, 512, 64), (512, 128, 128), (512, 128, 128)
    arrays = [jax.ShapeDtypeStruct(x, "bfloat16") for x in shapes]
    parts = {}
    for mesh in (
        None,
        jax.sharding.AbstractMesh((2,), ("sp",)),
    ):  # on the second, keys are gathered, and values with them
        served = LatentAttention(
            "splash", **sizes, backend="tpu", block_kv=256, **({} if mesh is None else {"mesh": mesh})
        )
        plan = served.plan(*arrays, causal=True, mode="prefill").inner
        parts[mesh is None] = plan.runs.memory(plan.problem, plan.placement, plan.config)["attnops_splash_forward"]
    assert parts[True]["key (block_kv)"] == 2 * 256 * 640 * 2
    assert "value (block_kv)" not in parts[True]
    assert parts[False]["value (block_kv)"] == 2 * 256 * 512 * 2


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
