"""How much VMEM a pass takes, so that blocks can be chosen before compiling."""

from __future__ import annotations

import math
from typing import NamedTuple

from .grid import Heads
from .key_sums import leaving_rows
from .splash_blocks import PassBlocks, SplashBlocks

__all__ = ["ScoreShape", "Shape", "backward_parts", "forward_parts"]

_LANES = 128
_OVERLAPPED = 1024  # queries and keys of a tile, beyond which the logits of several sub-tiles must be counted
_MIB = 1 << 20
# What a kernel holds besides blocks and sums is up to the compiler: logits, weights and masks for which there are no registers.
# Bytes per weight of a sub-tile in bfloat16 and float32, in the middle of what was compiled (tools/vmem_counts.py): forward of
# each sub-tile that is worked on at once, backward of one.
_SPILLED = {"forward": (4.5, 9.0), "backward": (7.0, 16.0)}
# Of 64, those that hold the numbers of a sub-tile; where sub-tiles overlap, they are spilled all the same.
_REGISTERS = 56 * 4096


class ScoreShape(NamedTuple):
    """What a score takes for each query head: how many steps go by distance, bytes per query and per key of a block, and those of
    arrays by distance, which are held whole.
    """

    by_distance: int
    of_query: int
    of_key: int
    whole: int

    def part(self, heads: int, rows: int, keys: int) -> int:
        """Bytes for a block of so many queries and keys."""
        squares = self.by_distance * ((rows + keys) // _LANES - 1) * _LANES * _LANES * 4
        return heads * (2 * (rows * self.of_query + keys * self.of_key + self.whole) + squares)


class Shape(NamedTuple):
    """One device's problem, as far as memory is concerned. itemsize: bytes per element in the run-time dtype; for key and value
    as given, (itemsize, whether there is a scale).
    """

    q_len: int
    kv_len: int
    heads: Heads
    dim: int
    value_dim: int
    itemsize: int
    dense_itemsize: int  # bytes per weight of bias and mask arrays together; 0 without
    key: tuple[int, bool]
    value: tuple[int, bool]
    device_kind: str = ""
    value_in_key: bool = False  # its values are loaded, and their gradients summed, as parts of their keys
    score: ScoreShape | None = None


def forward_parts(shape: Shape, blocks: SplashBlocks, *, at_most: bool = False) -> dict[str, int]:
    """Bytes by what they hold: blocks (twice, for the pipeline), sums, and the current tile.

    XLA may keep a small tensor in VMEM whole; a kernel then takes less, as it needs no blocks of it. at_most: as if nothing of
    the tile were in registers, to choose blocks by.
    """
    tiles, kv_tile, rows, keys = len(shape.heads.in_tile), shape.heads.kv_tile, *blocks.forward[:2]
    dim = _lanes(shape.dim)
    value_dim = out_dim = _lanes(shape.value_dim)
    working = _forward_tile(shape, blocks)
    if at_most:
        working = max(working, _whole_forward_tile(shape, blocks))
    columns = 2 * _LANES
    if blocks.transposed_tiles:
        working += kv_tile * keys * value_dim * shape.itemsize  # the values, transposed
        value_dim, columns = _sublanes(shape.value_dim), 2 * 8
    parts = {
        "query (block_q)": 2 * tiles * rows * dim * shape.itemsize,
        "output and lse (block_q)": 2 * tiles * rows * (out_dim * shape.itemsize + 8 * 4),
        "mask arrays and bias (block_q x block_kv)": 2 * shape.dense_itemsize * rows * keys * tiles,
        "sums (block_q)": tiles * rows * (columns + value_dim) * 4,
    }
    if shape.score is not None:
        parts["score (block_q, block_kv)"] = shape.score.part(tiles, rows, keys)
    loaded = (("key", dim, shape.key), ("value", out_dim, shape.value))
    for name, width, (itemsize, scaled) in loaded[: 1 if shape.value_in_key else 2]:
        parts[f"{name} (block_kv)"] = 2 * kv_tile * keys * (width * itemsize + 8 * 4 * scaled)
        if itemsize != shape.itemsize:
            working += blocks.forward.compute_kv * width * (shape.itemsize + 4)  # on its way through float32
    return parts | {"logits and weights (block_q_compute x block_kv_compute)": working}


def _forward_tile(shape: Shape, blocks: SplashBlocks) -> int:
    """Bytes that the compiler takes for the logits and weights of a tile: of one sub-tile, or of the two or three that
    overlap.
    """
    subtile, tile = math.prod(blocks.forward.subtile), math.prod(blocks.forward[:2])
    max_units = 2 if blocks.transposed_tiles or tile <= _OVERLAPPED**2 else 3
    at_once = max(1, min(max_units, tile // subtile // 2))
    spilled = _spilled("forward", at_once * subtile, shape.itemsize, alone=subtile == tile)
    # On a v4 the compiler begins with the products of all sub-tiles if the head dim is wider than a register.
    return (
        max(spilled, 4 * tile) if shape.device_kind == "TPU v4" and shape.dim > _LANES and subtile < tile else spilled
    )


def _whole_forward_tile(shape: Shape, blocks: SplashBlocks) -> int:
    """The same if registers held nothing of a sub-tile, and of those in flight."""
    subtile, tile = math.prod(blocks.forward.subtile), math.prod(blocks.forward[:2])
    working = _working(subtile, shape.itemsize) + blocks.forward.pipeline_depth * subtile * 4  # whose logits wait
    # The compiler begins with later sub-tiles: 15 MiB in a compiled program of 2048 x 2048, 49 of 4096 x 4096, 76 with 4096 rows
    # in a sub-tile.
    if not blocks.transposed_tiles and subtile < tile and tile > _OVERLAPPED**2:
        working = max(working + 2 * tile, working * (4 if blocks.forward.compute_q > 2 * _OVERLAPPED else 1))
    return working


def _spilled(what: str, weights: int, itemsize: int, alone: bool) -> int:
    """Bytes for so many weights of sub-tiles that are worked on at once, or of one that is alone in its tile."""
    bytes_ = int(weights * _SPILLED[what][itemsize == 4])
    return max(0, bytes_ - _REGISTERS) if alone else bytes_


def backward_parts(shape: Shape, blocks: SplashBlocks, *, at_most: bool = False) -> dict[str, dict[str, int]]:
    """The same for each backward pass, by the name of its kernel."""
    transposed = blocks.stationary_weights
    if blocks.dq is None:
        sums = blocks.block_kv_dkv_sums
        return {"backward": _backward_pass(shape, blocks.dkv, "dkv", transposed, True, True, at_most, sums)}
    return {
        "dkv": _backward_pass(shape, blocks.dkv, "dkv", transposed, False, True, at_most),
        "dq": _backward_pass(shape, blocks.dq, "dq", transposed, True, False, at_most),
    }


def _backward_pass(
    shape: Shape,
    blocks: PassBlocks,
    suffix: str,
    transposed: bool,
    of_query: bool,
    of_keys: bool,
    at_most: bool,
    at_a_time: int | None = None,
) -> dict[str, int]:
    tiles, kv_tile, size = len(shape.heads.in_tile), shape.heads.kv_tile, shape.itemsize
    rows, keys, subtile = blocks.block_q, blocks.block_kv, math.prod(blocks.subtile)
    dim, dims = _lanes(shape.dim), _lanes(shape.dim) + _lanes(shape.value_dim)
    q, kv = f"block_q_{suffix}", f"block_kv_{suffix}"
    parts = {
        f"query, gradient of the output, two numbers a row ({q})": 2 * tiles * rows * (dims * size + 2 * 8 * 4),
        f"key and value ({kv})": 2 * kv_tile * keys * (dim if shape.value_in_key else dims) * size,
        f"mask arrays and bias ({q} x {kv})": 2 * shape.dense_itemsize * rows * keys * tiles,
    }
    if shape.score is not None:
        parts[f"score ({q}, {kv})"] = shape.score.part(tiles, rows, keys)
    working = _spilled("backward", subtile, size, alone=subtile == rows * keys)
    if at_most:
        whole = (
            _working(subtile, size) * 2 + blocks.pipeline_depth * subtile * 2 * 4
        )  # logits and the weights' gradients that wait
        transposed_elements = tiles * rows * (dims if of_keys else 0) + kv_tile * keys * (dim if of_query else 0)
        working = max(working, whole + transposed_elements * size * transposed)
    sum_dim, sum_dims = dim, dims
    if transposed:
        sum_dim, sum_dims = _sublanes(shape.dim), _sublanes(shape.dim) + _sublanes(shape.value_dim)
    key_dims = dims
    if shape.value_in_key:
        key_dims, sum_dims = dim, sum_dim
    in_parts = at_a_time is not None and at_a_time < shape.kv_len
    if of_query:
        moved = 2 * 2 * 4 if in_parts else 2 * size  # in float32 between parts of the keys, coming and going
        parts[f"gradient of the query and its sum ({q})"] = tiles * rows * (dim * moved + sum_dim * 4)
    if of_keys:
        padded = math.ceil(shape.kv_len / keys) * keys
        length = min(padded, at_a_time or padded) if of_query else keys
        if of_query:
            where = f"{length if in_parts else f'all {shape.kv_len}'} keys: block_kv_dkv_sums"
            parts[f"sums of the gradients of key and value ({where})"] = kv_tile * length * sum_dims * 4
            leaving = max(leaving_rows(min(length, padded - first), first) for first in range(0, padded, length))
            parts["rows of these gradients that leave"] = 2 * leaving * key_dims * size
        else:
            parts[f"gradients of key and value and their sums ({kv})"] = (
                kv_tile * length * (key_dims * 2 * size + sum_dims * 4)
            )
    name = f"{q}_compute" if suffix == "dkv" else q
    return parts | {f"logits, weights and their gradients ({name} x {kv}_compute)": working}


def _working(weights: int, itemsize: int) -> int:
    """Logits of a tile in float32, and the weights in the input's type; a float32 product splits both factors in three."""
    return weights * (6 if itemsize == 2 else 18)


def _sublanes(dim: int) -> int:
    return math.ceil(dim / 8) * 8


def _lanes(dim: int) -> int:
    return math.ceil(dim / _LANES) * _LANES
