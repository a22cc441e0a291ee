"""How the Hopper kernels' sizes are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

from ...errors import ConfigError
from ...masks import SegmentIds
from ...planning import AttentionProblem
from ..choices.mask_blocks import in_whole_blocks
from ..mosaic.kernel.linker import registers_move
from ..mosaic.kernel.mosaic_sizes import MosaicSizes, column_parts, equal_share
from ..mosaic.mosaic_sizes import MOSAIC_FIELDS, Sizing, columns
from .kernel.hopper_sizes import FEW, KEYS, ROWS, conversions, divided, latent_halves, shared_bytes

__all__ = ["HopperSizing"]

_STAGES_FROM_DIM = 64
# Of one warpgroup's rows: a tile is loaded in more time than it is computed, so that as many as fit are on their way.
_FEW = tuple(MosaicSizes(ROWS, 64, stages) for stages in range(8, 0, -1))
# Where values are a part of their keys, each of two warpgroups has half of the columns of a gradient.
_LATENTS = {
    "dkv": tuple(MosaicSizes(FEW, ROWS, stages) for stages in (4, 2, 1)),
    "dq": tuple(MosaicSizes(ROWS, FEW, stages) for stages in (4, 2, 1)),
}
# What takes registers beside the numbers that are counted: then a tile for the gradients of key and value has 64 rows. Segment
# ids that each visible key has in common with its row do so only where they aren't in order, blocks where tiles are cut by them.
_IN_REGISTERS = frozenset({
    "segment_ids", "positions", "dense_mask", "blocks", "chosen_blocks", "bias", "score", "logits_soft_cap", "dropout",
})  # fmt: skip
# Registers of a thread that computes, for the numbers that `_registers` counts.
_REGISTERS = {"forward": 192, "dkv": 224, "dq": 208}
# Where registers don't move: what a thread has beside those numbers, and further tiles, by pass.
_BESIDE = {"forward": 48, "dkv": 16, "dq": 24}
_FEWER = {
    "forward": tuple(MosaicSizes(ROWS, *rest) for rest in ((128, 4), (128, 2), (64, 4), (64, 2), (64, 1))),
    "dq": tuple(MosaicSizes(ROWS, *rest) for rest in ((64, 4), (64, 2), (64, 1), (FEW, 4), (FEW, 2))),
}
_OF_CONVERSION = (0, 32, 72)  # that each of two warpgroups has fewer, by how many others convert keys and values


class HopperSizing(Sizing):
    """What doesn't fit into shared memory or registers is passed over."""

    device: ClassVar[str] = "h100"
    lines: ClassVar[int] = ROWS
    least: ClassVar[Mapping[str, int]] = dict.fromkeys(MOSAIC_FIELDS, ROWS)
    of_latents: ClassVar[tuple[str, ...]] = tuple(MOSAIC_FIELDS)
    # One stage is loaded while another is read; two more tiles fit at 64, where a tile takes half the time. The rest of a
    # division by another number than a power of two takes a twentieth of a turn.
    tiles: ClassVar[Mapping[str, tuple[MosaicSizes, ...]]] = {
        "forward": tuple(
            MosaicSizes(2 * ROWS, *rest) for rest in ((128, 4), (128, 2), (64, 4), (64, 3), (64, 2), (64, 1))
        ),
        "dkv": (
            MosaicSizes(128, 2 * ROWS, 2),
            *(MosaicSizes(64, *rest) for rest in ((2 * ROWS, 4), (2 * ROWS, 2), (ROWS, 2), (ROWS, 1))),
        ),
        "dq": tuple(MosaicSizes(2 * ROWS, *rest) for rest in ((128, 2), (64, 4), (64, 2), (64, 1))),
    }

    def tiles_for(self, which: str, problem: AttentionProblem, rows: int) -> tuple[MosaicSizes, ...]:
        """See Sizing."""
        # Beside warpgroups that convert keys or values, two that compute would have registers for fewer columns.
        wide = problem.quantised and columns(problem)[1] > 128
        if which != "forward" and problem.value_columns is not None:
            return _LATENTS[which]
        few = rows <= ROWS or wide or column_parts(columns(problem)[1]) > 1
        if which == "forward" and few:
            return _FEW
        return self.tiles[which] if registers_move() else (*self.tiles[which], *_FEWER.get(which, ()))

    def rows(self, which: str, sizes: MosaicSizes, q_len: int) -> int:
        """See Sizing."""
        del which
        return sizes.block_q if q_len > ROWS else min(sizes.block_q, ROWS)

    def passed_over(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """See Sizing."""
        if sizes.stages > 2 and sizes.block_kv > 64 and max(columns(problem)) > _STAGES_FROM_DIM:
            return True
        known = {"segment_ids"} if _ids_of_all(problem) else set[str]()
        if in_whole_blocks(problem, sizes.block_q, sizes.block_kv):
            known |= {"blocks", "chosen_blocks"}
        return which == "dkv" and sizes.block_q > ROWS and bool(problem.features & _IN_REGISTERS - known)

    def fits(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """See Sizing."""
        if which == "dkv" and _together(problem) and sizes.block_kv != ROWS:
            return False
        fewer = not registers_move() and not _shares_lines(which, problem)
        most = _most_of_equal_share(which, problem, sizes) if fewer else _most(which, problem, sizes)
        return self.fits_shared(which, problem, sizes) and _registers(which, problem, sizes) <= most

    def shared_of(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> dict[str, int]:
        """See Sizing."""
        stored = tuple(problem.quantised) if which == "forward" else ()
        return shared_bytes(which, sizes, *columns(problem), in_key=problem.value_columns is not None, stored=stored)

    def check(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> None:
        """Errors: ConfigError for keys that a block can't hold."""
        if which == "forward" and column_parts(columns(problem)[1]) > 1 and sizes.block_q != ROWS:
            raise ConfigError(
                f"FlashAttention2Config: block_q={sizes.block_q}, with value dim {problem.value_dim}: the columns of {ROWS} rows "
                f"are shared by the warpgroups that compute. Hint: block_q={ROWS}."
            )
        lines = {"dkv": 1, "dq": 0}.get(which)
        if lines is not None and _shares_lines(which, problem) and (sizes.block_q, sizes.block_kv)[lines] != ROWS:
            name, given = MOSAIC_FIELDS[which][lines], (sizes.block_q, sizes.block_kv)[lines]
            raise ConfigError(
                f"FlashAttention2Config: {name}={given}, with head_dim={problem.head_dim} and value dim {problem.value_dim}: two "
                f"warpgroups share the sums of the same {ROWS} {('rows', 'keys')[lines]}. Hint: {name}={ROWS}."
            )

    def near(self, which: str, sizes: MosaicSizes) -> list[MosaicSizes]:
        """See Sizing."""
        possible = KEYS if which != "dq" else (FEW, *KEYS)
        keys = [n for n in (sizes.block_kv, sizes.block_kv * 2, sizes.block_kv // 2) if n in possible]
        least = FEW if which == "dkv" else ROWS
        blocks = [n for n in (sizes.block_q, sizes.block_q * 2, sizes.block_q // 2) if least <= n <= 2 * ROWS]
        stages = [n for n in (sizes.stages, sizes.stages + 1, sizes.stages - 1) if n >= 1]
        if which == "dkv":
            keys = [n for n in keys if n <= 2 * ROWS]
        return [MosaicSizes(q, kv, n) for q, n, kv in itertools.product(blocks, stages, keys)]


def _ids_of_all(problem: AttentionProblem) -> bool:
    """Whether segment ids are a part that each visible key passes, and no other part has any."""
    whole, leaves = ([one.kind for one in some] for some in (problem.mask.conjuncts(), problem.mask.leaves()))
    return whole.count(SegmentIds.kind) == leaves.count(SegmentIds.kind) == 1


def _together(problem: AttentionProblem) -> bool:
    """Whether two warpgroups sum the gradients of the same keys."""
    return problem.value_columns is not None or divided(*columns(problem))


def _most(which: str, problem: AttentionProblem, sizes: MosaicSizes) -> int:
    """Registers for the numbers that are counted."""
    shared = which == "forward" and sizes.block_q > ROWS
    converting = conversions(tuple(problem.quantised), columns(problem)[1])
    return _REGISTERS[which] - (_OF_CONVERSION[len(converting)] if shared else 0)


def _shares_lines(which: str, problem: AttentionProblem) -> bool:
    """Whether two warpgroups have the same rows or keys, whatever the sizes."""
    if which == "forward":
        return column_parts(columns(problem)[1]) > 1
    return _together(problem) if which == "dkv" else problem.value_columns is not None


def _most_of_equal_share(which: str, problem: AttentionProblem, sizes: MosaicSizes) -> int:
    """Registers for the numbers that are counted, where each warpgroup keeps what it begins with."""
    computing = (sizes.block_kv if which == "dkv" else sizes.block_q) // ROWS
    converting = len(conversions(tuple(problem.quantised), columns(problem)[1])) if which == "forward" else 0
    return equal_share(computing + 1 + converting) - _BESIDE[which]


def _registers(which: str, problem: AttentionProblem, sizes: MosaicSizes) -> int:
    """A thread's numbers: sums, logits, the gradients of weights, and 16-bit weights. Of a warpgroup's 64 rows, 128 threads hold
    half a row each."""
    dim, value_dim = columns(problem)
    if which == "forward":
        return value_dim // column_parts(value_dim) // 2 + sizes.block_kv // 2 + sizes.block_kv // 4
    block = sizes.block_kv if which == "dq" else sizes.block_q
    if problem.value_columns is not None:
        return max(sum(one.columns for one in part) for part in latent_halves(dim, value_dim)) // 2 + block + block // 4
    if which == "dq":
        return dim // 2 + block + block // 4
    sums = max(dim, value_dim) if divided(dim, value_dim) else dim + value_dim
    return sums // 2 + block + block // 4
