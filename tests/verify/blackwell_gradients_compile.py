"""The kernels of Blackwell's gradients compiled for a described B200: registers, spills, memory, the work in their loops."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import pytest
from mosaic_calls import DROPOUT, FEATURES, MASKS, REPEATED
from mosaic_plans import mosaic_report

from attnops import Causal, OperationMetadata, OperationRegistry
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.operators.mosaic.mosaic_sizes import tiles_of
from attnops.verify.call import verify_call
from attnops.verify.gpu.gpu_kernels import GpuKernelUse
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin
from attnops.verify.gpu.sass import disassembler
from attnops.verify.report import TargetReport
from attnops.verify.targets import target_of

if not has_cuda_plugin() or importlib.util.find_spec("cramjam") is None:
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: plans choose the kernel in Triton", allow_module_level=True)

FORWARD, GRADIENTS = "attnops_blackwell_forward", ("attnops_blackwell_dkv", "attnops_blackwell_dq")
# 512 threads share the 65536 registers of a multiprocessor.
REGISTERS, THREADS, COMPUTING = 128, 512, 8


def _report(**given: Any) -> TargetReport:
    return mosaic_report("b200", mode="train", **given)


def _gradients(report: TargetReport) -> tuple[GpuKernelUse, GpuKernelUse]:
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_blackwell"  # type: ignore[union-attr]
    kernels = {k.name: k for k in report.passes[1].kernels or () if isinstance(k, GpuKernelUse)}
    assert set(kernels) == {FORWARD, *GRADIENTS}
    dkv, dq = (kernels[name] for name in GRADIENTS)
    for kernel in (dkv, dq):
        assert (kernel.registers, kernel.threads) == (REGISTERS, THREADS)
        assert kernel.occupancy is not None
        assert kernel.occupancy.blocks == 1
    return dkv, dq


def _check_stack(report: TargetReport) -> None:
    assert [kernel.stack_bytes for kernel in _gradients(report)] == [0, 0]


def _check_loops(report: TargetReport) -> None:
    """An exponential for each weight, in each turn."""
    if disassembler() is None:
        return
    for kernel, sizes in zip(_gradients(report), tiles_of(report.plan.config)[1:], strict=True):  # type: ignore[arg-type,union-attr]
        loops = kernel.loops or ()
        assert loops
        assert {one.loop.ex2 * 32 * COMPUTING for one in loops} == {sizes.block_q * sizes.block_kv}


@pytest.mark.parametrize("dim", [64, 128])
def test_a_backward_pass(dim: int) -> None:
    report = _report(dims=(dim, dim))
    assert [kernel.stack_bytes for kernel in _gradients(report)] == [0, 0]
    _check_loops(report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (64, 128), (80, 48), (32, 32), (96, 96), (192, 128), (256, 128), (256, 256)], ids=str
)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    report = _report(dims=dims, dtype=dtype)
    assert [kernel.stack_bytes for kernel in _gradients(report)] == [0, 0]
    _check_loops(report)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, dim: int) -> None:
    _check_stack(_report(dims=(dim, dim), mask=MASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("call", FEATURES, ids=lambda call: next(iter(call)))
def test_other_features(call: dict[str, Any]) -> None:
    _check_stack(_report(**call))


@pytest.mark.slow
def test_a_function_that_reads_its_logit_several_times() -> None:
    """Its gradients are summed."""
    report = _report(score=REPEATED)
    assert report.passed, [one.failure for one in report.passes]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1000, 1000), (130, 777), (1024, 60)])
def test_lengths_that_end_within_a_tile(lengths: tuple[int, int]) -> None:
    assert [kernel.stack_bytes for kernel in _gradients(_report(lengths=lengths))] == [0, 0]


def _of_latents(dims: tuple[int, int], lengths: tuple[int, int] = (1024, 1024), **call: Any) -> TargetReport:
    mesh = target_of("b200").mesh({"fsdp": 1})
    metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", runtime_dtype="bfloat16")
    q, k = (jax.ShapeDtypeStruct((1, n, h, dims[0]), "bfloat16") for n, h in zip(lengths, (4, 1), strict=True))
    arguments = {"query": q, "key": k, "value": KeyColumns(dims[1]), "mask": Causal(), "softmax_scale": 0.1}
    arguments |= {"query_offset": lengths[1] - lengths[0], "mode": "train", **call}
    return verify_call(OperationRegistry.create("flash_attn2", metadata), arguments, "b200")


# dims -> how often a block goes through its tiles, for keys and for a query
LATENTS = {
    (576, 512): (2, 3), (544, 512): (2, 3), (576, 256): (2, 2), (448, 384): (1, 2), (320, 256): (1, 1), (288, 256): (1, 1),
    (160, 128): (1, 1), (128, 64): (1, 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dims", LATENTS, ids=str)
def test_latents(dims: tuple[int, int]) -> None:
    report = _of_latents(dims)
    assert [kernel.stack_bytes for kernel in _gradients(report)] == [0, 0]
    _check_loops(report)
    if disassembler():  # over tiles with and without a mask
        assert tuple(len(kernel.loops or ()) // 2 for kernel in _gradients(report)) == LATENTS[dims]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [*({"mask": MASKS[name]} for name in ("window", "segments", "lengths")), *FEATURES[:3], DROPOUT]
)
def test_features_of_latents(call: dict[str, Any]) -> None:
    assert [kernel.stack_bytes for kernel in _gradients(_of_latents((576, 512), **call))] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1000, 1000), (130, 777)])
def test_latents_that_end_within_a_tile(lengths: tuple[int, int]) -> None:
    assert [kernel.stack_bytes for kernel in _gradients(_of_latents((576, 512), lengths))] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_narrow_tiles(dim: int) -> None:
    report = _report(dims=(dim, dim), config={"block_q_dkv": 32, "block_kv_dq": 32})
    assert [kernel.stack_bytes for kernel in _gradients(report)] == [0, 0]
