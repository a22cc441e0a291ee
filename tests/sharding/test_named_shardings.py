"""NamedShardings of plans and of a model's arrays, handed to jax as they are."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import Attention, InputError, OperationMetadata, OperationRegistry, ShardingError, shardings_for
from attnops.authoring import plan
from attnops.verify import reference_attention

SIZES: dict[str, Any] = {"batch": 4, "length": 8, "q_heads": 4, "kv_heads": 2, "head_dim": 8}
QUERY, KEY, VALUE = (
    np.random.default_rng(n).standard_normal((4, 8, heads, 8)).astype(np.float32) for n, heads in enumerate((4, 2, 2))
)


def _mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    sizes = sizes or {"fsdp": 2, "sp": 2, "tp": 2}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_plans_shardings_are_taken_by_device_put_and_jit(kind: AxisType) -> None:
    mesh = _mesh(kind)
    attention = Attention("vanilla", mesh=mesh)
    bias = np.random.default_rng(5).standard_normal((1, 4, 8, 8)).astype(np.float32)
    named = attention.plan(QUERY, KEY, VALUE, bias=bias).named_shardings()
    assert {name: tuple(s.spec) for name, s in named.items()} == {
        "query": ("fsdp", "sp", "tp", None),
        "key": ("fsdp", "sp", "tp", None),
        "value": ("fsdp", "sp", "tp", None),
        "bias": (None, None, "sp", None),
        "output": ("fsdp", "sp", "tp", None),
    }
    arrays = dict(zip(("query", "key", "value", "bias"), (QUERY, KEY, VALUE, bias), strict=True))
    placed = jax.device_put(arrays, {name: named[name] for name in arrays})
    assert {name: x.sharding for name, x in placed.items()} == {name: named[name] for name in arrays}
    run = jax.jit(
        lambda *x: attention(*x[:3], bias=x[3]).attention_outputs,
        in_shardings=tuple(named[name] for name in arrays),
        out_shardings=named["output"],
    )
    out = run(*(placed[name] for name in arrays))
    assert out.sharding.is_equivalent_to(named["output"], 4)
    wanted = reference_attention(QUERY, KEY, VALUE, scale=8**-0.5, mask=np.tril(np.ones((8, 8), bool)), bias=bias)
    np.testing.assert_allclose(out, wanted.output, atol=3e-6)
    assert not any(
        "sends" in note for note in attention.plan(*(placed[name] for name in arrays if name != "bias")).notes
    )


def test_heads_that_are_repeated_are_not_split_before() -> None:
    mesh = _mesh(tp=8)
    x, y = jnp.zeros((1, 4, 8, 8)), jnp.zeros((1, 4, 2, 8))
    named = Attention("vanilla", mesh=mesh).plan(x, y, y).named_shardings()
    assert (tuple(named["query"].spec), tuple(named["key"].spec)) == ((None, None, "tp", None), (None,) * 4)
    jax.device_put(y, named["key"])
    where = shardings_for(Attention("vanilla", mesh=mesh), **SIZES | {"q_heads": 8})
    assert (where.q_proj.spec, where.k_proj.spec, where.v_bias.spec) == (P(None, "tp"), P(None, None), P(None))


def test_whose_mesh() -> None:
    mesh, x = _mesh(tp=2), jax.ShapeDtypeStruct((1, 4, 2, 8), np.float32)
    alone = Attention("vanilla").plan(x, x, x)
    with pytest.raises(ShardingError, match="this plan has no mesh, so it has no NamedShardings; declare one"):
        alone.named_shardings()
    decided = Attention("vanilla", mesh=mesh).plan(x, x, x)
    assert decided.mesh == decided.named_shardings()["query"].mesh == mesh
    bare = plan(decided.operation, decided.problem, decided.policy)
    for meshless in (bare, pickle.loads(pickle.dumps(decided))):
        assert meshless == decided
        with pytest.raises(ShardingError, match=r"this plan is for mesh tp=2, .*; give named_shardings\(mesh\)"):
            meshless.named_shardings()
        assert meshless.named_shardings(mesh) == decided.named_shardings()
        with jax.set_mesh(mesh):
            assert meshless.named_shardings() == decided.named_shardings()
    with pytest.raises(ShardingError, match="this plan is for mesh tp=2, but the mesh given is tp=4"):
        decided.named_shardings(_mesh(tp=4))
    with jax.set_mesh(mesh):
        assert Attention("vanilla").plan(x, x, x).named_shardings()["query"].spec == P(None, None, "tp", None)
    out = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh))(*[jnp.zeros(x.shape)] * 3)
    assert out.plan.named_shardings()["output"].is_equivalent_to(out.attention_outputs.sharding, 4)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_a_models_arrays(layout: str) -> None:
    mesh = _mesh()
    where = shardings_for(Attention("vanilla", mesh=mesh, layout=layout), **SIZES, cache_len=16)
    assert (where.tokens.spec, where.q_proj.spec, where.o_proj.spec) == (P("fsdp", "sp"), P(None, "tp"), P("tp"))
    order = (lambda b, t, h, d: (b, t, h, d)) if layout == "bthd" else (lambda b, t, h, d: (b, h, t, d))
    assert tuple(where.query.spec) == order("fsdp", "sp", "tp", None)
    assert where.cache_key is not None
    assert where.cache_key == where.cache_value
    # Tokens, hidden states; kernels with heads apart and joined; biases; a cache.
    for sharding, shapes in (
        (where.tokens, [(4, 8), (4, 8, 32)]),
        (where.q_proj, [(32, 4, 8), (32, 32)]),
        (where.k_proj, [(32, 2, 8), (32, 16)]),
        (where.o_proj, [(4, 8, 32), (32, 32)]),
        (where.q_bias, [(4, 8), (32,)]),
        (where.v_bias, [(2, 8), (16,)]),
        (where.cache_key, [order(4, 16, 2, 8)]),
    ):
        for shape in shapes:
            placed = jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sharding)
            assert placed.sharding == sharding
            assert placed.sharding.shard_shape(shape) != shape
            jax.jit(lambda x: x * 2, in_shardings=sharding, out_shardings=sharding)(placed)


def test_weights_of_nnx_are_split_and_compute_the_same() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="pip install 'attnops[flax]'")
    from attnops.adapters.flax_nnx import attention_fn

    mesh = _mesh(fsdp=2, tp=4)
    attention = Attention("vanilla", mesh=mesh, causal=False)
    layer = nnx.MultiHeadAttention(4, 32, decode=False, attention_fn=attention_fn(attention), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((4, 8, 32)).astype(np.float32)
    plain = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))(x)
    where = shardings_for(attention, **SIZES | {"kv_heads": 4})
    graph, state = nnx.split(layer)
    of = {
        ("query", "kernel"): where.q_proj, ("key", "kernel"): where.k_proj, ("value", "kernel"): where.v_proj,
        ("query", "bias"): where.q_bias, ("key", "bias"): where.k_bias, ("value", "bias"): where.v_bias,
        ("out", "kernel"): where.o_proj,
    }  # fmt: skip
    whole = NamedSharding(mesh, P())
    shardings = nnx.from_flat_state(
        [(path, leaf.replace(of.get(path, whole))) for path, leaf in nnx.to_flat_state(state)]
    )
    state = jax.device_put(state, shardings)
    run = jax.jit(
        lambda state, x: nnx.merge(graph, state)(x), in_shardings=(shardings, where.tokens), out_shardings=where.tokens
    )
    out = run(state, jax.device_put(x, where.tokens))
    assert out.sharding == where.tokens
    kernel = dict(nnx.to_flat_state(state))[("query", "kernel")]
    assert kernel.get_value().sharding.shard_shape((32, 4, 8)) == (32, 1, 8)
    np.testing.assert_allclose(out, plain, atol=1e-5)


def test_decoding_from_a_cache_that_lies_so() -> None:
    mesh = _mesh(fsdp=2, tp=2)
    attention = Attention("vanilla", mesh=mesh)
    where = shardings_for(attention, **SIZES, cache_len=8)
    cache = [jax.device_put(x, s) for x, s in ((KEY, where.cache_key), (VALUE, where.cache_value))]
    query = QUERY[:, -1:]
    wanted = reference_attention(query, KEY, VALUE, scale=8**-0.5).output
    np.testing.assert_allclose(attention(query, *cache).attention_outputs, wanted, atol=3e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"there is no mesh; declare one"):
        shardings_for(Attention("vanilla"), **SIZES)
    with pytest.raises(InputError, match="layout 'thd' has no batch to name"):
        shardings_for(Attention("vanilla", layout="thd", mesh=_mesh(tp=2)), **SIZES)
    with pytest.raises(InputError, match="query has 4 heads and key 3"):
        shardings_for(Attention("vanilla"), **SIZES | {"kv_heads": 3}, mesh=_mesh(tp=2))
