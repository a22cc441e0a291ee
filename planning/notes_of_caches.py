"""What plans note about caches and steps over pages: the rows of notes.NOTES, as (code, field, text) and maybe a severity."""

from __future__ import annotations

from typing import Literal

__all__ = ["NOTES_OF_CACHES"]

NOTES_OF_CACHES: tuple[tuple[str, str, str] | tuple[str, str, str, Literal["info", "note"]], ...] = (
    # -- steps over pages
    ("paged.merged", "cache.page_sequence_axis",
     "each device attends to its own pages, and outputs are merged by their lse over {axes:plus}: all-reduces of {size:bytes}, "
     "{sent:bytes} sent per device and layer"),
    ("paged.selected", "selected",
     "each token gathers at most {count} keys from the pages, {size:bytes} for all tokens of a device and layer", "info"),
    ("paged.selected_pieces", "selected",
     "the kernel fetches, of pages, pieces of {tokens} tokens that hold a selected key: at most {size:bytes} for all tokens of a "
     "device and layer, named in {scalars:bytes} of scalar memory", "info"),
    ("paged.fused_spans", "update",
     "update='fused': beside {names} keys are written first; the result is the same"),
    ("paged.draft_tree", "draft_tree",
     "a token of a tree, of up to {drafts} drafts, sees stored keys and the drafts of its path; its position is the first "
     "draft's plus its depth", "info"),
    ("paged.stored_as_given", "key_scale", "{names} come as {dtype} and are stored as they are", "info"),
    ("paged.cast", "runtime_dtype", "query cast from {given} to {runtime} (runtime_dtype); key and value are the cache's"),
    ("paged.policy_unread", "sequence_parallel", "{name}={value!r} is not read: sequences lie in pages"),
    ("paged.axes_unread", "partition_axis",
     "partition_axis is not read: the cache declares pages_axis, kv_head_axis and page_sequence_axis"),
    ("paged.not_causal", "mask", "the mask is not causal: a query sees later keys of its own step"),
    ("paged.advice", "cache", "{message}: better is {hint}"),
    ("paged.fused_long_rows", "update",
     "update='fused': the kernel writes rows of one token; the keys of longer rows are written first"),
    ("paged.fused_unsupported", "update",
     "update='fused': {method} writes no pages, so keys are written first; the result is the same"),
    # -- a declared cache
    ("cache.repeated_heads", "kv_heads",
     "{kv_heads} kv heads are split {ways} ways: each is stored {times} times, in {stored} heads"),
    ("cache.rope_apart", "rope_dtype",
     "rotary keys are stored in {dtype}, in an array of their own: a token and layer take {latent} bytes of latent and {rope} of "
     "rotary key, against {whole} with both quantised"),
    ("cache.repeated_latents", "kv_head_axis",
     "latents have no heads, so {axes} repeats them {times} times: {size:bytes} of pages per device; as pages_axis (the "
     "batch) or page_sequence_axis (each sequence's pages) it would split them to {split:bytes}"),
    ("cache.padded_row", "layout",
     "{name} of {size} is padded to {lanes} lanes in layout {layout}: {share:.0%} of the pages is padding, included in the "
     "bytes"),
    ("cache.padded_dim", "head_dim",
     "{name} {size} is padded to {lanes} lanes on a TPU: {share:.0%} of such pages is padding, included in the bytes"),
    ("cache.copied_at_writes", "dtype",
     "XLA:CPU copies a layer's pages of {dtype} at each write; pages of float32 and int8 aren't copied"),
    ("cache.pages_by_turns", "page_sequence_axis",
     "page number p of a sequence is on shard p % {shards} of {axes}, and so are its ids: g % {shards} == p % {shards}"),
    ("cache.window_without_max_tokens", "max_tokens",
     "max_tokens isn't declared, so a step may insert a whole sequence: layers with a window of {window} tokens are planned with "
     "the pages of max_length"),
    ("cache.idle_axes", "mesh",
     "{names:list} of the mesh split nothing of the cache: all their devices hold the same data"),
    ("cache.axis_dropped", "mesh", "{field} {axis!r}: {reason}"),
    ("cache.repeated_states", "mesh", "{axes:list} of the mesh split nothing of {name}: all their devices hold the same states"),
    ("cache.padded_state", "layers",
     "{name} of {shape} per device fills no tiles of a TPU: {share:.0%} of it is padding, included in the bytes"),
    ("cache.few_slots", "slots", "{slots} slots hold {sequences} sequences; max_sequences is {wanted}"),
)  # fmt: skip
