"""Programs compiled for GPUs that aren't here, and what is read of them, held against NVIDIA's own tools.

What compiles is not thereby right or fast: numbers are held against the reference in Pallas' interpreter.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from every_operation import every_operation
from test_traffic import CELLS

from attnops import (
    T5,
    ALiBi,
    Causal,
    MaskFunction,
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    RelativeBias2D,
    register_mask_function,
)
from attnops.devices import gpu_specs
from attnops.errors import ConfigError
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.flash.flash_sizes import min_shared_bytes
from attnops.verify.call import verify_call
from attnops.verify.call_program import call_program
from attnops.verify.devices import lowered_for, tracing_on
from attnops.verify.gpu.cubin import cubin_functions
from attnops.verify.gpu.gpu_kernels import GpuKernelUse, gpu_kernels
from attnops.verify.gpu.gpu_mesh import described_gpus, has_cuda_plugin
from attnops.verify.gpu.launches import launches
from attnops.verify.gpu.sass import disassembler
from attnops.verify.outcome import Outcome
from attnops.verify.report import TargetReport
from attnops.verify.targets import target_of
from attnops.verify.tune import tune_plan

if not has_cuda_plugin() or importlib.util.find_spec("cramjam") is None:
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
needs_disassembler = pytest.mark.skipif(disassembler() is None, reason="pip install 'attnops[cuda-sass]'")
GPUS = tuple(gpu_specs())


def _report(
    target: str,
    *,
    sizes: dict[str, int] | None = None,
    shape: tuple[int, ...] = (1, 256, 4, 2, 64),
    dtype: str = "bfloat16",
    operation: str = "flash_attn2",
    mode: str = "prefill",
    call: dict[str, Any] | None = None,
    **fields: Any,
) -> TargetReport:
    wanted = target_of(target)
    mesh = wanted.mesh(sizes or {"fsdp": wanted.count})
    fields = {"operation_configs": {}} | fields
    # The kernel of test_hopper_compile.py aside.
    fields["operation_configs"] = {
        "flash_attn2": {"kernel": "triton"} | fields["operation_configs"].get("flash_attn2", {})
    }
    metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", runtime_dtype=dtype, **fields)
    batch, length, heads, kv_heads, dim = shape
    q, k = (jax.ShapeDtypeStruct((batch, length, h, dim), dtype) for h in (heads, kv_heads))
    arguments = {"query": q, "key": k, "value": k, "mask": Causal(), "mode": mode} | (call or {})
    return verify_call(OperationRegistry.create(operation, metadata), arguments, target)


def _kernels(report: TargetReport, at: int = -1) -> tuple[GpuKernelUse, ...]:
    found = report.passes[at].kernels
    assert found is not None
    assert all(isinstance(kernel, GpuKernelUse) for kernel in found)
    return tuple(kernel for kernel in found if isinstance(kernel, GpuKernelUse))


def test_devices_are_what_a_plan_asks_for() -> None:
    mesh = described_gpus("h100:2x4", {"fsdp": 2, "tp": 4})
    device = mesh.devices.flat[0]
    assert (mesh.size, device.platform, device.device_kind) == (8, "gpu", "NVIDIA H100 80GB HBM3")
    assert {d.process_index for d in mesh.devices.flat} == {0, 1}


def test_a_forward_pass() -> None:
    """Two rows of 256 tokens, 4 heads (2 of K) of 64 in bfloat16, on two GPUs: q and the output 128 KiB, k and v 64 KiB each."""
    report = _report("h100:2", shape=(2, 256, 4, 2, 64))
    assert report.passed, report.passes[0].failure
    (one,) = report.passes
    assert one.argument_bytes == (128 + 64 + 64) * 1024
    assert one.output_bytes == 128 * 1024
    assert one.collectives == ()
    (kernel,) = _kernels(report)
    assert kernel.name == "attnops_flash_forward"
    assert kernel.threads == 32 * report.plan.config.num_warps  # type: ignore[attr-defined]
    assert kernel.blocks == 4 * 256 // report.plan.config.block_q  # type: ignore[attr-defined]
    assert kernel.registers is not None
    assert 32 < kernel.registers <= 255
    assert kernel.shared_bytes is not None
    least = min_shared_bytes(report.plan.problem, report.plan.config)["forward"]  # type: ignore[arg-type]
    assert least <= kernel.shared_bytes <= 232448
    assert kernel.occupancy is not None
    assert kernel.occupancy.blocks >= 1
    tile = report.plan.config.block_q * report.plan.config.block_kv  # type: ignore[attr-defined]
    assert one.flops % (2 * tile * (64 + 64)) == 0
    assert one.roofline_seconds == pytest.approx(max(one.flops / 989.5e12, 384 * 1024 / 3.35e12))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("score", ["alibi", "t5", "table"])
@pytest.mark.parametrize("gpu", GPUS)
def test_scores_compile_with_gradients(gpu: str, score: str, dim: int) -> None:
    made, arrays = {
        "alibi": (ALiBi(), {}),
        "t5": (RelativeBias(buckets=T5(bidirectional=False)), {"table": (32, 4)}),
        "table": (RelativeBias2D(grid=(32, 32)), {"table": (63 * 63, 4)}),
    }[score]
    given = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in arrays.items()}
    report = _report(gpu, shape=(1, 1024, 4, 2, dim), mode="train", call={"score": made, **given})
    assert report.passed, [one.failure for one in report.passes]
    assert len(report.passes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "value"), [(576, 512), (320, 256), (288, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gpu", GPUS)
def test_latents_compile_with_gradients(gpu: str, dtype: str, dim: int, value: int) -> None:
    """128 heads over one key, whose first columns are its value, with sizes by the rule."""
    query, key = (jax.ShapeDtypeStruct((1, 256, heads, dim), dtype) for heads in (128, 1))
    report = _report(gpu, dtype=dtype, mode="train", call={"query": query, "key": key, "value": KeyColumns(value)})
    assert report.passed, [one.failure for one in report.passes]
    assert {kernel.name for kernel in _kernels(report)} == {
        f"attnops_flash_{name}" for name in ("forward", "dkv", "dq")
    }
    assert report.passes[0].argument_bytes == 256 * 129 * dim * np.dtype(jax.numpy.dtype(dtype)).itemsize


@needs_disassembler
def test_inner_loops_of_an_a100() -> None:
    """Each tile's products are there in HMMAs: 2 x 2 x block_q x block_kv x dim operations, over the warps. An exponential a
    weight, and two a row for what was summed before."""
    report = _report("a100", shape=(1, 1024, 2, 2, 64))
    (kernel,) = _kernels(report)
    config: Any = report.plan.config
    assert kernel.loops
    for one in kernel.loops:
        weights = config.block_q * config.block_kv
        assert one.loop.tensor_flops == 2 * 2 * weights * 64 / config.num_warps
        assert weights <= one.loop.ex2 * 32 * config.num_warps <= weights + 8 * config.block_q
        assert one.loop.instructions > one.loop.tensor + one.loop.ex2
        assert one.bound is not None


@pytest.mark.slow
def test_too_much_shared_memory() -> None:
    """Six stages of 64 x 128 keys and values in bfloat16, 16 KiB each, where an A100 has 163 KiB for a block and an H100 227."""
    blocks = {"block_q": 64, "block_kv": 64, "num_warps": 4, "num_stages": 6}
    shape = (1, 1024, 1, 1, 128)
    report = _report("a100", shape=shape, operation_configs={"flash_attn2": blocks})
    (one,) = report.passes
    assert not report.passed
    assert one.failure is not None
    assert (one.failure.memory, one.failure.available) == ("shared", 166912)
    assert one.failure.needed is not None
    assert 166912 < one.failure.needed <= 12 * 64 * 128 * 2
    assert one.advice is not None
    assert one.advice.startswith("compiles with num_stages=")
    better = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", one.advice)}
    assert _report("a100", shape=shape, operation_configs={"flash_attn2": blocks | better}).passed


def test_the_plugin_says_why_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**call: Any) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(ConfigError, match="set JAX_PLATFORMS=cpu"):
        described_gpus("h100")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_resources_are_those_that_cuobjdump_prints(gpu: str, tmp_path: Path) -> None:
    program = disassembler()
    tool = None if program is None else Path(program).with_name("cuobjdump")
    if tool is None or not tool.exists():
        pytest.skip("pip install 'attnops[cuda-sass]'")
    mesh = described_gpus(gpu)
    configs = {"flash_attn2": {"kernel": "triton"}}
    attend = OperationRegistry.create(
        "flash_attn2", OperationMetadata(mesh=mesh, tuning="off", operation_configs=configs)
    )
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), "bfloat16")
    arguments = {"query": x, "key": x, "value": x, "mask": Causal()}
    with tracing_on(mesh, "cuda"):
        made, arrays = call_program(attend, arguments, attend.plan(**arguments), True)
        compiled = lowered_for(made.trace(arrays), "cuda").compile()
    spec = gpu_specs()[gpu]
    uses = gpu_kernels(compiled, compiled.as_text(), spec)
    assert sorted(use.name for use in uses) == ["attnops_flash_dkv", "attnops_flash_dq", "attnops_flash_forward"]
    found = launches(compiled)
    assert found is not None
    for number, launch in enumerate(found):
        path = tmp_path / f"{number}.cubin"
        path.write_bytes(launch.cubin)
        said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        (function,) = cubin_functions(launch.cubin, spec.capability)
        numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", said)}
        driver = 1024 if spec.capability >= (9, 0) and numbers["SHARED"] else 0
        assert f"Function {function.name}:" in said
        resources = function.registers, function.stack_bytes, function.shared_bytes
        assert resources == (numbers["REG"], numbers["STACK"], numbers["SHARED"] - driver)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gpu", GPUS)
def test_both_passes_on_every_gpu(gpu: str, dtype: str) -> None:
    report = _report(gpu, dtype=dtype, mode="train")
    assert report.passed, [one.failure for one in report.passes]
    names = ["attnops_flash_dkv", "attnops_flash_dq", "attnops_flash_forward"]
    assert sorted(kernel.name for kernel in _kernels(report)) == names
    assert all(kernel.registers and kernel.occupancy for kernel in _kernels(report))
    if disassembler() is not None:
        tensor = [one.loop.tensor for kernel in _kernels(report) for one in kernel.loops or ()]
        assert tensor
        assert all(count == 0 for count in tensor) if dtype == "float32" else all(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["vanilla", "splash"])
def test_other_operations(operation: str) -> None:
    report = _report("h200:4", sizes={"fsdp": 2, "tp": 2}, shape=(2, 512, 4, 2, 64), operation=operation, mode="train")
    assert report.passed, [one.failure for one in report.passes]
    assert bool(_kernels(report)) == (operation == "splash")


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_eight_gpus_send_what_is_needed(cell: str) -> None:
    sizes, fields, call, kv_heads = CELLS[cell]
    count = 1
    for size in sizes.values():
        count *= size
    length = 8 if "split cache" in cell else 512
    k = jax.ShapeDtypeStruct((4, 512, kv_heads, 64), "bfloat16")
    given = {"key": k, "value": k, "mode": "train", **call}
    report = _report(
        f"h100:{count}", sizes=sizes, shape=(4, length, 8, kv_heads, 64), operation="splash", call=given, **fields
    )
    # Of these the sums of the backward pass are XLA's choice, so they aren't compared: test_traffic.py has the same cells.
    uncompared = kv_heads == 2 or "alone" in cell
    assert report.outcome is (Outcome.COMPILED if uncompared else Outcome.PASSED), report.unchecked
    assert not any(one.differences or one.failure for one in report.passes)


ARRAYS = {
    "dense": {"mask": jax.ShapeDtypeStruct((1, 4, 1024, 1024), bool)},
    "bias": {"bias": jax.ShapeDtypeStruct((1, 4, 1024, 1024), "float32")},
    "segments": {n: jax.ShapeDtypeStruct((1, 1024), "int32") for n in ("q_segment_ids", "kv_segment_ids")},
    "sinks": {"softmax_aux": jax.ShapeDtypeStruct((4,), "float32")},
    "lengths": {"kv_lengths": jax.ShapeDtypeStruct((1,), "int32")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_tiles_of_arrays_fit_beside_those_of_keys(target: str, dim: int, name: str) -> None:
    """The stages of Hopper's sizes hold the tiles of a mask or a bias too."""
    call = ARRAYS[name] if name == "dense" else {"mask": Causal(), **ARRAYS[name]}
    report = _report(target, shape=(1, 1024, 4, 2, dim), mode="train", call=call)
    assert report.passed, [one.failure for one in report.passes]


@pytest.mark.slow
def test_hops_that_are_awaited_at_once_are_no_overlap() -> None:
    """XLA's scheduler for GPUs starts many and waits for them where it started them; it says which."""
    ring = {"sequence_parallel": "ring", "ring_order": "contiguous"}
    report = _report("h100:4", sizes={"sp": 4}, shape=(1, 512, 4, 4, 64), **ring)
    sent = report.passes[0].collectives
    assert sent
    assert sum(one.sent_bytes for one in sent) == 2 * 3 * 128 * 4 * 64 * 2
    assert any(not one.overlapped for one in sent)


@needs_disassembler
@pytest.mark.parametrize("operation", ["flash_attn2", "splash"])
def test_sizes_are_searched_without_a_gpu(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    metadata = OperationMetadata(mesh=described_gpus("a100"), fallback="error")
    attend = OperationRegistry.create(operation, metadata)
    q, k = (jax.ShapeDtypeStruct((2, 1024, heads, 64), "bfloat16") for heads in (4, 2))
    report = tune_plan(attend.plan(q, k, k, mask=Causal()), most=2)
    assert report.how == "static"
    for part in ("forward", "backward"):
        measured = report.measured(part)
        assert len(measured) == 2
        assert all(one.seconds or "spills" in (one.failure or "") for one in measured)
        assert all(one.detail["cycles"] > 0 for one in measured)
    tuned = attend.plan(q, k, k, mask=Causal()).tuning
    assert tuned is not None
    assert tuned.source == "cache"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "h100"])
def test_every_operation_of_a_mask_function_compiles(target: str) -> None:
    """Those that the kernels' rules allow."""

    def function(x: Any, j: Any) -> Any:
        return (
            (x + j) % 3 < 2 if isinstance(x, np.ndarray) else every_operation(x, j)
        )  # on the host, any partial blocks

    register_mask_function("gpu_compile.every", override=True)(function)
    report = _report(target, mode="train", call={"mask": MaskFunction("gpu_compile.every")})
    assert [one.failure for one in report.passes] == [None, None]
    assert len(report.passes[1].kernels or ()) == 3
