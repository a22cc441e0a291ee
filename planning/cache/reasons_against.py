"""Reasons against a fitted KV cache, and notes on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from ...errors import shown
from ...page_layouts import LAYOUTS
from ...sharding import describe_mesh
from ..capability import Reason
from ..notes import Note, note
from ..text import bytes_text
from ..tiles import lanes_of
from .cache_checks import axis_names
from .cache_plan import CachePlan

__all__ = ["CacheSizes", "bytes_refusal", "memory_refusal", "notes", "refusals", "without_duplicates"]

_LANES = lanes_of(1)
_MAX_PAGES = 2**30
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # others take a byte
_T = TypeVar("_T")


class CacheSizes(NamedTuple):
    """The sizes of the whole cache. along: the shards of one sequence's pages."""

    pages: int
    shards: int
    along: int
    repeat: int
    head_shards: int


def refusals(plan: CachePlan, sizes: CacheSizes, policy: str) -> list[Reason]:
    """Every reason against the cache."""
    cache, reasons = plan.cache, []

    def refuse(code: str, field: str, message: str, hint: str) -> None:
        reasons.append(Reason(code, field, message, hint))

    manual = [
        axis.name for axis in plan.mesh if axis.name in axis_names(cache.page_sequence_axis) and axis.kind == "manual"
    ]
    if manual:
        refuse(
            "page_sequence_axis", "page_sequence_axis",
            f"page_sequence_axis={shown(cache.page_sequence_axis)}, but the mesh's axis {manual[0]!r} is Manual here: inside the "
            "caller's shard_map the outputs of its devices can't be merged",
            "Call it outside the shard_map, or leave page_sequence_axis out.",
        )  # fmt: skip
    if sizes.repeat > 1 and policy == "error":
        refuse(
            "kv_heads", "kv_heads",
            f"{cache.kv_heads} kv heads are split {sizes.head_shards} ways over {_plus(cache.kv_head_axis)} "
            f"({describe_mesh(plan.mesh)}), but kv_heads='error'",
            f"Plan with kv_heads='replicate' (each head stored {sizes.repeat} times), or split at most {cache.kv_heads} ways.",
        )  # fmt: skip
    seen = set()
    for array in plan.arrays:
        for drop in array.fitted.dropped:
            if not drop.harmless and (drop.axis, drop.reason) not in seen:
                seen.add((drop.axis, drop.reason))
                refuse(
                    "unfit", drop.dim, f"{array.name}, dimension {drop.dim}, axis {drop.axis!r}: {drop.reason}", f"{drop.hint}."
                )  # fmt: skip
    word = LAYOUTS[cache.layout].heads_per_word(cache.pack)
    if (2 * plan.stored_heads) % (word * sizes.head_shards):
        refuse(
            "page_packing", "layout",
            f"layout={cache.layout!r} puts {word} heads of {cache.stored_dtype} in a word, but a device has "
            f"{2 * plan.stored_heads / sizes.head_shards:g} of keys and values",
            "Split heads over fewer devices, or declare another layout.",
        )  # fmt: skip
    if cache.max_sequences % sizes.shards:
        refuse(
            "max_sequences", "max_sequences",
            f"max_sequences={cache.max_sequences} is not divisible by the {sizes.shards} shards of {_plus(cache.pages_axis)}",
            f"Make it a multiple of {sizes.shards}.",
        )  # fmt: skip
    if cache.max_tokens is not None and cache.max_tokens % sizes.shards:
        refuse(
            "max_tokens", "max_tokens",
            f"max_tokens={cache.max_tokens} is not divisible by the {sizes.shards} shards of {_plus(cache.pages_axis)}",
            f"Make it a multiple of {sizes.shards}.",
        )  # fmt: skip
    if plan.local_pages > _MAX_PAGES:
        refuse(
            "page_ids",
            "pages",
            f"{plan.local_pages} pages per shard; page ids are int32",
            "Declare larger or fewer pages.",
        )
    if plan.local_pages < plan.most_pages:
        where = "" if plan.group is None else f"group {plan.group[0]}: "
        capacity = f"{plan.local_pages} pages" + (" per shard" if plan.shards > 1 else "")
        min_pages = sizes.shards * plan.most_pages
        bytes_ = "" if cache.bytes_per_device is None else f" in {bytes_text(cache.bytes_per_device)} per device"
        needs = f"a sequence of max_length={cache.max_length} needs {cache.table_width}"
        hint = f"Wanted at least {min_pages} pages, or a smaller max_length."
        if plan.most_pages < plan.table_width:
            both = f"a window of {plan.window_tokens} tokens and a step of {cache.max_tokens}"
            needs = f"a sequence needs {plan.most_pages}: {both}"
            hint = f"Wanted at least {min_pages} pages, or a smaller window_tokens or max_tokens."
        refuse(
            "pages", "pages" if cache.bytes_per_device is None else "bytes_per_device",
            f"{where}{capacity}{bytes_} of {cache.page_size} tokens; {needs}", hint,
        )  # fmt: skip
    scalars = plan.bytes_of("page_table", "cu_q_lens", "kv_lens", "num_seqs")
    if plan.scalar_limit is not None and scalars > plan.scalar_limit:
        refuse(
            "page_table_smem", "max_length",
            f"the page table of {plan.local_sequences} sequences x {plan.table_width // sizes.along} pages and the lengths are "
            f"{bytes_text(scalars)}, but scalar memory of a {plan.device_kind or 'TPU'} is {bytes_text(plan.scalar_limit)}",
            "Make pages larger, max_length or max_sequences smaller, or split sequences over pages_axis.",
        )  # fmt: skip
    return [*reasons, *memory_refusal(plan)]


def memory_refusal(plan: CachePlan) -> tuple[Reason, ...]:
    """The reason against a cache larger than a device's memory."""
    if plan.memory_limit is None or plan.bytes_per_device <= plan.memory_limit:
        return ()
    field = "pages" if plan.cache.bytes_per_device is None else "bytes_per_device"
    text = (
        f"{bytes_text(plan.bytes_per_device)} per device, but a {plan.device_kind} has {bytes_text(plan.memory_limit)}"
    )
    return (Reason("device_memory", field, text, "Declare fewer pages, a quantised cache, or a larger mesh."),)


def bytes_refusal(plan: CachePlan) -> tuple[Reason, ...]:
    """The reason against states that take more than bytes_per_device, without pages that could be fewer."""
    declared = plan.cache.bytes_per_device
    if declared is None or plan.page_groups or plan.bytes_per_device <= declared:
        return ()
    text = f"states take {bytes_text(plan.bytes_per_device)} per device; {bytes_text(declared)} are declared"
    hint = "Declare fewer max_sequences, drafts, snapshots or slots, or a larger mesh."
    return (Reason("bytes_per_device", "bytes_per_device", text, hint),)


def without_duplicates(groups: Iterable[Iterable[_T]]) -> tuple[_T, ...]:
    """The reasons or notes of several groups, without duplicates."""
    return tuple(dict.fromkeys(item for group in groups for item in group))


def notes(plan: CachePlan, sizes: CacheSizes) -> list[Note]:
    """Notes on what is as declared but has a cost."""
    cache, entries = plan.cache, []
    if sizes.repeat > 1 and cache.values_in_keys:
        held, axes = plan.bytes_of("kv_pages", "rope_pages"), _plus(cache.kv_head_axis)
        split = held // sizes.repeat
        entries.append(note("cache.repeated_latents", axes=axes, times=sizes.repeat, size=held, split=split))
    elif sizes.repeat > 1:
        entries.append(
            note(
                "cache.repeated_heads",
                kv_heads=cache.kv_heads,
                ways=sizes.head_shards,
                times=sizes.repeat,
                stored=plan.stored_heads,
            )
        )
    rows = [LAYOUTS[cache.layout].padded_row(cache.head_dim, cache.value_size)]
    if cache.rope_size:
        rows = [("a latent", cache.key_size), ("a rotary key", cache.rope_size)]
        entries.append(_rope_note(plan))
    for what, size in filter(None, rows):
        if size % _LANES:
            lanes, layout = lanes_of(size), cache.layout
            share = 1 - size / lanes
            entries.append(note("cache.padded_row", name=what, size=size, lanes=lanes, share=share, layout=layout))
    if rows == [None] and plan.platform == "tpu":
        for name, size in (("head_dim", cache.head_dim), ("value_dim", cache.value_size)):
            if size % _LANES and (name == "head_dim" or size != cache.head_dim):
                lanes = lanes_of(size)
                share = 1 - size / lanes
                entries.append(note("cache.padded_dim", name=name, size=size, lanes=lanes, share=share))
    if plan.platform == "cpu" and cache.stored_dtype not in ("float32", "int8"):
        entries.append(note("cache.copied_at_writes", dtype=cache.stored_dtype))
    if sizes.along > 1:
        entries.append(note("cache.pages_by_turns", shards=sizes.along, axes=_plus(cache.page_sequence_axis)))
    if plan.window_tokens is not None and cache.max_tokens is None:
        entries.append(note("cache.window_without_max_tokens", window=plan.window_tokens))
    if plan.idle_axes:
        names = [axis.label for axis in plan.idle_axes]
        entries.append(note("cache.idle_axes", names=names))
    for field in ("pages_axis", "page_sequence_axis", "kv_head_axis"):
        dropped = plan.pages_array.fitted.dropped if plan.mesh and cache.is_set(field) else ()
        own_axes = axis_names(getattr(cache, field))
        entries += [
            note("cache.axis_dropped", field=field, axis=drop.axis, reason=drop.reason)
            for drop in dropped
            if drop.axis in own_axes and drop.harmless
        ]
    return entries


def _rope_note(plan: CachePlan) -> Note:
    """The bytes of a token and layer with rotary keys apart, as pages hold them, and those of one quantised row."""
    cache = plan.cache
    latent, rope = (plan[name] for name in ("kv_pages", "rope_pages"))
    of_latent, of_rope = (array.fitted.shape[-1] * _ITEMSIZE.get(array.dtype, 1) for array in (latent, rope))
    whole = lanes_of(cache.head_dim) * _ITEMSIZE.get(cache.stored_dtype, 1)
    return note("cache.rope_apart", dtype=cache.rope_dtype, latent=of_latent, rope=of_rope, whole=whole)


def _plus(axes: Any) -> str:
    return repr("+".join(axis_names(axes)))
