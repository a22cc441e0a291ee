"""The Blackwell kernel compiled for a described B200: registers, spills, memory, exponentials in its loops, its search."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mosaic_calls import FEATURES, FEW, MASKS, PAIRS
from mosaic_plans import mosaic_report

from attnops import Causal, Mask, OperationMetadata, OperationRegistry
from attnops.operators.call.key_columns import KeyColumns
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

NAME = "attnops_blackwell_forward"
# The warpgroups share the 65536 registers of a multiprocessor, in units of 8: two for softmaxes, or one, and two more.
SHARES = {256: (128, 512), 128: (168, 384)}


def _report(target: str = "b200", **given: Any) -> TargetReport:
    return mosaic_report(target, **given)


def _kernel(report: TargetReport) -> GpuKernelUse:
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_blackwell"  # type: ignore[union-attr]
    (kernel,) = (k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse))
    block_q = tiles_of(report.plan.config).forward.block_q  # type: ignore[union-attr, arg-type]
    assert (kernel.name, kernel.registers, kernel.threads) == (NAME, *SHARES[block_q])
    return kernel


def _check_loops(kernel: GpuKernelUse, block_kv: int, computed: tuple[int, ...] = (44, 32)) -> None:
    """One program serves all warpgroups that compute softmaxes. A thread has a row: an exponential for each weight, and one to
    shrink it; of 128 weights so many are computed in each loop. Products are another warp's."""
    found = [(one.loop.ex2, one.loop.tensor) for one in kernel.loops or ()]
    assert found == [(block_kv * (128 - some) // 128 + 1, 0) for some in computed]


def test_a_forward_pass() -> None:
    kernel = _kernel(_report())
    assert kernel.stack_bytes == 0
    assert kernel.occupancy is not None
    assert kernel.occupancy.blocks == 1
    if disassembler() is not None:
        _check_loops(kernel, 128)


@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize(("dim", "computed"), [(64, (44, 32)), (128, (44, 32)), (256, (44,))])
def test_few_tiles_with_a_mask(dim: int, computed: tuple[int, ...], soft_cap: float | None) -> None:
    """Where products take longer than softmaxes, all tiles are in one loop, which asks what they hide."""
    kernel = _kernel(_report(lengths=(4096, 4096), dims=(dim, dim), logits_soft_cap=soft_cap))
    assert kernel.stack_bytes == 0
    if soft_cap is None:
        _check_loops(kernel, 128, computed)
    else:
        assert len(kernel.loops or ()) == len(computed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (64, 128), (64, 256), (80, 48), (32, 32), (96, 96)],
    ids=str,
)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    report = _report(dims=dims, dtype=dtype)
    kernel = _kernel(report)
    assert kernel.stack_bytes == 0
    sizes = tiles_of(report.plan.config).forward  # type: ignore[union-attr, arg-type]
    if disassembler() is not None:
        _check_loops(kernel, sizes.block_kv)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, dim: int) -> None:
    assert _kernel(_report(dims=(dim, dim), mask=MASKS[name])).stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("call", FEATURES, ids=lambda call: next(iter(call)))
def test_other_features(call: dict[str, Any]) -> None:
    assert _kernel(_report(**call)).stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("call", PAIRS, ids=lambda call: "-".join([call["mask"].kind, *list(call)[1:]]))
def test_a_mask_and_another_feature(call: dict[str, Any], dim: int) -> None:
    assert _kernel(_report(**call, dims=(dim, dim))).stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", FEW)
def test_few_queries(name: str, dim: int) -> None:
    """Query heads folded into rows, the keys in parts, whose outputs are float32."""
    report = _report(dims=(dim, dim), lengths=(5, 8192), heads=(8, 2), query_offset=8187, **FEW[name])
    config: Any = report.plan.config  # type: ignore[union-attr]
    assert (config.fold, config.kv_splits) == (True, 32)
    assert _kernel(report).stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1024, 1024), (1, 8192)], ids=str)
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_quantised_keys(dims: tuple[int, int], stored: str, lengths: tuple[int, int]) -> None:
    """One more warpgroup widens keys and values."""
    key, value = (jax.ShapeDtypeStruct((1, lengths[1], 2, dim), stored) for dim in dims)
    scale = jax.ShapeDtypeStruct((1, lengths[1], 2, 1), "float32")
    call = {"key": key, "value": value, "key_scale": scale, "value_scale": scale}
    report = _report(dims=dims, lengths=lengths, query_offset=lengths[1] - lengths[0], **call)
    assert report.passed, [one.failure for one in report.passes]
    assert report.plan.method == "forward_blackwell"  # type: ignore[union-attr]
    (kernel,) = (k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse))
    sizes = tiles_of(report.plan.config).forward  # type: ignore[union-attr, arg-type]
    groups = sizes.block_q // 128
    assert (kernel.name, kernel.registers, kernel.threads) == (NAME, *{1: (128, 512), 2: (96, 640)}[groups])
    assert kernel.stack_bytes == 0
    assert len(kernel.converting) == (2 if lengths[0] > 1 else 1)  # loops over tiles with and without a mask


# (dims, queries, heads) of latents -> (rows, keys and stages of a tile, bytes that a thread spills at most)
LATENTS = {
    (576, 512, 1, 128): (128, 32, 2, 0),
    (576, 512, 1024, 16): (128, 32, 2, 0),
    (320, 256, 1, 64): (128, 64, 2, 0),
    (320, 256, 1024, 16): (128, 64, 2, 0),
    (160, 128, 1024, 16): (256, 64, 4, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_latents(case: tuple[int, int, int, int]) -> None:
    """Each tile is loaded once; of 512 columns two blocks of threads have a half each, and compute the logits both."""
    dim, value_dim, q_len, heads = case
    mesh = target_of("b200").mesh({"fsdp": 1})
    metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", runtime_dtype="bfloat16")
    q, k = (jax.ShapeDtypeStruct((1, n, h, dim), "bfloat16") for n, h in ((q_len, heads), (8192, 1)))
    arguments = {"query": q, "key": k, "value": KeyColumns(value_dim), "mask": Causal(), "mode": "prefill"}
    arguments |= {"query_offset": 8192 - q_len, "softmax_scale": 0.1}
    report = verify_call(OperationRegistry.create("flash_attn2", metadata), arguments, "b200")
    kernel = _kernel(report)
    *sizes, spilled = LATENTS[case]
    assert tiles_of(report.plan.config).forward == tuple(sizes)  # type: ignore[union-attr, arg-type]
    assert kernel.stack_bytes <= spilled


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1000, 1000), (130, 777), (1024, 60), (100, 1000)], ids=str)
def test_lengths_that_end_within_a_tile(lengths: tuple[int, int]) -> None:
    assert _kernel(_report(lengths=lengths)).stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "config"),
    [
        ((128, 128), {"block_kv": 64, "num_stages": 4}),
        ((64, 64), {"block_kv": 128, "num_stages": 5}),
        ((256, 256), {"block_q": 128, "block_kv": 128, "num_stages": 1}),
        ((192, 192), {"block_q": 256, "block_kv": 64, "num_stages": 2}),
    ],
)
def test_most_of_the_memory(dims: tuple[int, int], config: dict[str, int]) -> None:
    """What the count lets pass compiles."""
    _kernel(_report(dims=dims, config=config))


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "sizes"), [("flash_attn2", {"fsdp": 1, "tp": 2}), ("ring", {"sp": 2})])
def test_several_gpus_send_what_is_needed(operation: str, sizes: dict[str, int]) -> None:
    report = _report(target="b200:2", sizes=sizes, operation=operation)
    assert report.passed, [(one.failure, one.differences) for one in report.passes]
    assert report.plan.method == "forward_blackwell"  # type: ignore[union-attr]


@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "mask"),
    [(64, Causal()), (256, Causal()), *((dim, MASKS[name]) for dim in (64, 128) for name in ("window", "segments"))],
)
def test_sizes_are_searched_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, mask: Mask
) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    configs = {"flash_attn2": {"kernel": "mosaic"}}
    metadata = OperationMetadata(mesh=described_gpus("b200"), fallback="error", operation_configs=configs)
    attend = OperationRegistry.create("flash_attn2", metadata)
    x = jax.ShapeDtypeStruct((1, 1024, 4, dim), jnp.bfloat16)
    report = tune_plan(attend.plan(x, x, x, mask=mask, mode="prefill"), most=2)
    measured = report.measured("forward")
    assert len(measured) == 2
    assert all(one.seconds and one.detail["cycles"] > 0 for one in measured)
