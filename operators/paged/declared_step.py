"""A declared step as the operation's arguments: shapes to plan with, or random arrays to run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ConfigError
from ...planning.cache.cache_plan import CachePlan
from ...planning.cache.kv_cache import KVCache
from ...planning.cache.window_pages import first_visible_page
from ...planning.score_operands import captured_names, held_captures
from ...registry.declaration import Declaration
from ..paged_cache.batch import RaggedBatch

__all__ = ["DeclaredStep", "declared_step"]


class DeclaredStep(NamedTuple):
    """query, key, value and sinks as shapes; the batch on the host, with pages handed out in order, as far as the window of the
    layer's group keeps them; options of the call."""

    cache: KVCache
    layer: int
    query: jax.ShapeDtypeStruct
    key: jax.ShapeDtypeStruct | None
    value: jax.ShapeDtypeStruct | None
    sinks: jax.ShapeDtypeStruct | None
    batch: RaggedBatch
    options: dict[str, Any]

    def draw(self, seed: int) -> dict[str, Any]:
        """Normal query, key, value and sinks, in the dtypes of the shapes; None for absent ones."""
        random = np.random.default_rng(seed)
        arrays: dict[str, Any] = {}
        for name in ("query", "key", "value", "sinks"):
            shape = getattr(self, name)
            arrays[name] = (
                None if shape is None else random.standard_normal(shape.shape, np.float32).astype(shape.dtype)
            )
        return arrays


def declared_step(declaration: Declaration, plan: CachePlan, update: str, mode: str | None = None) -> DeclaredStep:
    """The declared step of a file with a cache, whose plan is `plan`. `update` is the operation config's, used if the step has
    none.

    Whole blocks of sequences go to the shards of the pages. Errors: ConfigError for a file without a step or a cache.
    """
    cache, step = declaration.cache, declaration.step
    if cache is None:
        raise ConfigError(
            f"operation {declaration.operation!r} attends to a cache's pages; declare `cache` in the file."
        )
    if step is None:
        raise ConfigError(f"operation {declaration.operation!r} has steps, but the file declares none; declare `step`.")
    if step.q_heads is None:
        raise ConfigError("step.q_heads missing; declare the number of the query's heads.")
    held = held_captures(step.score, step.q_heads)
    if missing := [name for name in (captured_names(step.score) if step.score else ()) if name not in held]:
        raise ConfigError(
            f"step.score {step.score} needs {missing[0]}, an array, which a step's file has no place for; pass it in Python."
        )
    plan = plan.groups[step.group(cache)]
    rows = step.rows(cache)
    per_shard = plan.local_sequences
    shards = [rows[n * per_shard : (n + 1) * per_shard] for n in range(plan.shards)]
    if len(rows) <= plan.shards * per_shard and plan.shards > 1:
        shards = [rows[n :: plan.shards] for n in range(plan.shards)]
    tokens = max(1, *(sum(q for q, _ in shard_rows) for shard_rows in shards))
    if step.tokens is not None:
        if step.tokens % plan.shards or step.tokens // plan.shards < tokens:
            raise ConfigError(
                f"step.tokens={step.tokens}; wanted at least {tokens * plan.shards}, a multiple of the {plan.shards} shards."
            )
        tokens = step.tokens // plan.shards
    batches = [_batch(plan, shard_rows, tokens) for shard_rows in shards]
    count, dtype = tokens * plan.shards, step.dtype or plan.cache.dtype
    options = step.options() | ({} if mode is None else {"mode": mode})
    writes = (step.update or update) != "none"
    own = plan.cache  # the sizes of the step's group of layers

    def shape(heads: int, dim: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, heads, dim), jnp.dtype(dtype))

    return DeclaredStep(
        cache,
        step.layer,
        shape(step.q_heads, own.head_dim, dtype),
        shape(own.kv_heads, own.head_dim, own.dtype) if writes else None,
        shape(own.kv_heads, own.value_size, own.dtype) if writes and not own.values_in_keys else None,
        jax.ShapeDtypeStruct((step.q_heads,), jnp.float32) if step.softmax_aux else None,
        batches[0] if plan.cache.pages_axis is None else RaggedBatch.stack(batches),
        options,
    )


def _batch(plan: CachePlan, rows: tuple[tuple[int, int], ...], tokens: int) -> RaggedBatch:
    page, table, n = plan.cache.page_size, [], plan.sequence_shards
    allocated = [0] * n
    for row, (queries, length) in enumerate(rows):
        first = first_visible_page(length - queries, plan.window_tokens, page)
        page_ids = [plan.local_pages] * first
        for at in (number % n for number in range(first, -(-length // page))):
            page_ids.append(allocated[at] * n + at)
            allocated[at] += 1
        if max(allocated) > plan.local_pages // n:
            where = "" if n == 1 else f" of one of {n} sequence shards"
            raise ConfigError(
                f"step: the first {row + 1} sequences of a shard need {max(allocated)} pages of {page}{where}, but it has "
                f"{plan.local_pages // n}; declare more pages, or fewer keys."
            )
        table.append(page_ids)
    starts = np.cumsum([0, *(q for q, _ in rows)])
    batch = RaggedBatch.make(
        plan, cu_q_lens=starts, kv_lens=[n for _, n in rows], page_table=table, num_seqs=len(rows), tokens=tokens
    )
    return batch if batch.shards is None else jax.tree.map(lambda x: x[0], batch)
