"""CachePlan: what a declared KV cache takes on each device, where its arrays live, and what is against it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...errors import RefusedError
from ...sharding import FittedSpec, MeshAxis, describe_mesh
from ..capability import Reason
from ..text import bytes_text, spec_text
from .cache_fields import CacheFields

__all__ = ["CacheArray", "CachePlan", "array_rows", "fact_rows"]


class CacheArray(NamedTuple):
    """An array of the cache or of a batch over it: where it lies, how many there are (one a layer), bytes of one on a device.

    The bytes count what a device pads, which the fitted spec's own don't.
    """

    fitted: FittedSpec
    dtype: str
    copies: int
    device_bytes: int

    @property
    def name(self) -> str:
        return self.fitted.tensor


@dataclass(frozen=True)
class CachePlan:
    """The whole decision. `refused` has every reason against the cache; () where it can be made.

    `pages` are those of the whole cache, `shards` the parts in which `pages_axis` splits them and the batch, `sequence_shards`
    the devices of each that the pages of one sequence are dealt to in turn, `kv_repeat` how often a kv head is stored.
    `scalar_limit` and `memory_limit` are bytes of a device, None where they aren't known.
    """

    cache: CacheFields
    mesh: tuple[MeshAxis, ...]
    platform: str
    device_kind: str
    pages: int
    shards: int
    sequence_shards: int
    kv_repeat: int
    arrays: tuple[CacheArray, ...]
    scalar_limit: int | None
    memory_limit: int | None
    refused: tuple[Reason, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> CacheArray:
        for array in self.arrays:
            if array.name == name:
                return array
        raise KeyError(name)

    def get(self, name: str) -> CacheArray | None:
        """An array by its name, None where the cache has none of that name."""
        return next((array for array in self.arrays if array.name == name), None)

    @property
    def pages_array(self) -> CacheArray:
        """The first array of pages: of keys, or of both keys and values."""
        return self.get("key_pages") or self["kv_pages"]

    @property
    def idle_axes(self) -> tuple[MeshAxis, ...]:
        """Mesh axes over which the devices all hold the same pages."""
        pages = self.pages_array.fitted
        used = {*pages.axes(0), *pages.axes(self.heads_at)}
        return tuple(a for a in self.mesh if a.size > 1 and a.kind != "manual" and a.name not in used)

    @property
    def heads_at(self) -> int:
        """The dimension of the heads in an array of pages."""
        return self.cache.heads_at

    @property
    def stored_heads(self) -> int:
        """KV heads of the whole cache's arrays, repeats counted."""
        return self.cache.kv_heads * self.kv_repeat

    @property
    def local_pages(self) -> int:
        """Pages of a shard, on all of its sequence shards. Page ids count from 0 in each; this number itself is the id of
        padding."""
        return self.pages // self.shards

    @property
    def table_width(self) -> int:
        """Pages of a row of the page table: those of the longest sequence, as many on each sequence shard."""
        return -(-self.cache.table_width // self.sequence_shards) * self.sequence_shards

    @property
    def local_sequences(self) -> int:
        """Rows of a shard's batch."""
        return self.cache.max_sequences // self.shards

    @property
    def token_bytes(self) -> int | None:
        """Bytes a device of a step's keys and values, as many as max_tokens allows, in a layer; None where it isn't declared."""
        if self.cache.max_tokens is None:
            return None
        heads = self.pages_array.fitted
        split = math.prod(axis.size for axis in self.mesh if axis.name in heads.axes(self.heads_at))
        own = self.cache.kv_heads // (
            split if self.kv_repeat == 1 else 1
        )  # repeated heads come as declared, all of them
        each = own * (self.cache.head_dim + self.cache.value_size) * (4 if self.cache.dtype == "float32" else 2)
        return self.cache.max_tokens // self.shards * each

    @property
    def tokens(self) -> int:
        """Tokens that fit into all pages."""
        return self.pages * self.cache.page_size

    @property
    def most_lost(self) -> int:
        """Tokens' places that last pages leave empty at most, while all sequences are there."""
        return self.cache.max_sequences * (self.cache.page_size - 1)

    @property
    def page_table_bytes(self) -> int:
        """Of a device's page table, as scalar memory holds it."""
        return 4 * self.local_sequences * self.table_width // self.sequence_shards

    def bytes_of(self, *names: str) -> int:
        """Bytes a device of the arrays of these names, or of all."""
        return sum(array.copies * array.device_bytes for array in self.arrays if not names or array.name in names)

    @property
    def bytes_per_device(self) -> int:
        """Of pages, scales and one batch's arrays."""
        return self.bytes_of()

    def require(self) -> CachePlan:
        """Return self. Errors: RefusedError with every reason where the cache can't be made."""
        if self.refused:
            lines = [f"  {reason}" for reason in self.refused]
            raise RefusedError("\n".join((f"{self.describe()}:", *lines)))
        return self

    def describe(self) -> str:
        """The cache in one line."""
        cache = self.cache
        dims = f"{cache.head_dim}" if cache.value_size == cache.head_dim else f"{cache.head_dim}/{cache.value_size}"
        stored = (
            "" if cache.quantised is None else f" in {cache.quantised.dtype} (a scale a {_PER[cache.quantised.scale]})"
        )
        layout = "" if cache.layout == "split" else f", layout {cache.layout}"
        return (
            f"cache: {cache.layers} layers, {cache.kv_heads} kv heads of {dims}, {cache.dtype}{stored}, pages of "
            f"{cache.page_size} tokens{layout}"
        )

    def explain(self) -> str:
        """The whole decision as text."""
        lines = [self.describe(), *(f"{name:<9} {text}" for name, text in fact_rows(self))]
        lines.append("arrays    spec, shape -> per device, bytes per device")
        for name, spec, shape, local, size in array_rows(self):
            lines.append(f"  {name:<15} {spec}  {shape} -> {local}  {size}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        return {
            "cache": self.cache.every_field(),
            "mesh": [axis._asdict() for axis in self.mesh],
            "platform": self.platform,
            "device_kind": self.device_kind,
            "pages": self.pages,
            "shards": self.shards,
            "pages_per_shard": self.local_pages,
            "sequence_shards": self.sequence_shards,
            "tokens": self.tokens,
            "kv_repeat": self.kv_repeat,
            "bytes_per_device": self.bytes_per_device,
            "bytes_of_pages": self.bytes_of(*_PAGES),
            "bytes_of_scales": self.bytes_of("key_scale", "value_scale"),
            "bytes_of_batch": self.bytes_of(*_BATCH),
            "bytes_of_tokens": self.token_bytes,
            "page_table_bytes": self.page_table_bytes,
            "scalar_limit": self.scalar_limit,
            "memory_limit": self.memory_limit,
            "most_tokens_lost": self.most_lost,
            "arrays": {
                array.name: {
                    "spec": spec_text(array.fitted.spec),
                    "dtype": array.dtype,
                    "count": array.copies,
                    "shape": list(array.fitted.shape),
                    "device_shape": list(array.fitted.local_shape),
                    "device_bytes": array.device_bytes,
                    "dropped": [asdict(drop) for drop in array.fitted.dropped],
                }
                for array in self.arrays
            },
            "refused": [reason._asdict() for reason in self.refused],
            "notes": list(self.notes),
        }


_PER = {"tensor": "tensor", "head": "head", "token_head": "token and head"}
_PAGES = ("key_pages", "value_pages", "kv_pages")
_BATCH = ("page_table", "cu_q_lens", "kv_lens", "num_seqs")


def fact_rows(plan: CachePlan) -> list[tuple[str, str]]:
    """Labelled lines of all but the arrays."""
    cache, width = plan.cache, plan.table_width // plan.sequence_shards
    each = "" if plan.shards == 1 else f", {plan.local_pages} on each of {plan.shards} shards"
    if plan.sequence_shards > 1:
        each += f", {plan.local_pages // plan.sequence_shards} on each of {plan.sequence_shards} sequence shards"
    rows = [
        ("mesh", describe_mesh(plan.mesh)),
        ("device", plan.device_kind or plan.platform),
        ("pages", f"{plan.pages}{each}: {plan.tokens} tokens, {_whole_sequences(plan)} of {cache.max_length} tokens"),
        (
            "bytes",
            f"{bytes_text(plan.bytes_per_device)} a device: pages {bytes_text(plan.bytes_of(*_PAGES))}, "
            f"scales {bytes_text(plan.bytes_of('key_scale', 'value_scale'))}, a batch {bytes_text(plan.bytes_of(*_BATCH))}",
        ),
        (
            "padding",
            f"last pages leave at most {plan.most_lost} tokens empty: {cache.max_sequences} sequences x {cache.page_size - 1}",
        ),
        (
            "scalars",
            f"page table {plan.local_sequences} x {width}: {bytes_text(plan.page_table_bytes)}"
            + ("" if plan.scalar_limit is None else f" of {bytes_text(plan.scalar_limit)} scalar memory"),
        ),
    ]
    if plan.token_bytes is not None:
        rows.append(
            (
                "a step",
                f"at most {cache.max_tokens} tokens: {bytes_text(plan.token_bytes)} of keys and values a device and layer",
            )
        )
    rows += [("note", note) for note in plan.notes]
    return rows + [("refused", str(reason)) for reason in plan.refused]


def array_rows(plan: CachePlan) -> list[tuple[str, str, str, str, str]]:
    """Rows (array, spec, shape, per-device shape, per-device bytes)."""
    rows = []
    for array in plan.arrays:
        fitted = array.fitted
        many = f"{array.copies} x " if array.copies > 1 else ""
        shapes = f"{many}{array.dtype}[{_shape(fitted.shape)}]", f"[{_shape(fitted.local_shape)}]"
        rows.append((array.name, spec_text(fitted.spec), *shapes, f"{many}{bytes_text(array.device_bytes)}"))
    return rows


def _whole_sequences(plan: CachePlan) -> str:
    count = plan.local_pages // plan.table_width * plan.shards
    return f"{count} sequence{'' if count == 1 else 's'}"


def _shape(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
