"""The attention shapes of real models, forward and gradient, through the TPU compiler for four v5e chips."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.errors import ShardingWarning

pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
pytestmark = pytest.mark.slow

SHAPES = json.loads((Path(__file__).parents[1] / "data" / "model_shapes.json").read_text())["shapes"]
LONGEST = 8192  # beyond it the same blocks are only more of them


@pytest.fixture(scope="module")
def v5e() -> Any:
    from attnops.verify.topology import described_mesh

    return described_mesh("v5e:2x2", {"fsdp": 2, "tp": 2})


def _mask(shape: dict[str, Any]) -> Mask:
    mask: Mask = Causal() if shape["causal"] else Full()
    if shape["window"]:
        mask = mask & SlidingWindow(*shape["window"])
    if shape["chunk"]:
        mask = mask & Chunked(shape["chunk"])
    return mask


@pytest.mark.parametrize("shape", SHAPES, ids=[s["name"].replace(" ", "_") for s in SHAPES])
def test_compiles_or_says_why_not(v5e: Any, shape: dict[str, Any]) -> None:
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=v5e, fallback="allow"))
    q_len, kv_len = (min(shape[n], LONGEST) for n in ("seq_q", "seq_kv"))
    q, k, v = (
        jax.ShapeDtypeStruct((2, n, h, d), jnp.bfloat16)
        for n, h, d in (
            (q_len, shape["hq"], shape["head_dim"]),
            (kv_len, shape["hkv"], shape["head_dim"]),
            (kv_len, shape["hkv"], shape["head_dim_v"]),
        )
    )
    call = {
        "mask": _mask(shape),
        "softmax_scale": shape["softmax_scale"],
        "logits_soft_cap": shape["logits_soft_cap"],
    }
    sinks = jax.ShapeDtypeStruct((shape["hq"],), jnp.float32) if shape["sinks"] else None
    plan = attend.plan(q, k, v, softmax_aux=sinks, **call)
    if q_len == 1:
        assert (plan.kind, plan.method) == ("routed", "forward_native")
        assert [r.code for rejected in plan.rejected for r in rejected.reasons] == ["splash.one_query"]
        return
    assert plan.method == "forward_tpu"

    def both(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q, k, v, softmax_aux=sinks, **call).attention_outputs.astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    def laid_out(x: jax.ShapeDtypeStruct | None, spec: PartitionSpec) -> Any:
        return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(v5e, spec))

    fitted = plan.placement.fitted
    arguments = [laid_out(x, fitted[t].spec) for x, t in ((q, "query"), (k, "key"), (v, "value"))]
    # Falcon's 71 heads can't be split over two devices, of which the call warns.
    splits = shape["hq"] % v5e.shape["tp"] == 0
    with contextlib.nullcontext() if splits else pytest.warns(ShardingWarning, match="repeat each other's work"):
        lowered = jax.jit(both).lower(*arguments, laid_out(sinks, PartitionSpec()))
    compiled = lowered.compile()
    assert compiled.as_text().count("tpu_custom_call") >= 2
