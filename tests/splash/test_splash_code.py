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
from attnops.operators.splash.pass_cost import is_short_code
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
    lower half. A window of 1024 leaves out units of every tile, so the tiles have 1024 queries and keys, and ten units live."""
    function, _ = _call(kind, MASKS[name], 8192, 64)
    assert _products(function, 8192, 64) == {"attnops_splash_forward": 2 * most}


@pytest.mark.parametrize("kind", PIPELINED)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_a_tile_has_little_code(name: str, dim: int, kind: str) -> None:
    """A body computes at most 2**21 weights forward and 2**20 backward, with the sizes that a plan chooses and no more keys."""
    from attnops.operators.splash.passes import splash_passes
    from attnops.verify.tile_counts import kernel_bodies

    config: Any = _call(kind, MASKS[name], 8192, dim)[1].config
    # 2048 queries would have two tiles at each of a wide window's edges: more kinds than a kernel has bodies. Of a narrow one all
    # tiles are at an edge.
    assert config.block_q == (1024 if "window" in name else 2048)
    for part, block, most in (
        ("forward", (config.block_q, config.block_kv), 1 << 21),
        ("backward", (config.block_q_dkv, config.block_kv_dkv), 1 << 20),
    ):
        for kernel in splash_passes(config, part == "backward"):
            variants = kernel_bodies(kernel, MASKS[name], 8192)
            assert max(variant.computed for variant in variants) * block[0] * block[1] <= most, (part, variants)
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


@pytest.mark.parametrize("kind", PIPELINED)
@pytest.mark.parametrize("kv_len", [77, 512, 700])
def test_few_keys_keep_wide_tiles(kv_len: int, kind: str) -> None:
    """All keys are in one tile, nothing of it is hidden, and its code is short."""
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, "tpu"))
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, tuning="off"))
    query, key = (jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16) for length in (16384, kv_len))
    assert attend.plan(query, key, key, mask=Full()).config.block_q == 2048  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", PIPELINED)
def test_backward_tiles_are_as_large_under_a_narrow_window(kind: str) -> None:
    """The bound on tiles that are all at an edge is for the forward pass; few units of a backward tile live, of any size."""
    config: Any = _call(kind, Causal() & SlidingWindow(127), 8192, 128)[1].config
    assert (config.block_q, config.block_kv) == (1024, 1024)
    assert config.block_kv_dkv == 2048


@pytest.mark.parametrize("kind", PIPELINED)
def test_a_mask_without_visible_keys_is_planned(kind: str) -> None:
    """Also if only the rows that are looked at see none."""
    for length in (4096, 32768):
        _, plan = _call(kind, Causal(-20000), length, 128)
        assert plan.implementation is not None


@pytest.mark.parametrize("kind", PIPELINED)
def test_what_compiles_as_fast_as_the_default(kind: str) -> None:
    """Of larger tiles a search for shipped sizes keeps those of full attention, and none of a window without a full tile."""
    wide = {"block_q": 2048, "block_kv": 2048}
    for mask, fields, short in (
        (Full(), {"block_q": 2048, "block_kv": 1024}, True), (Full(), wide, False), (MASKS["window"], wide, False),
        (MASKS["window"], {}, True), (MASKS["window"], {"block_q": 2048, "block_kv": 512}, True),
    ):  # fmt: skip
        plan = _call(kind, mask, 8192, 128, fields)[1]
        assert is_short_code(plan.problem, plan.placement, plan.config, "forward") == short, (mask, fields)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5p"])
def test_other_generations_keep_their_blocks(kind: str) -> None:
    config: Any = _call(kind, Causal(), 8192, 128)[1].config
    assert (config.block_q, config.block_kv) == (1024, 1024)
