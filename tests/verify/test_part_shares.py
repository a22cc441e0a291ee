"""Which parts of tiles a warp sees, against brute force."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Blocks, Causal, Full, Mask, SlidingWindow
from attnops.masks import Chunked, Prefix, SegmentIds
from attnops.operators.kernels.local_mask import LocalMask
from attnops.verify.gpu.part_regions import EVERY_PART
from attnops.verify.gpu_clock import loop_tiles, part_shares

Q_LEN, KV_LEN, HEADS = 200, 330, 6
LAYOUT = np.random.default_rng(0).random((HEADS, 4, 6)) < 0.4
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(70),
    "chunked": Causal() & Chunked(64),
}


def _shares(
    seen: np.ndarray,
    block: tuple[int, int],
    part: tuple[int, int],
    *,
    all_tiles: bool,
    visible: np.ndarray | None = None,
) -> tuple[float, float]:
    """(seen, cut) of [queries, keys], part by part, of tiles with a mask or of all that are visited. Keys beyond the end aren't
    seen, and rows there aren't counted. visible: what the whole mask leaves, if it isn't `seen`."""
    rows, keys = seen.shape
    padding = (0, 0), (0, -keys % block[1])
    seen, visible = np.pad(seen, padding), np.pad(seen if visible is None else visible, padding)
    found = []
    for row, key in itertools.product(range(0, rows, block[0]), range(0, keys, block[1])):
        at = np.s_[row : row + block[0], key : key + block[1]]
        tile, left = seen[at], visible[at]
        if left.any() and (all_tiles or not left.all()):
            parts = itertools.product(range(0, len(tile), part[0]), range(0, block[1], part[1]))
            some = [tile[first : first + part[0], at : at + part[1]] for first, at in parts]
            found += [(one.any(), one.any() and not one.all()) for one in some]
    return tuple(np.mean(found, axis=0)) if found else (1.0, 1.0)


@pytest.mark.parametrize("part", [(16, 32), (32, 32), (32, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("block", [(64, 32), (32, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_the_shares_of_parts(name: str, block: tuple[int, int], part: tuple[int, int]) -> None:
    """Of tiles with a mask, or of all if few are full and so have no loop of their own. No part is larger than a tile."""
    rows, keys = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None]
    seen = np.broadcast_to(np.asarray(MASKS[name].test(rows, rows, keys)), (Q_LEN, KV_LEN))
    size = min(part[0], block[0]), min(part[1], block[1])
    apart = len(loop_tiles(MASKS[name], block, "q", Q_LEN, KV_LEN, 0)) == 2
    local = LocalMask(MASKS[name], 0, Q_LEN, KV_LEN, 0)
    assert part_shares(local, block, part) == pytest.approx(_shares(seen, block, size, all_tiles=not apart))


def test_the_shares_of_heads_with_blocks_of_their_own() -> None:
    rows, keys, block, part = 192, 256, (64, 128), (16, 32)
    seen = LAYOUT.repeat(64, 1).repeat(64, 2)[:, :rows, :keys]
    of_tiles = seen.reshape(HEADS, rows // block[0], block[0], keys // block[1], block[1]).mean((2, 4))
    masked = ((of_tiles > 0) & (of_tiles < 1)).sum((1, 2))
    shares = part_shares(LocalMask(Blocks(LAYOUT, 64, 64), 0, rows, keys, 0), block, part, HEADS)
    by_head = [_shares(one, block, part, all_tiles=False) for one in seen]
    assert shares == pytest.approx(np.average(by_head, axis=0, weights=masked))


def test_the_shares_of_whole_tiles() -> None:
    """Of few tiles with a mask a warp asks at once: 16 of 136 causal ones, whose warps see some of each and none sees all."""
    local, block = LocalMask(Causal(), 0, 2048, 2048, 0), (128, 128)
    assert loop_tiles(Causal(), block, "q", 2048, 2048, 0, asks=True) == (136.0,)
    assert part_shares(local, block, (32, 32), asks=True) == pytest.approx((1.0, 16 / 136))
    assert loop_tiles(Causal(), block, "q", 1920, 1920, 0, asks=True) == (120.0,)  # one of eight is few
    assert loop_tiles(Causal(), block, "q", 1792, 1792, 0, asks=True) == (91.0, 14.0)


def test_what_is_no_span_hides_no_part() -> None:
    """The tiles are those that the whole mask leaves; few are full."""
    rows, keys = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None]
    block, part, late = (64, 64), (16, 32), Causal() & ~Prefix(96)
    assert len(loop_tiles(late, block, "q", Q_LEN, KV_LEN, 0)) == 1
    expected = _shares(keys <= rows, block, part, all_tiles=True, visible=(keys <= rows) & (keys >= 96))
    assert part_shares(LocalMask(late, 0, Q_LEN, KV_LEN, 0), block, part) == pytest.approx(expected)


def test_the_shares_of_packed_documents() -> None:
    """Ids in order, of 48, 16 and 64 tokens: of tiles of 64 rows and 32 keys, two, with eight parts of 16 rows and 16 keys each,
    lie in no two documents; nor is one cut that has a mask."""
    ids = np.repeat(np.arange(3, dtype=np.int32), (48, 16, 64))[None]
    local = LocalMask(SegmentIds(jnp.asarray(ids), jnp.asarray(ids)), 0, 128, 128, 0)
    # Of two tiles with a mask the one has keys of the first document, whose rows are three parts of four; the other has 16 keys
    # of each of two.
    assert part_shares(local, (64, 32), (16, 16)) == pytest.approx(((6 + 3 + 1) / 16, 0.0))
    assert part_shares(local, (64, 32), (16, 32)) == pytest.approx(((3 + 4) / 8, 4 / 8))
    assert part_shares(local, (64, 32), (0, 0)) == EVERY_PART


def test_shares_without_tiles_that_have_a_mask() -> None:
    assert part_shares(LocalMask(Full(), 0, 128, 128, 0), (64, 64), (16, 32)) == EVERY_PART


def test_of_too_many_parts_none_is_counted() -> None:
    """A million tokens have 2**30 parts."""
    many = LocalMask(Causal(), 0, 2**20, 2**20, 0)
    assert part_shares(many, (256, 128), (32, 32)) == EVERY_PART
