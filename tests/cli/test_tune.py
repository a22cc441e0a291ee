"""`attnops tune`: what it prints and keeps, and that later plans take it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attnops.planning import tune_cache
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin
from attnops.verify.gpu.sass import disassembler

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
needs_cuda = pytest.mark.skipif(
    not has_cuda_plugin() or disassembler() is None, reason="pip install 'attnops[cuda-compile,cuda-sass]'"
)
without_cuda = pytest.mark.skipif(has_cuda_plugin(), reason="JAX's CUDA plugin is installed")
SIZES = {"q_len": 640, "q_heads": 2, "head_dim": 16, "mode": "prefill"}
BLOCKWISE = {"operation_configs": {"vanilla": {"path": "blockwise"}}}
SPLASH = {"runtime_dtype": "bfloat16", "operation_configs": {"splash": {"block_kv_compute_in": 128}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tune_cache.ENVIRONMENT, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_on_this_machine(attnops: Any, config: Any, folder: Path) -> None:
    path = config(metadata=BLOCKWISE, **SIZES)
    done = attnops("tune", path, "--most", 3)
    assert done.status == 0
    assert "measured here, on cpu: medians" in done.out
    assert done.out.count(" ms ") == 3
    assert "heuristic  " in done.out
    assert done.out.count("1.000") >= 1
    assert str(folder) in done.out.replace("\n", "").replace(" ", "")
    planned = attnops("plan", path)
    assert "cache: measured on the device" in planned.out
    assert "(tuned)" in planned.out
    again = attnops("tune", path, "--most", 3)
    assert "3 candidates measured before" in again.out


@needs_libtpu
def test_for_a_tpu_that_is_not_here(attnops: Any, config: Any, tmp_path: Path) -> None:
    path = config("splash", metadata=SPLASH, **SIZES)
    there = tmp_path / "elsewhere"
    done = attnops("tune", path, "--target", "v5e:2x2", "--most", 2, "--cache", there, "--json")
    assert done.status == 0
    (report,) = json.loads(done.out)
    assert (report["target"], report["how"], report["device_kind"]) == ("v5e:2x2", "static", "TPU v5 lite")
    measured = report["passes"]["forward"]
    assert len(measured) == 2
    assert [one["chosen"] for one in measured].count(True) == 1
    chosen = next(one for one in measured if one["chosen"])
    assert chosen["detail"]["cycles"] == min(one["detail"]["cycles"] for one in measured)
    assert report["choice"] == chosen["fields"]
    assert Path(report["kept_in"]).is_relative_to(there)
    shown = attnops("tune", path, "--target", "v5e:2x2", "--most", 2, "--cache", there)
    assert "static clock" in shown.out
    assert "an estimate" in shown.out
    assert f"{chosen['detail']['cycles']:,}" in shown.out
    planned = attnops("plan", path, "--target", "v5e:2x2")
    assert "cache: static clock, an estimate" in planned.out


@needs_cuda
def test_for_a_gpu_that_is_not_here(attnops: Any, config: Any) -> None:
    path = config("flash_attn2", metadata={"runtime_dtype": "bfloat16"}, **SIZES)
    done = attnops("tune", path, "--target", "h100", "--most", 2, "--json")
    assert done.status == 0
    (report,) = json.loads(done.out)
    assert (report["target"], report["how"], report["device_kind"]) == ("h100", "static", "NVIDIA H100 80GB HBM3")
    chosen = next(one for one in report["passes"]["forward"] if one["chosen"])
    shown = attnops("tune", path, "--target", "h100", "--most", 2)
    assert "cycles for which warps stall" in " ".join(shown.out.split())
    assert f"{chosen['detail']['cycles']:,}" in shown.out
    assert "shared memory" in shown.out
    planned = attnops("plan", path, "--target", "h100")
    assert "cache: static clock, an estimate" in planned.out


@needs_libtpu
def test_nothing_compiles(attnops: Any, config: Any) -> None:
    configs = {"operation_configs": {"splash": {"vmem_limit_bytes": 16384}}, "runtime_dtype": "bfloat16"}
    done = attnops("tune", config("splash", metadata=configs, **SIZES), "--target", "v5e:2x2", "--most", 1)
    assert done.status == 1
    assert "attnops_splash_forward needs" in " ".join(done.out.split())
    assert "nothing: no candidate compiles" in done.out
    assert "v5e:2x2: no candidate compiles or runs" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "v9:2x2"], "target 'v9:2x2'; wanted a TPU generation and a shape"),
        (["--target", "v5e:2x2", "--how", "device"], "--how device measures times on this machine"),
        (["--how", "static"], "device kind 'cpu' is no TPU that can be described"),
        (["--how", "guess"], "how='guess'; wanted 'static' or 'device'"),
        (["--most", "0"], "--most"),
        pytest.param(["--target", "v5e:2x2"], "has no kernels whose schedule can be read", marks=needs_libtpu),
        pytest.param(["--target", "h100"], "has no kernels whose schedule can be read", marks=needs_cuda),
        pytest.param(["--target", "h100"], "needs jax's CUDA plugin and nvdisasm", marks=without_cuda),
    ],
    ids=str,
)
def test_bad_options(attnops: Any, config: Any, options: list[str], message: str) -> None:
    done = attnops("tune", config(metadata=BLOCKWISE, **SIZES), *options)
    assert done.status == 2
    assert message in done.err


def test_a_call_without_sizes_to_search(attnops: Any, config: Any) -> None:
    done = attnops("tune", config(q_len=16, q_heads=1, head_dim=8))
    assert done.status == 2
    assert "vanilla.forward_native has no sizes to search for this call" in done.err


def test_a_cache_that_is_a_file(attnops: Any, config: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = attnops("tune", config(metadata=BLOCKWISE, **SIZES), "--cache", tmp_path / "file", "--most", 1)
    assert done.status == 2
    assert "can't be written" in done.err
