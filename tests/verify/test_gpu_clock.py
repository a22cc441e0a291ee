"""The cost of GPU kernels by their stalls: tiles against brute force, and what is refused. test_gpu_compile.py compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from attnops import Blocks, Causal, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.compat import abstract_device
from attnops.devices import gpu_specs
from attnops.errors import ConfigError
from attnops.masks import Chunked, Lengths, SegmentIds
from attnops.planning import PassSizes, Plan
from attnops.verify import tune as searches
from attnops.verify.gpu.gpu_kernels import GpuKernelUse, GpuLoop
from attnops.verify.gpu.sass import TileLoop
from attnops.verify.gpu_clock import GpuCost, gpu_cost, loop_tiles, same_splits
from attnops.verify.tune import measured_by, search_of

Q_LEN, KV_LEN, HEADS, KV_HEADS, BATCH = 200, 330, 6, 2, 3
TRITON = {"flash_attn2": {"kernel": "triton"}}
LAYOUT = np.random.default_rng(0).random((HEADS, 4, 6)) < 0.4
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(70),
    "chunked": Causal() & Chunked(64),
    "blocks": Blocks(LAYOUT, 64, 64),
}


def _plan(kind: str = "NVIDIA H100 80GB HBM3", q_len: int = Q_LEN, platform: str = "gpu", **call: Any) -> Plan:
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, platform))
    attend = OperationRegistry.create(
        "flash_attn2", OperationMetadata(mesh=mesh, tuning="off", operation_configs=TRITON)
    )
    q = jax.ShapeDtypeStruct((BATCH, q_len, HEADS, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((BATCH, KV_LEN, KV_HEADS, 64), jnp.bfloat16)
    return attend.plan(q, k, k, **({"mask": Causal(), "query_offset": 0} | call))


@pytest.mark.parametrize("slow", ["q", "kv"])
@pytest.mark.parametrize("block", [(64, 32), (32, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_loops(name: str, block: tuple[int, int], slow: str) -> None:
    """Every live tile is in a loop, and in the one without a mask only those that are visible everywhere."""
    rows, keys = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None]
    if name == "blocks":
        seen = LAYOUT.repeat(64, 1).repeat(64, 2)[:, :Q_LEN, :KV_LEN]
    else:
        seen = np.broadcast_to(np.asarray(MASKS[name].test(rows, rows, keys)), (1, Q_LEN, KV_LEN))
    padded = [(0, 0), (0, -Q_LEN % block[0]), (0, -KV_LEN % block[1])]
    any_of, inside = np.pad(seen, padded), np.pad(np.ones((Q_LEN, KV_LEN), bool), padded[1:])
    shape = (-1, any_of.shape[1] // block[0], block[0], any_of.shape[2] // block[1], block[1])
    live = any_of.reshape(shape).any((2, 4))
    no_key_beyond = np.arange(1, live.shape[2] + 1) * block[1] <= KV_LEN
    whole = (any_of | ~inside).reshape(shape).all((2, 4)) & no_key_beyond
    tiles = loop_tiles(MASKS[name], block, slow, Q_LEN, KV_LEN, 0, HEADS)
    assert sum(tiles) == pytest.approx(live.sum() / len(live))
    if len(tiles) == 2:
        assert tiles[0] <= whole.sum() / len(whole)


def test_traced_masks_and_offsets_count_as_masked() -> None:
    lengths = Causal() & Lengths(jax.ShapeDtypeStruct((BATCH,), jnp.int32))
    dead_above = loop_tiles(Causal(), (64, 64), "q", Q_LEN, KV_LEN, 0)
    assert loop_tiles(lengths, (64, 64), "q", Q_LEN, KV_LEN, 0) == (0.0, sum(dead_above))
    assert loop_tiles(Causal(), (64, 64), "q", Q_LEN, KV_LEN, None) == (0.0, 4.0 * 6.0)


def _kernel(name: str, *stalls: int, stack: int = 0, warps: int = 4) -> GpuKernelUse:
    loops = tuple(GpuLoop(TileLoop(100, 16, None, 8, 8, n, spills=stack // 4), None) for n in stalls)
    return GpuKernelUse(name, 200, stack, 1024, 32 * warps, 1, None, loops)


def _cost(decided: Plan, config: Any, backward: bool, kernels: tuple[GpuKernelUse, ...]) -> GpuCost:
    assert decided.runs is not None
    return gpu_cost(decided.problem, decided.placement, config, decided.runs.passes(config, backward), kernels)


def test_cost_is_stalls_times_warps_tiles_and_heads() -> None:
    decided = _plan()
    config = decided.config.with_fields({"block_q": 64, "block_kv": 64, "fold": False})
    full, masked = loop_tiles(Causal(), (64, 64), "q", Q_LEN, KV_LEN, 0)
    cost = gpu_cost(
        decided.problem,
        decided.placement,
        config,
        decided.runs.passes(config, False),
        (_kernel("attnops_flash_forward", 10, 1000),),
    )
    assert (full, masked) == (6, 4)  # below and on the diagonal of four blocks of rows
    assert cost.stalls == (6 * 10 + 4 * 1000) * 4 * HEADS * BATCH
    spec = gpu_specs()["h100"]
    assert cost.seconds == pytest.approx(cost.stalls / (4 * 132 * spec.clock))
    assert (cost.registers, cost.shared_bytes) == (200, 1024)


@pytest.mark.parametrize(("programs", "each"), [(0, 2), (2, 4)])
def test_warpgroups_with_programs_of_their_own(programs: int, each: int) -> None:
    """Eight of sixteen warps compute. Of four loops for tiles with a mask, and four without, one belongs to a quarter of them; or
    to a half, if there are two programs, which then go through their tiles twice."""
    decided = _plan()
    sizes = PassSizes("dkv", 64, 64, "gradients", loading=8, programs=programs)
    some = gpu_cost(
        decided.problem, decided.placement, decided.config, (sizes,), (_kernel("gradients", *range(1, 9), warps=16),)
    )
    whole, cut = loop_tiles(Causal(), (64, 64), "kv", Q_LEN, KV_LEN, 0)
    by_head = (1 + 3 + 5 + 7) * whole + (2 + 4 + 6 + 8) * cut
    assert some.stalls == by_head * each * HEADS * BATCH


def test_a_warpgroup_corrects_the_sums_of_all_rows() -> None:
    decided = _plan()
    config = decided.config.with_fields({"block_q": 64, "block_kv": 64, "fold": False})
    kernel = replace(_kernel("attnops_flash_forward", 10, 1000), sum_loops=(TileLoop(50, 0, None, 0, 64, 70),))
    assert _cost(decided, config, False, (kernel,)).stalls == (6 * 10 + 4 * 1000 + 10 * 70) * 4 * HEADS * BATCH


def test_warpgroups_that_convert_have_loops_of_their_own() -> None:
    """Of three warpgroups two convert: their warps don't compute."""
    decided = _plan()
    config = decided.config.with_fields({"block_q": 64, "block_kv": 64, "fold": False})
    widen = tuple(TileLoop(50, 0, None, 0, 64, stalls) for stalls in (3, 5, 7, 11))
    kernel = replace(_kernel("attnops_flash_forward", 10, 1000, warps=12), converting=widen)
    assert (
        _cost(decided, config, False, (kernel,)).stalls == (6 * (10 + 3 + 7) + 4 * (1000 + 5 + 11)) * 4 * HEADS * BATCH
    )
    with pytest.raises(ConfigError, match="has 3 loops that convert, for 2 over tiles"):
        _cost(decided, config, False, (replace(kernel, converting=widen[:3]),))


MOSAIC = PassSizes("forward", 64, 64, "by parts", loading=4, part=(16, 32))


def _by_parts(*parts: tuple[int, int, int]) -> GpuKernelUse:
    """A kernel of four warps that compute, whose loops have so many stalls, and so many of them where parts are seen and cut."""
    kernel = _kernel("by parts", *(stalls for stalls, _, _ in parts), warps=8)
    loops = (
        one._replace(
            loop=one.loop._replace(seen_stalls=seen, seen_instructions=seen, cut_stalls=cut, cut_instructions=cut)
        )
        for one, (_, seen, cut) in zip(kernel.loops or (), parts, strict=True)
    )
    return replace(kernel, loops=tuple(loops))


def test_tiles_whose_warps_leave_parts_out() -> None:
    decided = _plan()
    tiles = loop_tiles(Causal(), (64, 64), "q", Q_LEN, KV_LEN, 0)
    assert tiles == (6, 4)
    # Three tiles on the diagonal with four parts by two, and a last one with a row of parts: below the diagonal, on it, above.
    seen, cut = (3 * 6 + 1) / (3 * 8 + 2), (3 * 4 + 1) / (3 * 8 + 2)
    kernel = _by_parts((100, 0, 0), (1000, 300, 200))
    cost = gpu_cost(decided.problem, decided.placement, decided.config, (MOSAIC,), (kernel,))
    by_head = 6 * 100 + 4 * (500 + 300 * seen + 200 * cut)
    assert cost.stalls == round(by_head * 4 * HEADS * BATCH)


def test_of_a_traced_length_each_part_counts_as_cut() -> None:
    decided = _plan(mask=Causal() & Lengths(jax.ShapeDtypeStruct((BATCH,), jnp.int32)))
    kernel = _by_parts((100, 0, 0), (1000, 300, 200))
    cost = gpu_cost(decided.problem, decided.placement, decided.config, (MOSAIC,), (kernel,))
    assert cost.stalls == 10 * 1000 * 4 * HEADS * BATCH


@pytest.mark.parametrize(
    ("parts", "by_tile"),
    [([(10, 0, 0), (1000, 300, 200), (9999, 0, 0)], 1000), ([(0, 0, 0), (700, 0, 0), (99, 0, 0)] * 2, 700)],
    ids=["full and partial", "two programs"],
)
def test_the_loop_for_ids_that_are_not_in_order_has_no_tiles(parts: list[tuple[int, int, int]], by_tile: int) -> None:
    ids = jax.ShapeDtypeStruct((BATCH, Q_LEN), jnp.int32), jax.ShapeDtypeStruct((BATCH, KV_LEN), jnp.int32)
    decided = _plan(mask=Causal() & SegmentIds(*ids))
    cost = gpu_cost(decided.problem, decided.placement, decided.config, (MOSAIC,), (_by_parts(*parts),))
    assert cost.stalls == 10 * by_tile * 4 * HEADS * BATCH
    of_triton = replace(_kernel("by parts", 10, 1000), threads=128)
    cost = gpu_cost(decided.problem, decided.placement, decided.config, (MOSAIC._replace(loading=0),), (of_triton,))
    assert cost.stalls == 10 * 1000 * 4 * HEADS * BATCH


def test_folded_heads_count_once() -> None:
    decided = _plan(q_len=1, mask=Full())
    assert decided.config.fold
    one = _kernel("attnops_flash_forward", 100)
    tiles = loop_tiles(Full(), (1, decided.config.block_kv), "q", 1, KV_LEN, 0)
    cost = gpu_cost(
        decided.problem,
        decided.placement,
        decided.config,
        decided.runs.passes(decided.config, False),
        (replace(one, loops=one.loops * len(tiles)),),
    )
    assert cost.stalls == round(sum(tiles) * 100 * 4 * KV_HEADS * BATCH)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ((), "the instructions of attnops_flash_forward can't be read; pip install"),
        ((GpuKernelUse("attnops_flash_forward"),), "can't be read"),
        ((_kernel("attnops_flash_forward", 10),), "has 1 loops where 2 are known"),
    ],
    ids=["none", "unread", "loops"],
)
def test_what_has_no_cost(kernels: tuple[GpuKernelUse, ...], message: str) -> None:
    decided = _plan()
    config = decided.config.with_fields({"block_q": 64, "block_kv": 64})
    with pytest.raises(ConfigError, match=message):
        _cost(decided, config, False, kernels)


def test_spills_are_told() -> None:
    decided = _plan()
    config = decided.config.with_fields({"block_q": 64, "block_kv": 64})
    kernels = (_kernel("attnops_flash_forward", 10, 20, stack=48),)
    told = _cost(decided, config, False, kernels).spills
    assert told == "attnops_flash_forward spills 48 bytes of registers per thread"
    names = "attnops_flash_dkv", "attnops_flash_dq"
    backward = config.with_fields({f"block_{axis}_{one}": 64 for axis in ("q", "kv") for one in ("dkv", "dq")})
    for stack in (16, 8):
        both = tuple(_kernel(name, 10, 20, stack=stack) for name in names)
        told = _cost(decided, backward, True, both).spills
        assert all((name in (told or "")) == (stack == 16) for name in names)


def test_spills_outside_of_the_loops_are_no_reason_to_refuse_sizes() -> None:
    """They are written and read once for all tiles of a block."""
    decided = _plan()
    config = decided.config.with_fields({"block_q": 64, "block_kv": 64})
    kernel = replace(_kernel("attnops_flash_forward", 10, 20), stack_bytes=48)
    assert _cost(decided, config, False, (kernel,)).spills is None
    other = (TileLoop(50, 0, None, 0, 64, 70, spills=2),)
    assert _cost(decided, config, False, (replace(kernel, loading=other),)).spills is None
    assert _cost(decided, config, False, (replace(kernel, sum_loops=other),)).spills is not None


def test_candidates_keep_the_heuristics_splits() -> None:
    decided = _plan()
    offered = decided.runs.candidates(decided.problem, decided.placement)["forward"]
    assert len({way["kv_splits"] for way in offered}) > 1
    kept = same_splits(offered)
    assert kept[0] == offered[0]
    assert {way["kv_splits"] for way in kept} == {offered[0]["kv_splits"]}
    assert same_splits(({"block_q_dkv": 16}, {"block_q_dkv": 32})) == ({"block_q_dkv": 16}, {"block_q_dkv": 32})


def test_a_search_needs_a_gpu_that_is_known_and_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"isn't a GPU that can be described: NVIDIA A100.* Run the search on the device"
    ):
        measured_by(search_of(_plan("NVIDIA L4")), None)
    monkeypatch.setattr(searches, "has_cuda_plugin", lambda: False)
    with pytest.raises(ConfigError, match=r"needs jax's CUDA plugin and nvdisasm; pip install 'attnops\[cuda-compile"):
        measured_by(search_of(_plan()), None)
    monkeypatch.setattr(searches, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(searches, "disassembler", lambda: "nvdisasm")
    assert measured_by(search_of(_plan()), None) == measured_by(search_of(_plan()), "static") == "static"


def test_a_search_measures_compiled_candidates_and_refuses_those_that_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """With a compiler that isn't here: the fewest stalls win, spills and errors are told."""
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(searches, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(searches, "disassembler", lambda: "nvdisasm")

    def compiled(kind: str, local: Any, part: str, fields: dict[str, Any]) -> tuple[GpuKernelUse, ...]:
        if fields["num_warps"] == 8:
            raise RuntimeError(
                "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 229376, available: 166912"
            )
        stack = 16 if fields["block_q"] == 64 else 0
        loops = loop_tiles(Causal(), (fields["block_q"], fields["block_kv"]), "q", Q_LEN, KV_LEN, 0)
        return (_kernel("attnops_flash_forward", *[fields["block_q"]] * len(loops), stack=stack),)

    monkeypatch.setattr(searches, "compiled_kernels", compiled)
    decided = _plan(mode="prefill")
    report = searches.tune_plan(decided, how="static", most=12)
    measured = report.measured("forward")
    failures = {one.failure for one in measured if one.seconds is None}
    assert len(failures) == 2
    assert any("asks for 224.0 KiB of shared memory" in (text or "") for text in failures), failures
    assert "attnops_flash_forward spills 16 bytes of registers per thread" in failures
    best = report.best["forward"]
    works = [one for one in measured if one.seconds is not None]
    assert best.detail["cycles"] == min(one.detail["cycles"] for one in works)
    assert set(best.detail) == {"cycles", "registers", "shared_bytes"}
