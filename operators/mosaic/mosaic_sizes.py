"""How the part of kernels in Mosaic GPU of a FlashAttention2Config is filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ...devices import gpu_specs, gpu_variant
from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ..choices.mask_blocks import fitted_block
from ..flash.flash_config import FlashAttention2Config
from ..flash.flash_sizes import splits_of
from ..flash.pass_fields import FIELDS
from .kernel.mosaic_sizes import MosaicSizes, MosaicTiles, latent_columns, padded_dim

__all__ = ["MOSAIC_FIELDS", "WARPS", "Sizing", "columns", "fields_of", "tiles_of"]

# The fields of a MosaicSizes, as a config has them for each pass; the warps follow from them.
WARPS = tuple(names[2] for names in FIELDS.values())
MOSAIC_FIELDS = {which: tuple(name for name in names if name not in WARPS) for which, names in FIELDS.items()}


class Sizing:
    """How a generation's sizes are chosen. device: the GPU whose limits are taken where none is known, in the interpreter. lines:
    rows of a warpgroup. least: the fewest keys of a tile. of_latents: the passes that there are where values are a part of their
    keys. tiles: by pass, best first."""

    device: ClassVar[str]
    lines: ClassVar[int]
    least: ClassVar[Mapping[str, int]]
    of_latents: ClassVar[tuple[str, ...]] = ("forward",)
    tiles: ClassVar[Mapping[str, tuple[MosaicSizes, ...]]]

    def folds(self, problem: AttentionProblem, placement: Placement) -> bool:
        """Whether the query heads of a kv head are rows of the same tiles of the forward pass: where a warpgroup's rows have room
        for several heads' queries."""
        local = placement.local
        return local.q_heads > local.kv_heads and local.q_len <= self.lines

    def tiles_for(self, which: str, problem: AttentionProblem, rows: int) -> tuple[MosaicSizes, ...]:
        """Those for a head of so many rows."""
        return self.tiles[which]

    def rows(self, which: str, sizes: MosaicSizes, q_len: int) -> int:
        """The rows of a tile for so many queries."""
        raise NotImplementedError

    def passed_over(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """Sizes that fit and aren't wanted."""
        raise NotImplementedError

    def fits(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """Whether sizes can be taken by default: without spills."""
        raise NotImplementedError

    def shared_of(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> dict[str, int]:
        """Bytes of shared memory of a block of threads, by what they hold."""
        raise NotImplementedError

    def check(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> None:
        """Errors: ConfigError for what shared memory allows and the kernel doesn't."""

    def near(self, which: str, sizes: MosaicSizes) -> list[MosaicSizes]:
        """Sizes around some, the nearest first."""
        raise NotImplementedError

    def resolve(
        self, problem: AttentionProblem, placement: Placement, config: FlashAttention2Config
    ) -> FlashAttention2Config:
        """Fill in every size. Errors: ConfigError if none fits."""
        local = placement.local
        fold = self.folds(problem, placement) if config.fold is None else config.fold
        rows = local.q_len * (local.q_heads // local.kv_heads) if fold else local.q_len
        fields: dict[str, Any] = {"kernel": config.kernel or "mosaic", "fold": fold}
        for which in self.tiles if problem.value_columns is None else self.of_latents:
            sizes = self._chosen(which, problem, placement, config, rows if which == "forward" else local.q_len)
            self.check(which, problem, sizes)
            self._check_shared(which, problem, sizes)
            fields |= fields_of(which, sizes)
        programs = local.batch * (local.kv_heads if fold else local.q_heads) * math.ceil(rows / fields["block_q"])
        fields["kv_splits"] = config.kv_splits or splits_of(problem, placement, programs)
        return config.with_fields(fields)

    def fits_shared(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> bool:
        """Whether there is as much shared memory."""
        return sum(self.shared_of(which, problem, sizes).values()) <= self._shared_limit(problem)

    def _chosen(
        self, which: str, problem: AttentionProblem, placement: Placement, config: FlashAttention2Config, rows: int
    ) -> MosaicSizes:
        local = placement.local
        declared = [getattr(config, name) for name in MOSAIC_FIELDS[which]]
        found: list[MosaicSizes] = []
        for sizes in self.tiles_for(which, problem, rows):
            if self.passed_over(which, problem, sizes):
                continue
            least = min(self.least[which], sizes.block_kv)
            keys = _of_mask(problem, sizes.block_kv if local.kv_len > least else least, least)
            tried = (self.rows(which, sizes, rows), keys, sizes.stages)
            sizes = MosaicSizes(*(x if given is None else given for given, x in zip(declared, tried, strict=True)))
            found.append(sizes)
            if self.fits(which, problem, sizes):
                return sizes
        return found[-1]

    def _shared_limit(self, problem: AttentionProblem) -> int:
        """Bytes of shared memory that a block of threads may request."""
        gpu = gpu_variant(problem.device_kind) or gpu_variant(gpu_specs()[self.device].kind)
        assert gpu is not None
        return gpu.shared_bytes_a_block

    def _check_shared(self, which: str, problem: AttentionProblem, sizes: MosaicSizes) -> None:
        """Errors: ConfigError for sizes whose tiles take more shared memory than there is."""
        block_q, block_kv, stages = MOSAIC_FIELDS[which]
        parts, limit = self.shared_of(which, problem, sizes), self._shared_limit(problem)
        taken = sum(parts.values())
        if taken > limit:
            held = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
            raise ConfigError(
                f"FlashAttention2Config: {block_q}={sizes.block_q}, {block_kv}={sizes.block_kv} and {stages}={sizes.stages} take "
                f"{taken} bytes of shared memory ({held}); {problem.device} has {limit} for a block of threads. Hint: fewer "
                "stages or a smaller block."
            )


def tiles_of(config: FlashAttention2Config) -> MosaicTiles:
    """The sizes of a filled config. Those of passes that have no kernel are None each."""
    return MosaicTiles(
        **{which: MosaicSizes(*(getattr(config, name) for name in names)) for which, names in MOSAIC_FIELDS.items()}
    )


def fields_of(which: str, sizes: MosaicSizes) -> dict[str, Any]:
    """The sizes of a pass as a config's fields."""
    return dict(zip(MOSAIC_FIELDS[which], sizes, strict=True))


def columns(problem: AttentionProblem) -> tuple[int, int]:
    """The columns of a tile of the query and of the output."""
    dim, value_dim = problem.head_dim, problem.value_dim
    return padded_dim(dim), padded_dim(value_dim) if problem.value_columns is None else latent_columns(dim, value_dim)


def _of_mask(problem: AttentionProblem, size: int, least: int) -> int:
    """Keys of a tile that lie in one block of the mask, unless its blocks are smaller than a tile can be."""
    fitted = fitted_block(problem.mask, "kv", size, problem.kv_len, least)
    return 1 << (fitted.bit_length() - 1)
