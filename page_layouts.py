"""Page layouts: how a KV cache's pages hold keys and values. A layout is one class; everything about it is asked here."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from .errors import ConfigError, nearest, shown

__all__ = ["LANES", "LAYOUTS", "ArraySize", "PageLayout", "PageShape", "page_layout", "register_layout"]

LANES = 128


class PageShape(NamedTuple):
    """Sizes of a layer's pages on this device."""

    pages: int
    page: int
    kv_heads: int
    dim: int
    value_dim: int


class ArraySize(NamedTuple):
    """What an array of pages holds. dim: its own; both_dims: those of keys and values; pack: stored numbers per 32-bit word."""

    pages: int
    page: int
    heads: int
    dim: int
    both_dims: tuple[int, int]
    pack: int


class PageLayout:
    """Keys and values of a page, [page, kv_heads, dim] each, in arrays of their own. Stateless; subclasses change what differs.

    one_array: keys and values are in one array, `key_pages`, and `value_pages` is None. values_in_keys: values are the first
    numbers of their keys, so nothing else is stored. heads_first: a page's heads come before its tokens. same_dim: keys and
    values need one dim. dims: the names of the dimensions of an array, `form` in words.
    kernel: the form in which the TPU kernel reads its pages, the name of one of the layouts below; None if it can't.
    whole_pages: a page's numbers are in the order [page, kv_heads, dim], so that it can be fetched as one row.
    """

    name: ClassVar[str]
    one_array: ClassVar[bool] = False
    values_in_keys: ClassVar[bool] = False
    heads_first: ClassVar[bool] = False
    same_dim: ClassVar[bool] = False
    dims: ClassVar[tuple[str, ...]] = ("pages", "page", "kv_heads", "head_dim")
    form: ClassVar[str] = "[pages, page, kv_heads, dim]"
    kernel: ClassVar[str | None] = None
    whole_pages: ClassVar[bool] = False

    @property
    def heads_at(self) -> int:
        """The dimension of the heads in an array of pages."""
        return 1 if self.heads_first else 2

    def array_shape(self, size: ArraySize) -> tuple[int, ...]:
        """The shape of an array of keys, of values, or of both."""
        sizes = {"pages": size.pages, "page": size.page, "kv_heads": size.heads, "head_dim": size.dim}
        return tuple(sizes[dim] for dim in self.dims)

    def sizes(self, key: Any, value: Any, dim: int, value_dim: int | None) -> PageShape:
        """Read the sizes from the arrays. dim: the query's; value_dim: needed if padded rows don't determine it."""
        sizes = dict(zip(self.dims, key.shape, strict=True))
        last = key.shape[-1]
        return PageShape(
            sizes["pages"], sizes["page"], sizes["kv_heads"], last, last if value is None else value.shape[-1]
        )

    def viewed(self, pages: Any) -> Any:
        """An array of pages as `index` takes it."""
        return pages

    def index(self, ids: Any, half: int, first: int, dim: int) -> tuple[Any, ...]:
        """What of an array's pages to fetch: its keys (half 0) or values (half 1). A joined row's begin at `first`."""
        return (ids,)

    def tokens_by_head(self, pages: Any) -> Any:
        """An array of pages as `one_head` takes it, with four dimensions."""
        return pages

    def one_head(self, page: Any, head: Any, half: int, rows: Any, columns: Any) -> tuple[Any, ...]:
        """The index of some tokens of a page: the columns of one head's keys (half 0) or values (half 1)."""
        return (page, head, rows, columns) if self.heads_first else (page, rows, head, columns)

    def first_value(self, dim: int) -> int:
        """The column at which a value begins, in a row with keys of this dim."""
        return 0

    def joined(self, key: Any, value: Any) -> Any:
        """Tokens' keys and values [tokens, kv_heads, dim], in the form of an array that holds both; only with `one_array`."""
        raise NotImplementedError

    def separate(self, key: Any, value: Any, dim: int, value_dim: int) -> tuple[Any, Any]:
        """Keys and values [pages, page, kv_heads, dim] of a layer's arrays."""
        return (key.swapaxes(1, 2), value.swapaxes(1, 2)) if self.heads_first else (key, value)

    def places(self, page: Any, row: Any) -> tuple[Any, ...]:
        """The index of tokens in an array of pages, or of scales: the page's `row`."""
        return (page, slice(None), row) if self.heads_first else (page, row)

    def padded_row(self, dim: int, value_dim: int) -> tuple[str, int] | None:
        """(what a row holds, how many numbers) where the layout itself pads rows to 128 lanes; None if it doesn't."""
        return None

    def heads_per_word(self, pack: int) -> int:
        """Heads of keys and values together that share a 32-bit word, so that a device holds a multiple of them."""
        return 1


class _Split(PageLayout):
    """Key and value [pages, page, kv_heads, dim] each."""

    name = "split"
    kernel = "split"
    whole_pages = True


class _Heads(PageLayout):
    """Key and value [pages, kv_heads, page, dim] each: a head's page is one tile."""

    name = "heads"
    kernel = "heads"
    heads_first = True
    dims = ("pages", "kv_heads", "page", "head_dim")
    form = "[pages, kv_heads, page, dim]"


class _Joined(PageLayout):
    """Both in one array [pages, kv_heads, page, lanes]: a key followed by its value, padded to 128 lanes."""

    name = "joined"
    kernel = "joined"
    one_array = True
    heads_first = True
    dims = ("pages", "kv_heads", "page", "head_dim")
    form = "[pages, kv_heads, page, lanes]"

    def array_shape(self, size: ArraySize) -> tuple[int, ...]:
        return size.pages, size.heads, size.page, _in_lanes(sum(size.both_dims))

    def sizes(self, key: Any, value: Any, dim: int, value_dim: int | None) -> PageShape:
        return PageShape(key.shape[0], key.shape[2], key.shape[1], dim, value_dim or dim)

    def index(self, ids: Any, half: int, first: int, dim: int) -> tuple[Any, ...]:
        return (ids, slice(None), slice(None), slice(first, first + dim))

    def first_value(self, dim: int) -> int:
        return dim

    def joined(self, key: Any, value: Any) -> Any:
        both = jnp.concatenate([key, value], axis=-1)
        return jnp.pad(both, ((0, 0), (0, 0), (0, -both.shape[-1] % LANES)))

    def separate(self, key: Any, value: Any, dim: int, value_dim: int) -> tuple[Any, Any]:
        both = key.swapaxes(1, 2)
        return both[..., :dim], both[..., dim : dim + value_dim]

    def padded_row(self, dim: int, value_dim: int) -> tuple[str, int] | None:
        return "a key and its value", dim + value_dim


class _Latent(_Joined):
    """Latents [pages, 1, page, lanes]: one key for all heads, the latent and then its rotary key, padded to 128 lanes. Its values
    are its latents. Devices that share a latent's heads hold a copy each, along the dimension of the heads."""

    name = "latent"
    kernel = "latent"
    values_in_keys = True
    form = "[pages, copies, page, lanes]"

    def array_shape(self, size: ArraySize) -> tuple[int, ...]:
        return size.pages, size.heads, size.page, _in_lanes(size.dim)

    def index(self, ids: Any, half: int, first: int, dim: int) -> tuple[Any, ...]:
        return super().index(ids, half, 0, dim)

    def first_value(self, dim: int) -> int:
        return 0

    def joined(self, key: Any, value: Any) -> Any:
        return jnp.pad(key, ((0, 0), (0, 0), (0, -key.shape[-1] % LANES)))

    def separate(self, key: Any, value: Any, dim: int, value_dim: int) -> tuple[Any, Any]:
        both = key.swapaxes(1, 2)
        return both[..., :dim], both[..., :value_dim]

    def padded_row(self, dim: int, value_dim: int) -> tuple[str, int] | None:
        return "a latent with its rotary key", dim


class _Interleaved(PageLayout):
    """Both in one array [pages, page, 2 kv_heads, dim], keys and values alternating."""

    name = "interleaved"
    kernel = "interleaved"
    one_array = True
    same_dim = True
    form = "[pages, page, 2 kv_heads, dim]"

    def array_shape(self, size: ArraySize) -> tuple[int, ...]:
        return size.pages, size.page, 2 * size.heads, size.dim

    def sizes(self, key: Any, value: Any, dim: int, value_dim: int | None) -> PageShape:
        return PageShape(key.shape[0], key.shape[1], key.shape[2] // 2, key.shape[3], dim)

    def viewed(self, pages: Any) -> Any:
        return pages.reshape(*pages.shape[:2], -1, 2, pages.shape[-1])

    def index(self, ids: Any, half: int, first: int, dim: int) -> tuple[Any, ...]:
        return (ids, slice(None), slice(None), half)

    def tokens_by_head(self, pages: Any) -> Any:
        return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])

    def one_head(self, page: Any, head: Any, half: int, rows: Any, columns: Any) -> tuple[Any, ...]:
        return page, rows, 2 * head + half, columns

    def joined(self, key: Any, value: Any) -> Any:
        tokens, heads, dim = key.shape
        return jnp.stack([key, value], axis=2).reshape(tokens, 2 * heads, dim)

    def separate(self, key: Any, value: Any, dim: int, value_dim: int) -> tuple[Any, Any]:
        both = self.viewed(key)[..., :dim]
        return both[:, :, :, 0], both[:, :, :, 1]


class _Packed(_Interleaved):
    """The same with heads in 32-bit words and dim in lanes of 128, [pages, page, 2 kv_heads / pack, pack, lanes]."""

    name = "packed"
    kernel = "packed"
    dims = ("pages", "page", "kv_heads", "pack", "head_dim")
    form = "[pages, page, 2 kv_heads / pack, pack, lanes]"

    def array_shape(self, size: ArraySize) -> tuple[int, ...]:
        return size.pages, size.page, -(-2 * size.heads // size.pack), size.pack, _in_lanes(size.dim)

    def sizes(self, key: Any, value: Any, dim: int, value_dim: int | None) -> PageShape:
        return PageShape(key.shape[0], key.shape[1], key.shape[2] * key.shape[3] // 2, dim, dim)

    def joined(self, key: Any, value: Any) -> Any:
        pack, both = 4 // key.dtype.itemsize, super().joined(key, value)
        both = jnp.pad(both, ((0, 0), (0, 0), (0, -both.shape[-1] % LANES)))
        return both.reshape(both.shape[0], both.shape[1] // pack, pack, -1)

    def padded_row(self, dim: int, value_dim: int) -> tuple[str, int] | None:
        return "a head", dim

    def heads_per_word(self, pack: int) -> int:
        return pack


def _in_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


LAYOUTS: dict[str, PageLayout] = {
    layout.name: layout for layout in (_Split(), _Heads(), _Joined(), _Interleaved(), _Packed(), _Latent())
}
"""All layouts by name. The first two hold keys and values in separate arrays."""


def register_layout(layout: PageLayout) -> None:
    """Add a layout under its name, for caches to declare. Errors: ConfigError for a name that is taken."""
    if layout.name in LAYOUTS:
        raise ConfigError(f"a page layout is called {shown(layout.name)} already; choose another name.")
    LAYOUTS[layout.name] = layout


def page_layout(name: str) -> PageLayout:
    """The layout of a name. Errors: ConfigError for an unknown one."""
    if name not in LAYOUTS:
        raise ConfigError(f"layout={shown(name)}; wanted one of {', '.join(LAYOUTS)}." + nearest(name, LAYOUTS))
    return LAYOUTS[name]
