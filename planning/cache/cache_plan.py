"""CachePlan: what a declared KV cache takes on each device, where its arrays live, and what is against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...errors import InputError, RefusedError
from ...sharding import FittedSpec, MeshAxis, describe_mesh
from ..capability import Reason
from ..text import bytes_text, spec_text
from .cache_fields import CacheFields
from .layer_groups import layer_numbers
from .window_pages import pages_of_one, sequences_on

__all__ = ["CacheArray", "CachePlan", "array_rows", "fact_rows"]


class CacheArray(NamedTuple):
    """An array of the cache or of a batch over it: where it lies, how many there are (one a layer), bytes of one on a device.

    The bytes count what a device pads, which the fitted spec's own don't. `group` is that of its layers, where there are several.
    """

    fitted: FittedSpec
    dtype: str
    copies: int
    device_bytes: int
    group: int | None = None

    @property
    def name(self) -> str:
        return self.fitted.tensor

    @property
    def label(self) -> str:
        """The name, with the group where there are several."""
        return self.name if self.group is None else f"{self.name}[{self.group}]"


@dataclass(frozen=True)
class CachePlan:
    """The whole decision. `refused` has every reason against the cache; () where it can be made.

    `pages` are those of the whole cache, `shards` the parts in which `pages_axis` splits them and the batch, `sequence_shards`
    the devices of each that the pages of one sequence are dealt to in turn, `kv_repeat` how often a kv head is stored.
    `scalar_limit` and `memory_limit` are bytes of a device, None where they aren't known.

    Of a cache whose layers are in several groups, `parts` are the plans of the groups, each that of a cache of its own, and
    `pages` are those of all; `group` of such a part is (its number, how many there are).
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
    parts: tuple[CachePlan, ...] = ()
    group: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> CacheArray:
        array = self.get(name)
        if array is None:
            raise KeyError(name)
        return array

    def get(self, name: str) -> CacheArray | None:
        """An array by its name, None where the cache has none of that name. Errors: InputError where each group has one."""
        self.one_group(f"plan[{name!r}]")
        return next((array for array in self.arrays if array.name == name), None)

    @property
    def groups(self) -> tuple[CachePlan, ...]:
        """The plan of each group of layers; itself where there is one."""
        return self.parts or (self,)

    def one_group(self, what: str) -> CachePlan:
        """Itself. Errors: InputError for the plan of several groups, where `what` is of one."""
        if self.parts:
            raise InputError(
                f"{what} is of one group of layers, and the cache has {len(self.parts)}; wanted plan.groups[n]: "
                "cache.group_of(layer) says which."
            )
        return self

    @property
    def pages_array(self) -> CacheArray:
        """The first array of pages: of keys, or of both keys and values."""
        one = self.groups[0]
        return one.get("key_pages") or one["kv_pages"]

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
        return self.one_group("local_pages").pages // self.shards

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
    def most_pages(self) -> int:
        """Pages that one sequence has at most: those of max_length tokens, or of a window and a step."""
        return pages_of_one(self.one_group("most_pages").cache, self.shards, self.sequence_shards)

    @property
    def sequences(self) -> int:
        """Sequences of max_length that fit."""
        return min(
            sequences_on(part.local_pages, part.cache, part.shards, part.sequence_shards) * part.shards
            for part in self.groups
        )

    @property
    def tokens(self) -> int:
        """Tokens that fit into all pages; with a window more, as long sequences give pages back."""
        return min(
            max(
                part.pages * part.cache.page_size,
                part.sequences * part.cache.max_length * (part.window_tokens is not None),
            )
            for part in self.groups
        )

    @property
    def window_tokens(self) -> int | None:
        """Of the one group: tokens that a query sees at most."""
        return self.cache.window_tokens

    @property
    def most_lost(self) -> int:
        """Tokens' places that last pages leave empty at most, while all sequences are there."""
        return self.cache.max_sequences * (self.cache.page_size - 1)

    @property
    def page_table_bytes(self) -> int:
        """Of a device's page table, as scalar memory holds it; each group of layers has one."""
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
        layers = f"{cache.layer_count} layers" + (f" in {len(self.parts)} groups" if self.parts else "")
        if not self.parts and self.window_tokens is not None:
            layers += f" with a window of {self.window_tokens} tokens"
        which = "" if self.group is None else f"group {self.group[0]} of {self.group[1]}: "
        return (
            f"cache: {which}{layers}, {cache.kv_heads} kv heads of {dims}, {cache.dtype}{stored}, pages of "
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
            "pages_per_shard": self.pages // self.shards,
            "sequence_shards": self.sequence_shards,
            "tokens": self.tokens,
            "groups": [_group_dict(self, number) for number in range(len(self.groups))],
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
                array.label: {
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
    rows = [
        ("mesh", describe_mesh(plan.mesh)),
        ("device", plan.device_kind or plan.platform),
        *[(f"group {number}", _group_text(plan, number)) for number in range(len(plan.parts))],
        ("tokens", _fit_text(plan)) if plan.parts else ("pages", f"{_pages_text(plan)}: {_fit_text(plan)}"),
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
            + (", one a group" if plan.parts else "")
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
        rows.append((array.label, spec_text(fitted.spec), *shapes, f"{many}{bytes_text(array.device_bytes)}"))
    return rows


def _pages_text(plan: CachePlan, what: str = "") -> str:
    """How many pages one group has, and where."""
    each = "" if plan.shards == 1 else f", {plan.local_pages} on each of {plan.shards} shards"
    if plan.sequence_shards > 1:
        each += f", {plan.local_pages // plan.sequence_shards} on each of {plan.sequence_shards} sequence shards"
    most = "" if plan.window_tokens is None else f", at most {plan.most_pages} a sequence"
    return f"{plan.pages}{what}{each}{most}"


def _fit_text(plan: CachePlan) -> str:
    count = plan.sequences
    return f"{plan.tokens} tokens, {count} sequence{'' if count == 1 else 's'} of {plan.cache.max_length} tokens"


def _group_text(plan: CachePlan, number: int) -> str:
    """One of several groups."""
    part = plan.parts[number]
    layers = layer_numbers(plan.cache.groups)[number]
    window = "all tokens" if part.window_tokens is None else f"a window of {part.window_tokens} tokens"
    return (
        f"{len(layers)} layer{'' if len(layers) == 1 else 's'} ({_runs(layers)}), {window}: {_pages_text(part, ' pages')}: "
        f"{_fit_text(part)}; {bytes_text(part.bytes_of(*_PAGES, 'key_scale', 'value_scale'))} a device"
    )


def _group_dict(plan: CachePlan, number: int) -> dict[str, Any]:
    part = plan.groups[number]
    return {
        "layers": list(layer_numbers(plan.cache.groups)[number]),
        "window_tokens": part.window_tokens,
        "pages": part.pages,
        "pages_per_shard": part.local_pages,
        "pages_per_sequence": part.most_pages,
        "tokens": part.tokens,
        "sequences": part.sequences,
        "bytes_of_pages": part.bytes_of(*_PAGES),
        "bytes_of_scales": part.bytes_of("key_scale", "value_scale"),
    }


def _runs(numbers: Sequence[int]) -> str:
    """0-4, 6-10: numbers that follow one another by their ends."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, run)) for run in found)


def _shape(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
