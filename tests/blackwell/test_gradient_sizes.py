"""The sizes of the tiles of Blackwell's gradients, and what can be declared."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from mosaic_plans import B200, mosaic_plan

from attnops import Causal, ConfigError, OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.masks import Blocks
from attnops.operators.blackwell.kernel.backward_sizes import gradient_bytes, gradient_columns, gradient_turns
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes
from attnops.operators.mosaic.mosaic_sizes import tiles_of

SHARED, COLUMNS = 232448, 512  # bytes that a block of threads may request, and columns of tensor memory
KIB = 1024


pytestmark = pytest.mark.usefixtures("new_jax")


def _plan(dims: tuple[int, int], q_len: int = 4096, mask: Any = None, **config: Any) -> Any:
    call = {"mask": Causal() if mask is None else mask, "mode": "train"}
    given = {"lengths": (q_len, 4096), "config": {"kernel": "mosaic"} | config, "call": call}
    return mosaic_plan(B200, dims=dims, **given, fallback="error")


@pytest.mark.parametrize(
    ("dims", "dkv", "dq"),
    [
        ((32, 32), (128, 128, 4), (128, 128, 4)),
        ((64, 64), (128, 128, 4), (128, 128, 4)),
        ((80, 48), (128, 128, 4), (128, 128, 4)),
        ((128, 128), (128, 128, 2), (128, 128, 2)),
        ((192, 128), (64, 128, 2), (128, 64, 2)),  # sums of 320 columns leave no room for twice 128 more
        ((256, 128), (64, 128, 2), (128, 64, 2)),
        ((256, 256), (64, 128, 1), (128, 64, 1)),  # 256 columns at a time, of keys after those of values
    ],
    ids=str,
)
def test_sizes_by_head_dim(dims: tuple[int, int], dkv: tuple[int, ...], dq: tuple[int, ...]) -> None:
    plan = _plan(dims)
    assert plan.method == "forward_blackwell"
    tiles = tiles_of(plan.config)
    assert (tiles.dkv, tiles.dq) == (dkv, dq)
    for which in ("dkv", "dq"):
        sizes = getattr(tiles, which)
        assert sum(gradient_bytes(which, sizes, *dims).values()) <= SHARED
        assert sum(gradient_columns(which, sizes, *dims).values()) <= COLUMNS


def test_memory_counted_by_hand() -> None:
    """Of 128 keys and values, and two tiles of 128 rows; of 128 rows, and two tiles of 128 keys."""
    sizes = MosaicSizes(128, 128, 2)
    held = gradient_bytes("dkv", sizes, 128, 128)
    assert [held[name] for name in ("key", "value", "query", "d_output", "lse")] == [
        n * KIB for n in (32, 32, 64, 64, 2)
    ]
    held = gradient_bytes("dq", sizes, 128, 128)
    assert [held[name] for name in ("key", "value", "query", "d_output", "lse")] == [
        n * KIB for n in (64, 64, 32, 32, 0)
    ]
    assert sum(gradient_columns("dkv", sizes, 128, 128).values()) == 128 + 128 + 128 + 128
    assert sum(gradient_columns("dq", sizes, 128, 128).values()) == 128 + 128 + 128 + 64


def test_few_queries_have_a_tile_of_64() -> None:
    assert tiles_of(_plan((128, 128), q_len=64).config).dkv.block_q == 64


def test_blocks_of_64_keys_are_parts_of_a_tile() -> None:
    """The keys of a block are as many as a product has lines."""
    tiles = tiles_of(_plan((128, 128), mask=Blocks(np.tri(64, dtype=bool), 64, 64)).config)
    assert (tiles.dkv.block_kv, tiles.dq.block_kv) == (128, 64)


@pytest.mark.parametrize(
    ("config", "hint"),
    [({"block_q_dkv": 128}, "block_q_dkv=64"), ({"block_kv_dq": 128}, "block_kv_dq=64")],
)
def test_more_tensor_memory_than_there_is(config: dict[str, int], hint: str) -> None:
    plan = _plan((256, 128), **config)
    assert plan.method != "forward_blackwell"
    blackwell = plan.operation.implementation("forward_blackwell", plan.problem.config)
    with pytest.raises(ConfigError, match=f"columns of tensor memory.*{hint}"):
        blackwell.resolve(plan.problem, plan.placement)


def _of_latents(dims: tuple[int, int], mode: str = "train", **config: int) -> Any:
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(B200, 1, "gpu"))
    metadata = OperationMetadata(
        mesh=mesh, operation_configs={"flash_attn2": config}, tuning="off", runtime_dtype="bfloat16"
    )
    q, k = (jax.ShapeDtypeStruct((2, 2048, heads, dims[0]), "bfloat16") for heads in (128, 1))
    call = {"mask": Causal(), "query_offset": 0, "mode": mode, "softmax_scale": 0.1}
    return OperationRegistry.create("flash_attn2", metadata).plan(q, k, KeyColumns(dims[1]), **call)


# dims of latents -> (rows and stages of tiles that the gradient of keys goes through; keys and stages of the query's)
LATENTS = {
    (576, 512): ((32, 1), (32, 2)),
    (448, 384): ((32, 2), (32, 2)),
    (432, 256): ((32, 2), (32, 2)),
    (320, 256): ((64, 2), (64, 2)),
    (128, 64): ((128, 2), (128, 4)),
}


@pytest.mark.parametrize("dims", LATENTS, ids=str)
def test_latents(dims: tuple[int, int]) -> None:
    plan = _of_latents(dims)
    assert (plan.method, plan.rejected) == ("forward_blackwell", ())
    tiles = tiles_of(plan.config)
    (rows, of_keys), (keys, of_queries) = LATENTS[dims]
    assert (tiles.dkv, tiles.dq) == ((rows, 128, of_keys), (128, keys, of_queries))
    counted = plan.runs.memory(plan.problem, plan.placement, plan.config)
    for which in ("dkv", "dq"):
        held = counted[f"attnops_blackwell_{which}"]
        assert held["value"] == 0
        assert sum(held.values()) <= SHARED
        assert sum(gradient_columns(which, getattr(tiles, which), *dims, in_key=True).values()) <= COLUMNS


@pytest.mark.parametrize("value_dim", [32, 256, 384, 512])
def test_latents_of_any_dim_fit(value_dim: int) -> None:
    for dim in range(value_dim, 577, 32):
        assert _of_latents((dim, value_dim)).method == "forward_blackwell", dim


@pytest.mark.parametrize(
    ("which", "dims", "turns"),
    [
        ("dkv", (576, 512), (((0, 160, True), (160, 128, True)), ((288, 224, True), (512, 64, False)))),
        ("dkv", (576, 128), (((0, 128, True), (128, 160, False)), ((288, 160, False), (448, 128, False)))),
        ("dkv", (320, 256), (((0, 256, True), (256, 64, False)),)),
        ("dq", (576, 512), (((0, 192, True),), ((192, 192, True),), ((384, 128, True), (512, 64, False)))),
        ("dq", (320, 256), (((0, 256, True), (256, 64, False)),)),
    ],
)
def test_columns_of_each_turn(which: str, dims: tuple[int, int], turns: Any) -> None:
    """(the first, how many, whether values have them) of the parts that one product can have."""
    found = gradient_turns(which, *dims, in_key=True)
    assert tuple(tuple((one.first, one.columns, "value" in one.of) for one in turn) for turn in found) == turns


def test_memory_of_latents_counted_by_hand() -> None:
    """Beside 128 keys of 576 columns a tile of 32 rows, with 512 of the output's gradient; beside 128 rows two tiles of keys,
    and in tensor memory the output's gradient. What is stored passes through two places of 16 columns."""
    held = gradient_bytes("dkv", MosaicSizes(32, 128, 1), 576, 512, in_key=True)
    names = "key", "value", "query", "d_output", "lse", "pieces"
    assert [held[name] for name in names] == [n * KIB for n in (144, 0, 36, 32, 2, 8)]
    held = gradient_bytes("dq", MosaicSizes(128, 32, 2), 576, 512, in_key=True)
    assert [held[name] for name in names] == [n * KIB for n in (72, 0, 144, 0, 0, 8)]
    assert sum(gradient_columns("dkv", MosaicSizes(32, 128, 1), 576, 512, in_key=True).values()) == 288 + 2 * 32
    assert sum(gradient_columns("dq", MosaicSizes(128, 32, 2), 576, 512, in_key=True).values()) == 192 + 2 * 32 + 256


@pytest.mark.parametrize(
    ("dims", "config", "words"),
    [
        ((576, 512), {"block_q_dkv": 64, "num_stages_dkv": 1}, "bytes of shared memory"),
        ((576, 512), {"block_kv_dq": 64, "num_stages_dq": 1}, "columns of tensor memory.*block_kv_dq=32"),
        ((448, 256), {"block_q_dkv": 64}, "columns of tensor memory.*block_q_dkv=32"),
    ],
)
def test_declared_tiles_of_latents_that_do_not_fit(dims: tuple[int, int], config: dict[str, int], words: str) -> None:
    plan = _of_latents(dims, **config)
    assert plan.method != "forward_blackwell"
    blackwell = plan.operation.implementation("forward_blackwell", plan.problem.config)
    with pytest.raises(ConfigError, match=words):
        blackwell.resolve(plan.problem, plan.placement)
