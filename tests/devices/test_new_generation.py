"""A generation of TPUs or GPUs is one row of data: calls and caches are planned for it, and meshes and strategies estimated."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from attnops import Causal, KVCache, OperationMetadata, OperationRegistry
from attnops.cli.app import main
from attnops.devices import SCALAR_BYTES, Topology, Vmem, gpu_variant, gpus, spec_of_kind
from attnops.devices.tpus import KINDS, _Kind
from attnops.verify import targets
from attnops.verify.devices import device_limits
from attnops.verify.targets import target_of

MIB = 1 << 20
TPU, GPU = "TPU v9", "NVIDIA X900"
TPU_ROW = _Kind(
    1, 1, 200_000_000_000, 5e12, 2e15, 128 * MIB, SCALAR_BYTES, Vmem(32 * MIB, 120 * MIB),
    Topology("v9", 1, "v9:2x2", 2e9, 262144, 256, 200e9, 16),
)  # fmt: skip
CACHED = (gpus.gpu_specs, gpus.gpu_variants, gpus.gpu_variant)


@pytest.fixture(autouse=True)
def _one_row_more(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    table = copy.deepcopy(dict(gpus._table()))
    row = copy.deepcopy(table["gpu"]["h100"]) | {"kind": GPU}
    row["runtime"] |= {"cores": 200, "hbm_bytes": 3 * 10**11}
    table["gpu"]["x900"] = row
    monkeypatch.setitem(KINDS, TPU, TPU_ROW)
    monkeypatch.setattr(gpus, "_table", lambda: table)
    for function in CACHED:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()


CALL: dict[str, Any] = {
    "batch": 2, "q_len": 8192, "q_heads": 16, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16", "mask": "causal",
    "mode": "train",
}  # fmt: skip
Q, K = (jax.ShapeDtypeStruct((2, 8192, heads, 128), "bfloat16") for heads in (16, 4))


def test_its_memory() -> None:
    cache = KVCache(layers=1, kv_heads=2, head_dim=128, pages=8, max_sequences=2, max_length=32)
    assert cache.plan(device_kind=TPU).memory_limit == 2e11
    assert cache.plan(device_kind=GPU).memory_limit == 3e11
    large = cache.model_copy(update={"pages": 10**9}).plan(device_kind=GPU)
    assert [reason.code for reason in large.refused] == ["device_memory"]
    assert device_limits("tpu", TPU).hbm_bytes == 2e11  # type: ignore[union-attr]
    assert device_limits("cuda", GPU).hbm_bytes == 3e11  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "platform"), [("v9:2x2", "tpu"), ("x900:4", "cuda")])
def test_kernels_have_sizes_that_fit(name: str, platform: str) -> None:
    target = target_of(name)
    mesh = target.abstract({"fsdp": 2, "tp": 2})
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, fallback="error"))
    plan = attend.plan(Q, K, K, mask=Causal(), mode="train").require()
    assert (plan.problem.device_kind, plan.problem.platform, plan.kind) == (target.kind, platform, "platform")
    passes = plan.runs.passes(plan.config, False) + plan.runs.passes(plan.config, True)  # type: ignore[union-attr]
    assert all(size.block_q > 0 and size.block_kv > 0 for size in passes)
    for parts in plan.runs.memory(plan.problem, plan.placement, plan.config).values():  # type: ignore[union-attr]
        assert sum(parts.values()) <= (TPU_ROW.vmem.maximum if platform == "tpu" else 232448)
    assert not any(note.code == "flash.unknown_gpu" for note in plan.notes)  # type: ignore[attr-defined]


def test_a_gpu_is_one_for_which_sizes_are_known() -> None:
    variant, spec = gpu_variant(GPU), spec_of_kind(GPU)
    assert variant is not None
    assert spec is not None
    assert (variant.architecture, variant.cores, spec.capability) == ("hopper", 200, (9, 0))
    assert gpu_variant("NVIDIA H100 PCIe").cores == 114  # type: ignore[union-attr]


def _advised(path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["advise", str(path), "--target", target, "--compile", "0", "--json"]) == 0
    best: dict[str, Any] = json.loads(capsys.readouterr().out)["entries"][0]
    return best


@pytest.mark.parametrize(("target", "slower"), [("v9:2x2", "v5e:2x2"), ("x900:4", "h100:4")])
def test_the_commands_take_its_name(
    target: str, slower: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "has_libtpu", lambda: False)  # which describes only what there is
    path = tmp_path / "call.json"
    path.write_text(json.dumps({"operation": "splash", "call": CALL}))
    assert main(["plan", str(path), "--target", target, "--mesh", "tp=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device_kind"] == (TPU if target.startswith("v9") else GPU)
    own, other = _advised(path, target, capsys), _advised(path, slower, capsys)
    assert 0 < own["estimate"]["seconds"] <= other["estimate"]["seconds"]
