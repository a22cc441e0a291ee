"""The table of GPUs, their targets and their description for XLA."""

from __future__ import annotations

import contextlib

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops import OperationMetadata, OperationRegistry
from attnops.devices import gpu_specs, spec_of_kind
from attnops.errors import AttnOpsError, ConfigError, ShardingError
from attnops.verify.devices import device_limits
from attnops.verify.gpu.gpu_target import GpuTarget, gpu_target
from attnops.verify.gpu.target_config import target_config
from attnops.verify.targets import target_of

# From NVIDIA's data sheets: dense TFLOP/s of bfloat16, TF32 and float32, GB/s of HBM, GB of it; multiprocessors.
SHEETS = {
    "a100": (312, 156, 19.5, 2039, 80, 108),
    "h100": (989.5, 494.5, 67, 3350, 80, 132),
    "h200": (989.5, 494.5, 67, 4800, 141, 132),
    "b200": (2250, 1125, 75, 8000, 180, 148),
}


@pytest.mark.parametrize("name", SHEETS)
def test_figures_of_the_data_sheets(name: str) -> None:
    spec = gpu_specs()[name]
    half, tf32, single, moved, held, cores = SHEETS[name]
    assert (spec.flops_float16, spec.flops_tf32, spec.flops_float32) == (half * 1e12, tf32 * 1e12, single * 1e12)
    assert (spec.bytes_per_second, spec.cores) == (moved * 1e9, cores)
    assert held * 1e9 < spec.hbm_bytes < held * 2**30 * 1.001  # a data sheet's GB are 2**30, of which CUDA keeps some
    assert all("," in source or ":" in source for source in spec.sources)
    assert len(spec.sources) == 5


@pytest.mark.parametrize("name", SHEETS)
def test_rates_of_units_make_the_rates_of_the_data_sheet(name: str) -> None:
    """At the highest clock the units do no less than the data sheet says, and not a tenth more: its clock is a little lower."""
    spec = gpu_specs()[name]
    assert 1 <= spec.cores * spec.tensor_flops_a_cycle * spec.clock / spec.flops_float16 * 1.001 < 1.1
    assert 0.99 <= spec.cores * spec.fp32_a_cycle * 2 * spec.clock / spec.flops_float32 < 1.1


def test_rooflines() -> None:
    """An exact float32 product isn't made by the tensor cores; HBM is the same for all."""
    device = device_limits("cuda", "NVIDIA A100-SXM4-80GB")
    assert device is not None
    assert device.roofline(312e12, 2.039e12, "bfloat16", False) == (1.0, 1.0)
    assert device.roofline(156e12, 0, "float32", False)[0] == 1.0
    assert device.roofline(19.5e12, 0, "float32", True)[0] == 1.0
    assert device_limits("cuda", "NVIDIA GeForce") is None
    assert device_limits("cpu", "cpu") is None


def test_description() -> None:
    text = target_config(gpu_specs()["h100"])
    for line in (
        "core_count: 132",
        "shared_memory_per_block_optin: 232448",
        "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert line in text
    assert "feature_extension" not in target_config(gpu_specs()["a100"])
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("h100", GpuTarget("h100", 1, 1)),
        ("a100:4", GpuTarget("a100", 1, 4)),
        ("h100:2x8", GpuTarget("h100", 2, 8)),
    ],
)
def test_names_of_targets(target: str, wanted: GpuTarget) -> None:
    assert gpu_target(target) == wanted
    assert target_of(target).count == wanted.hosts * wanted.gpus


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("h1000:8", "Did you mean 'h100'"),
        ("b20", "GPUs: a100, h100, h200, b200"),
        ("h100:0", "h100:2x8 (hosts x GPUs of each)"),
        ("h100:", "h100:2x8"),
        ("h100:2x2x2", "h100:2x8"),
        ("h100:8 ", "h100:2x8"),
        ("h100:999x999", "at most 65536"),
        ("", "wanted a TPU generation"),
        ("v5", "Did you mean 'v5"),
    ],
)
def test_bad_targets(target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace(")", r"\)")):
        target_of(target)


@given(st.text(alphabet="abhv0123456789:x e,\n", max_size=20))
def test_any_name_is_a_target_or_an_error_of_ours(name: str) -> None:
    with contextlib.suppress(AttnOpsError):
        assert target_of(name).count >= 1


def test_without_the_plugin_there_is_an_abstract_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnops.verify.targets.has_cuda_plugin", lambda: False)
    target = target_of("h200:2x4")
    mesh = target.mesh({"fsdp": 4, "tp": 2})
    assert isinstance(mesh, jax.sharding.AbstractMesh)
    attend = OperationRegistry.create("flash_attn2", OperationMetadata(mesh=mesh))
    x = jax.ShapeDtypeStruct((4, 256, 8, 64), "bfloat16")
    plan = attend.plan(x, x, x)
    assert (plan.problem.platform, plan.problem.device_kind) == ("cuda", "NVIDIA H200")
    assert plan.implementation in ("flash_attn2.forward_cuda", "flash_attn2.forward_hopper")
    assert spec_of_kind(plan.problem.device_kind) is gpu_specs()["h200"]
    with pytest.raises(ShardingError, match="has 9 devices and h200:2x4 has 8"):
        target.mesh({"fsdp": 9})
    monkeypatch.setattr("attnops.verify.gpu.gpu_mesh.has_cuda_plugin", lambda: False)
    with pytest.raises(ConfigError, match="cuda-compile"):
        target.described(None)


def test_every_spec_has_room_for_its_blocks() -> None:
    for spec in gpu_specs().values():
        assert spec.shared_bytes_a_block + 1024 <= spec.shared_bytes_a_core  # the driver keeps 1 KiB
        assert spec.shared_bytes_a_block % 1024 == 0
