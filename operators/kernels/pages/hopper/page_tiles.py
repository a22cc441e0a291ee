"""The sizes of the Hopper kernel over pages by rule, and the shared memory that they take."""

from __future__ import annotations

import math
from typing import NamedTuple

from .....devices import gpu_specs, gpu_variant
from .....page_layouts import PageLayout
from ....hopper.kernel.hopper_sizes import ROWS
from ....mosaic.kernel.mosaic_sizes import DIM_STEP, padded_dim

__all__ = [
    "KEYS",
    "NAMES",
    "PAGES",
    "HopperStep",
    "PageTiles",
    "StepShape",
    "block_tokens",
    "head_tiles",
    "heads_of_tile",
    "hopper_step",
    "own_columns",
    "row_copies",
    "rows_stored",
    "shared_bytes",
    "shared_limit",
    "tokens_of_tile",
    "writable",
]

KEYS = (64, 128)  # of a tile: a product with values goes through 64 keys at once
PAGES = (
    8,
    16,
    32,
    64,
    128,
    256,
)  # tokens: rows of shared memory are swizzled eight at a time, and a tile has whole pages
_COLUMNS = 256  # of values that a warpgroup's registers hold sums for; and of a copy
_NARROW = 64  # columns up to which a multiprocessor takes two blocks that decode
_WIDE = 128  # columns up to which a chunk's tile has the most keys
_MOST_STAGES = 8
_STAGES_OF_CHUNKS = 3  # a chunk's tiles take longer to compute than to load
_ALIGNMENT, _UNIT, _BARRIER, _FLOAT = 2560, 512, 8, 4  # bytes, as Mosaic lays arrays out
_COPY_ALIGNMENT = 128  # bytes
_BLOCKS_A_CORE = 2  # of the parts of all keys: the last ones of a batch end at different times


NAMES = {False: "attnops_hopper_pages", True: "attnops_hopper_pages_chunks"}
"""The kernels of rows of few tokens, and of chunks."""


class PageTiles(NamedTuple):
    """block_kv: keys of a tile. stages: tiles that shared memory holds. row_groups: groups of 64 rows of a block of threads.
    parts: warpgroups among which the columns of a group's values are divided. stored: tiles of quantised numbers that shared
    memory holds beside those that are widened; 0 where pages aren't quantised."""

    block_kv: int
    stages: int
    row_groups: int = 1
    parts: int = 1
    stored: int = 0

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.row_groups * self.parts

    @property
    def rows(self) -> int:
        """Of a block of threads."""
        return ROWS * self.row_groups


class StepShape(NamedTuple):
    """What sizes depend on, of one device. dims: of a key and of a value. latent: values are the first numbers of their keys.
    quantised: pages hold numbers of 8 bits. rows: how many numbers a token's key and its value have in a page, where the kernel
    writes them; none where it doesn't."""

    tokens: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    page: int
    latent: bool
    quantised: bool = False
    rows: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads


class HopperStep(NamedTuple):
    """decode, chunks: sizes for rows of few tokens and for others. splits, chunk_splits: parts of all keys besides one for each
    tile of rows, 0 for none."""

    decode: PageTiles
    chunks: PageTiles
    splits: int
    chunk_splits: int


def hopper_step(
    shape: StepShape, cores: int, pages: int | None = None, queries: int | None = None, splits: int | None = None
) -> HopperStep:
    """Every size, by rule where it is None. cores: multiprocessors of the device. pages: of a tile; queries: tokens of a chunk's
    tile, one of `block_tokens`; splits: parts of all keys."""
    keys = None if pages is None else pages * shape.page
    parts, columns = _columns_in_parts(shape.dims[1]), max(map(padded_dim, shape.dims))
    # Up to 64 columns a thread's registers leave room for a second block on the multiprocessor.
    alone = columns > _NARROW or (shape.quantised and not shape.latent)  # one more warpgroup loads
    decode = _fitted(shape, keys or KEYS[0], _MOST_STAGES, 1, parts, 1 if alone else 2)
    groups = 1 if len(block_tokens(shape)) == 1 or queries == block_tokens(shape)[0] else 2
    wide = _NARROW if shape.quantised else _WIDE
    chunks = _fitted(shape, keys or KEYS[columns <= wide], _STAGES_OF_CHUNKS, groups, parts)
    if splits is None:
        splits = math.ceil(_BLOCKS_A_CORE * cores / (shape.kv_heads * head_tiles(shape.group, decode.rows)))
    # Where chunks alone fill the device, merging would cost more than it saves.
    few = math.ceil(shape.tokens / tokens_of_tile(shape.group, chunks.rows)) < splits
    return HopperStep(decode, chunks, splits, splits if few else 0)


def block_tokens(shape: StepShape) -> tuple[int, ...]:
    """Tokens of tiles of 64 rows, and of 128, where a warpgroup holds all columns of a row's values beside all that load."""
    crowded = shape.quantised and not shape.latent and padded_dim(shape.dims[1]) > _WIDE
    rows = (ROWS, 2 * ROWS) if _columns_in_parts(shape.dims[1]) == 1 and not crowded else (ROWS,)
    return tuple(tokens_of_tile(shape.group, n) for n in rows)


def head_tiles(group: int, rows: int) -> int:
    """Parts of the query heads of a kv head, so that those of a token fit into so many rows."""
    return math.ceil(group / rows)


def heads_of_tile(group: int, rows: int) -> int:
    """Query heads of a part; the last part may have fewer."""
    return math.ceil(group / head_tiles(group, rows))


def tokens_of_tile(group: int, rows: int) -> int:
    """Tokens whose heads of a part fill at most so many rows."""
    return rows // heads_of_tile(group, rows)


def rows_stored(group: int, tokens: int, tiles: PageTiles) -> int:
    """Rows of a block's result that are written: whole groups of eight."""
    used = tokens * heads_of_tile(group, tiles.rows)
    return tiles.rows if tiles.row_groups > 1 else math.ceil(used / 8) * 8


def shared_bytes(shape: StepShape, tiles: PageTiles) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold. Numbers have 16 bits, stored ones of quantised pages 8.
    The output of one group of rows takes the place of its query."""
    dim, value_dim = map(padded_dim, shape.dims)
    query, output = 2 * tiles.rows * dim, 2 * tiles.rows * value_dim
    shares = dim == value_dim or tiles.row_groups == 1
    stored, streams = tiles.stored * tiles.block_kv, 1 if shape.latent else 2
    barriers = 2 * streams * tiles.stages + (streams * tiles.stored if shape.quantised else 2 * tiles.stages)
    return {
        "query": max(query, output) if shares else query,
        "key": 2 * tiles.stages * tiles.block_kv * dim,
        "value": 0 if shape.latent else 2 * tiles.stages * tiles.block_kv * value_dim,
        "output": 0 if shares else output,
        "stored": stored * (dim + (0 if shape.latent else value_dim)),
        "scales": streams * (_unit(_FLOAT * stored) + _unit(_FLOAT * tiles.stages * tiles.block_kv) * (stored > 0)),
        "lse": _unit(_FLOAT * ROWS * tiles.consumers),
        "rows": sum(_unit((1 if shape.quantised else 2) * numbers) for numbers in shape.rows),
        "barriers": _BARRIER * (tiles.row_groups + 1 + len(shape.rows) + barriers),
        "alignment": _ALIGNMENT,
    }


def own_columns(form: PageLayout, dim: int, rows: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """(the first, how many) of the numbers of a page's row that a token's key has, and of those of its value: all of them.
    rows: how many numbers a row of keys has, and one of values."""
    first = form.first_value(dim)
    if form.values_in_keys:
        return ((0, rows[0]),)
    return (0, first or rows[0]), (first, rows[1] - first)


def row_copies(numbers: int, size: int) -> int | None:
    """Copies by TMA of a token's row of so many numbers, of `size` bytes: of at most 256 each, that begin where copies can; None
    if there are no such."""
    for copies in range(-(-numbers // _COLUMNS), numbers // DIM_STEP + 1):
        each, rest = divmod(numbers, copies)
        if not rest and (copies == 1 or each * size % _COPY_ALIGNMENT == 0):
            return copies
    return None


def writable(columns: tuple[tuple[int, int], ...], size: int) -> bool:
    """Whether copies can write such numbers of a token, of `size` bytes: they begin and end where copies can."""
    return all(first * size % 16 == 0 and row_copies(numbers, size) is not None for first, numbers in columns)


def _unit(size: int) -> int:
    """The bytes that a small array takes."""
    return math.ceil(size / _UNIT) * _UNIT


def shared_limit() -> int:
    """Bytes of shared memory that a block of threads may request on Hopper."""
    gpu = gpu_variant(gpu_specs()["h100"].kind)
    assert gpu is not None
    return gpu.shared_bytes_a_block


def _fitted(shape: StepShape, block_kv: int, stages: int, row_groups: int, parts: int, blocks: int = 1) -> PageTiles:
    """The same with as many stages as fit beside each other in so many blocks, one at least; what one takes may be too much.
    Of quantised tiles so many are stored, while one of the widened ones is read and another is written."""
    chosen = PageTiles(block_kv, stages, row_groups, parts)
    fewer = [chosen._replace(stages=n) for n in range(stages, 0, -1)]
    if shape.quantised:
        sizes = [*((2, n) for n in range(stages, 1, -1)), *((1, n) for n in range(stages, 0, -1))]
        fewer = [chosen._replace(stages=wide, stored=n) for wide, n in sizes]
    fits = (tiles for tiles in fewer if sum(shared_bytes(shape, tiles).values()) <= shared_limit() // blocks)
    return next(fits, fewer[-1])


def _columns_in_parts(value_dim: int) -> int:
    """Parts of a value's columns, each of which a warpgroup has registers for."""
    columns = padded_dim(value_dim)
    parts = math.ceil(columns / _COLUMNS)
    while columns % (parts * DIM_STEP):
        parts += 1
    return parts
