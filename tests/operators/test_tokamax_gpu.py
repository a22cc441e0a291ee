"""kernel="tokamax" on CUDA: which calls a plan refuses and why, what it notes, and the kernels compiled for described GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from attnops import OperationMetadata, OperationRegistry, SegmentIds
from attnops.compat import abstract_device
from attnops.operators.flash import tokamax_rules
from attnops.operators.flash.kernel.tokamax_attention import installed_version
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin

KINDS = {"h100": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200", "a100": "NVIDIA A100-SXM4-80GB"}
RUNS = "flash_attn2.forward_cuda"
IDS = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
BIAS = jax.ShapeDtypeStruct((1, 4, 1024, 1024), jnp.float32)
COMPILES = has_cuda_plugin() and importlib.util.find_spec("cramjam") is not None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tokamax were here: a plan doesn't import it."""
    monkeypatch.setattr(tokamax_rules, "_version", lambda: (0, 0, 17))


def _plan(gpu: str, dims: tuple[int, int] = (128, 128), dtype: str = "bfloat16", **changes: Any) -> Any:
    call = {"mode": "prefill", "causal": True, "lengths": (1024, 1024), "config": {}} | changes
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(KINDS[gpu], None, "cuda"))
    configs = {"flash_attn2": {"kernel": "tokamax"} | call.pop("config")}
    metadata = OperationMetadata(mesh=mesh, runtime_dtype=dtype, operation_configs=configs, fallback="allow")
    q_len, kv_len = call.pop("lengths")
    q = jax.ShapeDtypeStruct((2, q_len, 4, dims[0]), dtype)
    k, v = (jax.ShapeDtypeStruct((2, kv_len, 2, dim), dtype) for dim in dims)
    return OperationRegistry.create("flash_attn2", metadata).plan(q, k, v, **call)


def _against(plan: Any) -> list[Any]:
    return [r for rejected in plan.rejected if rejected.implementation == RUNS for r in rejected.reasons]


def _notes(plan: Any) -> dict[str, Any]:
    return {note.code: dict(note.values) for note in plan.notes}


REFUSED = {
    "other GPUs": ("device", {"gpu": "a100"}),
    "float32": ("dtype", {"gpu": "h100", "dtype": "float32"}),
    "head dims": ("head_dim", {"gpu": "h100", "dims": (288, 288)}),
    "head dims of a gradient": ("head_dim", {"gpu": "b200", "dims": (256, 256), "mode": "train"}),
    "a bias before the cap": ("cap_and_bias", {"gpu": "h100", "bias": BIAS, "logits_soft_cap": 30.0}),
    "a mask's array and keys of 1000": (
        "mask_gradient",
        {
            "gpu": "h100",
            "mode": "train",
            "lengths": (1000, 1000),
            "mask": SegmentIds(*2 * [jax.ShapeDtypeStruct((2, 1000), jnp.int32)]),
        },
    ),
    "a bias's gradient": ("bias_gradient", {"gpu": "b200", "mode": "train", "bias": BIAS}),
    "sizes": ("sizes", {"gpu": "h100", "config": {"block_q": 128}}),
    "names of residuals": ("sizes", {"gpu": "h100", "config": {"residual_checkpoint_name": "kept"}}),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_carry_is_refused(name: str) -> None:
    rule, call = REFUSED[name]
    plan = _plan(**call)
    codes = {reason.code for reason in _against(plan)}
    assert codes == {f"flash.tokamax.{rule}"}
    assert plan.implementation == "flash_attn2.forward_native"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("feature", ["dropout", "sinks", "return_lse", "score"])
def test_features_that_it_lacks_are_refused_by_name(feature: str) -> None:
    from attnops import ALiBi

    call: dict[str, Any] = {
        "dropout": {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.random.key(0)},
        "sinks": {"softmax_aux": jax.ShapeDtypeStruct((4,), jnp.float32)},
        "return_lse": {"return_lse": True},
        "score": {"score": ALiBi(jax.ShapeDtypeStruct((4,), jnp.float32))},
    }[feature]  # fmt: skip
    plan = _plan("h100", **call)
    codes = {reason.code for reason in _against(plan)}
    assert codes == {f"feature.{feature}"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("length", "carried"), [(1024, True), (1000, False)])
def test_a_devices_rows_of_a_mask_are_an_array(length: int, carried: bool) -> None:
    """Two devices with half of the queries each: causality from the first row on isn't theirs."""
    mesh = AbstractMesh((2,), ("sp",), abstract_device=abstract_device(KINDS["h100"], None, "cuda"))
    configs = {"flash_attn2": {"kernel": "tokamax"}}
    metadata = OperationMetadata(
        mesh=mesh, runtime_dtype="bfloat16", operation_configs=configs, fallback="allow", sequence_parallel="gather"
    )
    x = jax.ShapeDtypeStruct((2, length, 4, 128), "bfloat16")
    plan = OperationRegistry.create("flash_attn2", metadata).plan(x, x, x, causal=True, mode="train")
    assert plan.placement.local.q_len == length // 2
    assert (plan.implementation == RUNS) == carried
    assert not carried or _notes(plan)["flash.tokamax_mask"]["q_len"] == 512


@pytest.mark.usefixtures("installed")
def test_a_plan_says_what_runs_and_what_a_mask_takes() -> None:
    plan = _plan("h100", mode="train")
    assert (plan.implementation, plan.kind) == (RUNS, "platform")
    assert "hopper.kernel" in [r.code for rejected in plan.rejected for r in rejected.reasons]
    assert not any(code.startswith("flash.tokamax") for code in _notes(plan))
    values = _notes(_plan("h100", mask=SegmentIds(IDS, IDS)))["flash.tokamax_mask"]
    assert values == {"q_len": 1024, "kv_len": 1024, "size": 1 << 20}


@pytest.mark.usefixtures("installed")
def test_a_window_is_an_array_on_blackwell_alone() -> None:
    arrays = {gpu: "flash.tokamax_mask" in _notes(_plan(gpu, sliding_window=(99, 0))) for gpu in ("h100", "b200")}
    assert arrays == {"h100": False, "b200": True}


@pytest.mark.parametrize("version", [None, (0, 0, 12)])
def test_without_such_a_tokamax_the_plan_says_so(
    version: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokamax_rules, "_version", lambda: version)
    lengths = (1031, 1031) if version is None else (1033, 1033)  # plans are kept: problems that no other test has
    (reason,) = _against(_plan("h100", lengths=lengths))
    assert reason.code == "flash.tokamax.version"
    assert "attnops[tokamax]" in reason.hint


@pytest.mark.skipif((installed_version() or ()) < (0, 0, 17), reason="pip install 'attnops[tokamax]', Python 3.12")
@pytest.mark.skipif(not COMPILES, reason="pip install 'attnops[cuda-compile]'")
@pytest.mark.parametrize("call", ["causal", "window", "segment_ids"])
def test_the_kernels_compile_for_described_gpus(call: str, tmp_path: Path) -> None:
    """Of two architectures, each in a process of its own."""
    masks: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"sliding_window": [100, 0]},
        "segment_ids": {"segment_ids": 3},
    }
    sizes = {
        "batch": 2,
        "q_len": 1024,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 128,
        "dtype": "bfloat16",
        "causal": True,
    }
    configs = {"flash_attn2": {"kernel": "tokamax"}}
    declaration = {
        "operation": "flash_attn2",
        "metadata": {"fallback": "error", "operation_configs": configs},
        "call": sizes | masks[call],
    }
    file = tmp_path / "call.json"
    file.write_text(json.dumps(declaration))
    command = (sys.executable, "-m", "attnops", "verify", str(file), "--target", "h100", "--target", "b200", "--json")
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    reports = json.loads(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    for report, name in zip(reports, ("flash_attention_sm90", "flash_attention_sm100"), strict=True):
        assert report["passed"]
        assert report["plan"]["implementation"] == RUNS
        assert [kernel["name"] for kernel in report["passes"][0]["kernels"]] == [name]
        assert len(report["passes"][1]["kernels"]) == 3
