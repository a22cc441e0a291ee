"""The Hopper kernel over pages compiled for described GPUs: registers, spills, products in its loops; shapes of served models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import pytest
from pages_compile import FEATURES, MODELS, QUANTISED, TABLES, check_written_in_place, declared, kernels

from attnops.operators.kernels.pages.mosaic.page_sizes import HOPPER_SIZING
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify.drawn_step import plan_declared
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

DECODE, CHUNKS = (HOPPER_SIZING.kernel(chunks) for chunks in (False, True))


def _check_loops(kernel: GpuKernelUse, block_kv: int, dims: tuple[int, int], parts: int = 1) -> None:
    """Two loops, of whole and of other tiles. Each has a tile's products, of the 64 rows of a warpgroup's four warps, and an
    exponential for each weight; a thread shrinks two rows."""
    if disassembler() is None:
        return
    assert len(kernel.loops or ()) == 2
    for one in kernel.loops or ():
        assert one.loop.tensor_flops == 2 * 64 * block_kv * (dims[0] + dims[1] / parts) / 4
        assert one.loop.ex2 * 32 * 4 == 64 * block_kv + 2 * 32 * 4


def test_a_decoding_step() -> None:
    found, sizes = kernels("llama-3-8b")
    kernel = found[DECODE]
    assert (set(found), kernel.stack_bytes, kernel.threads) == ({DECODE}, 0, 256)
    _check_loops(kernel, sizes.decode.block_kv, (128, 128))
    if disassembler() is not None:  # four pages of keys and four of values
        assert [loop.copies for loop in kernel.loading] == [8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "h200"])
@pytest.mark.parametrize("model", MODELS)
def test_decoding_steps_of_models(model: str, target: str) -> None:
    """No thread spills a register, but for those of latents, which hold sums of 256 columns and 36 descriptors."""
    found, sizes = kernels(model, target)
    kernel, fields = found[DECODE], MODELS[model][1]
    latent = fields.get("kind") == "latent"
    dims = fields["head_dim"], fields.get("value_dim", fields["head_dim"])
    assert kernel.threads == 128 * (1 + sizes.decode.consumers)
    assert kernel.stack_bytes is not None
    assert kernel.stack_bytes <= (128 if latent else 0)
    _check_loops(kernel, sizes.decode.block_kv, dims, sizes.decode.parts)
    if fields["head_dim"] == 64:
        assert kernel.registers is not None
        assert kernel.registers <= 128  # two blocks on a multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_mixed_steps_of_models(model: str) -> None:
    found, sizes = kernels(model, q_lens=[1, 1, 100, 300, 1, 2, 40, 1])
    fields = MODELS[model][1]
    latent = fields.get("kind") == "latent"
    assert set(found) == {DECODE, CHUNKS}
    chunks = found[CHUNKS]
    assert (chunks.registers, chunks.threads) == (168, 384)
    assert chunks.stack_bytes is not None
    assert chunks.stack_bytes <= (128 if latent or fields["head_dim"] > 128 else 0)
    dims = fields["head_dim"], fields.get("value_dim", fields["head_dim"])
    _check_loops(chunks, sizes.chunks.block_kv, dims, sizes.chunks.parts)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype", "scale"), QUANTISED)
def test_quantised_pages(model: str, dtype: str, scale: str) -> None:
    """Numbers of 8 bits are widened by warpgroups that load; those that compute have the products of any other step."""
    of_pages = {"dtype": dtype, "scale": scale}
    found, sizes = kernels(model, q_lens=[1, 1, 100, 300, 1, 2, 40, 1], quantised=of_pages)
    fields = MODELS[model][1]
    latent = fields.get("kind") == "latent"
    dims = fields["head_dim"], fields.get("value_dim", fields["head_dim"])
    for name, tiles in ((DECODE, sizes.decode), (CHUNKS, sizes.chunks)):
        assert tiles.stored
        spilled = found[name].stack_bytes
        assert spilled is not None
        assert spilled <= (200 if latent else 128 if fields["head_dim"] > 128 and name == CHUNKS else 8)
        assert found[name].threads == 128 * (tiles.consumers + 2 - latent)
        _check_loops(found[name], tiles.block_kv, dims, tiles.parts)
        if disassembler() is not None:  # of each warpgroup that loads: tiles ahead, whole ones, others
            assert len(found[name].loading) == 3 * (2 - latent)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["split", "heads", "joined", "interleaved", "packed"])
@pytest.mark.parametrize("page", [8, 32, 256])
def test_layouts_and_pages(layout: str, page: int) -> None:
    found, _ = kernels("llama-3-8b", layout=layout, page_size=page, pages=4096)
    assert found[DECODE].stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", FEATURES, ids=lambda step: next(iter(step)))
def test_features(step: dict[str, Any]) -> None:
    dtype = {"dtype": step["dtype"]} if "dtype" in step else {}
    found, _ = kernels("llama-3-8b", q_lens=[1, 1, 100, 300, 1, 2, 40, 1], step=step, **dtype)
    assert {kernel.stack_bytes for kernel in found.values()} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    found, _ = kernels("llama-3-8b", q_lens=[1, 1, 100, 300, 1, 2, 40, 1], score=TABLES[name])
    assert {kernel.stack_bytes for kernel in found.values()} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("q_lens", [1, [1, 1, 100, 300, 1, 2, 40, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ("llama-3-8b", {}),
        ("llama-3-8b", {"layout": "packed"}),
        ("gpt-oss-20b", {"layout": "joined"}),
        ("llama-3-8b", {"quantised": {"dtype": "int8", "scale": "head"}}),
        ("latents of 288", {}),
    ],
)
def test_pages_are_written_in_place(model: str, cache: dict[str, Any], q_lens: Any) -> None:
    spilled = 8 if model == "latents of 288" else 0  # chunks of them spill two registers
    check_written_in_place("h100", model, cache, q_lens, spilled)


@pytest.mark.skipif(disassembler() is None, reason="pip install 'attnops[cuda-sass]'")
@pytest.mark.slow
def test_sizes_are_searched_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stalls of both kernels' loops. Parts of all keys aren't compared: their number isn't in the sums."""
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    operation, given = declared("llama-3-8b", "h100", q_lens=[1, 1, 100, 300, 1, 2, 40, 1])
    report = tune_step(operation, given, most=2)
    measured = report.measured("step")
    assert [bool(one.seconds) for one in measured] == [True, True]
    assert len({one.detail["cycles"] for one in measured}) == 2
    assert all(one.fields.get("kv_splits", 33) == 33 for one in measured)


@pytest.mark.slow
@pytest.mark.parametrize("q_lens", [1, [1, 1, 100, 300, 1, 2, 40, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize("axis", ["kv_head_axis", "page_sequence_axis", "pages_axis"])
def test_several_gpus_send_what_is_needed(axis: str, q_lens: Any) -> None:
    """Heads, the pages of each sequence, or sequences on two devices: outputs are merged where pages are shared, else nothing is
    sent."""
    operation, given = declared("llama-3-8b", "h100:2", q_lens=q_lens, sizes={"x": 2}, cache={axis: "x"})
    *_, report = target_reports(PlannedStep(operation, given), "h100:2")
    assert [one.failure for one in report.passes] == [None]
    assert report.plan.implementation == "paged.forward_hopper"
    assert not report.passes[0].differences
    kinds = {one.kind for one in report.passes[0].collectives or ()}
    assert kinds == ({"all-reduce"} if axis == "page_sequence_axis" else set())


def test_tiles_of_a_batch_by_hand() -> None:
    """Three rows of one token with 3000, 64 and 65 keys, and one of 40 tokens that ends at 200, in tiles of 64 and 128 keys."""
    operation, given = declared("llama-3-8b", "h100", q_lens=[1, 1, 1, 40], kv_lens=[3000, 64, 65, 200], sequences=4)
    plan = plan_declared(operation, given)
    found = plan.runs.visits(plan.problem, plan.config, given.batch)
    # 46 whole tiles and a last one; one whole; one whole and a last one. Tokens 0 to 31 end at 160 to 191, others at 192 to 199.
    assert {name: x.loops for name, x in found.items()} == {DECODE: (8 * 48, 8 * 2), CHUNKS: (8 * 2, 8 * 2)}
    assert {name: x.warps for name, x in found.items()} == {DECODE: 4, CHUNKS: 8}
