"""The Hopper kernels compiled for described GPUs: registers, spills, shared memory, the products in their loops, their search."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mosaic_calls import DROPOUT, FEATURES, FEW, MASKS, PAIRS, REPEATED
from mosaic_plans import mosaic_report

from attnops import Causal, Mask, OperationMetadata, OperationRegistry
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.hopper.kernel.hopper_sizes import divided
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.operators.mosaic.mosaic_sizes import tiles_of
from attnops.verify.call import verify_call
from attnops.verify.gpu.gpu_kernels import GpuKernelUse
from attnops.verify.gpu.gpu_mesh import described_gpus, has_cuda_plugin
from attnops.verify.gpu.sass import disassembler
from attnops.verify.report import TargetReport
from attnops.verify.targets import target_of
from attnops.verify.tune import tune_plan

if not has_cuda_plugin() or importlib.util.find_spec("cramjam") is None:
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: plans choose the kernel in Triton", allow_module_level=True)
needs_disassembler = pytest.mark.skipif(disassembler() is None, reason="pip install 'attnops[cuda-sass]'")

NAME, GRADIENTS = "attnops_hopper_forward", ("attnops_hopper_dkv", "attnops_hopper_dq")
LITTLE = 16  # bytes
# 384 threads share the 65536 registers of a multiprocessor, in units of 8.
REGISTERS, THREADS = 168, 384
FEW_REGISTERS, FEW_THREADS = 240, 256  # of one warpgroup that computes


def _report(target: str = "h100", **given: Any) -> TargetReport:
    return mosaic_report(target, **given)


def _kernel(report: TargetReport) -> GpuKernelUse:
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_hopper"  # type: ignore[union-attr]
    (kernel,) = (k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse))
    assert (kernel.name, kernel.registers, kernel.threads) == (NAME, REGISTERS, THREADS)
    return kernel


def _check_loops(kernel: GpuKernelUse, block_kv: int, dims: tuple[int, int]) -> None:
    """Each tile's products are there, of the 64 rows of a warpgroup's four warps, and an exponential for each weight and row."""
    for one in kernel.loops or ():
        assert one.loop.tensor_flops == 2 * 64 * block_kv * sum(dims) / 4
        assert one.loop.ex2 * 32 * 4 == 64 * block_kv + 2 * 32 * 4  # a thread shrinks two rows


def test_a_forward_pass() -> None:
    kernel = _kernel(_report())
    assert kernel.stack_bytes == 0
    assert kernel.occupancy is not None
    assert kernel.occupancy.blocks == 1
    if disassembler() is not None:
        assert _by_parts(kernel) == [False, True]
        _check_loops(kernel, 128, (128, 128))


def _by_parts(kernel: GpuKernelUse) -> list[bool]:
    """Of each loop, whether a warp leaves out what it doesn't have to compute or to hide."""
    return [one.loop.by_parts for one in kernel.loops or ()]


@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "dim", "name", "loops"),
    [
        (4096, 128, "causal", [False, True]),  # one tile of sixteen has a mask: a loop of their own
        (4096, 128, "full", [False]),
        (4096, 128, "window", [True]),
        (1024, 64, "chunks", [True]),
        (1024, 128, "lengths", [False, True]),
        (
            1024,
            128,
            "segments",
            [False, True, False],
        ),  # the last one for ids that aren't in order, which all warps compare
        (1024, 64, "prefix", [False, False]),
    ],
)
def test_loops_over_tiles_with_a_mask_decide_what_to_hide(length: int, dim: int, name: str, loops: list[bool]) -> None:
    kernel = _kernel(_report(lengths=(length, length), dims=(dim, dim), mask=({"causal": Causal()} | MASKS)[name]))
    assert _by_parts(kernel) == loops


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256), (64, 128), (80, 48), (32, 32), (96, 96)], ids=str
)
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_head_dims(target: str, dims: tuple[int, int], dtype: str) -> None:
    report = _report(target, dims=dims, dtype=dtype)
    kernel = _kernel(report)
    assert _spilled(kernel) == 0
    padded = tuple(-(-dim // 32) * 32 for dim in dims)
    _check_loops(kernel, tiles_of(report.plan.config).forward.block_kv, (padded[0], padded[1]))  # type: ignore[arg-type]


def _spilled(kernel: GpuKernelUse) -> int:
    """Bytes of registers, without a few outside of the loops that compute, such as those of the warps that load."""
    assert kernel.stack_bytes is not None
    return kernel.stack_bytes if kernel.spills_in_loops or kernel.stack_bytes > LITTLE else 0


def _gradients(report: TargetReport) -> tuple[GpuKernelUse, GpuKernelUse]:
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_hopper"  # type: ignore[union-attr]
    kernels = {k.name: k for k in report.passes[1].kernels or () if isinstance(k, GpuKernelUse)}
    assert set(kernels) == {NAME, *GRADIENTS}
    tiles = tiles_of(report.plan.config)  # type: ignore[arg-type, union-attr]
    # A mask of small blocks has tiles of 64 keys, which one warpgroup has.
    for which, rows in {"forward": tiles.forward.block_q, "dkv": tiles.dkv.block_kv, "dq": tiles.dq.block_q}.items():
        problem = report.plan.problem  # type: ignore[union-attr]
        shared = which == "dkv" and divided(problem.head_dim, problem.value_dim)
        alone = rows == 64 and not shared and problem.value_columns is None
        of_kernel = kernels[f"attnops_hopper_{which}"]
        expected = (FEW_REGISTERS, FEW_THREADS) if alone else (REGISTERS, THREADS)
        assert (of_kernel.registers, of_kernel.threads) == expected
    dkv, dq = (kernels[name] for name in GRADIENTS)
    return dkv, dq


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (64, 128), (80, 48), (32, 32), (96, 96), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_gradients(target: str, dims: tuple[int, int], dtype: str) -> None:
    """Four products of a tile for keys, three for queries; where key and value have a warpgroup each, three and two. Warpgroups
    with the same work share a program."""
    report = _report(target, dims=dims, dtype=dtype, mode="train")
    dkv, dq = _gradients(report)
    assert (dkv.stack_bytes, dq.stack_bytes) == (0, 0)
    if disassembler() is None:
        return
    sizes, (dim, value_dim) = tiles_of(report.plan.config), (-(-d // 32) * 32 for d in dims)  # type: ignore[arg-type]
    of_queries = 64 * sizes.dq.block_kv * (2 * dim + value_dim)
    assert [one.loop.tensor_flops for one in dq.loops or ()] == [2 * of_queries / 4] * 2
    together = dim + value_dim <= 256
    columns = [2 * (dim + value_dim)] if together else [2 * dim + value_dim, dim + value_dim]
    of_keys = [64 * sizes.dkv.block_q * n for n in columns]
    assert [one.loop.tensor_flops for one in dkv.loops or ()] == [2 * n / 4 for n in of_keys for _ in range(2)]
    assert {one.loop.ex2 * 32 * 4 for one in dkv.loops or ()} == {64 * sizes.dkv.block_q}
    assert {one.loop.ex2 * 32 * 4 for one in dq.loops or ()} == {64 * sizes.dq.block_kv}


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, dim: int) -> None:
    report = _report(dims=(dim, dim), mask=MASKS[name], mode="train")
    assert _kernel(report).stack_bytes == 0
    dkv, dq = (kernel.stack_bytes for kernel in _gradients(report))
    assert dkv <= (8 if (name, dim) == ("segments", 256) else 0)
    assert dq == 0


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_gradients_with_dropout(dim: int, mask: str, heads: tuple[int, int]) -> None:
    given = {"mask": MASKS["full"]} if mask == "full" else {}
    dkv, dq = _gradients(_report(dims=(dim, dim), heads=heads, **given, **DROPOUT, mode="train"))
    assert max(dkv.stack_bytes or 0, dq.stack_bytes or 0) <= (8 if dim == 256 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("call", FEATURES, ids=lambda call: next(iter(call)))
def test_other_features(call: dict[str, Any]) -> None:
    report = _report(**call, mode="train")
    dkv, dq = _gradients(report)
    assert [kernel.stack_bytes for kernel in (_kernel(report), dkv, dq)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("call", PAIRS, ids=lambda call: "-".join([call["mask"].kind, *list(call)[1:]]))
def test_a_mask_and_another_feature(call: dict[str, Any], dim: int) -> None:
    report = _report(**call, dims=(dim, dim), mode="train")
    dkv, dq = _gradients(report)
    of_ids = call["mask"] is MASKS["segments"] and dim == 128  # of ids that aren't in order, beside a soft cap
    assert (dkv.stack_bytes or 0) <= (8 if of_ids else 0)
    assert [kernel.stack_bytes for kernel in (_kernel(report), dq)] == [0, 0]


@pytest.mark.slow
def test_a_function_that_reads_its_logit_several_times() -> None:
    """Its gradients are summed."""
    report = _report(score=REPEATED, mode="train")
    assert report.passed, [one.failure for one in report.passes]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", FEW)
def test_few_queries(name: str, dim: int) -> None:
    """Query heads folded into rows, the keys in parts, whose outputs are float32."""
    report = _report(dims=(dim, dim), lengths=(5, 8192), heads=(8, 2), query_offset=8187, **FEW[name])
    assert report.passed, [one.failure for one in report.passes]
    config: Any = report.plan.config  # type: ignore[union-attr]
    assert (config.fold, config.kv_splits) == (True, 32)
    (kernel,) = (k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse))
    assert (kernel.name, kernel.registers, kernel.threads) == (NAME, FEW_REGISTERS, FEW_THREADS)
    assert kernel.stack_bytes <= (48 if (name, dim) == ("dropout", 256) else 0)


QUANTISED = {(64, 64): 640, (128, 128): 640, (192, 128): 640, (256, 256): 384}  # dims -> threads


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1024, 1024), (1, 8192)], ids=str)
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dims", QUANTISED, ids=str)
def test_quantised_keys(dims: tuple[int, int], stored: str, lengths: tuple[int, int]) -> None:
    """One warpgroup converts keys and one values; of more than 128 columns one does both, beside one that computes."""
    key, value = (jax.ShapeDtypeStruct((1, lengths[1], 2, dim), stored) for dim in dims)
    scale = jax.ShapeDtypeStruct((1, lengths[1], 2, 1), "float32")
    call = {"key": key, "value": value, "key_scale": scale, "value_scale": scale}
    report = _report(dims=dims, lengths=lengths, query_offset=lengths[1] - lengths[0], **call)
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_hopper"  # type: ignore[union-attr]
    (kernel,) = (k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse))
    threads = QUANTISED[dims] if lengths[0] > 64 or dims[1] > 128 else 512
    registers = {640: 96, 512: 128, 384: 168}[threads]
    assert (kernel.name, kernel.registers, kernel.threads) == (NAME, registers, threads)
    assert kernel.stack_bytes <= (48 if dims == (256, 256) else 0)
    groups = {640: 2, 512: 2, 384: 1}[threads]
    assert len(kernel.converting) == groups * (2 if lengths[0] > 1 else 1)  # loops over tiles with and without a mask
    padded = sum(-(-dim // 32) * 32 for dim in dims)
    for one in kernel.loops or ():
        assert one.loop.tensor_flops == 2 * 64 * 64 * padded / 4


# (dims, queries, heads) of latents -> (registers, threads, bytes that a thread spills at most)
LATENTS = {
    (576, 512, 1, 16): (168, 384, 0),
    (576, 512, 1024, 16): (168, 384, 56),
    (320, 256, 1, 64): (240, 256, 0),
    (320, 256, 1024, 16): (168, 384, 0),
    (288, 256, 1024, 16): (168, 384, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_latents(case: tuple[int, int, int, int]) -> None:
    """Each tile is loaded once; of 512 columns two warpgroups have a half each, and compute the logits both."""
    dim, value_dim, q_len, heads = case
    report = _latent_report((dim, value_dim), (q_len, 8192), heads, mode="prefill")
    (kernel,) = (k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse))
    registers, threads, spilled = LATENTS[case]
    assert (kernel.name, kernel.registers, kernel.threads) == (NAME, registers, threads)
    assert kernel.stack_bytes <= spilled
    columns, warps = min(256, value_dim), 4
    for one in kernel.loops or ():
        assert one.loop.tensor_flops == 2 * 64 * 64 * (dim + columns) / warps


def _latent_report(dims: tuple[int, int], lengths: tuple[int, int], heads: int, **call: Any) -> TargetReport:
    mesh = target_of("h100").mesh({"fsdp": 1})
    metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", runtime_dtype="bfloat16")
    q, k = (jax.ShapeDtypeStruct((1, n, h, dims[0]), "bfloat16") for n, h in zip(lengths, (heads, 1), strict=True))
    arguments = {"query": q, "key": k, "value": KeyColumns(dims[1]), "mask": Causal(), "softmax_scale": 0.1}
    arguments |= {"query_offset": lengths[1] - lengths[0], **call}
    report = verify_call(OperationRegistry.create("flash_attn2", metadata), arguments, "h100")
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_hopper"  # type: ignore[union-attr]
    return report


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(576, 512), (448, 384), (320, 256), (288, 256), (128, 64)], ids=str)
def test_gradients_of_latents(dims: tuple[int, int]) -> None:
    """Two warpgroups have half of the columns each, and compute logits and gradients of weights both, of 64 lines and 32
    columns."""
    dkv, dq = _gradients(_latent_report(dims, (1024, 1024), 16, mode="train"))
    assert (dkv.stack_bytes, dq.stack_bytes) == (0, 0)
    half = -(-dims[0] // 64) * 32
    of_keys = half, dims[0] - half
    of_values = min(half, dims[1]), dims[1] - min(half, dims[1])
    for kernel, summed in (dkv, map(sum, zip(of_keys, of_values, strict=True))), (dq, of_keys):
        flops = [2 * 64 * 32 * (sum(dims) + columns) / 4 for columns in summed for _ in range(2)]
        assert [one.loop.tensor_flops for one in kernel.loops or ()] == (flops if disassembler() else [])
        assert {one.loop.ex2 * 32 * 4 for one in kernel.loops or ()} <= {64 * 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [*({"mask": MASKS[name]} for name in ("window", "segments", "lengths")), *FEATURES[:2], DROPOUT]
)
def test_features_of_gradients_of_latents(call: dict[str, Any]) -> None:
    if "softmax_aux" in call:
        call = {"softmax_aux": jax.ShapeDtypeStruct((16,), "float32")}
    dkv, dq = _gradients(_latent_report((576, 512), (1024, 1024), 16, mode="train", **call))
    assert (dkv.stack_bytes, dq.stack_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_narrow_tiles_of_gradients(dim: int) -> None:
    dkv, dq = _gradients(_report(dims=(dim, dim), config={"block_q_dkv": 32, "block_kv_dq": 32}, mode="train"))
    assert (dkv.stack_bytes, dq.stack_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1000, 1000), (130, 777), (1024, 60)])
def test_lengths_that_end_within_a_tile(lengths: tuple[int, int]) -> None:
    assert _kernel(_report(lengths=lengths)).stack_bytes == 0


@pytest.mark.slow
def test_most_of_the_shared_memory() -> None:
    """What the count lets pass compiles: five stages of 64 keys and values of 128 numbers, six of 128 of 64."""
    _kernel(_report(config={"block_kv": 64, "num_stages": 5}))
    _kernel(_report(dims=(64, 64), config={"block_kv": 128, "num_stages": 5}))
    _gradients(_report(config={"num_stages_dkv": 4, "num_stages_dq": 4}, mode="train"))


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "sizes"), [("flash_attn2", {"fsdp": 1, "tp": 2}), ("ring", {"sp": 2})])
def test_several_gpus_send_what_is_needed(operation: str, sizes: dict[str, int]) -> None:
    report = _report("h100:2", sizes=sizes, operation=operation, mode="train")
    assert report.passed, [(one.failure, one.differences) for one in report.passes]
    assert report.plan.method == "forward_hopper"  # type: ignore[union-attr]


@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "part", "dim", "mask"),
    [
        ("prefill", "forward", 64, Causal()),
        *(("prefill", "forward", dim, MASKS[name]) for dim in (64, 128) for name in ("window", "segments", "lengths")),
        ("train", "backward", 64, Causal()),
        ("train", "backward", 64, MASKS["segments"]),
        ("train", "backward", 192, Causal()),
    ],
)
def test_sizes_are_searched_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, part: str, dim: int, mask: Mask
) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    configs = {"flash_attn2": {"kernel": "mosaic"}}
    metadata = OperationMetadata(mesh=described_gpus("h100"), fallback="error", operation_configs=configs)
    attend = OperationRegistry.create("flash_attn2", metadata)
    x = jax.ShapeDtypeStruct((1, 1024, 4, dim), jnp.bfloat16)
    report = tune_plan(attend.plan(x, x, x, mask=mask, mode=mode), most=2)
    measured = report.measured(part)
    assert len(measured) == 2
    assert all(one.seconds and one.detail["cycles"] > 0 for one in measured)
