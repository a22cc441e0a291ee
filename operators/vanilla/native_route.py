"""The rule that chooses how forward_native works: whole logits, blocks, or a few queries against many keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...masks import Full
from ...planning import AttentionProblem, Placement, Route
from ...planning.placement import LocalShape
from ...planning.text import bytes_text
from ...symbolic import is_symbolic, surely
from ..choices.mask_blocks import block_remarks, fitted_block, has_blocks, heads_differ
from .vanilla_config import VanillaConfig

__all__ = ["NativeRoute", "native_block_remarks", "native_route"]


@dataclass(frozen=True)
class NativeRoute(Route):
    """name: 'plain', 'blockwise', 'decode' or 'decode_rows'. Sizes of a tile, None where the logits are built whole.

    block_q, block_kv, heads_per_tile: query rows, keys and kv heads processed at once; the backward pass has its own rows
    and keys. On the decode routes block_kv is the number of keys in one piece, and the other two are only for the backward pass.
    """

    block_q: int | None = None
    block_kv: int | None = None
    heads_per_tile: int | None = None
    block_q_backward: int | None = None
    block_kv_backward: int | None = None

    @property
    def whole(self) -> bool:
        return self.name == "plain"

    def tile(self, backward: bool) -> tuple[int | None, int | None]:
        return (self.block_q_backward, self.block_kv_backward) if backward else (self.block_q, self.block_kv)


# For the measurements behind these numbers see benchmarks/native-path.md.
# Logits of a batch row so small that one product over the whole batch beats a loop over it, while those of the batch stay in
# the cache.
_PLAIN_ROW_BYTES, _PLAIN_BYTES = 512 << 10, 8 << 20
# Lengths up to this are one tile, of as many heads as these bytes hold.
_ONE_TILE, _ONE_TILE_BYTES = 512, 8 << 20
_TILE_CELLS = 1 << 18  # logits of a tile of one head: the fewest that XLA:CPU spreads over its threads
_ACCELERATOR_CELLS = 1 << 25  # per tile over all heads: 128 MiB in float32
_RING_BLOCK = 128  # the smallest block in a ring
_SYMBOLIC_BLOCK = 128  # lengths that aren't known are padded to whole blocks, so these are small
_MASK_BLOCK = 64  # smaller mask blocks are joined into tiles of this many rows and keys
_DECODE_ROWS = 16  # query rows over all heads, up to which block-diagonal products are cheap
_ACCELERATOR_ROWS = 32  # the same on an accelerator, as timed on an H200 (benchmarks/gpu.md)
_DECODE_KEYS = 2048
_PIECES = 8
# decode_rows, on a CPU:
_ROWS_A_HEAD = 16  # query rows of a kv head, up to which they read a key from the cache faster than products copy it
_CACHE_NUMBERS = 1 << 21  # keys' and values' numbers from which on products, or their copies of keys, leave the caches
_NUMBERS_A_LOGIT = 32  # bfloat16 numbers of a key for each row that reads it; with fewer, products take less time
_ROW_NUMBERS = 1 << 17  # those of a batch row that are worth a step of a loop
_BLOCK_CELLS = 1 << 14  # logits of a block, so that what a block makes stays in the caches
_MIN_BLOCK, _MAX_BLOCK = 64, 2048  # keys


def native_route(problem: AttentionProblem, placement: Placement, config: VanillaConfig) -> NativeRoute:
    """Choose from the shapes that one device gets; a path and blocks declared in the VanillaConfig are used as they are."""
    local = placement.local
    declared = config.path
    logits = local.batch * local.q_heads * local.q_len * local.kv_len * _itemsize(problem.softmax_dtype)
    size = f"{bytes_text(logits)} per device"
    if "return_weights" in problem.features:
        return NativeRoute("plain", "the attention weights are requested, and only whole logits give them")
    if _itemsize(problem.softmax_dtype) < 4:
        return NativeRoute("plain", f"the blocks' softmax is float32 or wider, but {problem.softmax_dtype} is declared")
    if "length" in problem.symbolic and has_blocks(problem):
        return NativeRoute("plain", "how many blocks of the mask a symbolic length has isn't known")
    blocks = _blocks(problem, placement, config.block_q, config.block_kv)
    if placement.sequence.ring_axes:
        return NativeRoute("blockwise", "keys arrive one part at a time, and parts are merged by their lse", *blocks)
    if declared == "plain":
        return NativeRoute("plain", f"declared; the logits take {size}")
    rows = local.q_heads * local.q_len
    # If keys stay split, a part takes the same route as the whole: whole logits would copy it.
    seen = problem.kv_len if placement.sequence.strategy == "split_kv" else local.kv_len
    # The decode route cuts the keys into a known number of chunks.
    max_rows = _DECODE_ROWS if problem.platform == "cpu" else _ACCELERATOR_ROWS
    few = not is_symbolic(seen) and surely(lambda: rows <= max_rows and seen >= _DECODE_KEYS)
    if declared == "decode_rows" or (declared is None and _in_place(problem, local, seen, few)):
        few_rows = local.q_heads // local.kv_heads * local.q_len
        why = f"{few_rows} query rows a KV head, at most {_ROWS_A_HEAD}, see {local.batch} x {seen} keys on a CPU"
        block = _block_of_rows(local, config.block_kv)
        return NativeRoute("decode_rows", "declared" if declared else why, blocks[0], block, *blocks[2:])
    if declared == "decode" or (declared is None and few):
        why = "declared" if declared else f"{rows} query rows over all heads, at most {max_rows}, see {seen} keys"
        piece = max(_DECODE_KEYS, math.ceil(local.kv_len / _PIECES))
        piece = min(config.block_kv or piece, local.kv_len)
        return NativeRoute("decode", why, blocks[0], piece, *blocks[2:])
    if declared is None and surely(lambda: _small(problem, local, logits)):
        return NativeRoute("plain", f"the logits take {size}: small enough to build whole")
    return NativeRoute("blockwise", f"{'declared; ' if declared else ''}whole logits would take {size}", *blocks)


def _small(problem: AttentionProblem, local: LocalShape, logits: int) -> bool:
    """Whether logits of that many bytes are built whole: on an accelerator, those that one tile may have. Those of a symbolic
    batch are judged by a row's."""
    if is_symbolic(local.batch):
        return logits // local.batch <= _PLAIN_ROW_BYTES
    if problem.platform != "cpu" and problem.mode != "__train__":  # whose backward pass would keep the weights
        return local.batch * local.q_heads * local.q_len * local.kv_len <= _ACCELERATOR_CELLS
    alone = 2 if local.batch == 1 else 1  # a single row has no loop to avoid
    return logits <= _PLAIN_BYTES and logits <= local.batch * _PLAIN_ROW_BYTES // alone


def _in_place(problem: AttentionProblem, local: LocalShape, kv_len: int, products: bool) -> bool:
    """Whether a CPU attends to the cache in place, without products; `products` says whether the decode route would be taken.

    Where keys are hidden, products would need a copy of the values, with zeros for the hidden ones.
    """
    if problem.platform != "cpu" or is_symbolic(kv_len):
        return False
    rows = local.q_heads // local.kv_heads * local.q_len
    if not surely(lambda: rows <= _ROWS_A_HEAD):
        return False
    if (
        products
        and problem.runtime_dtype == "bfloat16"
        and not surely(lambda: rows * _NUMBERS_A_LOGIT <= problem.head_dim)
    ):
        return False
    row = local.kv_heads * kv_len * problem.token_dim
    large = row >= _ROW_NUMBERS and surely(lambda: row * local.batch >= _CACHE_NUMBERS)
    return large or (products and not isinstance(problem.mask, Full))


def _block_of_rows(local: LocalShape, declared: int | None) -> int:
    """Keys in a block on the route decode_rows: a multiple of 8, unless there are fewer."""
    if local.kv_len < 8:
        return local.kv_len
    max_block = declared or max(_MIN_BLOCK, _BLOCK_CELLS // (local.q_heads * local.q_len))
    # Two blocks at least: what a loop does once, XLA takes out of the loop, and fuses it with what comes after.
    return max(8, min(max_block, _MAX_BLOCK, local.kv_len // 2) // 8 * 8)


def _blocks(
    problem: AttentionProblem, placement: Placement, block_q: int | None, block_kv: int | None
) -> tuple[int, int, int, int, int]:
    """(block_q, block_kv, heads_per_tile, and the backward pass's block_q, block_kv)."""
    local = placement.local
    group = local.q_heads // local.kv_heads
    if problem.platform != "cpu":
        # An accelerator works best on all heads at once; its memory then limits the tile.
        max_q = max_kv = 512
        heads = _divisor(local.kv_heads, _ACCELERATOR_CELLS // (group * max_q * max_kv))
    elif "length" in problem.symbolic:
        max_q = max_kv = _SYMBOLIC_BLOCK
        heads = 1
    elif max(local.q_len, local.kv_len) <= _ONE_TILE and not placement.sequence.ring_axes:
        max_q = max_kv = _ONE_TILE
        heads = _divisor(local.kv_heads, _ONE_TILE_BYTES // (4 * group * local.q_len * local.kv_len))
    else:
        # One kv head at a time. Smaller blocks skip more.
        rows = 1024 if isinstance(problem.mask, Full) or group > 1 else 512
        max_q, max_kv, heads = max(8, rows // group), _TILE_CELLS // rows, 1
        if placement.sequence.ring_axes:
            # At least two blocks, because a single one isn't skipped where nothing is visible.
            max_q, max_kv = (
                min(max_block, max(_RING_BLOCK, math.ceil(length / 2)))
                for max_block, length in ((max_q, local.q_len), (max_kv, local.kv_len))
            )
    if heads_differ(problem):
        heads = 1  # the visible blocks of a group's heads are merged, but not those of different groups
    fitted = []
    for axis, length, declared, max_block in (
        ("q", local.q_len, block_q, max_q),
        ("kv", local.kv_len, block_kv, max_kv),
    ):
        if is_symbolic(length):
            fitted.append(declared or max_block)
            continue
        of_mask = max_block if declared else fitted_block(problem.mask, axis, max_block, length, _MASK_BLOCK)
        # Keep sizes that the mask's blocks suggest: balanced sizes would cross block boundaries.
        fitted.append(_balanced(length, declared or max_block) if of_mask == max_block else min(of_mask, length))
    sizes = fitted[0], fitted[1]
    return *sizes, heads, *sizes


def native_block_remarks(problem: AttentionProblem, placement: Placement, route: NativeRoute) -> tuple[str, ...]:
    """What a plan says of a mask of blocks on this route."""
    local = placement.local
    if route.whole:
        return block_remarks(problem, placement, local.q_len, local.kv_len, 1)
    if route.name in ("decode", "decode_rows"):
        return block_remarks(problem, placement, local.q_len, route.block_kv or local.kv_len, 1)
    groups = local.kv_heads // (route.heads_per_tile or 1)
    tables = groups if heads_differ(problem) else 1
    return block_remarks(problem, placement, route.block_q or 1, route.block_kv or 1, tables)


def _itemsize(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]


def _divisor(number: int, max_divisor: int) -> int:
    """The largest divisor of a number that is at most `max_divisor`, and at least 1."""
    return next(n for n in range(max(1, min(number, max_divisor)), 0, -1) if number % n == 0)


def _balanced(length: int, max_block: int, unit: int = 8) -> int:
    """A block of at most about `max_block` that cuts a length into equal blocks with the least padding."""
    count = math.ceil(length / max_block)
    block = math.ceil(length / count)
    return block if count == 1 else math.ceil(block / unit) * unit
