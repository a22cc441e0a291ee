"""`attnops verify` for GPUs that aren't here: with jax's CUDA plugin, and without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli_step import FILE

from attnops.verify.compiled import failure
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin
from attnops.verify.gpu.sass import disassembler

needs_plugin = pytest.mark.skipif(not has_cuda_plugin(), reason="pip install 'attnops[cuda-compile]'")
SIZES = {"batch": 2, "q_len": 256, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "causal": True}


def test_without_the_plugin_it_is_lowered_and_not_compiled(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnops.verify.targets.has_cuda_plugin", lambda: False)
    arguments = ("verify", config("flash_attn2", **SIZES), "--target", "h100:2")
    result = attnops(*arguments)
    assert result.status == 1
    assert "--lowered" in result.err
    said = " ".join(result.out.split())
    for part in (
        "NVIDIA H100 80GB HBM3, mesh fsdp=2; a device has 79.1 GiB of HBM, 132 multiprocessors, and 227.0 KiB of shared memory",
        "flash_attn2.forward_",
        "pip install 'attnops[cuda-compile]'",
        "lowers in",
    ):
        assert part in said, said
    assert "compiles in" not in said
    (report,) = json.loads(attnops(*arguments, "--json").out)
    assert report["device"]["kind"] == "NVIDIA H100 80GB HBM3"
    assert report["device"]["bytes_per_second"] == 3.35e12
    assert len(report["device"]["sources"]) == 5
    assert [one["compiled"] for one in report["passes"]] == [False, False]
    assert (report["passed"], report["outcome"]) == (False, "not compiled")
    assert attnops(*arguments, "--lowered").status == 0
    result = attnops(*arguments, "--mesh", "fsdp=3")
    assert (result.status, "has 3 devices and h100:2 has 2" in result.err) == (2, True)


def test_names(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("flash_attn2", **SIZES)
    for target, says in (("h10", "Did you mean 'h100'"), ("h100:2x2x2", "hosts x GPUs of each"), ("h100:0", "h100:8")):
        result = attnops("verify", path, "--target", target)
        assert (result.status, says in result.err) == (2, True), result.err


def test_targets_of_both_kinds(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("has_cuda_plugin", "has_libtpu"):
        monkeypatch.setattr(f"attnops.verify.targets.{name}", lambda: False)
    path = config("splash", **SIZES)
    result = attnops("verify", path, "--target", "v5e:2x2", "--target", "a100", "--mode", "prefill")
    assert result.status == 1, result.err
    said = " ".join(result.out.split())
    assert said.index("libtpu isn't installed") < said.index("jax's CUDA plugin isn't installed")
    assert said.index("splash.forward_tpu") < said.index("splash.forward_cuda")


def test_refusals_of_the_compiler_in_our_words() -> None:
    shared = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 229376, available: 166912, context: []"
    found = failure(RuntimeError(shared))
    assert found.message == (
        "a kernel asks for 224.0 KiB of shared memory per block; there are 163.0 KiB: 61.0 KiB too much"
    )
    assert (found.memory, found.needed, found.available) == ("shared", 229376, 166912)
    assert "cuDNN isn't installed" in failure(RuntimeError("cuDNN not found.")).message


@needs_plugin
def test_a_call_on_a_described_gpu(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    arguments = ("verify", config("flash_attn2", **SIZES), "--target", "h100", "--mode", "prefill")
    result = attnops(*arguments)
    assert result.status == 1
    assert "--lowered" in result.err
    said = " ".join(result.out.split())
    for part in ("compiles in", "attnops_flash_forward: ", "HBM per device: arguments 512.0 KiB, outputs 256.0 KiB"):
        assert part in said
    (report,) = json.loads(attnops(*arguments, "--json").out)
    (kernel,) = report["passes"][0]["kernels"]
    assert kernel["name"] == "attnops_flash_forward"
    if kernel["registers"] is None:
        assert "not known without attnops[cuda-compile]" in said
    else:
        assert kernel["occupancy"]["blocks"] >= 1
        assert f"{kernel['registers']} registers per thread" in said
        told = "inner loop of" if disassembler() else "not known without attnops[cuda-sass]"
        assert told in said


@needs_plugin
def test_a_failure_is_status_1(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("flash_attn2", **SIZES | {"batch": 64, "q_len": 131072, "q_heads": 32, "head_dim": 128})
    result = attnops("verify", path, "--target", "a100", "--mode", "prefill")
    assert result.status == 1
    assert "a device needs" in result.err
    assert "of HBM and has 79.3 GiB" in result.err
    assert "compiles but doesn't fit" in result.out
    # XLA takes it. 64 x 131072 x 32 x 128 x 2 bytes are 64 GiB of queries, and as much of outputs.
    assert "outputs 64.0 GiB" in " ".join(result.out.split())


@needs_plugin
@pytest.mark.slow
def test_a_step_over_pages(attnops: Callable[..., Any], tmp_path: Path) -> None:
    """Plain XLA on a GPU before Hopper: no kernels of Pallas'; what it moves and takes is told all the same."""
    path = tmp_path / "step.json"
    path.write_text(json.dumps(FILE))
    result = attnops("verify", path, "--target", "a100")
    assert (result.status, result.err) == (0, "")
    assert "paged.forward_native" in result.out
    (report,) = json.loads(attnops("verify", path, "--target", "a100", "--json").out)
    assert (report["passed"], report["kernels"], report["device"]["kind"]) == (True, [], "NVIDIA A100-SXM4-80GB")
    assert report["bound"] == "HBM"
