"""The static part of a call of the TPU kernel: shapes, page layout, options, sizes of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ...default_promotion import wider
from ..paged_step import PagedOptions

__all__ = ["HBM_ROWS", "LANES", "NOTHING", "Geometry", "Layout", "Options", "row_places", "rows_per_word", "sublanes"]

LANES = 128
HBM_ROWS = 8  # of a tile of 16 or 32 bits
# The peak of a row without visible keys: finite, so that the exponential of -inf minus it is 0 and not NaN.
NOTHING = float(jnp.finfo(jnp.float32).min)

Layout = Literal["split", "heads", "joined", "latent", "interleaved", "packed"]


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes of one device's arrays.

    layout: how a page's numbers are ordered. "split": [pages, page, kv_heads, dim], keys and values separate; "heads": [pages,
    kv_heads, page, dim], separate; "joined": [pages, kv_heads, page, dim + value_dim], a key and its value in one row; "latent":
    [pages, kv_heads, page, dim], values being the first numbers of their keys; "interleaved": [pages, page, 2 kv_heads, dim], the
    key and the value of each head in turn; "packed": the same with the rows that share a 32-bit word in a dimension of their
    own, [pages, page, 2 kv_heads / pack, pack, dim]. Rows may be wider than that.
    """

    layout: Layout
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    key_row: int  # numbers per row of key_pages; with one array: per whole row
    value_row: int
    pages: int
    page: int
    sequences: int
    width: int  # pages per row of the table
    dtype: np.dtype
    key_dtype: np.dtype
    value_dtype: np.dtype
    key_scale: int | None  # rank: 0, 1 or 3; None without
    value_scale: int | None
    rope_row: int = 0  # numbers per row of rope_pages, which hold the keys' numbers after value_dim; 0 without
    rope_dtype: np.dtype | None = None
    selected: int = 0  # positions of keys that come with each token; 0: it attends to what it sees
    stored_page: int = 0  # tokens of a stored page if only `page` of them are fetched at once; 0: whole pages are

    @property
    def pieces(self) -> int:
        """Into how many parts, each fetched alone, a stored page is cut."""
        return self.stored_page // self.page if self.stored_page else 1

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def queries_first(self) -> bool:
        """Whether a block of queries is [queries, heads, dim] in the kernel: the heads of one kv head fill whole tiles. Else it
        is [heads, queries, dim]."""
        return self.kv_heads == 1 and self.heads % sublanes(self.dtype) == 0

    def block_shape(self, queries: int, width: int) -> tuple[int, int, int]:
        """The shape of a block of queries, or of their outputs."""
        return (queries, self.heads, width) if self.queries_first else (self.heads, queries, width)

    @property
    def one_array(self) -> bool:
        return self.layout in ("joined", "latent", "interleaved", "packed")

    @property
    def tokens_first(self) -> bool:
        """Whether a page has the rows of one token after another; else those of one head."""
        return self.layout in ("split", "interleaved", "packed")

    @property
    def alternating(self) -> bool:
        """Whether a token's rows are the key and the value of each head in turn."""
        return self.layout in ("interleaved", "packed")

    @property
    def joined(self) -> bool:
        return self.layout == "joined"

    @property
    def whole_row(self) -> bool:
        """Joined rows used whole: the key's end is within a tile, so the query is padded with zeros beyond it."""
        return self.joined and self.dim % LANES != 0

    @property
    def key_lanes(self) -> tuple[int, int]:
        """Which numbers of a row of keys are multiplied with the query, padded with zeros."""
        return (0, self.dim) if self.joined and not self.whole_row else (0, self.key_row)

    @property
    def value_lanes(self) -> tuple[int, int]:
        """Which numbers of a row are multiplied with the weights."""
        if self.layout == "latent":
            return 0, min(-(-self.value_dim // LANES) * LANES, self.key_row)
        if not self.joined:
            return 0, self.value_row
        return (0 if self.whole_row else self.dim), self.key_row

    @property
    def output_lanes(self) -> slice:
        """Which of these are the value."""
        start = self.dim if self.whole_row else 0
        return slice(start, start + self.value_dim)

    @property
    def query_dim(self) -> int:
        """The query's dim in the kernel: its part for a row of keys, then that for a row of rotary keys."""
        return self.key_lanes[1] + self.rope_row

    @property
    def summed_dim(self) -> int:
        """The dim of the sums of values and of the kernel's output."""
        return self.value_lanes[1] - self.value_lanes[0]

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of the factors of products: none is rounded."""
        wide = self.dtype
        for pages in (self.key_dtype, self.value_dtype, self.rope_dtype):
            if pages is not None and pages.itemsize > 1:
                wide = wider(wide, pages)
        return wide

    def row_shape(self, width: int) -> tuple[int, ...]:
        """The shape of a page with rows of this width."""
        if self.layout == "packed":
            pack = rows_per_word(self.key_dtype)
            return self.page, 2 * self.kv_heads // pack, pack, width
        if self.tokens_first:
            return self.page, 2 * self.kv_heads if self.alternating else self.kv_heads, width
        return self.kv_heads, self.page, width

    def read_in_words(self, name: str) -> bool:
        """Whether one head's rows of an array are read so: loads with strides are of 128 lanes."""
        return self.in_words(name) and (self.layout == "packed" or self.streams()[name][0][-1] == LANES)

    def row_block(self, name: str) -> tuple[int, ...]:
        """The shape of what an array of rows holds of a token."""
        shape, _ = self.streams()[name]
        return shape[1:] if self.tokens_first else (self.kv_heads, shape[-1])

    def row_of(self, head: Any, of_values: bool) -> Any:
        """The place of a head's key or value among the rows of a token, or of its rows among those of a page."""
        return 2 * head + of_values if self.alternating else head

    def in_words(self, name: str) -> bool:
        """Whether a token's rows in an array fill 32-bit words, which lie in memory one after another. Unless they are packed
        there may be gaps between tokens."""
        if not self.tokens_first:
            return False
        (_, rows, *_), dtype = self.streams()[name]
        return self.layout == "packed" or (rows % rows_per_word(dtype) == 0 and (rows in (1, 2, 4) or rows % 8 == 0))

    def in_tiles(self, name: str) -> bool:
        """Whether a page's rows of each head are a whole number of tiles of HBM, so that they can be kept in these. Those of
        8-bit rows are as large as VMEM's."""
        rows = not self.tokens_first and not name.endswith("scale") and self.page % HBM_ROWS == 0
        return rows and self.streams()[name][1].itemsize > 1

    def kept(self, name: str, rows: int = 0) -> tuple[int, ...]:
        """The shape of a page in the kernel, or of so many rows of each head. Tiles of HBM are copied as they are; those of VMEM
        are larger on a tpu7x, which takes a description of each copy."""
        shape, _ = self.streams()[name]
        if not self.in_tiles(name):
            return shape
        return shape[0], (rows or shape[1]) // HBM_ROWS, HBM_ROWS, shape[2]

    def viewed(self, name: str, pages: jax.Array) -> jax.Array:
        """An array of whole pages as the kernel takes it: the same memory."""
        if not self.in_tiles(name):
            return pages
        return pages.reshape(pages.shape[0], *self.kept(name, self.stored_page or self.page))

    def streams(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """What is fetched per page: name -> (shape, dtype)."""
        if self.one_array:
            rows: dict[str, Any] = {"key": (self.row_shape(self.key_row), self.key_dtype)}
        else:
            rows = {
                "key": (self.row_shape(self.key_row), self.key_dtype),
                "value": (self.row_shape(self.value_row), self.value_dtype),
            }
        if self.rope_dtype is not None:
            rows["rope"] = self.row_shape(self.rope_row), self.rope_dtype
        for name, rank in (("key_scale", self.key_scale), ("value_scale", self.value_scale)):
            if rank == 3 and (name == "key_scale" or self.layout != "latent"):
                # Scales along lanes can't be cut there: they come as those of the stored page.
                whole = self.kv_heads, self.stored_page or self.page
                shape = (self.page, self.kv_heads) if self.tokens_first else whole
                rows[name] = shape, np.dtype(np.float32)
        return rows


@dataclass(frozen=True)
class Options(PagedOptions):
    """The call's options and its block sizes."""

    sinks: bool
    pages_per_block: int
    queries_per_block: int
    buffers: int  # blocks of pages in memory: the one being computed, and those being fetched
    vmem_limit_bytes: int | None
    interpret: bool | pltpu.InterpretParams
    writes: bool = False  # whether rows of one token are written by the kernel
    drafts: int = 0  # in a tree of a sequence's tokens; 0 without
    spans: bool = False  # whether rows see keys besides those of the mask
    stride: int = 1  # devices that have the pages of a sequence in turn; a table has this one's

    @property
    def farthest(self) -> int:
        """How far after its item's position a row of a block can be, at most."""
        return max(self.queries_per_block, self.drafts) - 1


def row_places(shape: tuple[int, ...], axis: int, *, in_tiles: bool) -> jax.Array:
    """int32 of a shape: the place of each row along an axis, or along it and the next one."""
    places = lax.broadcasted_iota(jnp.int32, shape, axis)
    if not in_tiles:
        return places
    return places * np.int32(HBM_ROWS) + lax.broadcasted_iota(jnp.int32, shape, axis + 1)


def rows_per_word(dtype: Any) -> int:
    """Rows of the dtype that share a sublane, a 32-bit word of each lane."""
    return max(1, 4 // np.dtype(dtype).itemsize)


def sublanes(dtype: Any) -> int:
    """Rows per tile of the dtype."""
    return 8 * max(1, 4 // np.dtype(dtype).itemsize)
