"""How much code splash's kernels have for a tile where tiles are pipelined: plans bound it, as it takes time to compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from attnops import Causal, Full, Mask, OperationMetadata, OperationRegistry, Prefix, SegmentIds, SlidingWindow
from attnops.compat import abstract_device
from attnops.planning import Plan

PIPELINED = ("TPU v6 lite", "TPU7x")
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(1023),
    "wide window": Causal() & SlidingWindow(4095),
    "prefix": Causal() | Prefix(3000),
}
WIDE = {"block_kv": 2048, "block_kv_dkv": 2048}


def _call(kind: str, mask: Mask, length: int, dim: int, fields: Any = None, **call: Any) -> tuple[Any, Plan]:
    """(a function of query, key and value, and its plan)."""
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, "tpu"))
    configs = {"splash": fields or {}}
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, operation_configs=configs, tuning="off"))
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    return lambda *qkv: attend(*qkv, mask=mask, **call).attention_outputs, attend.plan(x, x, x, mask=mask, **call)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _products(function: Any, length: int, dim: int) -> dict[str, int]:
    """The matrix products in each kernel of a traced program."""
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    found = {}
    for equation in _equations(jax.jit(function).trace(x, x, x).jaxpr.jaxpr):
        if equation.primitive.name == "pallas_call":
            inner = _equations(equation.params["jaxpr"])
            found[equation.params["name"]] = sum(one.primitive.name == "dot_general" for one in inner)
    return found


@pytest.mark.parametrize("kind", PIPELINED)
@pytest.mark.parametrize(("name", "most"), [("full", 32), ("causal", 32 + 26 + 10), ("window", 10 + 10)])
def test_products_of_a_forward_kernel(name: str, most: int, kind: str) -> None:
    """Two for each unit of 256 x 256. Causal: a tile of 2048 x 1024 is whole, or the diagonal crosses its upper half, or its
    lower half. A window of 1024 has no whole tile, so the tiles have 1024 queries and keys, and ten units live."""
    function, _ = _call(kind, MASKS[name], 8192, 64)
    assert _products(function, 8192, 64) == {"attnops_splash_forward": 2 * most}


@pytest.mark.parametrize("kind", PIPELINED)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_a_tile_has_little_code(name: str, dim: int, kind: str) -> None:
    """A body computes at most 2**21 weights forward and 2**20 backward, with the sizes that a plan chooses and no more keys."""
    from attnops.verify.tile_counts import kernel_bodies, kernels_of

    config: Any = _call(kind, MASKS[name], 8192, dim)[1].config
    # 2048 queries would have two tiles at each of a wide window's edges: more kinds than a kernel has bodies. Of a narrow one all
    # tiles are at an edge.
    assert config.block_q == (1024 if "window" in name else 2048)
    for part, block, most in (
        ("forward", (config.block_q, config.block_kv), 1 << 21),
        ("backward", (config.block_q_dkv, config.block_kv_dkv), 1 << 20),
    ):
        for kernel in kernels_of(part, config):
            bodies = kernel_bodies(config, part, kernel, MASKS[name], 8192)
            assert max(body.live for body in bodies) * block[0] * block[1] <= most, (part, bodies)
    assert config.block_kv == 1024


@pytest.mark.parametrize("kind", PIPELINED)
def test_traced_ids_count_as_visible(kind: str) -> None:
    """What they hide isn't known when the kernel is compiled, so a window hides nothing either where ids are in doubt."""
    ids = jnp.zeros((1, 8192), jnp.int32)
    call = {"q_segment_ids": jax.ShapeDtypeStruct((1, 8192), jnp.int32)}
    assert _call(kind, Causal(), 8192, 128, **call)[1].config.block_kv == 1024
    assert _call(kind, Causal() & SegmentIds(ids, ids), 8192, 128)[1].config.block_kv == 1024
    window: Any = _call(kind, Causal() & SlidingWindow(1023), 8192, 128, **call)[1].config
    assert (window.block_q, window.block_kv) == (1024, 1024)


@pytest.mark.parametrize("kind", PIPELINED)
def test_declared_blocks_may_have_more(kind: str) -> None:
    function, plan = _call(kind, Full(), 4096, 64, WIDE)
    config: Any = plan.config
    assert (config.block_kv, config.block_kv_dkv) == (2048, 2048)
    assert _products(function, 4096, 64) == {"attnops_splash_forward": 2 * 64}


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5p"])
def test_other_generations_keep_their_blocks(kind: str) -> None:
    config: Any = _call(kind, Causal(), 8192, 128)[1].config
    assert (config.block_q, config.block_kv) == (1024, 1024)
