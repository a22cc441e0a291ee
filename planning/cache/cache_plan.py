"""CachePlan: the memory that a declared KV cache needs on each device, where its arrays are, and reasons against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import RefusedError
from ...sharding import describe_mesh
from ..text import bytes_text, spec_text
from .cache_fields import CacheFields
from .cache_numbers import CacheNumbers
from .layer_groups import GEOMETRY, layer_numbers

__all__ = ["CachePlan", "array_rows", "fact_rows"]


@dataclass(frozen=True, kw_only=True)
class CachePlan(CacheNumbers):
    """The whole decision, with its text and JSON forms. Its fields are those of CacheNumbers."""

    def require(self) -> CachePlan:
        """Return self. Errors: RefusedError with every reason if the cache can't be created."""
        if self.refused:
            lines = [f"  {reason}" for reason in self.refused]
            raise RefusedError("\n".join((f"{self.describe()}:", *lines)))
        return self

    def describe(self) -> str:
        """The cache in one line."""
        cache = self.cache
        layout = "" if cache.layout == "split" or cache.values_in_keys else f", layout {cache.layout}"
        layers = f"{cache.layer_count} layer{'s' if cache.layer_count > 1 else ''}" + (
            f" in {len(self.parts)} groups" if len(self.parts) > 1 else ""
        )
        layers += "" if cache.reads_layer is None else f", {len(cache.stored_layers)} with pages"
        if not self.parts and self.window_tokens is not None:
            layers += f" with a window of {self.window_tokens} tokens"
        which = "" if self.group is None else f"group {self.group[0]} of {self.group[1]}: "
        own = any(group.geometry for group in cache.groups)
        if not self.page_groups:
            return f"cache: {which}{layers} with states"
        geometry = "sizes by group" if own else _geometry_text(cache)
        geometry += " and states" if cache.has_states else ""
        return f"cache: {which}{layers}, {geometry}, pages of {cache.page_size} tokens{layout}"

    def explain(self, *, arrays: bool = True) -> str:
        """The decision as text, with or without the lines of its arrays."""
        lines = [self.describe(), *(f"{name:<9} {text}" for name, text in fact_rows(self))]
        if not arrays:
            return "\n".join(lines)
        lines.append("arrays    spec, shape -> per device, bytes per device")
        for name, spec, shape, local, size in array_rows(self):
            lines.append(f"  {name:<15} {spec}  {shape} -> {local}  {size}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def group_text(self, own_geometry: bool) -> str:
        """The line of one of several groups, after its layers. own_geometry: whether groups differ in what they store."""
        window = "all tokens" if self.window_tokens is None else f"a window of {self.window_tokens} tokens"
        geometry = f", {_geometry_text(self.cache)}" if own_geometry else ""
        size = bytes_text(self.bytes_of(*_PAGES, "key_scale", "value_scale"))
        return f", {window}{geometry}: {_pages_text(self, ' pages')}: {_fit_text(self)}; {size} per device"

    def group_dict(self, stored_layers: list[int]) -> dict[str, Any]:
        """The values of one of several groups, besides its layers."""
        return {
            "stored_layers": stored_layers,
            "window_tokens": self.window_tokens,
            **{name: getattr(self.cache, name) for name in GEOMETRY},
            "pages": self.pages,
            "pages_per_shard": self.local_pages,
            "pages_per_sequence": self.most_pages,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "bytes_of_pages": self.bytes_of(*_PAGES),
            "bytes_of_scales": self.bytes_of("key_scale", "value_scale"),
        }

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
            "bytes_of_states": sum(part.bytes_of(*part.states) for part in self.state_groups),
            "bytes_of_batch": self.bytes_of(*_BATCH),
            "bytes_per_sequence": self.sequence_bytes,
            "bytes_per_token": self.bytes_per_token,
            "pages_larger_from": self.larger_from,
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
_PAGES = ("key_pages", "value_pages", "kv_pages", "rope_pages")
_BATCH = ("page_table", "cu_q_lens", "kv_lens", "num_seqs", "read_slots", "write_slots")


def _geometry_text(cache: CacheFields) -> str:
    """What is stored of a token, and its dtype."""
    if cache.values_in_keys:
        heads = f"latents of {cache.value_size} with rotary keys of {cache.head_dim - cache.value_size}"
    else:
        dims = f"{cache.head_dim}" if cache.value_size == cache.head_dim else f"{cache.head_dim}/{cache.value_size}"
        heads = f"{cache.kv_heads} kv heads of {dims}"
    quantised = cache.quantised
    stored = "" if quantised is None else f" in {quantised.dtype} (a scale per {_PER[quantised.scale]})"
    stored += f", rotary keys in {cache.rope_dtype}" if cache.rope_size else ""
    return f"{heads}, {cache.dtype}{stored}"


def fact_rows(plan: CachePlan) -> list[tuple[str, str]]:
    """Labelled lines for everything except the arrays."""
    cache, width = plan.cache, plan.table_width // plan.sequence_shards
    rows = [
        ("mesh", describe_mesh(plan.mesh)),
        ("device", plan.device_kind or plan.platform),
        *[(f"group {number}", _group_text(plan, number)) for number in range(len(plan.parts))],
        *[("shared", text) for text in _reads_text(cache)],
        ("tokens", _fit_text(plan)) if plan.parts else ("pages", f"{_pages_text(plan)}: {_fit_text(plan)}"),
        *[("sequence", text) for text in _sequence_text(plan)],
        ("bytes", _bytes_text(plan)),
    ]
    if plan.page_groups:
        rows += [
            (
                "padding",
                f"last pages leave at most {plan.most_lost} tokens empty: {cache.max_sequences} sequences x "
                f"{cache.page_size - 1}",
            ),
            (
                "scalars",
                f"page table {plan.local_sequences} x {width}: {bytes_text(plan.page_table_bytes)}"
                + ("" if plan.scalar_limit is None else f" of {bytes_text(plan.scalar_limit)} scalar memory")
                + (", one per group" if len(plan.page_groups) > 1 else ""),
            ),
        ]
    if plan.token_bytes is not None:
        written = "latents" if cache.values_in_keys else "keys and values"
        rows.append(
            (
                "a step",
                f"at most {cache.max_tokens} tokens: {bytes_text(plan.token_bytes)} of {written} per device and layer",
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
    """The number of pages of one group, and where they are."""
    per_shard = "" if plan.shards == 1 else f", {plan.local_pages} on each of {plan.shards} shards"
    if plan.sequence_shards > 1:
        per_shard += f", {plan.local_pages // plan.sequence_shards} on each of {plan.sequence_shards} sequence shards"
    limit = "" if plan.window_tokens is None else f", at most {plan.most_pages} per sequence"
    return f"{plan.pages}{what}{per_shard}{limit}"


def _fit_text(plan: CachePlan) -> str:
    count = plan.sequences
    if not plan.page_groups:
        return f"any number, {count} sequence{'' if count == 1 else 's'}"
    return f"{plan.tokens} tokens, {count} sequence{'' if count == 1 else 's'} of {plan.cache.max_length} tokens"


def _bytes_text(plan: CachePlan) -> str:
    """The bytes per device and what they are of."""
    states = sum(part.bytes_of(*part.states) for part in plan.state_groups)
    kept = [f"states {bytes_text(states)}"] if plan.state_groups else []
    if plan.page_groups:
        scales = bytes_text(plan.bytes_of("key_scale", "value_scale"))
        rest = ", the rest" if plan.state_groups and plan.cache.bytes_per_device is not None else ""
        kept += [f"pages {bytes_text(plan.bytes_of(*_PAGES))}{rest}", f"scales {scales}"]
    return f"{bytes_text(plan.bytes_per_device)} per device: {', '.join(kept)}, a batch {bytes_text(plan.bytes_of(*_BATCH))}"


def _sequence_text(plan: CachePlan) -> list[str]:
    """What a sequence takes on a device, if layers keep states: a fixed part, and one that grows with its length."""
    if not plan.state_groups:
        return []
    fixed = f"{bytes_text(plan.sequence_bytes)} per device whatever its length"
    if not all(part.pages for part in plan.page_groups) or not plan.page_groups:
        return [fixed]
    larger = plan.larger_from
    most = f"up to {plan.cache.max_length} tokens states are the larger part"
    most = most if larger is None else f"from {larger} tokens on pages are the larger part"
    return [f"{fixed}, and {bytes_text(round(plan.bytes_per_token))} per token: {most}"]


def _group_text(plan: CachePlan, number: int) -> str:
    """The line of one of several groups."""
    layers = layer_numbers(plan.cache.groups)[number]
    text: str = plan.groups[number].group_text(any(group.geometry for group in plan.cache.groups))
    return f"{len(layers)} layer{'' if len(layers) == 1 else 's'} ({_runs(layers)}){text}"


def _reads_text(cache: CacheFields) -> list[str]:
    """Which layers read which other's pages, a line for each of these."""
    by_source: dict[int, list[int]] = {}
    for layer, source in cache.reads_layer or ():
        by_source.setdefault(source, []).append(layer)
    lines = []
    for source, layers in by_source.items():
        many = len(layers) > 1
        subject = f"layers {_runs(layers)} read" if many else f"layer {layers[0]} reads"
        lines.append(f"{subject} the keys and values of layer {source}")
    return lines


def _group_dict(plan: CachePlan, number: int) -> dict[str, Any]:
    layers = layer_numbers(plan.cache.groups)[number]
    stored = [layer for layer in layers if plan.cache.layer_read(layer) == layer]
    return {"layers": list(layers), **plan.groups[number].group_dict(stored)}


def _runs(numbers: Sequence[int]) -> str:
    """0-4, 6-10: consecutive numbers as ranges."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _shape(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
