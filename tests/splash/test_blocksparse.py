"""Masks of blocks on their way to the kernels: which tiles are visited, by which head, and what the plan tells of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from attnops import Blocks, BlockSparseConfig, Causal, InputError, Mask, OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.masks import bigbird
from attnops.operators.choices.mask_blocks import fitted_block
from attnops.operators.flash.kernel.tile_schedule import tile_schedule as flash_schedule
from attnops.operators.kernels.block_words import block_words, seen_by_words
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.tiles import tile_table
from attnops.operators.splash.kernel.schedule import kv_block_of, q_block_of, tile_schedule, variant_of

V5E = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device("TPU v5 lite", 1, "tpu"))
H100 = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device("NVIDIA H100 80GB HBM3", 1, "gpu"))
RNG = np.random.default_rng(5)
LAYOUT = RNG.random((4, 6, 8)) < 0.3  # of four heads: 96 rows in blocks of 16, 80 keys in blocks of 10
CAUSAL = np.arange(80) <= np.arange(96)[:, None]
BLOCKS = LAYOUT.repeat(16, 1).repeat(10, 2)


def _plan(mask: Mask, mesh: Any = None, length: int = 2048, operation: str = "blocksparse", **configs: Any) -> Any:
    metadata = OperationMetadata(mesh=mesh, operation_configs=configs, tuning="off", fallback="error")
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16) for heads in (4, 2))
    return OperationRegistry.create(operation, metadata).plan(q, k, k, mask=mask)


def _tiles(cells: np.ndarray, block_q: int, block_kv: int) -> set[tuple[int, int]]:
    """Those with something visible."""
    rows, keys = np.nonzero(cells)
    return set(zip((rows // block_q).tolist(), (keys // block_kv).tolist(), strict=True))


def _wanted(name: str, heads: slice, block_q: int, block_kv: int) -> set[tuple[int, int]]:
    """Exactly the live tiles of a layout; of a choice those that both parts of the mask have something in."""
    blocks = BLOCKS[heads].any(0)
    if name == "layout":
        return _tiles(blocks & CAUSAL, block_q, block_kv)
    return _tiles(blocks, block_q, block_kv) & _tiles(CAUSAL, block_q, block_kv)


def _mask(name: str) -> Mask:
    """The choice is the layout, as bools that are chosen at run time."""
    return Causal(0) & Blocks(LAYOUT if name == "layout" else jnp.asarray(LAYOUT[None]), 16, 10)


@pytest.mark.parametrize(
    ("name", "blocks"), [("layout", (16, 10)), ("layout", (32, 16)), ("layout", (8, 32)), ("choice", (32, 16))], ids=str
)
def test_each_head_visits_its_own_tiles_on_a_gpu(name: str, blocks: tuple[int, int]) -> None:
    for slow, axis in (("q", 0), ("kv", 1)):
        table = flash_schedule(LocalMask(_mask(name), 0, 96, 80, 0), *blocks, slow, 4)
        rows = np.asarray(table.table)
        assert rows.shape[:2] == (1, 4)
        for head in range(4):
            found = set()
            for row, entry in enumerate(rows[0, head]):
                listed = range(entry[0], entry[3]) if table.neighbours else entry[2 : 2 + entry[1]]
                found |= {(row, int(n)) if axis == 0 else (int(n), row) for n in listed}
            assert found == _wanted(name, slice(head, head + 1), *blocks)


@pytest.mark.parametrize(("name", "tables"), [("layout", 4), ("layout", 2), ("choice", 2)])
def test_tiles_of_heads_are_listed_apart_on_a_tpu(name: str, tables: int) -> None:
    """Lists are as long as the longest; beyond its end one does nothing."""
    made = tile_schedule(LocalMask(_mask(name), 0, 96, 80, 0), 32, 16, "q", tables=tables)
    assert (made.rows, made.tables) == (1, tables)
    words = np.asarray(made.words).reshape(tables, made.length)
    for table in range(tables):
        heads = slice(table * 4 // tables, (table + 1) * 4 // tables)
        live = [word for word in words[table] if variant_of(word)]
        assert {(int(q_block_of(w)), int(kv_block_of(w))) for w in live} == _wanted(name, heads, 32, 16)
        assert len(live) == len(set(live))


@pytest.mark.parametrize("name", ["layout", "choice"])
def test_groups_of_heads_visit_what_any_of_them_sees_in_plain_xla(name: str) -> None:
    table = tile_table(LocalMask(_mask(name), 0, 96, 80, 0), 32, 16, tables=2)
    rows = np.asarray(table.table)
    for group in range(2):
        found = {(row, int(n)) for row, entry in enumerate(rows[0, group]) for n in entry[2 : entry[1]]}
        assert found == _wanted(name, slice(2 * group, 2 * group + 2), 32, 16)


@pytest.mark.parametrize(
    ("block_q", "block_kv", "size"), [(16, 10, (16, 10)), (24, 7, (5, 2)), (32, 64, (7, 1)), (32, 32, (9, 13))], ids=str
)
def test_words_say_what_rows_see(block_q: int, block_kv: int, size: tuple[int, int]) -> None:
    """Tiles that hold up to 64 of the mask's blocks, from a first row and key of their own."""
    layout = RNG.random((2, -(-110 // size[0]), -(-110 // size[1]))) < 0.5
    mask = LocalMask(Blocks(layout, *size), 6, 96, 80, None, 13)
    (held,) = block_words(mask, block_q, block_kv, 96, 1, settle=False)
    assert held is not None
    words = np.asarray(held.words)
    want = layout[:, (6 + np.arange(96))[:, None] // size[0], (13 + np.arange(80)) // size[1]]
    for tile in range(-(-80 // block_kv)):
        keys = np.arange(tile * block_kv, min((tile + 1) * block_kv, 80))
        rows = [jnp.asarray(words[0, :, tile, n, :, None]) for n in range(words.shape[3])]
        seen = seen_by_words(rows, jnp.asarray(keys + 13)[None, None], jnp.int32(13 + tile * block_kv), size[1])
        np.testing.assert_array_equal(np.asarray(seen), want[:, :, keys])


def test_a_tile_in_one_block_of_the_mask_needs_no_test() -> None:
    local = LocalMask(Causal(0) & Blocks(LAYOUT, 16, 10), 0, 96, 80, 0)
    assert block_words(local, 16, 5, 96, 4) == (None,)
    assert block_words(local, 16, 5, 96, 2) != (None,)  # a tile of two heads, which differ
    assert block_words(local, 16, 20, 96, 4) != (None,)
    under_or = LocalMask(Causal(0) | Blocks(LAYOUT, 16, 10), 0, 96, 80, 0)
    assert block_words(under_or, 16, 5, 96, 4) != (None,)


@pytest.mark.parametrize(
    ("block", "size", "length", "least", "wanted"),
    [
        (64, 512, 4096, 64, 64),
        (16, 512, 4096, 64, 64),  # four of them
        (48, 512, 4096, 64, 96),
        (768, 512, 4096, 64, 384),
        (2048, 512, 4096, 64, 512),
        (1009, 512, 4096, 64, 512),  # a prime: tiles lie across
        (5000, 512, 4096, 64, 512),  # holds everything
    ],
)
def test_tiles_follow_the_blocks(block: int, size: int, length: int, least: int, wanted: int) -> None:
    mask = Causal() & Blocks(np.ones((-(-length // block),) * 2, bool), block, block)
    assert fitted_block(mask, "kv", size, length, least) == wanted


def test_the_plan_counts_tiles() -> None:
    layout = np.eye(16, dtype=bool)
    layout[:, 0] = True
    plan = _plan(Causal() & Blocks(layout, 128, 128), H100, flash_attn2={"kernel": "triton"})
    assert plan.implementation == "blocksparse.forward_cuda"
    assert plan.config.operation == "flash_attn2"
    said = [note for note in plan.notes if note.startswith("blocks")]
    # 16 on the diagonal and 15 below it in the first column, of 16 * 17 / 2 that causal leaves.
    assert said == [
        "blocks: a layout of 128x128 blocks, 0.121 of them seen",
        "blocks: a head visits 31 of 256 tiles of 128x128; without the blocks 136, so the work is 0.228 of that"
        if plan.config.block_kv == 128
        else "blocks: a head visits 62 of 512 tiles of 128x64; without the blocks 272, so the work is 0.228 of that",
    ]


def test_the_plan_tells_what_is_rounded_united_and_shared() -> None:
    """Tiles on a TPU have 128 keys at least; layouts of query heads are united for the kv head that two of them share."""
    apart = RNG.random((4, 32, 32)) < 0.2
    text = _plan(Causal() & Blocks(apart, 64, 64), V5E).explain()
    assert "a tile that holds some of a block is visited whole" in text
    assert "the 2 query heads of a tile visit what any of them sees" in text
    shared = _plan(Causal() & Blocks(apart[:2], 64, 64), V5E).explain()
    assert "the 2 query heads of a kv head share its choice" in shared
    assert "any of them sees" not in shared
    chosen = Blocks(jax.ShapeDtypeStruct((1, 2, 16, 4), jnp.int32), 128, 128)
    plan = _plan(Causal() & chosen, V5E)
    assert plan.config.block_q == plan.config.block_kv == 128
    assert "4 of 16 128x128 blocks chosen at run time, at most 0.25 of them" in plan.explain()


def test_tiles_in_plain_xla_are_declared_or_those_of_the_mask() -> None:
    mask = Causal() & bigbird(2048, block=64, window=3, first=1, random=2)
    assert (_plan(mask).route.block_q, _plan(mask).route.block_kv) == (64, 64)
    declared = _plan(mask, blocksparse={"block_q": 256, "block_kv": 128})
    assert (declared.route.block_q, declared.route.block_kv) == (256, 128)
    assert "of 64x64 in tiles of 256x128" in declared.explain()
    assert _plan(mask, operation="vanilla").route.block_q == 64
    assert "no part of the mask defines which blocks are seen" in _plan(Causal()).explain()
    metadata = OperationMetadata(operation_configs={"blocksparse": {}})
    assert isinstance(metadata.get_operation_config("blocksparse"), BlockSparseConfig)
    unread = _plan(mask, V5E, blocksparse={"block_q": 256})
    assert "(block_q) is not read by blocksparse on tpu, which runs splash's kernels" in unread.explain(verbose=True)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (np.ones((3, 2, 32, 32), bool), "Blocks choice has batch 3; wanted 1"),
        (np.ones((3, 32, 32), bool) & np.eye(32, dtype=bool)[:3, :, None], "3 heads; wanted 1 or 2 or 4"),
        (np.ones((31, 32), bool), "31 q blocks of 64, 1984 in all; wanted q_len=2048, which are 32 blocks"),
        (np.ones((32, 31), bool), "31 kv blocks of 64, 1984 in all; wanted kv_len=2048"),
        (np.zeros((1, 1, 31, 2), np.int32), "31 q blocks of 64"),
        (np.zeros((1, 5, 32, 2), np.int32), "5 heads; wanted 1 or 2 or 4"),
    ],
)
def test_sizes_that_do_not_fit_the_call(layout: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _plan(Blocks(layout, 64, 64))


def test_a_choice_inside_a_callers_own_split_is_refused() -> None:
    """Which of the whole sequence's blocks a part's choice counts can't be told."""
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    metadata = OperationMetadata(mesh=mesh, sequence_parallel="ring")
    attend = OperationRegistry.create("blocksparse", metadata)
    x, choice = jnp.ones((1, 64, 2, 8)), jnp.zeros((1, 1, 8, 2), jnp.int32)
    spec = jax.sharding.PartitionSpec(None, "sp")

    def part(q: jax.Array) -> jax.Array:
        return attend(q, q, q, mask=Blocks(choice, 8, 8)).attention_outputs

    with pytest.raises(InputError, match="which part block_choice covers isn't known"):
        jax.eval_shape(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), x)


def test_lowers_for_a_tpu() -> None:
    chosen = Causal() & Blocks(jax.ShapeDtypeStruct((1, 4, 16, 4), jnp.int32), 64, 64)
    metadata = OperationMetadata(mesh=V5E, fallback="error")
    attend = OperationRegistry.create("blocksparse", metadata)
    q, k = (jax.ShapeDtypeStruct((1, 1024, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def loss(q: jax.Array, k: jax.Array, mask: Mask) -> jax.Array:
        return attend(q, k, k, mask=mask).attention_outputs.astype(jnp.float32).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=("tpu",))
    assert exported(q, k, chosen).mlir_module().count("tpu_custom_call") == 2
