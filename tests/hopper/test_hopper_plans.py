"""When a plan chooses the Hopper kernel, with which sizes, and why not."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from mosaic_plans import A100, B200, GATHERED, H100, codes_against, mosaic_plan

from attnops import (
    T5,
    Blocks,
    Causal,
    ConfigError,
    MaskFunction,
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    register_mask_function,
)
from attnops.compat import abstract_device
from attnops.masks import ChosenBlocks, SegmentIds
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.hopper.kernel.hopper_sizes import latent_halves, shared_bytes
from attnops.operators.mosaic.kernel import linker
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes
from attnops.operators.mosaic.mosaic_sizes import tiles_of
from attnops.planning.notes import has_note

SHARED = 232448  # bytes that a block of threads may request on Hopper
JAX = "hopper.jax"
KERNEL = "attnops_hopper_forward"


def _plan(kind: str = H100, **given: Any) -> Any:
    return mosaic_plan(kind, **given)


def _codes(plan: Any) -> set[str]:
    """Why the Hopper kernel doesn't run, apart from this jax."""
    return codes_against(plan, "forward_hopper") - {JAX}


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this jax has what the kernel needs")
@pytest.mark.parametrize("operation", ["flash_attn2", "splash", "blocksparse", "ring", "ulysses"])
def test_an_older_jax_is_the_reason_for_triton(operation: str) -> None:
    plan = _plan(operation=operation)
    assert (plan.kind, plan.method) == ("platform", "forward_cuda")
    ((name, reasons),) = plan.rejected
    assert (name, [reason.code for reason in reasons]) == (f"{operation}.forward_hopper", [JAX])


@pytest.mark.parametrize("kind", [A100, B200])
def test_other_gpus_do_not_ask_it(kind: str) -> None:
    plan = _plan(kind)
    own = kind == B200 and jax.__version_info__ >= (0, 12)
    assert plan.method == ("forward_blackwell" if own else "forward_cuda")
    assert not any(one.implementation.endswith("hopper") for one in plan.rejected)


REFUSED = {
    "hopper.kernel": {"config": {"kernel": "triton"}},
    "hopper.dtype": {"dtype": "float32"},
    "hopper.softmax_dtype": {"runtime_softmax_dtype": "bfloat16"},
    "hopper.head_dim": {"dims": (320, 128)},
    "hopper.padding": {"dims": (20, 20)},
    "hopper.block_q": {"config": {"block_q": 256}},
    "hopper.block_kv": {"config": {"block_kv": 512}},
    "hopper.block_q_dq": {"config": {"block_q_dq": 32}},
    "hopper.block_q_dkv": {"config": {"block_q_dkv": 256}},
    "hopper.block_kv_dkv": {"config": {"block_kv_dkv": 256}},
    "hopper.block_kv_dq": {"config": {"block_kv_dq": 16}},
    "hopper.num_warps": {"config": {"num_warps": 8}},
    "hopper.num_warps_dkv": {"config": {"num_warps_dkv": 8}},
    "hopper.num_warps_dq": {"config": {"num_warps_dq": 8}},
    "feature.return_weights": {"call": {"return_weights": True}},
    "hopper.mask_function_operation": {"call": {"mask": "sine"}},
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("code", REFUSED)
def test_triton_runs_what_it_refuses(code: str) -> None:
    given = dict(REFUSED[code])
    call = dict(given.pop("call", {}))
    if call.get("mask") == "sine":
        register_mask_function("hopper.sine", override=True)(lambda x, j: jnp.sin(x.astype(jnp.float32)) < j)
        call["mask"] = MaskFunction("hopper.sine")
    plan = _plan(call=call, **given)
    assert plan.method != "forward_hopper"
    assert code in _codes(plan)


@pytest.mark.usefixtures("new_jax")
def test_what_triton_only_does_better_can_be_declared() -> None:
    given = dict(REFUSED["hopper.padding"])
    assert _plan(**given, config={"kernel": "mosaic"}).method == "forward_hopper"


@pytest.mark.usefixtures("new_jax")
def test_numbers_by_distance() -> None:
    call = {"score": RelativeBias(buckets=T5()), "table": jax.ShapeDtypeStruct((32, 32), "float32")}
    plan = _plan(call=call)
    assert (plan.method, plan.rejected) == ("forward_hopper", ())


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("mode", ["prefill", "train"])
@pytest.mark.parametrize("name", GATHERED)
def test_numbers_of_tables_and_products(name: str, mode: str) -> None:
    plan = _plan(call=GATHERED[name](2048) | {"mode": mode})
    assert (plan.method, plan.rejected) == ("forward_hopper", ())


# Two rows of a batch and 132 multiprocessors: parts of the keys fill those that the other blocks leave, of 256 keys at least.
FEW = {
    "decoding": ({"lengths": (1, 32768)}, (True, 64, 132 // 16)),
    "decoding, a kv head each": ({"lengths": (1, 32768), "heads": (8, 8)}, (False, 64, 132 // 16)),
    "40 queries of 4 heads": ({"lengths": (40, 8192)}, (True, 128, 132 // 32)),
    "a chunk": ({"lengths": (256, 8192), "heads": (8, 4)}, (False, 128, 132 // 32)),
    "few keys": ({"lengths": (1, 600)}, (True, 64, 2)),
    "enough rows": ({"lengths": (2048, 8192)}, (False, 128, 1)),
    "declared": ({"lengths": (1, 32768), "config": {"fold": False, "kv_splits": 3}}, (False, 64, 3)),
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("name", FEW)
def test_few_queries_fold_their_heads_and_divide_the_keys(name: str) -> None:
    given, expected = FEW[name]
    plan = _plan(**given)
    assert (plan.method, plan.rejected) == ("forward_hopper", ())
    assert (plan.config.fold, plan.config.block_q, plan.config.kv_splits) == expected


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(("dims", "stages"), [((64, 64), 8), ((128, 128), 6), ((192, 128), 4), ((256, 256), 2)])
def test_few_rows_have_as_many_tiles_on_their_way_as_fit(dims: tuple[int, int], stages: int) -> None:
    plan = _plan(dims=dims, lengths=(1, 32768))
    sizes = tiles_of(plan.config).forward
    assert (sizes.block_kv, sizes.stages) == (64, stages)
    taken = [
        sum(plan.runs.memory(plan.problem, plan.placement, plan.config.with_fields({"num_stages": n}))[KERNEL].values())
        for n in (stages, min(stages + 1, 8))
    ]
    assert taken[0] <= SHARED
    assert stages == 8 or taken[1] > SHARED


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("operation", ["flash_attn2", "splash", "blocksparse", "ring", "ulysses"])
def test_every_operation_of_the_gpu_kernels_chooses_it(operation: str) -> None:
    plan = _plan(operation=operation, call={"mode": "train"})
    assert (plan.kind, plan.method, plan.rejected) == ("platform", "forward_hopper", ())
    passes = [(size.kernel, size.loading) for part in (False, True) for size in plan.runs.passes(plan.config, part)]
    assert passes == [("attnops_hopper_forward", 4), ("attnops_hopper_dkv", 4), ("attnops_hopper_dq", 4)]


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (128, 64), (96, 96), (32, 32), (80, 80)],
)
@pytest.mark.parametrize("lengths", [(2048, 2048), (2048, 40), (100, 5000)])
@pytest.mark.parametrize("mode", ["prefill", "train"])
def test_chosen_sizes_fit(dims: tuple[int, int], lengths: tuple[int, int], mode: str) -> None:
    plan = _plan(dims=dims, lengths=lengths, heads=(64, 64), call={"mode": mode})
    assert plan.method == "forward_hopper", plan.rejected
    sizes = tiles_of(plan.config)
    assert sizes.forward.block_q == 128
    assert sizes.forward.stages >= 2
    counted = plan.runs.memory(plan.problem, plan.placement, plan.config)
    assert set(counted) == {"attnops_hopper_forward"} | (
        {"attnops_hopper_dkv", "attnops_hopper_dq"} if mode == "train" else set()
    )
    for which, one in sizes._asdict().items():
        parts = plan.runs.sizing.shared_of(which, plan.problem, one)
        assert sum(parts.values()) <= SHARED
        assert counted.get(f"attnops_hopper_{which}", parts) == parts
        assert one.block_q in (64, 128)
        assert one.block_kv in (64, 128)


def test_shared_memory_by_hand() -> None:
    """Of 16-bit numbers: 128 rows of a query and two stages of 128 keys and values; 128 keys and values, and two stages of 64
    queries and gradients; and so on."""
    counted = shared_bytes("forward", MosaicSizes(128, 128, 2), 128, 128)
    assert (counted["query"], counted["key"], counted["value"]) == (32768, 65536, 65536)
    assert (counted["lse"], counted["columns"]) == (1024, 1024)
    assert shared_bytes("forward", MosaicSizes(128, 64, 2), 192, 128)["query"] == 49152
    assert shared_bytes("forward", MosaicSizes(128, 64, 2), 128, 192)["query"] == 49152
    counted = shared_bytes("forward", MosaicSizes(64, 64, 2), 576, 512, in_key=True)
    assert (counted["query"], counted["key"], counted["value"], counted["lse"]) == (73728, 147456, 0, 1024)
    counted = shared_bytes("dkv", MosaicSizes(32, 64, 2), 576, 512, in_key=True)
    assert (counted["query"], counted["d_output"], counted["key"], counted["value"]) == (73728, 65536, 73728, 0)
    counted = shared_bytes("dq", MosaicSizes(64, 32, 2), 576, 512, in_key=True)
    assert (counted["query"], counted["d_output"], counted["key"], counted["value"]) == (73728, 65536, 73728, 0)
    assert (counted["columns"], counted["barriers"]) == (1024, 56)
    counted = shared_bytes("dkv", MosaicSizes(64, 128, 2), 128, 64)
    assert (counted["query"], counted["d_output"]) == (32768, 16384)
    assert (counted["key"], counted["value"], counted["lse"], counted["columns"]) == (32768, 16384, 2048, 1024)
    counted = shared_bytes("dq", MosaicSizes(128, 64, 3), 128, 64)
    assert (counted["query"], counted["d_output"], counted["key"], counted["value"]) == (32768, 16384, 49152, 24576)
    # As Mosaic says, which refuses them.
    assert sum(shared_bytes("forward", MosaicSizes(128, 128, 3), 128, 128).values()) == 233600
    assert sum(shared_bytes("dkv", MosaicSizes(64, 128, 6), 128, 128).values()) == 267392
    assert sum(shared_bytes("dq", MosaicSizes(128, 64, 6), 128, 128).values()) == 263392


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("dims", "padded"), [((32, 32), None), ((192, 96), None), ((80, 48), "(96, 64)"), ((256, 20), None)]
)
def test_columns_are_noted_where_there_are_more(dims: tuple[int, int], padded: str | None) -> None:
    plan = _plan(dims=dims, heads=(64, 64), config={"kernel": "mosaic"})
    noted = [note for note in plan.notes if has_note([note], "mosaic.columns")]
    assert bool(noted) == (padded is not None or dims[1] == 20)
    assert padded is None or padded in noted[0]


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("installed", "noted"),
    [
        ({"jax-cuda13-plugin": "0.12.0", "nvidia-nvjitlink": "13.5.37"}, True),
        ({"jax-cuda12-plugin": "0.12.0", "nvidia-nvjitlink-cu12": "12.9.86"}, True),
        ({"jax-cuda13-plugin": "0.12.0", "nvidia-nvjitlink-cu12": "12.9.86"}, False),
        ({"jax-cuda13-plugin": "0.12.0"}, False),
        ({"nvidia-nvjitlink": "13.5.37"}, False),
    ],
)
def test_a_linker_beside_the_plugin_is_noted(
    installed: dict[str, str], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(linker, "version", version)
    linker.linker.cache_clear()
    try:
        plans = [_plan(config={"kernel": kernel}) for kernel in ("mosaic", "triton")]
        assert [has_note(plan.notes, "mosaic.linker") for plan in plans] == [noted, False]
    finally:
        linker.linker.cache_clear()


LINKED_BY = ("nvidia-nvjitlink", "13.5.37")
# Head dim -> rows and keys of a tile by pass, with registers of an equal share: 168 for a thread of three warpgroups, 255 of two.
LINKED = {
    64: {"forward": (128, 64), "dkv": (64, 128), "dq": (128, 64)},
    96: {"forward": (128, 64), "dkv": (64, 64), "dq": (128, 64)},
    128: {"forward": (128, 64), "dkv": (64, 64), "dq": (128, 64)},
    192: {"forward": (64, 128), "dkv": (64, 64), "dq": (64, 64)},
    256: {"forward": (64, 64), "dkv": (64, 64), "dq": (64, 64)},
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("dim", LINKED)
def test_a_linker_has_tiles_of_fewer_registers(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker, "linker", lambda: LINKED_BY)
    plan = _plan(dims=(dim, dim), config={"kernel": "mosaic"}, call={"mode": "train"})
    tiles = tiles_of(plan.config)._asdict()
    assert {which: (one.block_q, one.block_kv) for which, one in tiles.items()} == LINKED[dim]


# (dims, queries) of latents whose values are a part of their keys -> rows, keys and stages of a tile
LATENTS = {
    (576, 512, 1): (64, 64, 2),
    (576, 512, 2048): (64, 64, 2),
    (320, 256, 1): (128, 64, 3),
    (320, 256, 2048): (128, 64, 3),
    (288, 256, 2048): (128, 64, 4),
    (448, 384, 2048): (64, 64, 2),
    (128, 64, 2048): (128, 128, 2),
}


def _latents(dim: int, columns: int, q_len: int, mode: str = "prefill", **config: Any) -> Any:
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(H100, 1, "gpu"))
    metadata = OperationMetadata(
        mesh=mesh, operation_configs={"flash_attn2": config}, tuning="off", runtime_dtype="bfloat16"
    )
    q, k = (jax.ShapeDtypeStruct((2, n, heads, dim), "bfloat16") for n, heads in ((q_len, 128), (4096, 1)))
    call = {"mask": Causal(), "query_offset": 4096 - q_len, "mode": mode, "softmax_scale": 0.1}
    return OperationRegistry.create("flash_attn2", metadata).plan(q, k, KeyColumns(columns), **call)


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_latents_are_loaded_once(shape: tuple[int, int, int]) -> None:
    plan = _latents(*shape)
    assert (plan.method, plan.rejected) == ("forward_hopper", ())
    assert tuple(tiles_of(plan.config).forward) == LATENTS[shape]
    (counted,) = plan.runs.memory(plan.problem, plan.placement, plan.config).values()
    assert counted["value"] == 0
    assert sum(counted.values()) <= SHARED
    for way in plan.runs.candidates(plan.problem, plan.placement)["forward"]:
        assert sum(shared_of_latents(plan, way).values()) <= SHARED


# dims of latents -> stages of the tiles of 32 rows or keys for their gradients, in the order of keys and queries
STAGES_OF_LATENTS = {(576, 512): (2, 2), (448, 384): (2, 4), (320, 256): (4, 4), (288, 256): (4, 4), (128, 64): (4, 4)}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("dims", STAGES_OF_LATENTS, ids=str)
def test_gradients_of_latents(dims: tuple[int, int]) -> None:
    plan = _latents(*dims, 2048, mode="train")
    assert (plan.method, plan.rejected) == ("forward_hopper", ())
    tiles, (of_keys, of_queries) = tiles_of(plan.config), STAGES_OF_LATENTS[dims]
    assert (tuple(tiles.dkv), tuple(tiles.dq)) == ((32, 64, of_keys), (64, 32, of_queries))
    counted = plan.runs.memory(plan.problem, plan.placement, plan.config)
    assert set(counted) == {"attnops_hopper_forward", "attnops_hopper_dkv", "attnops_hopper_dq"}
    for held in counted.values():
        assert held["value"] == 0
        assert sum(held.values()) <= SHARED


@pytest.mark.parametrize(
    ("dims", "of_each"),
    [
        ((576, 512), (((0, 160, True), (160, 128, True)), ((288, 224, True), (512, 64, False)))),
        ((320, 256), (((0, 160, True),), ((160, 96, True), (256, 64, False)))),
        ((288, 256), (((0, 160, True),), ((160, 96, True), (256, 32, False)))),
        ((128, 128), (((0, 64, True),), ((64, 64, True),))),
        ((96, 64), (((0, 64, True),), ((64, 32, False),))),
    ],
    ids=str,
)
def test_columns_of_two_warpgroups(dims: tuple[int, int], of_each: Any) -> None:
    """(the first, how many, whether values have them) of the parts that one product can have, of at most 256."""
    found = latent_halves(*dims)
    assert tuple(tuple((one.first, one.columns, "value" in one.of) for one in parts) for parts in found) == of_each


def shared_of_latents(plan: Any, way: dict[str, Any]) -> dict[str, int]:
    (counted,) = plan.runs.memory(plan.problem, plan.placement, plan.config.with_fields(way)).values()
    return counted


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("shape", "mode", "config", "code"),
    [
        ((640, 512, 64), "prefill", {}, "hopper.latent_dim"),
        ((544, 520, 64), "prefill", {}, "hopper.latent_dim"),
        ((320, 300, 64), "prefill", {}, "hopper.latent_dim"),  # in two parts of 64 columns each time
        ((576, 512, 64), "prefill", {"block_q": 128}, "config"),
        ((128, 64, 2048), "train", {"block_q_dq": 128}, "config"),
        ((128, 64, 2048), "train", {"block_kv_dkv": 128}, "config"),
    ],
)
def test_latents_that_triton_takes(shape: tuple[int, int, int], mode: str, config: dict[str, int], code: str) -> None:
    assert _codes(_latents(*shape, mode=mode, **config)) == {code}


@pytest.mark.usefixtures("new_jax")
def test_sizes_that_do_not_fit_are_refused() -> None:
    plan = _plan(config={"kernel": "mosaic", "block_kv": 128, "num_stages": 8}, fallback="error")
    assert _codes(plan) == {"config"}
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        plan.operation.implementation("forward_hopper", plan.problem.config).resolve(plan.problem, plan.placement)


@pytest.mark.usefixtures("new_jax")
def test_rows_of_a_tile_for_keys_by_what_takes_registers() -> None:
    dims, ids = (64, 64), jax.ShapeDtypeStruct((2, 2048), "int32")
    packed = {"q_segment_ids": ids, "kv_segment_ids": ids}
    assert tiles_of(_plan(dims=dims).config).dkv == MosaicSizes(128, 128, 2)
    assert tiles_of(_plan(dims=dims, call=packed).config).dkv == MosaicSizes(128, 128, 2)
    either = {"mask": Causal() | SegmentIds(ids, ids)}
    assert tiles_of(_plan(dims=dims, call=packed | either).config).dkv == MosaicSizes(64, 128, 4)
    assert tiles_of(_plan(dims=dims, call={"logits_soft_cap": 3.0}).config).dkv == MosaicSizes(64, 128, 4)


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("block", "heads", "whole"),
    [((128, 128), 1, True), ((256, 128), 1, True), ((64, 128), 1, False), ((128, 128), 32, False)],
)
def test_blocks_that_cut_no_tile_take_no_registers(block: tuple[int, int], heads: int, whole: bool) -> None:
    """Of gradients of key and value. Blocks of each head have tables of their own, or words."""
    layout = np.ones((heads, 2048 // block[0], 2048 // block[1]), bool)
    layout[:, 0, -1] = False
    layout[0, -1, 0] = False
    blocks = Blocks(layout if heads > 1 else layout[0], *block)
    at_run_time = ChosenBlocks(jax.ShapeDtypeStruct((2, *layout.shape), "bool"), *block)
    masks = (Causal() & blocks, whole), (Causal() & at_run_time, whole), (Causal() | blocks, False)
    for mask, same in masks:
        plan = _plan(dims=(64, 64), call={"mask": mask, "mode": "train"})
        assert tiles_of(plan.config).dkv == (MosaicSizes(128, 128, 2) if same else MosaicSizes(64, 128, 4))


@pytest.mark.usefixtures("new_jax")
def test_keys_of_two_warpgroups_are_shared() -> None:
    """Where one warpgroup can't hold the sums of key and value, a block has 64 keys."""
    call = {"mode": "train"}
    assert tiles_of(_plan(dims=(192, 128), call=call).config).dkv.block_kv == 64
    assert tiles_of(_plan(call=call).config).dkv.block_kv == 128
    plan = _plan(dims=(192, 128), config={"kernel": "mosaic", "block_kv_dkv": 128}, fallback="error", call=call)
    assert _codes(plan) == {"config"}


@pytest.mark.usefixtures("new_jax")
def test_what_a_search_tries() -> None:
    plan = _plan(call={"mode": "train"})
    free = plan.runs.tuned_fields(plan.problem, plan.placement)
    assert {"block_q", "block_kv", "num_stages", "block_q_dkv", "num_stages_dq"} <= set(free)
    assert not {"num_warps", "num_warps_dkv", "num_warps_dq", "kv_splits"} & set(free)
    ways = plan.runs.candidates(plan.problem, plan.placement)
    assert set(ways) == {"forward", "backward"}
    for part, some in ways.items():
        assert some[0] == {name: getattr(plan.config, name) for name in some[0]}
        assert len({tuple(way.items()) for way in some}) == len(some) > 3
        assert all(set(way) <= set(free) for way in some), part
    for way in ways["forward"]:
        sizes = MosaicSizes(way["block_q"], way["block_kv"], way["num_stages"])
        assert sum(shared_bytes("forward", sizes, 128, 128).values()) <= SHARED
    tiles = [tiles_of(plan.config.with_fields(way)) for way in ways["backward"]]
    assert len({one.dkv for one in tiles}) > 2
    assert len({one.dq for one in tiles}) > 2
    for one in tiles:
        assert sum(shared_bytes("dkv", one.dkv, 128, 128).values()) <= SHARED
        assert sum(shared_bytes("dq", one.dq, 128, 128).values()) <= SHARED
