"""Operations that attnops counts itself, against counts by hand."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from attnops import Causal, Full, Mask, OperationMetadata, OperationRegistry
from attnops.planning import Plan
from attnops.verify.targets import target_of
from attnops.verify.topology import described_mesh
from attnops.verify.work import attention_flops

TILES = {"block_q": 64, "block_kv": 64, "block_q_dkv": 32, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 32}


def _plan(mask: Mask, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Plan:
    monkeypatch.setattr("attnops.verify.targets.has_cuda_plugin", lambda: False)
    count = 1
    for size in sizes.values():
        count *= size
    mesh = target_of(f"h100:{count}").mesh(sizes)
    configs = {"flash_attn2": TILES} if fields.get("operation") != "vanilla" else {}
    attend = OperationRegistry.create(
        fields.pop("operation", "flash_attn2"), OperationMetadata(mesh=mesh, operation_configs=configs, **fields)
    )
    q = jax.ShapeDtypeStruct((2, 256, 8, 64), "bfloat16")
    k = jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16")
    return attend.plan(q, k, jax.ShapeDtypeStruct((2, 256, 4, 32), "bfloat16"), mask=mask)


def test_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 8 heads of 256 x 256 weights: a product of 64 and one of 32 forward; 4 x 64 and 3 x 32 more backward."""
    plan = _plan(Full(), {"fsdp": 1}, monkeypatch)
    weights = 2 * 8 * 256 * 256
    assert attention_flops(plan, False) == 2 * weights * (64 + 32)
    assert attention_flops(plan, True) == 2 * weights * (64 + 32) + 2 * weights * (4 * 64 + 3 * 32)


def test_live_tiles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal: of 4 x 4 tiles 10 are live; of 8 x 4 (32 queries, 64 keys) 2 x (1+2+3+4) = 20; of 4 x 8 2 + 4 + 6 + 8 = 20."""
    plan = _plan(Causal(), {"fsdp": 1}, monkeypatch)
    forward = 2 * 2 * 8 * 10 * 64 * 64 * (64 + 32)
    backward = 2 * 2 * 8 * 20 * 32 * 64 * (2 * 64 + 2 * 32) + 2 * 2 * 8 * 20 * 64 * 32 * (2 * 64 + 32)
    assert attention_flops(plan, False) == forward
    assert attention_flops(plan, True) == forward + backward


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 4}, {"sp": 8}, {"fsdp": 2, "sp": 2, "tp": 2}])
def test_devices_share_it(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = attention_flops(_plan(Causal(), {"fsdp": 1}, monkeypatch), True)
    for strategy in ("ring", "auto"):
        assert attention_flops(_plan(Causal(), sizes, monkeypatch, sequence_parallel=strategy), True) == alone / 8


def test_an_implementation_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128: 3 of 4 are live. Backward at least the logits again and four products."""
    plan = _plan(Causal(), {"fsdp": 1}, monkeypatch, operation="vanilla")
    weights = 2 * 8 * 3 * 128 * 128
    assert attention_flops(plan, False) == 2 * weights * (64 + 32)
    assert attention_flops(plan, True) == 2 * weights * (64 + 32) + 2 * weights * (3 * 64 + 2 * 32)


def test_units_that_a_tpu_kernel_leaves_out() -> None:
    """Causal, 2 x 2 blocks of 512 of which 3 are live, units of 128: the two on the diagonal have 10 of 16 live."""
    config = {"block_q": 512, "block_kv": 512, "block_q_compute": 128, "block_kv_compute": 128, "block_q_dkv": 512}
    config |= {"block_kv_dkv": 512, "block_q_dkv_compute": 512, "block_kv_dkv_compute": 256}
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    metadata = OperationMetadata(mesh=described_mesh("v5e:2x2"), operation_configs={"splash": config}, tuning="off")
    x = jax.ShapeDtypeStruct((4, 1024, 4, 64), "bfloat16")
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x)
    weights = 4 * 4 * (16 + 2 * 10) * 128 * 128
    devices = 4
    assert attention_flops(plan, False) == 2 * weights * 2 * 64 / devices
    backward = 4 * 4 * 3 * 512 * 512  # no part of 512 x 256 lies above the diagonal of 512 x 512
    assert attention_flops(plan, True) == 2 * (weights * 2 + backward * 5) * 64 / devices
