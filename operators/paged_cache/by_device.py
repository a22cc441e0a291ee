"""by_device: a step's attention of each shard of the pages with its own part of the batch, on a mesh or one after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ...sharding import axes_at, axes_of, on_auto_axes, pin, spec_of
from ...sharding.mesh import AnyMesh
from .batch import RaggedBatch
from .join_shards import check_mesh
from .layer_arrays import LayerPages
from .logit_arrays import LogitArrays
from .paged_call import Attended
from .state import CacheState
from .state_shardings import step_specs
from .token_slots import rows_by_shard

__all__ = ["by_device"]


def by_device(
    shard: Any,
    state: CacheState,
    pages: LayerPages,
    batch: RaggedBatch,
    query: Any,
    of_logits: LogitArrays,
    dims: tuple[tuple[str, ...], ...],
    rows: LayerPages | None,
    mesh: AnyMesh | None,
    kv_heads: Any,
    check_vma: bool,
    result: type[Any] = Attended,
) -> Any:
    """Each shard of the pages with its own part of the batch; on a mesh, each device also with its own heads of attention.

    result: the class of what `shard` returns, which merges the results of parts of the keys: Attended, or one with its methods.
    """
    if mesh is None or mesh.size == 1 or all(axis.kind == "manual" for axis in axes_of(mesh)):
        arrays = jnp.asarray(query), pages, batch, of_logits, rows
        run = partial(_all_shards, shard, result)
        return on_auto_axes(run, *arrays, specs=lambda: _specs_like(result, *arrays[:2], rows))
    plan = state.cache.plan(mesh, kv_heads=kv_heads).require()
    check_mesh(state, plan)
    of_query, of_layer, of_batch = step_specs(plan)
    tokens, heads = (axes_at(of_query, index) or None for index in (0, 1))
    weights = of_logits.index_weights is not None  # index heads are summed over, so each device has all of them
    of_query = PartitionSpec(tokens, None, None) if weights else of_query
    specs = of_query, of_layer, replace(of_batch, group=batch.group)
    of_table = plan["page_table"].fitted.spec
    along = axes_at(of_table, len(of_table) - 3) if plan.sequence_shards > 1 else ()

    def body(query: Any, pages: LayerPages, batch: RaggedBatch, of_logits: LogitArrays, rows: Any) -> Any:
        count = query.shape[1]
        head_start = lax.axis_index(heads) * np.int32(count) if heads and dims else 0
        if batch.shards is not None:  # a device has one shard
            batch = jax.tree.map(lambda x: x[0], batch)
        if not along:
            return shard(query, pages, batch, of_logits, rows, head_start=head_start)
        index = lax.axis_index(along)
        batch = replace(batch, page_table=batch.page_table[0])
        return shard(query, pages, batch, of_logits.of_shard(index), rows, index, head_start).merged_over(along)

    of_rows = None if rows is None else jax.tree.map(lambda _: PartitionSpec(tokens, heads), rows)
    of_captures = (PartitionSpec(*(heads if dim == "heads" else None for dim in of)) for of in dims)
    of_sinks = None if of_logits.sinks is None else PartitionSpec(heads)
    by_row = {name: PartitionSpec(tokens, *[None] * (x.ndim - 1)) for name, x in of_logits.by_row.items()}
    in_specs = (*specs, LogitArrays(of_sinks, tuple(of_captures), **by_row), of_rows)
    operands = jax.tree.map(
        lambda x, spec: pin(jnp.asarray(x), spec, mesh), (query, pages, batch, of_logits, rows), in_specs
    )
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=result.specs(tokens, heads, _written(specs[1], rows)),
        axis_names={axis.name for axis in axes_of(mesh) if axis.kind != "manual"},
        check_vma=check_vma,
    )(*operands)


def _written(of_layer: LayerPages, rows: LayerPages | None) -> LayerPages | None:
    """Of a layer's specs, those of the arrays that hold the written rows."""
    if rows is None:
        return None
    return LayerPages(*(None if array is None else spec for spec, array in zip(of_layer, rows, strict=True)))  # type: ignore[arg-type]


def _specs_like(result: type[Any], query: jax.Array, pages: LayerPages, rows: LayerPages | None) -> Any:
    """Of Explicit axes, those that split the query and the pages."""
    tokens, heads = (axes_at(spec_of(query), index) or None for index in (0, 1))
    after = _written(jax.tree.map(spec_of, pages), rows)
    return result.specs(tokens, heads, after)


def _all_shards(
    shard: Any, result: type[Any], query: Any, pages: LayerPages, batch: RaggedBatch, of_logits: LogitArrays, rows: Any
) -> Any:
    """Without a mesh: one shard of the pages after the other."""
    if batch.shards is None:
        return _merged_over_shards(shard, result, query, pages, batch, of_logits, rows)
    parts = [_part(batch.shards, n, query, pages, batch, of_logits, rows) for n in range(batch.shards)]
    results = [_merged_over_shards(shard, result, *part) for part in parts]
    return jax.tree.map(lambda *of_shards: jnp.concatenate(of_shards), *results)


def _merged_over_shards(
    shard: Any, result: type[Any], query: Any, pages: LayerPages, batch: RaggedBatch, of_logits: LogitArrays, rows: Any
) -> Any:
    """Without a mesh: one sequence shard after the other, if there are several, with their outputs merged."""
    if (n := batch.sequence_shards) == 1:
        return shard(query, pages, batch, of_logits, rows)
    results = []
    for index in range(n):
        shard_pages: Any = (x if x is None or x.ndim < 3 else rows_by_shard(n, x, "pages")[index] for x in pages)
        table = replace(batch, page_table=batch.page_table[index])
        results.append(shard(query, LayerPages(*shard_pages), table, of_logits.of_shard(index), rows, index))
    return result.merged(results)


def _part(
    shards: int,
    n: int,
    query: Any,
    pages: LayerPages,
    batch: RaggedBatch,
    of_logits: LogitArrays,
    rows: LayerPages | None,
) -> tuple[Any, LayerPages, RaggedBatch, LogitArrays, LayerPages | None]:
    """The query, the pages, the batch, what logits need and the written rows of one shard."""

    def part(x: Any) -> Any:
        return rows_by_shard(shards, x, "rows")[n]

    shard_pages: Any = (x if x is None or x.ndim < 3 else part(x) for x in pages)
    own = of_logits._replace(**{name: part(x) for name, x in of_logits.by_row.items()})
    return part(query), LayerPages(*shard_pages), jax.tree.map(lambda x: x[n], batch), own, jax.tree.map(part, rows)
