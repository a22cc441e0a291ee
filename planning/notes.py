"""Notes of plans, caches and models: a code, a field, a severity and values as data; the table here has their English."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from .notes_of_caches import NOTES_OF_CACHES
from .notes_of_models import NOTES_OF_MODELS
from .notes_of_recurrences import NOTES_OF_RECURRENCES
from .text import bytes_text

__all__ = ["NOTES", "Note", "NoteKind", "has_note", "is_info", "note"]

Severity = Literal["info", "note"]


class NoteKind(NamedTuple):
    """field: what it is about. severity: 'info' needs no action, so that a plan's one screen leaves it out."""

    field: str
    text: str
    severity: Severity = "note"


class Note(str):
    """A note in English, which is a string like any other, with what it says as data."""

    code: str
    field: str
    severity: Severity
    values: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.code, dict(self.values), self.severity)


class _English(string.Formatter):
    """Values in a sentence: {size:bytes}, {names:list}, {axes:plus}; all others as Python's own formats."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "bytes":
            return bytes_text(value)
        if format_spec in ("list", "plus"):
            return (", " if format_spec == "list" else "+").join(map(str, value))
        return str(super().format_field(value, format_spec))


_ENGLISH = _English()


def note(code: str, *, severity: Severity | None = None, **values: Any) -> Note:
    """The note of a code in NOTES, with the values that its text names. severity: other than the table's."""
    kind = NOTES[code]
    result = Note(_ENGLISH.vformat(kind.text, (), values))
    result.code, result.field, result.severity, result.values = code, kind.field, severity or kind.severity, values
    return result


def _restored(code: str, values: dict[str, Any], severity: Severity) -> Note:
    return note(code, severity=severity, **values)


def is_info(text: str) -> bool:
    """Whether a note needs no action. A plain string, as an operation of one's own may give, is read."""
    return isinstance(text, Note) and text.severity == "info"


def has_note(notes: Iterable[str], code: str) -> bool:
    """Whether one of the notes has this code."""
    return any(isinstance(entry, Note) and entry.code == code for entry in notes)


def _kinds(*rows: tuple[str, str, str] | tuple[str, str, str, Severity]) -> dict[str, NoteKind]:
    return {row[0]: NoteKind(*row[1:]) for row in rows}


NOTES = _kinds(
    # -- what runs
    ("platform.interpreted", "interpret", "the kernel for {platform} runs on {here}, interpreted, as its config requests"),
    ("platform.no_kernel", "platform", "{operation} has no kernel of its own on {platform}, so forward_native runs"),
    (
        "platform.unknown_gpu_vendor", "backend",
        "a gpu of unknown vendor: forward_cuda and forward_rocm aren't considered; specify 'cuda' or 'rocm'",
    ),
    ("platform.backend_unused", "backend", "backend={backend} is not used: {source} say {platform}"),
    ("config.unread", "operation_configs", "{method} doesn't read the config's {fields:list}"),
    ("config.other_unread", "operation_configs", "operation_configs[{name!r}] ({fields:list}) is not read by {reader}", "info"),
    ("config.feed_unread", "blocksize", "{source}={value} is not read by {operation}"),
    ("config.feed_gives_way", "blocksize", "{source}={value} gives way to the config's {field}={declared}"),
    ("config.feed_taken", "blocksize", "{source}={value} is taken as the config's {field}", "info"),
    ("config.plain_has_no_blocks", "path", "{fields} has no effect: the route is plain, which has no blocks"),
    ("config.backward_only", "block_q", "block_q={block_q} is for the backward pass alone: the route is {route}"),
    ("tuning.no_sizes", "tuning", "tuning={tuning!r} has no effect: {implementation} has no sizes to choose for this call"),
    ("tuning.stored_unused", "tuning", "stored sizes aren't used: {trouble}"),
    # -- dtypes
    ("dtype.cast", "runtime_dtype", "{names:list} cast from {given} to {runtime} (runtime_dtype)", "info"),
    ("dtype.unscaled", "key_scale", "{name} is {dtype} without {name}_scale: its values are used unscaled"),
    ("dtype.narrowed_x64", "dtype", "{name} is float64, computed in float32: jax_enable_x64 is off"),
    ("dtype.narrowed", "dtype", "{name} is float64, computed in {dtype}"),
    ("dtype.precision", "runtime_dtype",
     "products of float32 tensors are made as jax_default_matmul_precision says; the published tolerance is that of 'highest'"),
    ("memory.dequantised", "key_scale",
     "{method} works on a dequantised copy of {names} ({dtype}, {size:bytes} per device, in addition to {given:bytes} as given)"),
    ("memory.dequantised_gradient", "key_scale",
     "the gradient works on a dequantised copy of {names} ({dtype}, {size:bytes} per device, in addition to {given:bytes} as "
     "given)"),
    ("latent.pages", "latent",
     "pages hold latents, which the absorbed form reads: {cached} bytes per token and layer, against {expanded} of expanded keys "
     "and values"),
    ("latent.form", "latent", "latent attention, {form}, {chosen}: {other} would cost {ratio:.3g} times as much"),
    ("latent.gradients", "latent",
     "the gradients of the projections are summed over devices: {sent:bytes} per device in the backward pass, besides what the "
     "attention sends"),
    ("latent.sent_keys", "latent",
     "keys and values are sent as {form} ones: {sent:bytes} per device in the forward pass; {other} ones would be "
     "{other_sent:bytes}"),
    ("latent.query", "latent.fold_query",
     "queries are made of their latents: the projections of queries and keys are {how}, {chosen}; {other} they would cost "
     "{ratio:.3g} times as much"),
    ("latent.query_not_folded", "latent.fold_query",
     "fold_query has no effect in the expanded form, whose queries are made by one product"),
    ("score.bias_bytes", "score", "the score {score} becomes a bias of shape {shape}, {size:bytes} per device"),
    # -- mesh
    ("mesh.context", "mesh", "the mesh of the context is in force: {context}, declared {declared}"),
    ("mesh.manual_keys", "sequence_parallel",
     "the keys of this call count as all keys: {axes:plus} is Manual here; if they are parts of a sequence, declare "
     "sequence_parallel='ring' or 'ulysses', which count this axis in"),
    ("mesh.manual_dropout", "dropout_rng",
     "every shard of the Manual axes {axes:plus} draws the same dropout; fold their index into the key"),
    ("mesh.mapped", "spmd_axis_name",
     "jax.vmap maps {rows} calls like this one (batch {batch}), which the plan doesn't see{consequence}"),
    # -- arguments
    ("dropout.off", "dropout_prob", "dropout_prob={probability} is off: deterministic=True", "info"),
    ("dropout.serving", "dropout_prob", "dropout_prob={probability} is off: serving has no dropout"),
    ("dropout.zero", "deterministic", "deterministic=False has no effect: dropout_prob is 0"),
    ("dropout.key_unused", "dropout_rng", "dropout_rng is not used: {why}"),
    ("mask.default_causal", "causal",
     "metadata.causal is a default for calls without a Mask object; this call's mask is not causal", "info"),
    ("mask.causal_false", "causal", "causal=False has no effect: it takes nothing from a Mask object, and this one is causal"),
    ("mask.offset_unused", "query_offset", "query_offset has no effect: no part of the mask depends on it"),
    ("mode.derived", "mode", "mode derived from the lengths", "info"),
    ("mask.offset_at_end", "query_offset", "queries stand at the end of the kv: query_offset={offset}", "info"),
    ("mask.offset_of_cache", "query_offset",
     "queries stand at the end of each row's cache: query_offset = kv_lengths - q_len", "info"),
    # -- mask arrays
    ("mask.array_unknown", "mask",
     "mask: what the array {shape} hides isn't known to the plan; if it is causal or a window, declare that (call.causal, "
     "call.sliding_window or call.mask) and pass no array: hidden blocks are then skipped"),
    ("mask.array_causal", "causal",
     "mask: causal, the metadata's default, applies to the array {shape} too, so no query sees later keys; pass causal=False if "
     "the array is the whole mask, or causal=True to say that it isn't"),
    ("mask.array_unstructured", "mask",
     "mask: the array {shape} is none of full, prefix, causal, window; it is read as it is"),
    ("mask.array_declared", "mask", "{array}, which is declared already; pass no array: reading it has no use"),
    ("mask.array_full", "mask", "{array}: it hides nothing; pass no array: reading it has no use"),
    ("mask.array_structured", "mask",
     "{array}; declare {words} in call and pass no array: hidden blocks are then skipped"),
    # -- masks of blocks
    ("blocks.none", "mask",
     "no part of the mask defines which blocks are seen: declare Blocks, or a pattern of attnops.masks"),
    ("blocks.density", "mask", "blocks: {density}"),
    ("blocks.visits", "mask",
     "blocks: a head visits {visited:.4g} of {every} {of}; without the blocks {without:.4g}, so the work is {share:.3g} of that"),
    ("blocks.chosen", "mask", "blocks: tiles of {tile} that hold a chosen block are visited; which, is found on the device"),
    ("blocks.rounded", "mask",
     "blocks: of {blocks:list} in tiles of {tile}: a tile that holds some of a block is visited whole"),
    ("blocks.together", "mask", "blocks: the {heads} query heads of a tile visit what any of them sees"),
    ("blocks.shared", "mask", "blocks: the {heads} query heads of a kv head share its choice"),
    # -- sequences
    ("sequence.nothing_to_do", "sequence_parallel",
     "nothing splits the sequence of this call, so {operation} has nothing to do"),
    ("sequence.unsplit", "sequence_parallel",
     "sequence_parallel={strategy!r} has no effect: nothing splits the sequence of this call"),
    ("sequence.no_ring", "ring_order", "{name}={value!r} has no effect: this call runs no ring"),
    ("sequence.no_scan", "scan_ring_attention",
     "scan_ring_attention=True has no effect: a ring's steps {steps} are too few or too irregular for a loop and are compiled "
     "one by one"),
    # -- splash
    ("splash.tiles", "transposed_tiles", "forward tiles are [queries, keys], transposed_tiles=False: {reason}"),
    ("splash.transposed_tiles", "transposed_tiles",
     "forward tiles are [keys, queries], with {ahead} products ahead of their exponentials, transposed_tiles=True: {reason}"),
    ("splash.transposed_around", "layout",
     "the kernel works on [batch, heads, tokens, dim]: {names:list}{gradients} are transposed around it, {size:bytes} per device "
     "forward, unless XLA makes them in that order, as it does behind projections{way}", "info"),
    ("splash.vmem", "vmem_limit_bytes",
     "the kernels are counted to take {counted:.1f} MiB of VMEM, which may be a quarter too few, and may take {room:.1f}: they "
     "may not compile; `attnops verify` tells"),
    ("splash.tokamax_untried", "kernel", "tokamax {version}: its private kernel was tried in {tried:list}"),
    ("splash.tokamax_partial", "block_kv_dkv",
     "the backward of tokamax's kernel holds up to {parts} partial gradients of the query, {size:bytes} per device; a larger "
     "block_kv_dkv makes fewer"),
    ("splash.tokamax_reciprocal", "fuse_reciprocal",
     "fuse_reciprocal=False counts where tokamax's kernel is differentiated; else it divides inside"),
    ("splash.tokamax_scheduler", "use_experimental_scheduler",
     "use_experimental_scheduler=True reaches the forward pass of tokamax's kernel, not its backward"),
    # -- flash
    ("flash.unknown_gpu", "platform", "sizes for {device} fit any GPU from sm_86 on; known GPUs are {known:list}"),
    ("flash.tokamax_untried", "kernel", "tokamax {version}: its kernels for GPUs were tried in {tried:list}"),
    ("flash.tokamax_interpret", "interpret",
     "interpret=True runs tokamax's function in XLA: none of its kernels for GPUs runs in Pallas' interpreter"),
    ("flash.tokamax_mask", "mask",
     "the mask goes to tokamax as an array of {q_len} x {kv_len}, {size:bytes} for each head or batch that has its own",
     "info"),
    ("flash.steps", "block_kv", "a forward tile of {keys} keys is processed {how}", "info"),
    ("mosaic.linker", "kernel",
     "{package} {version} is installed, by which JAX makes the binaries of kernels in Mosaic GPU: registers don't move between "
     "warpgroups, so tiles are smaller by default; attnops verify shows the kernel beside kernel='triton'"),
    ("mosaic.columns", "head_dim", "head dims {dims} are computed as {padded}, from copies with zeros", "info"),
    # -- arrays that come elsewhere
    ("moved.unknown", "mesh", "{array} comes {given}; how that compares with {wanted} on the plan's mesh isn't known"),
    ("moved.nothing", "mesh",
     "{array} comes {given} and is taken as {wanted}: nothing is sent, each device holds {size:bytes}"),
    ("moved.each", "mesh", "{array} comes {given} and is moved to {wanted}: {size:bytes} sent to each device"),
    ("moved.some", "mesh",
     "{array} comes {given} and is moved to {wanted}: up to {size:bytes} sent to each device, {total:bytes} in all"),
    # -- other libraries' calls over pages
    ("foreign.unread", "call",
     "{arguments:list}: not read, and the result doesn't depend on it; sizes of blocks are fields of the operation's config "
     "here"),
    ("foreign.distribution", "distribution",
     "distribution: only its last number, that of the sequences, is read; steps aren't split by their kind", "info"),
    ("foreign.no_update", "update_kv_cache",
     "update_kv_cache=False: keys and values aren't read; the pages have them", "info"),
    # -- a selection of keys
    ("index.unread", "metadata",
     "{fields:list}: an indexer reads none of it; its scores are float32"),
    ("index.idle_axes", "mesh", "{names:list} of the mesh split nothing of the selection: all their devices do the same work"),
    ("index.keys_gathered", "partition_axis",
     "queries of {axes:plus} select among all keys: index keys are gathered, {size:bytes} on each device"),
    ("index.merged", "cache.page_sequence_axis",
     "each device selects from its own pages, and selections are merged over {axes:plus}: an all-to-all and an all-gather of "
     "{size:bytes}, {sent:bytes} sent per device and layer"),
    # -- calls that follow from their table of operands
    ("table.idle_axes", "mesh", "{names:list} of the mesh split no work: all their devices do the same"),
    ("table.unread", "metadata", "{fields:list}: {operation} reads none of it"),
    *NOTES_OF_RECURRENCES,
    *NOTES_OF_CACHES,
    *NOTES_OF_MODELS,
)  # fmt: skip
