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
from ...registry import OperationRegistry
from ...registry.declaration import Declaration
from ..paged_cache.batch import RaggedBatch
from .drawn_arrays import drawn_positions, drawn_selection, drawn_tree, spans_of_tokens

__all__ = ["DeclaredStep", "declared_step"]


class DeclaredStep(NamedTuple):
    """The arrays of the operation's call, by argument, as shapes, or as they are where the file says what they hold; the batch on
    the host, with pages handed out in order, as far as the window of the layer's group keeps them; options of the call."""

    cache: KVCache
    layer: int
    arrays: dict[str, jax.ShapeDtypeStruct | np.ndarray | None]
    batch: RaggedBatch
    options: dict[str, Any]

    def draw(self, seed: int) -> dict[str, Any]:
        """Normal numbers in the shapes' dtypes; some of the keys up to each token as `selected`, trees of drafts, and positions
        near the tokens' places; None for absent ones."""
        random = np.random.default_rng(seed)
        arrays: dict[str, Any] = {}
        for name, shape in self.arrays.items():
            if shape is None or isinstance(shape, np.ndarray):
                arrays[name] = shape
            elif name == "selected":
                arrays[name] = drawn_selection(random, shape.shape, self.batch)
            elif name == "q_positions":
                arrays[name] = drawn_positions(random, shape.shape, self.batch)
            elif name == "draft_tree":
                query = self.arrays["query"]
                assert query is not None
                arrays[name] = drawn_tree(random, shape.shape, self.batch, query.shape[0])
            else:
                arrays[name] = random.standard_normal(shape.shape, np.float32).astype(shape.dtype)
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
    attends = OperationRegistry.get(declaration.operation).family == "attention"
    if not attends and (unread := [name for name in _ATTENTION_ONLY if step.is_set(name)]):
        raise ConfigError(
            f"step.{unread[0]}: operation {declaration.operation!r} selects keys and has none; leave it out."
        )
    held = held_captures(step.score, step.q_heads)
    if missing := [name for name in (captured_names(step.score) if step.score else ()) if name not in held]:
        raise ConfigError(
            f"step.score {step.score} needs {missing[0]}, an array, which a step's file has no place for; pass it in Python."
        )
    plan = plan.groups[step.group(cache)]
    rows = step.rows(cache)
    per_shard = plan.local_sequences
    every = list(range(len(rows)))
    numbers = [every[n * per_shard : (n + 1) * per_shard] for n in range(plan.shards)]
    if len(rows) <= plan.shards * per_shard and plan.shards > 1:
        numbers = [every[n :: plan.shards] for n in range(plan.shards)]
    shards = [tuple(rows[n] for n in of_shard) for of_shard in numbers]
    tokens = max(1, *(sum(q for q, _ in shard_rows) for shard_rows in shards))
    if step.tokens is not None:
        if step.tokens % plan.shards or step.tokens // plan.shards < tokens:
            raise ConfigError(
                f"step.tokens={step.tokens}; wanted at least {tokens * plan.shards}, a multiple of the {plan.shards} shards."
            )
        tokens = step.tokens // plan.shards
    batches = [_batch(plan, shard_rows, tokens) for shard_rows in shards]
    count, dtype = tokens * plan.shards, jnp.dtype(step.dtype or plan.cache.dtype)
    options = step.options() | ({} if mode is None else {"mode": mode})
    writes = (step.update or update) != "none"
    own = plan.cache  # the sizes of the step's group of layers

    def shape(*sizes: int, dtype: Any = own.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *sizes), jnp.dtype(dtype))

    whole = batches[0] if plan.cache.pages_axis is None else RaggedBatch.stack(batches)
    arrays: dict[str, jax.ShapeDtypeStruct | np.ndarray | None]
    if attends:
        arrays = {
            "query": shape(step.q_heads, own.head_dim, dtype=dtype),
            "key": shape(own.kv_heads, own.head_dim) if writes else None,
            "value": shape(own.kv_heads, own.value_size) if writes and not own.values_in_keys else None,
            "softmax_aux": jax.ShapeDtypeStruct((step.q_heads,), jnp.float32) if step.softmax_aux else None,
            "selected": None if step.selected is None else shape(step.selected, dtype=jnp.int32),
            "q_positions": shape(dtype=jnp.int32) if step.q_positions else None,
            "spans": None if step.spans is None else spans_of_tokens((count, 2), whole, step.spans),
            "prefix_lengths": _prefixes(step.prefix_lengths, numbers, whole),
            "draft_tree": None,
        }
        if step.draft_tree is not None:
            tree = (whole.kv_lens.size, step.draft_tree, step.draft_tree)
            arrays["draft_tree"] = jax.ShapeDtypeStruct(tree, jnp.bool_)
    else:
        options = {name: x for name, x in options.items() if name not in _ATTENTION_ONLY}
        selects = options["mode"] != "insert"
        arrays = {
            "index_query": shape(step.q_heads, own.head_dim, dtype=dtype) if selects else None,
            "index_key": shape(own.head_dim) if writes else None,
            "index_weights": shape(step.q_heads, dtype=jnp.float32) if selects else None,
        }
    return DeclaredStep(cache, step.layer, arrays, whole, options)


_ATTENTION_ONLY = (
    "logits_soft_cap", "score", "softmax_aux", "selected", "q_positions", "spans", "prefix_lengths", "draft_tree", "return_lse",
)  # fmt: skip


def _prefixes(
    declared: int | tuple[int, ...] | None, numbers: list[list[int]], batch: RaggedBatch
) -> np.ndarray | None:
    """int32 [rows of all shards]; numbers: the sequences of each shard, by their places in the file."""
    if declared is None:
        return None
    lengths = np.zeros(np.shape(batch.kv_lens), np.int32).reshape(len(numbers), -1)
    for shard, sequences in enumerate(numbers):
        lengths[shard, : len(sequences)] = [declared if isinstance(declared, int) else declared[n] for n in sequences]
    return lengths.reshape(-1)


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
