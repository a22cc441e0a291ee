"""The sizes of the kernels over pages by rule, for each generation, and the shared memory that they take."""

from __future__ import annotations

import math
from typing import ClassVar

from ....blackwell.kernel import blackwell_sizes
from ....hopper.kernel import hopper_sizes
from ....mosaic.kernel.linker import registers_move
from ....mosaic.kernel.mosaic_sizes import BARRIER, DIM_STEP, FLOAT, MosaicSizes, column_parts
from .page_tiles import KEYS, PageSizing, PageTiles, StepShape

__all__ = ["BLACKWELL_SIZING", "HOPPER_SIZING", "BlackwellPageSizing", "HopperPageSizing"]

_COLUMNS = 256  # of values that a warpgroup's registers hold sums for
_HELD = 256  # columns of a latents' query that tensor memory can hold beside sums and logits
_NARROW = 64  # columns up to which a multiprocessor of Hopper takes two blocks that decode
_WIDE = 128  # columns up to which a chunk's tile has the most keys
_MOST_STAGES = 8
_STAGES_OF_CHUNKS = 3  # a chunk's tiles take longer to compute than to load
_ROW_NUMBERS = (
    4 * FLOAT * blackwell_sizes.ROWS
)  # bytes of what Blackwell's roles tell each other of a row, in one array
_ALIGNMENT, _UNIT = 2560, 512  # bytes, as Mosaic lays arrays out


class HopperPageSizing(PageSizing):
    """Sums are in registers: a warpgroup has 256 columns of values."""

    generation: ClassVar[str] = "hopper"
    target: ClassVar[str] = "h100"
    lines: ClassVar[int] = hopper_sizes.ROWS
    most: ClassVar[tuple[int, int]] = (576, 512)
    held: ClassVar[str] = "shared memory and registers"

    def decode(self, shape: StepShape, keys: int | None) -> PageTiles:
        """See PageSizing."""
        # Up to 64 columns a thread's registers leave room for a second block on the multiprocessor.
        alone = max(shape.padded) > _NARROW or (shape.quantised and not shape.latent)  # one more warpgroup loads
        return self._fitted(shape, keys or KEYS[0], _MOST_STAGES, 1, 1 if alone else 2)

    def chunks(self, shape: StepShape, keys: int | None, groups: int) -> PageTiles:
        """See PageSizing."""
        wide = _NARROW if shape.quantised else _WIDE
        most = max(shape.padded) <= wide and registers_move()
        return self._fitted(shape, keys or KEYS[most], _STAGES_OF_CHUNKS, groups)

    def two_groups(self, shape: StepShape) -> bool:
        """Where a warpgroup holds all columns of a row's values beside all that load, and beside another if it takes nothing
        from these."""
        crowded = (shape.quantised and not shape.latent) or not registers_move()
        return _columns_in_parts(shape) == 1 and not (crowded and shape.padded[1] > _WIDE)

    def shared_bytes(self, shape: StepShape, tiles: PageTiles) -> dict[str, int]:
        """Numbers have 16 bits, stored ones of quantised pages 8. The output of one group of rows is where its query was."""
        dim, value_dim = shape.padded
        query, output = 2 * tiles.block_q * dim, 2 * tiles.block_q * value_dim
        shares = dim == value_dim or tiles.row_groups == 1
        streams = 1 if shape.latent else 2
        barriers = 2 * streams * tiles.stages + (streams * tiles.stored if shape.quantised else 2 * tiles.stages)
        return {
            "query": max(query, output) if shares else query,
            "key": 2 * tiles.stages * tiles.block_kv * dim,
            "value": 0 if shape.latent else 2 * tiles.stages * tiles.block_kv * value_dim,
            "output": 0 if shares else output,
            **_stored_bytes(shape, tiles),
            "lse": _unit(FLOAT * self.lines * tiles.consumers),
            "own": _own_bytes(shape),
            "barriers": BARRIER * (tiles.row_groups + 1 + len(shape.rows) + barriers),
            "alignment": _ALIGNMENT,
        }

    def _fitted(self, shape: StepShape, block_kv: int, stages: int, row_groups: int, blocks: int = 1) -> PageTiles:
        """The same with as many stages as fit beside each other in so many blocks, one at least; what one takes may be too much.
        Of quantised tiles so many are stored, while one of the widened ones is read and another is written."""
        chosen = PageTiles(block_kv, stages, row_groups, _columns_in_parts(shape))
        fewer = [chosen._replace(stages=n) for n in range(stages, 0, -1)]
        if shape.quantised:
            sizes = [*((2, n) for n in range(stages, 1, -1)), *((1, n) for n in range(stages, 0, -1))]
            fewer = [chosen._replace(stages=wide, stored=n) for wide, n in sizes]
        return next((tiles for tiles in fewer if self.fits(shape, tiles, blocks)), fewer[-1])


class BlackwellPageSizing(PageSizing):
    """Sums and logits are in tensor memory. Stages are powers of two, as in the kernels over dense arrays. A place of latents is
    free once their product with weights has ended, so there are two; one where they come from places of 8 bits that leave no
    room for more."""

    generation: ClassVar[str] = "blackwell"
    target: ClassVar[str] = "b200"
    lines: ClassVar[int] = blackwell_sizes.ROWS
    most: ClassVar[tuple[int, int]] = (576, 512)
    held: ClassVar[str] = "shared and tensor memory"

    def decode(self, shape: StepShape, keys: int | None) -> PageTiles:
        """See PageSizing."""
        return self._fitted(shape, keys, 1)

    def chunks(self, shape: StepShape, keys: int | None, groups: int) -> PageTiles:
        """See PageSizing."""
        return self._fitted(shape, keys, groups)

    def two_groups(self, shape: StepShape) -> bool:
        """Zeros are written over latents once one warpgroup's logits of them are there. Warpgroups that widen quantised pages
        leave too few registers."""
        return not (shape.latent or shape.quantised) and self.fits(shape, self._fitted(shape, None, 2))

    def fits(self, shape: StepShape, tiles: PageTiles, blocks: int = 1) -> bool:
        """See PageSizing."""
        return super().fits(shape, tiles, blocks) and _tensor_columns(shape, tiles) <= blackwell_sizes.TENSOR_COLUMNS

    def taken(self, shape: StepShape, tiles: PageTiles) -> str:
        """See PageSizing."""
        columns = f"{_tensor_columns(shape, tiles)} columns of tensor memory, of {blackwell_sizes.TENSOR_COLUMNS}"
        return f"{super().taken(shape, tiles)}, and {columns}"

    def shared_bytes(self, shape: StepShape, tiles: PageTiles) -> dict[str, int]:
        """Those of a kernel over dense arrays, and of tiles of 8 bits with their tokens' scales."""
        dim, value_dim = shape.padded
        counted = blackwell_sizes.shared_bytes(_dense(tiles), dim, value_dim, in_key=shape.latent)
        if tiles.held:
            counted |= {
                "query": 2 * tiles.block_q * max(dim - tiles.held, value_dim // tiles.column_blocks),
                "rows": _ROW_NUMBERS,
            }
        counted |= {"own": _own_bytes(shape) + BARRIER * len(shape.rows)}
        if shape.quantised:
            counted |= _stored_bytes(shape, tiles) | {"alignment": _ALIGNMENT}
        return counted

    def _fitted(self, shape: StepShape, keys: int | None, groups: int) -> PageTiles:
        """The most keys of which two stages fit, and as many of them as fit; what one takes may be too much. Of quantised tiles,
        of 64 keys as registers allow, two stages are widened, and as many as fit are stored."""
        some = (keys,) if keys is not None else KEYS[::-1] if registers_move() else KEYS[:1]
        one = PageTiles(keys or KEYS[0], 2, groups, lines=self.lines)
        held = one._replace(column_blocks=column_parts(shape.padded[1]), held=_HELD)
        in_tensor_memory = [held] * (shape.latent and shape.padded[0] > _HELD)
        if shape.quantised:
            sizes = [(wide, stored) for wide in (2, 1) for stored in (8, 4, 2, 1)]
            ways = [tiles._replace(stages=w, stored=n) for tiles in (one, *in_tensor_memory) for w, n in sizes]
        else:
            ways = [one._replace(block_kv=n, stages=stages) for n in some for stages in (8, 4, 2)]
            ways += [one._replace(block_kv=n, stages=1) for n in some if not shape.latent]
            ways += in_tensor_memory
        return next((tiles for tiles in ways if self.fits(shape, tiles)), ways[-1])


def _dense(tiles: PageTiles) -> MosaicSizes:
    return MosaicSizes(tiles.block_q, tiles.block_kv, tiles.stages)


def _tensor_columns(shape: StepShape, tiles: PageTiles) -> int:
    if tiles.held:  # weights take the place of their logits
        return (
            shape.padded[1] // tiles.column_blocks
            + blackwell_sizes.places(_dense(tiles)) * tiles.block_kv
            + tiles.held // 2
        )
    return blackwell_sizes.tensor_columns(_dense(tiles), shape.dims[1])


def _unit(size: int) -> int:
    """The bytes that a small array takes."""
    return math.ceil(size / _UNIT) * _UNIT


def _stored_bytes(shape: StepShape, tiles: PageTiles) -> dict[str, int]:
    """The bytes of tiles of 8 bits, and of the scales of their tokens and of those of widened ones."""
    (dim, value_dim), keys, streams = shape.padded, tiles.stored * tiles.block_kv, 1 if shape.latent else 2
    scales = _unit(FLOAT * keys) + _unit(FLOAT * tiles.stages * tiles.block_kv) * (keys > 0)
    return {"stored": keys * (dim + (0 if shape.latent else value_dim)), "scales": streams * scales}


def _own_bytes(shape: StepShape) -> int:
    """The bytes that a token's key and value take, where the kernel writes them."""
    return sum(_unit((1 if shape.quantised else 2) * numbers) for numbers in shape.rows)


def _columns_in_parts(shape: StepShape) -> int:
    """Parts of a value's columns, each of which a warpgroup has registers for."""
    columns = shape.padded[1]
    parts = math.ceil(columns / _COLUMNS)
    while columns % (parts * DIM_STEP):
        parts += 1
    return parts


HOPPER_SIZING, BLACKWELL_SIZING = HopperPageSizing(), BlackwellPageSizing()
