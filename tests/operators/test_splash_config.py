"""Every field of SplashConfig is found in what is lowered for the TPU, or refused. Generated from the class."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from attnops import Causal, ConfigError, OperationMetadata, OperationRegistry
from attnops.operators.splash import SplashConfig

MESH = AbstractMesh((1,), ("fsdp",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
BASE: dict[str, Any] = dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"), 256) | {
    "block_kv_dkv_compute": 256, "block_q_dq": 256, "block_kv_dq": 256,
}  # fmt: skip
CHANGES: dict[str, Any] = {
    **dict.fromkeys(BASE, 128),
    "block_kv": 512,
    "block_kv_dkv": 512,
    "block_q": 64,
    "use_fused_bwd_kernel": True,
    "q_layout": "seq_minor",
    "k_layout": "seq_minor",
    "v_layout": "seq_minor",
    "residual_checkpoint_name": "splash_residuals",
    "interpret": True,
}
FIELDS = [f for f in SplashConfig.model_fields if f not in ("operation", "schema_version")]


def _lowered(config: dict[str, Any]) -> str:
    """The traced program and the program for the TPU, forward and gradient."""
    metadata = OperationMetadata(mesh=MESH, operation_configs={"splash": config}, fallback="error")
    attend = OperationRegistry.create("splash", metadata)
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    function = jax.jit(jax.grad(lambda q: attend(q, q, q, mask=Causal()).attention_outputs.astype(jnp.float32).sum()))
    traced = function.trace(x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    text = "\n".join(line for line in (str(traced.jaxpr) + text).splitlines() if " at 0x" not in line)
    # jax also writes the sizes into the kernel's profiler notes; those are no proof that anything reads them
    assert "xprof_metadata" in text
    return re.sub(r"xprof_metadata.*", "", text)


@pytest.fixture(scope="module")
def base() -> str:
    return _lowered(BASE)


def test_base_is_stable(base: str) -> None:
    assert _lowered(BASE) == base


@pytest.mark.parametrize("field", FIELDS)
def test_field_reaches_the_kernel(field: str, base: str) -> None:
    changed = BASE | {field: CHANGES[field]}  # a new field without a change here fails
    if field == "use_fused_bwd_kernel":
        changed = {name: value for name, value in changed.items() if not name.endswith("_dq")}
    got = _lowered(changed)
    assert got != base
    if field == "residual_checkpoint_name":
        assert "splash_residuals" in got
    if field == "interpret":
        assert "tpu_custom_call" in base
        assert "tpu_custom_call" not in got
    if field == "use_fused_bwd_kernel":
        assert (base.count("custom_call @tpu_custom_call"), got.count("custom_call @tpu_custom_call")) == (3, 2)


@pytest.mark.parametrize("name", ["block_q_dq", "block_kv_dq"])
def test_dq_blocks_are_refused_with_the_fused_backward(name: str) -> None:
    with pytest.raises(ConfigError, match="read by nobody"):
        SplashConfig.coerce({name: 128, "use_fused_bwd_kernel": True})


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({}, {"block_q": 512, "block_kv_compute": 512, "block_q_dq": 512}),
        ({"block_q": 256}, {"block_q": 256, "block_q_dkv": 256, "block_kv": 512}),
        ({"block_q": None}, {"block_q": 128}),  # the kernel's own default
        ({"block_kv_compute": None, "block_kv": 1024}, {"block_kv_compute": 1024}),
        ({"block_kv": 1024}, {"block_kv_compute": 512}),
        ({"use_fused_bwd_kernel": True}, {"block_q_dq": None, "block_kv_dq": None}),
    ],
)
def test_unset_is_chosen_and_none_is_the_kernels_default(given: dict[str, Any], resolved: dict[str, Any]) -> None:
    metadata = OperationMetadata(mesh=MESH, operation_configs={"splash": given})
    x = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    config = OperationRegistry.create("splash", metadata).plan(x, x, x).config
    assert {name: getattr(config, name) for name in resolved} == resolved


@pytest.mark.parametrize(
    ("length", "block"),
    [(4096, 512), (4100, 384), (600, 128), (577, 128), (197, 256), (77, 128), (75600, 512), (1500, 512)],
)
def test_blocks_trade_padding_against_size(length: int, block: int) -> None:
    """The largest block that pads at most a fiftieth more than blocks of 128 would."""
    x = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
    plan = OperationRegistry.create("splash", OperationMetadata(mesh=MESH)).plan(x, x, x)
    assert plan.config.block_q == block
    assert (length + plan.padding.q_len) % block == 0
    assert plan.padding.waste == pytest.approx(1 - (length / (length + plan.padding.q_len)) ** 2)


def test_metadata_block_sizes_feed_the_config() -> None:
    metadata = OperationMetadata(mesh=MESH, blocksize_q=256, blocksize_k=384, blocksize_b=2)
    x = jax.ShapeDtypeStruct((1, 1536, 2, 128), jnp.bfloat16)
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x)
    assert (plan.config.block_q, plan.config.block_kv) == (256, 384)
    assert "blocksize_b=2 is not read by splash" in plan.notes
