"""How the Blackwell kernels' sizes are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

from ...errors import ConfigError
from ...planning import AttentionProblem
from ...scores.steps import Lookup, Product
from ..mosaic.kernel.linker import registers_move
from ..mosaic.kernel.mosaic_sizes import MosaicSizes, column_parts
from ..mosaic.mosaic_sizes import MOSAIC_FIELDS, Sizing, columns
from .kernel.backward_sizes import FEW, STEPS, gradient_bytes, gradient_columns
from .kernel.blackwell_sizes import KEYS, ROWS, TENSOR_COLUMNS, shared_bytes, tensor_columns

__all__ = ["BLACKWELL_FIELDS", "BlackwellSizing"]

# By pass: rows of a block of threads or of a tile, and keys. A block that sums gradients has as many as a product has lines.
_ROWS = {"forward": (ROWS, 2 * ROWS), "dkv": (FEW, *STEPS), "dq": (ROWS,)}
_KEYS = {"forward": KEYS, "dkv": (ROWS,), "dq": (FEW, *STEPS)}
# The rows of a tile for fewer queries.
_LEAST_ROWS = {"forward": ROWS, "dkv": STEPS[0], "dq": ROWS}
_OF_LATENTS = (*itertools.product((*reversed(STEPS), FEW), (4, 2)), (FEW, 1))
# Of keys that are values too, which take more shared memory: two stages before more keys.
_LATENTS = {
    "forward": (
        *(MosaicSizes(rows, 64, stages) for rows in (2 * ROWS, ROWS) for stages in (4, 2)),
        *(MosaicSizes(ROWS, *rest) for rest in ((32, 2), (64, 1))),
    ),
    "dkv": tuple(MosaicSizes(rows, ROWS, stages) for rows, stages in _OF_LATENTS),
    "dq": tuple(MosaicSizes(ROWS, *rest) for rest in _OF_LATENTS),
}
# What can be declared, by field.
BLACKWELL_FIELDS = {
    MOSAIC_FIELDS[which][number]: sizes[which] for which in MOSAIC_FIELDS for number, sizes in enumerate((_ROWS, _KEYS))
}


class BlackwellSizing(Sizing):
    """What doesn't fit into shared or tensor memory is passed over: two softmaxes before one, and 128 keys before 64. Stages are
    powers of two: the warp that issues products has few registers, and another remainder takes some."""

    device: ClassVar[str] = "b200"
    lines: ClassVar[int] = ROWS
    least: ClassVar[Mapping[str, int]] = {which: max(STEPS[0], keys[0]) for which, keys in _KEYS.items()}
    of_latents: ClassVar[tuple[str, ...]] = tuple(MOSAIC_FIELDS)
    tiles: ClassVar[Mapping[str, tuple[MosaicSizes, ...]]] = {
        "forward": (
            *(MosaicSizes(2 * ROWS, *rest) for rest in ((128, 4), (128, 2), (64, 4), (64, 2))),
            *(MosaicSizes(ROWS, *rest) for rest in ((128, 4), (128, 2), (128, 1), (64, 2), (64, 1))),
        ),
        "dkv": tuple(MosaicSizes(rows, ROWS, n) for rows, n in ((128, 4), (128, 2), (64, 4), (64, 2), (64, 1))),
        "dq": tuple(MosaicSizes(ROWS, *rest) for rest in ((128, 4), (128, 2), (64, 4), (64, 2), (64, 1))),
    }

    def tiles_for(self, which: str, problem: AttentionProblem, rows: int) -> tuple[MosaicSizes, ...]:
        """See Sizing."""
        return self.tiles[which] if problem.value_columns is None else _LATENTS[which]

    def rows(self, which: str, sizes: MosaicSizes, q_len: int) -> int:
        """See Sizing."""
        return sizes.block_q if q_len > _LEAST_ROWS[which] else min(sizes.block_q, _LEAST_ROWS[which])

    def passed_over(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """See Sizing. Dropout's numbers, and those that a score reads for each pair, take the registers of so many logits; beside
        a warpgroup that widens keys and values, two for softmaxes have registers for fewer keys too, as where all keep an equal
        share."""
        beside_logits = "dropout" in problem.features or _reads_pairs(problem)
        widened = bool(problem.quantised) and sizes.block_q > ROWS
        fewer = beside_logits or widened or not registers_move()
        return which == "forward" and fewer and sizes.block_kv > STEPS[0]

    def fits(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """See Sizing."""
        return self.fits_shared(which, problem, sizes) and _columns(which, problem, sizes) <= TENSOR_COLUMNS

    def shared_of(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> dict[str, int]:
        """See Sizing."""
        dims, in_key = columns(problem), problem.value_columns is not None
        if which == "forward":
            return shared_bytes(sizes, *dims, in_key=in_key, stored=tuple(problem.quantised))
        return gradient_bytes(which, sizes, *dims, in_key=in_key)

    def check(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> None:
        """Errors: ConfigError for sizes whose tiles take more tensor memory than there is, or can't be widened."""
        taken, (block_q, block_kv, _) = _columns(which, problem, sizes), MOSAIC_FIELDS[which]
        if which == "forward" and problem.quantised and sizes.block_kv < STEPS[0]:
            raise ConfigError(
                f"FlashAttention2Config: {block_kv}={sizes.block_kv}, with keys or values of 8 bits a number: {STEPS[0]} of them "
                f"are widened at once. Hint: {block_kv}={STEPS[0]}."
            )
        if taken > TENSOR_COLUMNS:
            name, field = ("block_kv", block_kv) if which == "dq" else ("block_q", block_q)
            possible = BLACKWELL_FIELDS[field]
            smaller = (n for n in possible if _columns(which, problem, sizes._replace(**{name: n})) <= TENSOR_COLUMNS)
            hint = f"{field}={max(smaller, default=possible[0])}"
            raise ConfigError(
                f"FlashAttention2Config: {block_q}={sizes.block_q} and {block_kv}={sizes.block_kv}, with head_dim="
                f"{problem.head_dim} and value dim {problem.value_dim}, take {taken} columns of tensor memory; there are "
                f"{TENSOR_COLUMNS}. Hint: {hint}."
            )

    def near(self, which: str, sizes: MosaicSizes) -> list[MosaicSizes]:
        """See Sizing."""
        keys = [n for n in (sizes.block_kv, sizes.block_kv * 2, sizes.block_kv // 2) if n in _KEYS[which]]
        blocks = [n for n in (sizes.block_q, sizes.block_q * 2, sizes.block_q // 2) if n in _ROWS[which]]
        stages = [n for n in (sizes.stages, sizes.stages + 1, sizes.stages - 1) if n >= 1]
        return [MosaicSizes(q, kv, n) for q, n, kv in itertools.product(blocks, stages, keys)]


def _reads_pairs(problem: AttentionProblem) -> bool:
    """Whether a score reads a number for each pair of a query and a key."""
    score = problem.score
    return score is not None and not score.step_names(problem.contiguous_positions).isdisjoint(
        {Lookup.name, Product.name}
    )


def _columns(which: str, problem: AttentionProblem, sizes: MosaicSizes) -> int:
    """Columns of tensor memory."""
    if which == "forward":
        value_dim = columns(problem)[1]
        return tensor_columns(sizes, value_dim // column_parts(value_dim))
    in_key = problem.value_columns is not None
    return sum(gradient_columns(which, sizes, *columns(problem), in_key=in_key).values())
