"""CacheFields: the declaration of a KV cache, in Python and in JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator

from ...errors import ConfigError, a_type, shown
from ...page_layouts import LAYOUTS, ArraySize, page_layout
from ...strict_json import parse_json, read_text
from ..unset_fields import UnsetFieldsModel, explain_validation
from .cache_checks import CHECKS
from .cache_layers import CacheLayers
from .layer_groups import CacheKind, layer_numbers

__all__ = ["CacheFields", "QuantisedPages"]

_LIMIT = 2**30  # positions, page ids and their sums are int32 on devices
_MAX_BYTES = 2**50
_Cache = TypeVar("_Cache", bound="CacheFields")

_Size = Annotated[int, Field(strict=True, ge=1, le=_LIMIT)]
_SizeOfPages = Annotated[int, Field(strict=True, ge=0, le=_LIMIT)]  # 0 without pages, which a check sees to
_Bytes = Annotated[int, Field(strict=True, ge=1, le=_MAX_BYTES)]


def _named_once(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    names = (value,) if isinstance(value, str) else value or ()
    if (value is not None and not names) or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{shown(value)}; wanted a mesh axis, several distinct ones, or null for none")
    return value


_Axes = Annotated[str | tuple[str, ...] | None, AfterValidator(_named_once)]


def _known_layout(name: str) -> str:
    return page_layout(name).name


class QuantisedPages(UnsetFieldsModel):
    """How pages store quantised keys and values.

    `scale`: what has its own scale. Scales of the whole tensor or of each head are passed to `init` and stay fixed; scales of
    each token and head are computed from what is inserted.
    """

    model_config = ConfigDict(title="cache.quantised")

    dtype: Literal["int8", "float8_e4m3fn", "float8_e5m2"]
    scale: Literal["tensor", "head", "token_head"] = "token_head"


class CacheFields(CacheLayers):
    """The fields of KVCache. Sizes count elements of the whole cache, over all devices; only `bytes_per_device` is per device.

    Errors of all constructors: ConfigError that names the source, the field, the value and what is expected.
    """

    model_config = ConfigDict(title="cache")

    kind: Annotated[
        CacheKind,
        Field(
            description="'kv': keys and values of each head. 'latent': one latent and rotary key per token for all heads; "
            "head_dim is both together, value_dim the latent alone."
        ),
    ] = "kv"
    kv_heads: Annotated[_SizeOfPages, Field(description="KV heads; left out if no group of layers needs them.")] = 0
    head_dim: Annotated[_SizeOfPages, Field(description="Size of a key; left out if no group of layers needs it.")] = 0
    value_dim: Annotated[_Size | None, Field(description="Head dimension of values; null: head_dim.")] = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantised: QuantisedPages | None = None
    rope_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Field(
            description="Dtype of rotary keys beside quantised latents, which aren't quantised then; null: that of the latents."
        ),
    ] = None
    page_size: Annotated[_Size, Field(description="Tokens per page.")] = 16
    pages: Annotated[_Size | None, Field(description="Pages of the whole cache; or use bytes_per_device.")] = None
    bytes_per_device: Annotated[
        _Bytes | None, Field(description="Memory per device; as many pages as fit, including scales and page table.")
    ] = None
    max_sequences: Annotated[_Size, Field(description="Maximum number of sequences in a batch, over all devices.")]
    max_length: Annotated[_Size, Field(description="Maximum number of tokens per sequence.")]
    max_tokens: Annotated[
        _Size | None, Field(description="Maximum number of tokens in a step's arrays, over all devices.")
    ] = None
    layout: Annotated[
        str,
        AfterValidator(_known_layout),
        Field(
            description="Layout of the pages; all but 'split' and 'heads' hold keys and values in one array.",
            json_schema_extra={"enum": list(LAYOUTS)},
        ),
    ] = "split"
    pages_axis: Annotated[_Axes, Field(description="Mesh axes that split pages and batch (data parallelism).")] = None
    kv_head_axis: Annotated[_Axes, Field(description="Mesh axes that split the kv heads.")] = "tp"
    page_sequence_axis: Annotated[
        _Axes,
        Field(description="Mesh axes that split each sequence's pages, round-robin; outputs are merged by their lse."),
    ] = None
    scrub_on_free: Annotated[StrictBool, Field(description="Whether freed pages are zeroed.")] = False

    @model_validator(mode="before")
    @classmethod
    def _follows_from_kind(cls, data: Any) -> Any:
        """A cache of latents has one key for all heads, and a layout of its own."""
        if isinstance(data, Mapping) and data.get("kind") == "latent":
            return {"kv_heads": 1, "layout": "latent"} | dict(data)
        return data

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if problem := next(filter(None, (check(self) for check in CHECKS)), None):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _own_geometry(self) -> Self:
        if len(self.groups) == 1:
            if own := self.groups[0].geometry:
                name, value = next(iter(own.items()))
                raise ValueError(
                    f"layers[0].{name}={shown(value)} for the only group of layers; wanted {name} of the cache itself"
                )
            return self
        for number, group in enumerate(self.groups):
            if group.geometry:
                try:
                    self.part(number, 1)
                except ConfigError as error:
                    raise ValueError(f"layers[{number}]: {error}") from None
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "cache") -> Self:
        """Build a cache from JSON values."""
        if not isinstance(data, Mapping):
            raise ConfigError(f'{source}: got {a_type(data)}; wanted an object, {{"layers": 32, "kv_heads": 8, ...}}.')
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise ConfigError(f"{source}: {explain_validation(error, cls)}") from None

    @classmethod
    def from_json(cls, text: str, source: str = "cache") -> Self:
        """Build a cache from JSON text. Duplicate keys, NaN and Infinity are refused, so that nothing is lost."""
        return cls.from_dict(parse_json(text, source), source)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a UTF-8 file. Errors: ConfigError, also for a file that can't be read."""
        return cls.from_json(read_text(Path(path), "a JSON file with a cache"), str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that were given. `from_dict` of the result gives an equal cache."""
        return self.model_dump(mode="json")

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def part(self, group: int, pages: int) -> Self:
        """A cache with one group's layers, numbered from 0, and this many pages. For the only group, the cache itself."""
        return self if len(self.groups) == 1 else _part(self, group, max(1, pages))

    @property
    def value_size(self) -> int:
        """The head dimension of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def written_size(self) -> int:
        """Numbers of a token and kv head that a step writes."""
        return self.head_dim + (0 if self.values_in_keys else self.value_size)

    @property
    def rope_size(self) -> int:
        """Numbers of a key that pages store apart, in rope_dtype: the rotary part beside quantised latents; 0 for none."""
        apart = self.rope_dtype is not None and self.quantised is not None and self.values_in_keys
        return self.head_dim - self.value_size if apart else 0

    @property
    def key_size(self) -> int:
        """Numbers of a key in the pages of keys."""
        return self.head_dim - self.rope_size

    @property
    def stored_dtype(self) -> str:
        """The dtype of the pages."""
        return self.dtype if self.quantised is None else self.quantised.dtype

    def pages_shape(self, pages: int, heads: int, dim: int) -> tuple[int, ...]:
        """The shape of an array of pages: of keys, of values, of both if the layout joins them, or of rotary keys."""
        both = self.head_dim, self.value_size
        return LAYOUTS[self.layout].array_shape(ArraySize(pages, self.page_size, heads, dim, both, self.pack))

    @property
    def pack(self) -> int:
        """Stored numbers per 32-bit word."""
        return 4 // _ITEMSIZE.get(self.stored_dtype, 1)

    @property
    def values_in_keys(self) -> bool:
        """Whether values are the first numbers of their keys, so that only keys are written."""
        return LAYOUTS[self.layout].values_in_keys

    @property
    def heads_at(self) -> int:
        """The dimension of the heads in an array of pages."""
        return LAYOUTS[self.layout].heads_at

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence: the width of the page table."""
        return -(-self.max_length // self.page_size)


@functools.lru_cache(maxsize=256)
def _part(cache: _Cache, group: int, pages: int) -> _Cache:
    numbers = list(layer_numbers(cache.groups)[group])
    if cache.groups[group].of_states:
        own_states = cache.groups[group].model_dump(mode="json") | {"layers": len(numbers)}
        kept = {name: value for name, value in cache.to_dict().items() if name in _OF_STATES}
        return type(cache).from_dict(kept | {"layers": [own_states]})
    group_fields = {"layers": len(numbers)}
    if (window := cache.groups[group].window_tokens) is not None:
        group_fields["window_tokens"] = window
    own = cache.groups[group].geometry
    left_out = {"bytes_per_device", "pages", "reads_layer", "stateless_layers"}
    if own.get("kind", cache.kind) != cache.kind:  # then these follow from the kind, or are the group's own
        left_out |= {"kv_heads", "layout", "value_dim"}
    if own.get("kind", cache.kind) != "latent":
        left_out |= {"rope_dtype"}
    fields = {name: value for name, value in cache.to_dict().items() if name not in left_out}
    reads = [[numbers.index(n) for n in pair] for pair in cache.reads_layer or () if pair[0] in numbers]
    fields |= {"reads_layer": reads} if reads else {}
    return type(cache).from_dict(fields | own | {"layers": [group_fields], "pages": pages})


_OF_STATES = frozenset({
    "dtype", "page_size", "max_sequences", "max_length", "max_tokens", "pages_axis", "kv_head_axis", "page_sequence_axis",
    "scrub_on_free",
})  # fmt: skip
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
