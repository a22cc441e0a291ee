"""The sizes of the tiles of Blackwell's gradients, and what can be declared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mosaic_plans import B200, mosaic_plan

from attnops import Causal, ConfigError
from attnops.masks import Blocks
from attnops.operators.blackwell.kernel.backward_sizes import gradient_bytes, gradient_columns
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
