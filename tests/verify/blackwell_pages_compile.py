"""The Blackwell kernel over pages compiled for a described B200: registers, spills, exponentials in its loops, its search."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import pytest
from pages_compile import FEATURES, MODELS, QUANTISED, TABLES, check_written_in_place, declared, kernels

from attnops.operators.kernels.pages.mosaic.page_sizes import BLACKWELL_SIZING
from attnops.operators.kernels.pages.mosaic.page_tiles import PageTiles
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify.gpu.gpu_kernels import GpuKernelUse
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin
from attnops.verify.gpu.sass import disassembler
from attnops.verify.paged_step import PlannedStep
from attnops.verify.passes import target_reports
from attnops.verify.tune_step import tune_step

if not has_cuda_plugin() or importlib.util.find_spec("cramjam") is None:
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: plans choose plain XLA", allow_module_level=True)

DECODE, CHUNKS = (BLACKWELL_SIZING.kernel(chunks) for chunks in (False, True))
MIXED = [1, 1, 100, 300, 1, 2, 40, 1]
# The warpgroups share the 65536 registers of a multiprocessor, in units of 8: those of softmaxes and two more, and
# those that widen.
SHARES = {1: (168, 384), 2: (128, 512), 3: (96, 640)}


def _check(kernel: GpuKernelUse, tiles: PageTiles, spilled: int = 0, of_each: int = 1, wideners: int = 0) -> None:
    """For all warpgroups with softmaxes a loop of whole and one of other tiles; a thread has a row: `of_each` exponentials for
    each weight, and one to shrink it. Another corrects the sums."""
    assert (kernel.registers, kernel.threads) == SHARES[tiles.row_groups + wideners]
    assert kernel.stack_bytes is not None
    assert kernel.stack_bytes <= spilled
    if disassembler() is None:
        return
    assert len(kernel.loops or ()) == 2
    assert len(kernel.sum_loops) == 2
    for one in kernel.loops or ():
        assert (one.loop.ex2, one.loop.tensor) == (of_each * tiles.block_kv + 1, 0)


def test_a_decoding_step() -> None:
    found, sizes = kernels("llama-3-8b", "b200")
    assert set(found) == {DECODE}
    _check(found[DECODE], sizes.decode)
    if disassembler() is not None:  # eight pages of keys and eight of values
        assert [loop.copies for loop in found[DECODE].loading] == [16, 16]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_mixed_steps_of_models(model: str) -> None:
    found, sizes = kernels(model, "b200", q_lens=MIXED)
    assert set(found) == {DECODE, CHUNKS}
    _check(found[DECODE], sizes.decode)
    _check(found[CHUNKS], sizes.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["split", "heads", "joined", "interleaved", "packed"])
@pytest.mark.parametrize("page", [8, 256])
def test_layouts_and_pages(layout: str, page: int) -> None:
    found, sizes = kernels("llama-3.2-1b", "b200", layout=layout, page_size=page, pages=4096)
    _check(found[DECODE], sizes.decode)


@pytest.mark.slow
@pytest.mark.parametrize("step", FEATURES, ids=lambda step: next(iter(step)))
def test_features(step: dict[str, Any]) -> None:
    dtype = {"dtype": step["dtype"]} if "dtype" in step else {}
    of_each = 2 if "logits_soft_cap" in step else 1  # a cap's tanh has one too
    found, sizes = kernels("llama-3-8b", "b200", q_lens=MIXED, step=step, **dtype)
    _check(found[DECODE], sizes.decode, of_each=of_each)
    _check(found[CHUNKS], sizes.chunks, of_each=of_each)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    found, sizes = kernels("llama-3-8b", "b200", q_lens=MIXED, score=TABLES[name])
    _check(found[DECODE], sizes.decode, 8 if name == "grid" else 0)  # places in two dimensions
    _check(found[CHUNKS], sizes.chunks, 56 if name == "grid" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype", "scale"), QUANTISED)
def test_quantised_pages(model: str, dtype: str, scale: str) -> None:
    """Numbers of 8 bits are widened by warpgroups of their own, of keys and of values, or of latents."""
    found, sizes = kernels(model, "b200", q_lens=MIXED, quantised={"dtype": dtype, "scale": scale})
    wideners = 1 if MODELS[model][1].get("kind") == "latent" else 2
    for name, tiles in ((DECODE, sizes.decode), (CHUNKS, sizes.chunks)):
        assert tiles.stored
        _check(found[name], tiles, 8 if wideners == 1 else 0, wideners=wideners)
        if disassembler() is not None:  # of each of them: tiles ahead, if there are several, whole ones, others
            assert len(found[name].loading) == (2 + (tiles.stored > 1)) * wideners


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cache", "q_lens"),
    [
        ("llama-3-8b", {"quantised": {"dtype": "int8", "scale": "head"}}, 1),
        ("llama-3-8b", {}, 1),
        ("llama-3-8b", {"layout": "packed"}, MIXED),
        ("gpt-oss-20b", {"layout": "joined"}, MIXED),
        ("latents of 288", {}, MIXED),
    ],
)
def test_pages_are_written_in_place(model: str, cache: dict[str, Any], q_lens: Any) -> None:
    check_written_in_place("b200", model, cache, q_lens, 0)


@pytest.mark.skipif(disassembler() is None, reason="pip install 'attnops[cuda-sass]'")
@pytest.mark.slow
def test_sizes_are_searched_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stalls of both kernels' loops, those that correct sums too."""
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    operation, given = declared("llama-3-8b", "b200", q_lens=MIXED)
    report = tune_step(operation, given, most=2)
    measured = report.measured("step")
    assert [bool(one.seconds) for one in measured] == [True, True]
    assert len({one.detail["cycles"] for one in measured}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["kv_head_axis", "page_sequence_axis", "pages_axis"])
def test_several_gpus_send_what_is_needed(axis: str) -> None:
    operation, given = declared("llama-3.2-1b", "b200:2", sizes={"x": 2}, cache={axis: "x"})
    *_, report = target_reports(PlannedStep(operation, given), "b200:2")
    assert [one.failure for one in report.passes] == [None]
    assert report.plan.implementation == "paged.forward_blackwell"
    assert not report.passes[0].differences
    kinds = {one.kind for one in report.passes[0].collectives or ()}
    assert kinds == ({"all-reduce"} if axis == "page_sequence_axis" else set())
