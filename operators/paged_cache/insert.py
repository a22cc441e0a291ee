"""insert: writes a batch's keys and values into their pages, quantised if the cache is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ...errors import InputError, InputTypeError, a_type
from ...page_layouts import LAYOUTS
from ...planning.cache.cache_checks import axis_names
from ...sharding import axes_at, on_auto_axes, spec_of
from ..kernels.pages.page_layout import page_shape
from ..kernels.varying import varying
from .batch import RaggedBatch
from .batch_checks import check_later
from .known_sizes import known_sizes
from .layer_arrays import LayerPages
from .put import put
from .sequence_shards import by_sequence_shard
from .state import CacheState, alone, layer_of
from .stored_tokens import as_stored, check_no_values, check_token_scale
from .token_slots import by_shard, rows_by_shard, token_slots

__all__ = ["check_own_keys", "check_shards", "check_step", "insert", "write"]


def insert(
    state: CacheState,
    layer: int,
    batch: RaggedBatch,
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads value_dim"] | None,
    *,
    key_scale: Float[Array, "tokens kv_heads"] | None = None,
    value_scale: Float[Array, "tokens kv_heads"] | None = None,
    debug: bool = False,
) -> CacheState:
    """Return the state with the tokens written: row s's token i at position kv_len - q_len + i of its sequence.

    Tokens that belong to no sequence, and those without a page, are dropped, never clamped. Known batch values
    are checked first; `debug` checks traced ones on the host during the step, which then fails with the message. Heads may be
    as declared, or as the cache stores them. Inside a shard_map everything is a device's own part, heads repeated.
    Tokens in the dtype of quantised pages are stored as they are; if pages have a scale per token and head, pass the tokens'
    own. value: None for a cache of latents, whose `key` has each latent followed by its rotary key. Errors: InputTypeError for
    another dtype than the declared and the stored one, InputError for shapes, scales and for values, as in RaggedBatch.make.
    """
    return write(state, layer, batch, key, value, (key_scale, value_scale), debug=debug, which="all")[0]


def write(
    state: CacheState,
    layer: int,
    batch: RaggedBatch,
    key: Any,
    value: Any,
    scales: tuple[Any, Any],
    *,
    debug: bool,
    which: Literal["all", "several", "none"],
) -> tuple[CacheState, LayerPages]:
    """(the state with the tokens written, as by `insert`, the tokens as their pages store them). which: of which rows tokens are
    written: of all, of those with several tokens, or of none."""
    whole, at = state, layer
    check_own_keys(state, layer)
    state, layer = alone(whole, at, batch), 0
    pages = state.only_pages
    cache, shards = state.cache, batch.shards
    shape = page_shape(cache.layout, pages.key, pages.value, cache.head_dim, cache.value_size)
    for name, tokens, dim, scale in zip(("key", "value"), (key, value), shape[3:], scales, strict=True):
        if name == "value" and cache.values_in_keys:
            check_no_values(value, scale)
        else:
            _check_tokens(name, tokens, scale, pages.key, shape.kv_heads, dim, state)
    if value is not None and key.shape[0] != value.shape[0]:
        raise InputError(f"key has {key.shape[0]} tokens and value {value.shape[0]}; wanted the same number.")
    shard_pages, shard_tokens = check_step(state, layer, batch, key, debug=debug)
    along = state.sequence_shards
    slots: Any = partial(token_slots, tokens=shard_tokens, pages=shard_pages // along, page_size=cache.page_size)
    slots = partial(slots, singles=which == "all")
    if along > 1:
        slots = _on_each_shard(partial(slots, stride=along), along)

    def put_in(stored: jax.Array, page: jax.Array, row: jax.Array, tokens: jax.Array) -> jax.Array:
        return put(stored, LAYOUTS[cache.layout].places(page, row), tokens)

    put_all = by_sequence_shard(along, put_in, (0, 0, None))

    def put_tokens(stored: Any, tokens: jax.Array, where: tuple[jax.Array, jax.Array]) -> jax.Array:
        return by_shard(shards, put_all, stored, *where, rows_by_shard(shards, tokens, "tokens"))

    def run(
        pages: LayerPages, key: Any, value: Any, scales: tuple[Any, Any], *arrays: jax.Array
    ) -> tuple[LayerPages, LayerPages]:
        tokens = as_stored(cache, pages, shape.kv_heads, key, value, *scales)
        if which == "none":
            return pages, tokens
        where = slots(*arrays) if shards is None else jax.vmap(slots)(*arrays)
        after: Any = (x if rows is None else put_tokens(x, rows, where) for x, rows in zip(pages, tokens, strict=True))
        return LayerPages(*after), tokens

    def specs() -> tuple[Any, Any]:
        stored = jax.tree.map(spec_of, pages)
        heads = axes_at(stored.key, cache.heads_at)
        token_axes = tuple(axis for axis in axes_at(spec_of(key), 0) if axis not in heads)
        by_token = (
            pages.value is not None,
            *(
                x is not None and cache.quantised is not None and cache.quantised.scale == "token_head"
                for x in pages[2:4]
            ),
            pages.rope is not None,
        )
        rows = PartitionSpec(token_axes or None, heads or None)
        return stored, LayerPages(rows, *(rows if has_rows else None for has_rows in by_token))  # type: ignore[arg-type]

    arrays = (batch.cu_q_lens, batch.kv_lens, batch.page_table, batch.num_seqs)
    operands = jax.tree.map(jnp.asarray, (key, value, scales, *arrays))
    after, tokens = on_auto_axes(run, pages, *operands, specs=specs)
    return whole.with_layer(at, after), tokens


def check_own_keys(state: CacheState, layer: int) -> None:
    """Refuse to write for a layer that reads another's keys. Errors: InputError; those of layer_of."""
    layer_of(state, layer)
    if (source := state.cache.layer_read(int(layer))) != layer:
        raise InputError(
            f"layer {layer} reads the keys and values of layer {source}, as the cache's reads_layer declares, and has no pages "
            "to write; wanted update='none', without key and value."
        )


def check_step(
    state: CacheState, layer: int, batch: RaggedBatch, tokens: Any, *, debug: bool, writes: bool = True
) -> tuple[int, int]:
    """(pages, tokens) of a shard, after checking the batch's values against them: now, or with `debug` during the step. The
    state is that of one group of layers. `writes`: whether the step writes its tokens' keys."""
    known_sizes(tokens=tokens)
    batch.check_form()
    check_shards(state, batch)
    at = 0 if batch.shards is None else 1
    pages = rows_by_shard(batch.shards, layer_of(state, layer).key, "pages").shape[at]
    count = rows_by_shard(batch.shards, tokens, "tokens").shape[at]
    arrays = (batch.cu_q_lens, batch.kv_lens, batch.page_table, batch.num_seqs)
    batch.check(pages, state.cache.page_size, count, state.cache.window_tokens, writes)
    if debug and any(isinstance(array, jax.core.Tracer) for array in arrays):
        check_later(arrays, pages, state.cache.page_size, count, state.cache.window_tokens, writes)
    return pages, count


def check_shards(state: CacheState, batch: RaggedBatch) -> None:
    """Refuse a batch made for a different number of sequence shards than the state. Errors: InputError."""
    rank = len(batch.page_table.shape) - len(batch.kv_lens.shape)
    if batch.sequence_shards != state.sequence_shards or rank != (1 if state.sequence_shards == 1 else 2):
        raise InputError(
            f"the batch has page tables for {batch.sequence_shards} sequence shards, but the state has {state.sequence_shards}: "
            "make both from the plan of one mesh, and use them outside a shard_map over page_sequence_axis."
        )


def _on_each_shard(
    slots: Callable[..., tuple[jax.Array, jax.Array]], n: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """token_slots of each of n sequence shards, [n, tokens]; each has its own table."""

    def of_all(starts: jax.Array, lens: jax.Array, tables: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_shards = jax.vmap(lambda table, shard: slots(starts, lens, table, count, shard=shard))
        return of_shards(tables, jnp.arange(n, dtype=jnp.int32))

    return of_all


def _check_tokens(
    name: str, tokens: Any, scale: Any, stored: jax.Array, heads: int, dim: int, state: CacheState
) -> None:
    cache = state.cache
    if not hasattr(tokens, "dtype") or not hasattr(tokens, "shape"):
        raise InputTypeError(f"{name} is {a_type(tokens)}; wanted an array [tokens, kv_heads, dim] of {cache.dtype}.")
    axes = set(axis_names(cache.kv_head_axis))
    alike = axes & (varying(stored) - varying(tokens))
    if alike and cache.kv_heads > 1:
        axis = min(alike)
        raise InputError(
            f"{name} is the same on all devices of {axis!r}, which splits the pages' heads; inside a shard_map {name} must be a "
            "device's own heads, repeated like the cache's."
        )
    fitting = {heads} | ({cache.kv_heads} if heads % cache.kv_heads == 0 else set())
    if len(tokens.shape) != 3 or tokens.shape[1] not in fitting or tokens.shape[2] != dim:
        expected = " or ".join(f"[tokens, {count}, {dim}]" for count in sorted(fitting))
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; wanted {expected}, the cache's own heads and size.")
    check_token_scale(cache, name, tokens, scale)
