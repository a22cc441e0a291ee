"""attend: one step's attention of a ragged batch over a layer of the cache; optionally writes the step's own tokens first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ...errors import ConfigError, InputError, shown
from ...masks.int_arrays import known_values
from ...pytree_export import exported_tuple
from ...sharding import axes_at, axes_of, on_auto_axes, pin, spec_of
from ...sharding.mesh import AnyMesh
from ..kernels.lse import combine_by_lse, combine_over_devices
from ..kernels.pages.page_layout import page_shape
from ..kernels.varying import varying
from .batch import RaggedBatch
from .insert import check_step, insert, write
from .join_shards import check_mesh, sinks_of
from .known_sizes import known_sizes
from .paged_call import Attended, PagedCall, PagedMethod, PagedSizes, on_xla
from .state import CacheState, LayerPages, alone, layer_of, step_specs
from .token_slots import rows_by_shard

__all__ = ["PagedOutput", "attend", "check_longest", "check_operands", "check_window", "check_written"]


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
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
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
    `softmax_scale` defaults to 1/sqrt(head_dim). `sliding_window`: inclusive distances (left, right). `max_q_len`: the most
    queries of any row in this step, 1 if all rows decode; in a traced batch queries beyond it give 0, and with 'fused' and 1
    their keys aren't written. `debug`: checks traced batches on the host while the step runs. `method` does the attention, by
    default plain XLA; `check_vma`: whether shard_map can check it.

    A query that belongs to no sequence gives 0, and its lse is -inf. There is no gradient. Errors: those of `insert` and of
    RaggedBatch.check; InputError for shapes, and for keys that `update` doesn't use or that it needs and doesn't get.
    """
    check_operands(state, layer, query, key, value, update)
    layer_state = alone(state, layer, batch)
    cache = layer_state.cache
    check_window(cache.window_tokens, sliding_window)
    rows = None
    if key is None or value is None:
        check_step(layer_state, 0, batch, query, debug=debug, writes=False)
    elif update == "fused" and _writable(layer_state, batch, query, sinks, key, value, mesh):
        which: Any = "none" if max_q_len == 1 else "several"
        layer_state, rows = write(layer_state, 0, batch, key, value, (key_scale, value_scale), debug=debug, which=which)
    else:
        layer_state = insert(
            layer_state, 0, batch, key, value, key_scale=key_scale, value_scale=value_scale, debug=debug
        )
    check_longest(batch, max_q_len, debug=debug)

    def shard(query: Any, pages: LayerPages, batch: RaggedBatch, sinks: Any, rows: Any, index: Any = 0) -> Attended:
        scale = cache.head_dim**-0.5 if softmax_scale is None else softmax_scale
        mask = (causal, sliding_window)
        call = PagedCall(
            query,
            pages,
            batch,
            sinks,
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
        )
        return method(call)

    pages = layer_state.layers[0]
    output, lse, after = _by_device(shard, layer_state, pages, batch, query, sinks, rows, mesh, kv_heads, check_vma)
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
    check_written(update, key, value)
    known_sizes(query=query, key=key, value=value)
    pages, cache = layer_of(state, layer), state.cache
    heads = page_shape(cache.layout, pages.key, pages.value, cache.head_dim, cache.value_size).kv_heads
    if getattr(query, "ndim", 0) != 3 or query.shape[2] != cache.head_dim or query.shape[1] % heads:
        raise InputError(
            f"query has shape {tuple(getattr(query, 'shape', ()))}; wanted [tokens, heads, {cache.head_dim}], heads a multiple "
            f"of the {heads} kv heads that the cache stores."
        )


def check_window(window_tokens: int | None, sliding_window: tuple[int | None, int | None] | None) -> None:
    """Refuse a window larger than that of the layer's pages. Errors: InputError."""
    left = None if sliding_window is None else sliding_window[0]
    if window_tokens is not None and (left is None or left >= window_tokens):
        raise InputError(
            f"sliding_window={shown(sliding_window)} over pages that are kept for a window of {window_tokens} tokens; wanted "
            f"({window_tokens - 1}, 0), or a smaller one."
        )


def check_written(update: str, key: Any, value: Any) -> None:
    """Refuse keys and values that an update doesn't use, or lacks. Errors: InputError."""
    if (key is None) != (value is None) or (key is None) != (update == "none"):
        present = " and ".join(name for name, x in (("key", key), ("value", value)) if x is not None) or "neither"
        expected = "neither: the pages have them" if update == "none" else "key and value, to be written"
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


def _by_device(
    shard: Any,
    state: CacheState,
    pages: LayerPages,
    batch: RaggedBatch,
    query: Any,
    sinks: Any,
    rows: LayerPages | None,
    mesh: AnyMesh | None,
    kv_heads: Any,
    check_vma: bool,
) -> Attended:
    """Each shard of the pages with its own part of the batch; on a mesh, each device also with its own heads."""
    sinks = None if sinks is None else jnp.asarray(sinks)
    if mesh is None or mesh.size == 1 or all(axis.kind == "manual" for axis in axes_of(mesh)):
        arrays = jnp.asarray(query), pages, batch, sinks, rows
        return on_auto_axes(partial(_all_shards, shard), *arrays, specs=lambda: _specs_like(*arrays[:2], rows))
    plan = state.cache.plan(mesh, kv_heads=kv_heads).require()
    check_mesh(state, plan)
    of_query, of_layer, of_batch = step_specs(plan)
    specs = of_query, of_layer, replace(of_batch, group=batch.group)
    tokens, heads = (axes_at(specs[0], index) or None for index in (0, 1))
    of_table = plan["page_table"].fitted.spec
    along = axes_at(of_table, len(of_table) - 3) if plan.sequence_shards > 1 else ()

    def body(query: Any, pages: LayerPages, batch: RaggedBatch, sinks: Any, rows: Any) -> Attended:
        if batch.shards is not None:  # a device has one shard
            batch = jax.tree.map(lambda x: x[0], batch)
        if not along:
            return shard(query, pages, batch, sinks, rows)
        index = lax.axis_index(along)
        batch = replace(batch, page_table=batch.page_table[0])
        result = shard(query, pages, batch, sinks_of(sinks, index), rows, index)
        return Attended(*combine_over_devices(result.output, result.lse, along))

    of_rows = None if rows is None else jax.tree.map(lambda _: PartitionSpec(tokens, heads), rows)
    in_specs = (*specs, None if sinks is None else PartitionSpec(heads), of_rows)
    operands = jax.tree.map(
        lambda x, spec: pin(jnp.asarray(x), spec, mesh), (query, pages, batch, sinks, rows), in_specs
    )
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=Attended(PartitionSpec(tokens, heads, None), PartitionSpec(tokens, heads), _written(specs[1], rows)),
        axis_names={axis.name for axis in axes_of(mesh) if axis.kind != "manual"},
        check_vma=check_vma,
    )(*operands)


def _written(of_layer: LayerPages, rows: LayerPages | None) -> LayerPages | None:
    """Of a layer's specs, those of the arrays that hold the written rows."""
    if rows is None:
        return None
    return LayerPages(*(None if array is None else spec for spec, array in zip(of_layer, rows, strict=True)))  # type: ignore[arg-type]


def _specs_like(query: jax.Array, pages: LayerPages, rows: LayerPages | None) -> Attended:
    """Of Explicit axes, those that split the query and the pages."""
    tokens, heads = (axes_at(spec_of(query), index) or None for index in (0, 1))
    after = _written(jax.tree.map(spec_of, pages), rows)
    return Attended(PartitionSpec(tokens, heads, None), PartitionSpec(tokens, heads), after)


def _all_shards(shard: Any, query: Any, pages: LayerPages, batch: RaggedBatch, sinks: Any, rows: Any) -> Attended:
    """Without a mesh: one shard of the pages after the other."""
    if batch.shards is None:
        return _merged_over_shards(shard, query, pages, batch, sinks, rows)
    parts = [_part(batch.shards, n, query, pages, batch, rows) for n in range(batch.shards)]
    results = [_merged_over_shards(shard, *part, sinks=sinks, rows=shard_rows) for part, shard_rows in parts]
    return jax.tree.map(lambda *of_shards: jnp.concatenate(of_shards), *results)


def _merged_over_shards(
    shard: Any, query: Any, pages: LayerPages, batch: RaggedBatch, sinks: Any, rows: Any
) -> Attended:
    """Without a mesh: one sequence shard after the other, if there are several, with their outputs merged."""
    if (n := batch.sequence_shards) == 1:
        return shard(query, pages, batch, sinks, rows)
    results = []
    for index in range(n):
        shard_pages: Any = (x if x is None or x.ndim < 3 else rows_by_shard(n, x, "pages")[index] for x in pages)
        table = replace(batch, page_table=batch.page_table[index])
        results.append(shard(query, LayerPages(*shard_pages), table, sinks_of(sinks, index), rows, index))
    return Attended(*combine_by_lse([(x.output, x.lse) for x in results]))


def _part(
    shards: int, n: int, query: Any, pages: LayerPages, batch: RaggedBatch, rows: LayerPages | None
) -> tuple[tuple[Any, LayerPages, RaggedBatch], LayerPages | None]:
    """((the query, the pages, the batch), the written rows) of one shard."""

    def part(x: Any) -> Any:
        return rows_by_shard(shards, x, "rows")[n]

    shard_pages: Any = (x if x is None or x.ndim < 3 else part(x) for x in pages)
    return (part(query), LayerPages(*shard_pages), jax.tree.map(lambda x: x[n], batch)), jax.tree.map(part, rows)
