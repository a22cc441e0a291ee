"""Where to put a model's own arrays so that its attention needn't move them: tokens, projections, a dense cache."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import InputError, ShardingError
from ...planning import Plan
from ...sharding import canonical_layout
from ...sharding.mesh import AnyMesh
from .attention import Attention

__all__ = ["ModelShardings", "shardings_for"]


class ModelShardings(NamedTuple):
    """NamedShardings for one attention, in the form that jax.device_put and jit's in_shardings take.

    tokens: ids [batch, length] and hidden states [batch, length, features]. query, key, value, output: the call's, in its
    layout. q_proj, k_proj, v_proj: kernels [features, heads, dim] or [features, heads * dim]; o_proj: [heads, dim, features] or
    [heads * dim, features]. q_bias, k_bias, v_bias: [heads, dim] or [heads * dim]. cache_key, cache_value: a dense cache
    [batch, cache_len, kv_heads, dim] in the layout, None without a cache_len.
    """

    tokens: NamedSharding
    query: NamedSharding
    key: NamedSharding
    value: NamedSharding
    output: NamedSharding
    q_proj: NamedSharding
    k_proj: NamedSharding
    v_proj: NamedSharding
    o_proj: NamedSharding
    q_bias: NamedSharding
    k_bias: NamedSharding
    v_bias: NamedSharding
    cache_key: NamedSharding | None = None
    cache_value: NamedSharding | None = None


def shardings_for(
    attention: Attention,
    *,
    batch: int,
    length: int,
    q_heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    cache_len: int | None = None,
    mode: str = "train",
    mesh: AnyMesh | None = None,
) -> ModelShardings:
    """Return shardings for a model's arrays, from one plan of its self-attention and, with cache_len, one of a decoding step.

    mesh: by default the attention's own, else that of the context. The heads of a projection are split like those of the call;
    where kv heads are repeated for the mesh, or an axis doesn't divide a size, the array here isn't split. Errors: ShardingError
    without a mesh; InputError for sizes that no call could have.
    """
    declared = attention.declaration.call
    layout = canonical_layout(declared.layout)
    if layout == "thd":
        raise InputError("layout 'thd' has no batch to name; use the named_shardings() of a plan of the packed call.")
    mesh = attention.operation.metadata.mesh if mesh is None else mesh
    if mesh is None:
        raise ShardingError(
            "there is no mesh; declare one with Attention(..., mesh=mesh), or pass shardings_for(mesh=mesh)."
        )
    sizes = {"b": batch, "h": q_heads, "d": head_dim, "kv": kv_heads or q_heads, "v": value_dim or head_dim}

    def planned(q_len: int, kv_len: int, mode: str) -> Plan:
        dtype = jnp.dtype(attention.operation.metadata.runtime_dtype or declared.dtype)

        def of(heads: int, length: int, dim: int) -> jax.ShapeDtypeStruct:
            by_axis = {"b": sizes["b"], "t": length, "h": heads, "d": dim}
            return jax.ShapeDtypeStruct(tuple(by_axis[axis] for axis in layout), dtype)

        operation = type(attention.operation)(attention.operation.metadata.replace(mesh=mesh))
        key, value = (of(sizes["kv"], kv_len, sizes[dim]) for dim in ("d", "v"))
        return operation.plan(of(sizes["h"], q_len, sizes["d"]), key, value, causal=False, mode=mode, layout=layout)

    plan = planned(length, length, mode)
    named = plan.named_shardings(mesh)
    at = {axis: index for index, axis in enumerate(layout)}

    def split(tensor: str, axis: str) -> str | tuple[str, ...] | None:
        spec = named[tensor].spec
        return spec[at[axis]] if at[axis] < len(spec) else None

    def sharding(*entries: str | tuple[str, ...] | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*entries))

    q, k, v = (split(name, "h") for name in ("query", "key", "value"))
    cache = planned(1, cache_len, "autoregressive").named_shardings(mesh) if cache_len is not None else {}
    return ModelShardings(
        tokens=sharding(split("query", "b"), split("query", "t")),
        query=named["query"],
        key=named["key"],
        value=named["value"],
        output=named["output"],
        q_proj=sharding(None, q),
        k_proj=sharding(None, k),
        v_proj=sharding(None, v),
        o_proj=sharding(q),
        q_bias=sharding(q),
        k_bias=sharding(k),
        v_bias=sharding(v),
        cache_key=cache.get("key"),
        cache_value=cache.get("value"),
    )
