"""attend: one step's attention of a ragged batch over a layer of the cache; optionally writes the step's own tokens first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ...errors import ConfigError, InputError, shown
from ...masks.int_arrays import known_values
from ...planning.cache.kv_cache import KVCache
from ...planning.score_operands import score_rows
from ...pytree_export import exported_tuple
from ...scores import Score
from ...sharding.mesh import AnyMesh
from ..kernels.pages.page_layout import page_shape
from ..kernels.varying import varying
from .batch import RaggedBatch
from .by_device import by_device
from .check_visibility import check_visibility
from .insert import check_own_keys, check_step, insert, write
from .known_sizes import known_sizes
from .layer_arrays import LayerPages
from .logit_arrays import LogitArrays, by_place
from .paged_call import Attended, PagedCall, PagedMethod, PagedSizes, on_xla
from .state import CacheState, alone, layer_of

__all__ = ["PagedOutput", "attend", "check_longest", "check_operands", "check_window", "check_written", "default_scale"]


_CHOSEN = PagedSizes()


@exported_tuple
class PagedOutput(NamedTuple):
    """output [tokens, heads, value_dim] in the query's dtype, lse float32 [tokens, heads], and the state after the step."""

    output: Float[Array, "tokens heads value_dim"]
    lse: Float[Array, "tokens heads"]
    state: CacheState


def attend(
    state: CacheState,
    layer: int,
    batch: RaggedBatch,
    query: Float[Array, "tokens heads head_dim"],
    key: Float[Array, "tokens kv_heads head_dim"] | None = None,
    value: Float[Array, "tokens kv_heads value_dim"] | None = None,
    *,
    key_scale: Float[Array, "tokens kv_heads"] | None = None,
    value_scale: Float[Array, "tokens kv_heads"] | None = None,
    update: Literal["before", "fused", "none"] = "before",
    mesh: AnyMesh | None = None,
    kv_heads: Literal["replicate", "error"] = "replicate",
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    score: Score | None = None,
    captures: Sequence[Array] = (),
    selected: Int[Array, "tokens n"] | None = None,
    draft_tree: Bool[Array, "rows drafts drafts"] | None = None,
    spans: Int[Array, "tokens 2"] | None = None,
    prefix_lengths: Int[Array, " rows"] | None = None,
    q_positions: Int[Array, " tokens"] | None = None,
    max_q_len: int | None = None,
    debug: bool = False,
    method: PagedMethod = on_xla,
    platform: str | None = None,
    sizes: PagedSizes = _CHOSEN,
    check_vma: bool = True,
) -> PagedOutput:
    """Attend to the keys in each row's pages, including those of this step's own tokens. The operation `paged` is this, planned.

    update: 'before' writes `key` and `value` first, as `insert` does; 'fused' leaves rows of one token to the method, which must
    be one that writes, where the arrays allow it; 'none' uses the pages as they are, without key or value. Keys and values may
    come quantised, as for `insert`.
    `mesh` and `kv_heads` are those that the state was made with: each device then works on its own pages and heads.
    `score`: applied after the cap, by positions, with its arrays. `softmax_scale` defaults to 1/sqrt(head_dim), except over
    latents, where it is required.
    `selected`: for each token the positions of the keys that it attends to, of those that it sees; -1 is none. `draft_tree`: for
    each row of the batch which of its tokens in this step each of them sees; without a True, by position.
    `spans`: the first position of each token's span and one past the last, (0, 0) for none, `prefix_lengths`: for each row the
    tokens of its prefix: those of a span or prefix see one another whatever the mask. `q_positions`: each query's for a score
    that reads no key's, where it isn't its place in the sequence.
    `sliding_window`: inclusive distances (left, right). `chunk_size`: keys are seen only by queries of the same chunk of so many
    positions. `max_q_len`: the most queries of any row in this step, 1 if all rows
    decode; in a traced batch queries beyond it give 0, and with 'fused' and 1 their keys aren't written. `debug`: checks traced
    batches on the host while the step runs. `method` does the attention, by default plain XLA; `check_vma`: whether shard_map can
    check it.

    A query that belongs to no sequence gives 0, and its lse is -inf. There is no gradient. Errors: those of `insert` and of
    RaggedBatch.check; InputError for shapes, and for keys that `update` doesn't use or that it needs and doesn't get.
    """
    check_operands(state, layer, query, key, value, update)
    if key is not None:
        check_own_keys(state, layer)
    layer_state = alone(state, layer, batch)
    cache = layer_state.cache
    check_window(cache.window_tokens, sliding_window, chunk_size)
    rows, first = None, any(x is not None for x in (selected, spans, prefix_lengths))
    first |= layer_state.sequence_shards > 1
    if key is None:
        check_step(layer_state, 0, batch, query, debug=debug, writes=False)
    elif update == "fused" and not first and _writable(layer_state, batch, query, sinks, key, value, mesh):
        which: Any = "none" if max_q_len == 1 else "several"
        layer_state, rows = write(layer_state, 0, batch, key, value, (key_scale, value_scale), debug=debug, which=which)
    else:
        layer_state = insert(
            layer_state, 0, batch, key, value, key_scale=key_scale, value_scale=value_scale, debug=debug
        )
    check_longest(batch, max_q_len, debug=debug)
    given = (draft_tree, spans, prefix_lengths, q_positions)
    sinks, selected, *visible = (None if x is None else jnp.asarray(x) for x in (sinks, selected, *given))
    of_logits = LogitArrays(sinks, tuple(map(jnp.asarray, captures)), selected, None, *visible)
    check_visibility(batch, of_logits, cache.window_tokens, debug=debug)

    def shard(
        query: Any,
        pages: LayerPages,
        batch: RaggedBatch,
        of_logits: LogitArrays,
        rows: Any,
        index: Any = 0,
        head_start: Any = 0,
    ) -> Attended:
        steps, arrays = by_place(score, of_logits.captures)
        scale = default_scale(cache) if softmax_scale is None else softmax_scale
        mask = (causal, sliding_window)
        call = PagedCall(
            query,
            pages,
            batch,
            of_logits.sinks,
            cache.layout,
            cache.value_size,
            scale,
            *mask,
            logits_soft_cap,
            max_q_len,
            platform,
            sizes,
            layer_state.sequence_shards,
            index,
            rows,
            steps,
            arrays,
            head_start,
            of_logits.selected,
            chunk_size=chunk_size,
            draft_tree=of_logits.draft_tree,
            spans=of_logits.spans,
            prefix_lengths=of_logits.prefix_lengths,
            q_positions=of_logits.q_positions,
        )
        return method(call)

    pages = layer_state.only_pages
    dims = () if score is None else tuple(row.dims for row in score_rows(score.structure(), of_logits.ranks))
    output, lse, after = by_device(
        shard, layer_state, pages, batch, query, of_logits, dims, rows, mesh, kv_heads, check_vma
    )
    if after is not None:  # scales that aren't by token stay as they are
        pages = LayerPages(*(x if new is None else new for x, new in zip(pages, after, strict=True)))  # type: ignore[arg-type]
    return PagedOutput(output, lse, state.with_layer(layer, pages))


def _writable(
    state: CacheState, batch: RaggedBatch, query: Any, sinks: Any, key: Any, value: Any, mesh: AnyMesh | None
) -> bool:
    """Whether a method can hand back a layer's own arrays: not if they are taken apart by shards here, nor if the queries, but
    not the pages, differ on the devices of a caller's shard_map."""
    split_here = batch.shards is not None and (mesh is None or mesh.size == 1)
    return not split_here and varying((query, sinks)) <= varying((state.layers[0], batch, key, value))


def check_operands(state: CacheState, layer: Any, query: Any, key: Any, value: Any, update: str) -> None:
    """Refuse an unknown update, keys that it doesn't use or lacks, and a query of a wrong shape."""
    if update not in ("before", "fused", "none"):
        raise ConfigError(f"update={shown(update)}; wanted 'before', 'fused' or 'none'.")
    known_sizes(query=query, key=key, value=value)
    pages, cache = layer_of(state, layer), state.cache.part(state.cache.group_of(int(layer)), 1)
    check_written(update, key, value, latent=cache.values_in_keys)
    heads = page_shape(cache.layout, pages.key, pages.value, cache.head_dim, cache.value_size).kv_heads
    if getattr(query, "ndim", 0) != 3 or query.shape[2] != cache.head_dim or query.shape[1] % heads:
        raise InputError(
            f"query has shape {tuple(getattr(query, 'shape', ()))}; wanted [tokens, heads, {cache.head_dim}], heads a multiple "
            f"of the {heads} kv heads that the cache stores."
        )


def default_scale(cache: KVCache) -> float:
    """1/sqrt(head_dim). Errors: InputError for latents, whose heads have another dim before they are absorbed."""
    if cache.values_in_keys:
        raise InputError(
            "softmax_scale is missing over pages of latents; wanted that of the heads, (nope_dim + rope_dim) ** -0.5, which the "
            "latents don't show."
        )
    return float(cache.head_dim**-0.5)


def check_window(
    window_tokens: int | None, sliding_window: tuple[int | None, int | None] | None, chunk_size: int | None = None
) -> None:
    """Refuse a window larger than that of the layer's pages. Errors: InputError."""
    left = None if sliding_window is None else sliding_window[0]
    if window_tokens is not None and chunk_size is not None and chunk_size <= window_tokens:
        return
    if window_tokens is not None and (left is None or left >= window_tokens):
        raise InputError(
            f"sliding_window={shown(sliding_window)}, chunk_size={shown(chunk_size)} over pages that are kept for a window of "
            f"{window_tokens} tokens; wanted ({window_tokens - 1}, 0), or a smaller one, or chunks of up to {window_tokens}."
        )


def check_written(update: str, key: Any, value: Any, *, latent: bool = False) -> None:
    """Refuse keys and values that an update doesn't use, or lacks. latent: values are in the keys. Errors: InputError."""
    if latent and value is not None:
        raise InputError("value is given for a cache of latents, whose values are in its keys; wanted None.")
    value = key if latent else value
    if (key is None) != (value is None) or (key is None) != (update == "none"):
        present = " and ".join(name for name, x in (("key", key), ("value", value)) if x is not None) or "neither"
        to_write = "key, the latents to be written" if latent else "key and value, to be written"
        expected = "neither: the pages have them" if update == "none" else to_write
        raise InputError(f"update={update!r} with {present}; wanted {expected}.")


def check_longest(batch: RaggedBatch, max_q_len: int | None, *, debug: bool) -> None:
    """Refuse batches with more queries in a row than specified, which would be ignored; check traced ones with `debug`."""
    if max_q_len is None:
        return
    starts, count = known_values(batch.cu_q_lens), known_values(batch.num_seqs)
    if starts is not None and count is not None:
        _longest(starts, count, max_q_len)
    elif debug:
        jax.debug.callback(partial(_longest, max_q_len=max_q_len), batch.cu_q_lens, batch.num_seqs)


def _longest(starts: Any, count: Any, max_q_len: int) -> None:
    starts, count = np.asarray(starts), np.asarray(count)
    used = np.arange(starts.shape[-1] - 1) < count[..., None]
    longest = int(np.where(used, np.diff(starts, axis=-1), 0).max(initial=0))
    if longest > max_q_len:
        raise InputError(
            f"max_q_len={max_q_len}, but a row of the batch has {longest} queries; pass the longest, or leave it out."
        )
