"""How the Blackwell kernels' sizes are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

from ...errors import ConfigError
from ...planning import AttentionProblem
from ..mosaic.kernel.mosaic_sizes import MosaicSizes
from ..mosaic.mosaic_sizes import MOSAIC_FIELDS, Sizing
from .kernel.blackwell_sizes import KEYS, ROWS, TENSOR_COLUMNS, shared_bytes, tensor_columns

__all__ = ["BlackwellSizing"]


class BlackwellSizing(Sizing):
    """What doesn't fit into shared or tensor memory is passed over: two softmaxes before one, and 128 keys before 64. Stages are
    powers of two: the warp that issues products has few registers, and another remainder takes some."""

    device: ClassVar[str] = "b200"
    least: ClassVar[int] = KEYS[0]
    tiles: ClassVar[Mapping[str, tuple[MosaicSizes, ...]]] = {
        "forward": (
            *(MosaicSizes(2 * ROWS, *rest) for rest in ((128, 4), (128, 2), (64, 4), (64, 2))),
            *(MosaicSizes(ROWS, *rest) for rest in ((128, 4), (128, 2), (64, 4), (64, 2), (64, 1))),
        )
    }

    def rows(self, which: str, sizes: MosaicSizes, q_len: int) -> int:
        """See Sizing."""
        del which
        return sizes.block_q if q_len > ROWS else ROWS

    def passed_over(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """None."""
        del which, problem, sizes
        return False

    def fits(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """See Sizing."""
        return self.fits_shared(which, problem, sizes) and _columns(problem, sizes) <= TENSOR_COLUMNS

    def shared_of(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> dict[str, int]:
        """See Sizing."""
        del which
        return shared_bytes(sizes, problem.head_dim, problem.value_dim)

    def check(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> None:
        """Errors: ConfigError for sizes whose tiles take more tensor memory than there is."""
        taken, (block_q, block_kv, _) = _columns(problem, sizes), MOSAIC_FIELDS[which]
        if taken > TENSOR_COLUMNS:
            raise ConfigError(
                f"FlashAttention2Config: {block_q}={sizes.block_q} and {block_kv}={sizes.block_kv}, with value dim "
                f"{problem.value_dim}, take {taken} columns of tensor memory; there are {TENSOR_COLUMNS}. Hint: {block_q}={ROWS}."
            )

    def near(self, which: str, sizes: MosaicSizes) -> list[MosaicSizes]:
        """See Sizing."""
        keys = [n for n in (sizes.block_kv, sizes.block_kv * 2, sizes.block_kv // 2) if n in KEYS]
        blocks = [n for n in (sizes.block_q, sizes.block_q * 2, sizes.block_q // 2) if ROWS <= n <= 2 * ROWS]
        stages = [n for n in (sizes.stages, sizes.stages + 1, sizes.stages - 1) if n >= 1]
        return [MosaicSizes(q, kv, n) for q, n, kv in itertools.product(blocks, stages, keys)]


def _columns(problem: AttentionProblem, sizes: MosaicSizes) -> int:
    """Columns of tensor memory."""
    return tensor_columns(sizes, problem.value_dim)
