"""The sizes of kernels over pages in Mosaic GPU, and what a generation's rule for them has to say."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from .....devices import gpu_specs, gpu_variant
from .....page_layouts import PageLayout
from ....mosaic.kernel.mosaic_sizes import DIM_STEP, padded_dim

__all__ = [
    "KEYS",
    "PAGES",
    "PageSizing",
    "PageStep",
    "PageTiles",
    "StepShape",
    "head_tiles",
    "heads_of_tile",
    "own_columns",
    "row_copies",
    "rows_stored",
    "tokens_of_tile",
    "writable",
]

KEYS = (64, 128)  # of a tile: a product with values goes through 64 keys at once
PAGES = (8, 16, 32, 64, 128, 256)  # tokens: rows are swizzled eight at a time, and a tile has whole pages
_COLUMNS = 256  # of a copy
_COPY_ALIGNMENT = 128  # bytes
_BLOCKS_A_CORE = 2  # of the parts of all keys: the last ones of a batch end at different times


class PageTiles(NamedTuple):
    """block_kv: keys of a tile. stages: tiles that shared memory holds. row_groups: warpgroups' rows of a block of threads.
    parts: warpgroups among which the columns of a group's values are divided. stored: tiles of quantised numbers that shared
    memory holds beside those that are widened; 0 where pages aren't quantised. lines: rows of a warpgroup. column_blocks: of
    threads, among which the columns of values are divided. held: columns of queries that are in tensor memory."""

    block_kv: int
    stages: int
    row_groups: int = 1
    parts: int = 1
    stored: int = 0
    lines: int = 64
    column_blocks: int = 1
    held: int = 0

    @property
    def consumers(self) -> int:
        """Warpgroups that compute softmaxes."""
        return self.row_groups * self.parts

    @property
    def block_q(self) -> int:
        """Rows of a block of threads."""
        return self.lines * self.row_groups


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

    @property
    def padded(self) -> tuple[int, int]:
        """Columns of a tile of keys, and of values."""
        return padded_dim(self.dims[0]), padded_dim(self.dims[1])


class PageStep(NamedTuple):
    """decode, chunks: sizes for rows of few tokens and for others. splits, chunk_splits: parts of all keys besides one for each
    tile of rows, 0 for none."""

    decode: PageTiles
    chunks: PageTiles
    splits: int
    chunk_splits: int


class PageSizing:
    """How a generation's sizes are chosen. generation: as in the names of its kernels; target: a GPU of it; lines: rows of a
    warpgroup; most: the largest dims of a key and of a value, and where what bounds them is held."""

    generation: ClassVar[str]
    target: ClassVar[str]
    lines: ClassVar[int]
    most: ClassVar[tuple[int, int]]
    held: ClassVar[str]

    def step(
        self,
        shape: StepShape,
        cores: int,
        pages: int | None = None,
        queries: int | None = None,
        splits: int | None = None,
    ) -> PageStep:
        """Every size, by rule where it is None. cores: multiprocessors of the device. pages: of a tile; queries: tokens of a
        chunk's tile, one of `block_tokens`; splits: parts of all keys."""
        keys, tokens = None if pages is None else pages * shape.page, self.block_tokens(shape)
        decode = self.decode(shape, keys)
        chunks = self.chunks(shape, keys, 1 if len(tokens) == 1 or queries == tokens[0] else 2)
        if splits is None:
            of_rows = shape.kv_heads * head_tiles(shape.group, decode.block_q) * decode.column_blocks
            splits = math.ceil(_BLOCKS_A_CORE * cores / of_rows)
        # Where chunks alone fill the device, merging would cost more than it saves.
        few = math.ceil(shape.tokens / tokens_of_tile(shape.group, chunks.block_q)) < splits
        return PageStep(decode, chunks, splits, splits if few else 0)

    def kernel(self, chunks: bool) -> str:
        """The name of the kernel of rows of few tokens, or of chunks."""
        return f"attnops_{self.generation}_pages{'_chunks' * chunks}"

    def block_tokens(self, shape: StepShape) -> tuple[int, ...]:
        """Tokens of tiles of one warpgroup's rows, and of two where that fits."""
        rows = (self.lines, 2 * self.lines) if self.two_groups(shape) else (self.lines,)
        return tuple(tokens_of_tile(shape.group, n) for n in rows)

    def shared_limit(self) -> int:
        """Bytes of shared memory that a block of threads may request."""
        gpu = gpu_variant(gpu_specs()[self.target].kind)
        assert gpu is not None
        return gpu.shared_bytes_a_block

    def fits(self, shape: StepShape, tiles: PageTiles, blocks: int = 1) -> bool:
        """Whether so many blocks of threads with these tiles fit beside each other."""
        return sum(self.shared_bytes(shape, tiles).values()) <= self.shared_limit() // blocks

    def taken(self, shape: StepShape, tiles: PageTiles) -> str:
        """What these tiles take."""
        return f"{sum(self.shared_bytes(shape, tiles).values())} bytes of shared memory, of {self.shared_limit()}"

    def decode(self, shape: StepShape, keys: int | None) -> PageTiles:
        """Of rows of few tokens. keys: of a tile; None: by rule."""
        raise NotImplementedError

    def chunks(self, shape: StepShape, keys: int | None, groups: int) -> PageTiles:
        """Of others, with the rows of so many warpgroups."""
        raise NotImplementedError

    def two_groups(self, shape: StepShape) -> bool:
        """Whether a block can have the rows of two warpgroups."""
        raise NotImplementedError

    def shared_bytes(self, shape: StepShape, tiles: PageTiles) -> dict[str, int]:
        """Bytes of shared memory of a block of threads, by what they hold."""
        raise NotImplementedError


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
    used = tokens * heads_of_tile(group, tiles.block_q)
    return tiles.block_q if tiles.row_groups > 1 or tiles.held else math.ceil(used / 8) * 8


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
