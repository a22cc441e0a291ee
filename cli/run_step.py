"""RunnableStep: a declared step over pages on this machine's devices, for `attnops run` and for a report."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError
from ..masks.causal_window import causal_window
from ..masks.page_mask import page_mask
from ..operators.paged.step_output import StepOutput
from ..operators.paged_cache import LayerPages, RaggedBatch
from ..operators.paged_cache.sequence_shards import stored_ids, whole_table
from ..operators.selection import IndexStepOutput
from ..page_layouts import LAYOUTS
from ..planning.cache.cache_fields import CacheFields
from ..planning.paged.paged_plan import PagedPlan
from ..planning.score_operands import held_captures
from ..registry.declaration import Declaration
from ..verify.closeness import lse_size, row_sizes
from ..verify.drawn_step import draw_step, plan_declared
from ..verify.paged_reference import paged_reference, tokens_of
from ..verify.selection_error import index_reference, selection_error, window_shows
from .check import Comparison, Worst, tolerance_of
from .progress import ReportProgress
from .ran import Runnable
from .run_call import Compiled, compile_call
from .step import one_layer, step_of
from .target import run_metadata

__all__ = ["RunnableStep"]


class RunnableStep(Runnable):
    """Its pages and tokens are drawn. Errors: RefusedError if nothing can run it."""

    def __init__(self, declaration: Declaration, mesh: str | None, mode: str | None, seed: int) -> None:
        metadata = run_metadata(declaration, mesh=mesh)
        alone, notes = one_layer(declaration, metadata)
        operation, step = step_of(alone, metadata, mode)
        self.paged = self.plan = plan_declared(operation, step).require()
        if self.plan.problem.mode == "insert":
            raise ConfigError("step.mode is 'insert', which writes and returns no output; `attnops plan` plans it.")
        self.drawn, self.batch = draw_step(operation, step, seed), step.batch
        self.arrays = self.drawn.arrays
        self.notes = (f"pages and tokens drawn at random, seed {seed}", *notes)

    def compile(self) -> Compiled:
        return compile_call(self.drawn.run, self.drawn.arguments)

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        if self.paged.problem.top_k is not None:
            return [_check_selection(self.paged, output, self.arrays, self.batch)]
        return _check(self.paged, output, self.arrays, self.batch)


def _check_selection(
    plan: PagedPlan, output: IndexStepOutput, arrays: dict[str, Any], ragged: RaggedBatch
) -> Comparison:
    """Compare the selected keys' scores with the float64 reference over the pages, after the step's own keys were written."""
    problem, rows = plan.problem, plan.cache.local_pages
    after = jax.tree.map(np.asarray, output.state.layers[0])
    keys, window = _split(plan.cache.cache, after)[0], causal_window(problem.mask)
    assert window is not None
    positions, counts = np.asarray(output.positions), np.asarray(output.counts)
    worst, relative = 0.0, 0.0
    for n in range(plan.cache.shards):
        shard, first = slice(n * rows, (n + 1) * rows), n * problem.local_tokens
        batch = ragged if ragged.shards is None else jax.tree.map(lambda x, n=n: np.asarray(x)[n], ragged)
        scale, table = _of_shard(plan.cache.cache, after.key_scale, shard), _stored_table(batch, rows)
        for s in range(int(batch.num_seqs)):
            start, end, length = int(batch.cu_q_lens[s]), int(batch.cu_q_lens[s + 1]), int(batch.kv_lens[s])
            position = np.arange(length - (end - start), length)
            own = slice(first + start, first + end)
            begin = 0 if window.left is None else max(0, length - (end - start) - window.left)
            key = tokens_of(keys[shard], scale, table[s], begin, length)[:, 0]
            seen = window_shows(position, np.arange(begin, length), window)
            scores, sizes = index_reference(
                arrays["index_query"][own], key, arrays["index_weights"][own], problem.softmax_scale
            )
            chosen = np.where(positions[own] >= 0, positions[own] - begin, -1)
            found = selection_error(chosen, counts[own], scores, sizes, seen)
            worst, relative = max(worst, found[0]), max(relative, found[1])
    return Comparison("selected scores", "float64 reference over the pages", worst, relative, tolerance_of(plan))


def _check(plan: PagedPlan, output: StepOutput, arrays: dict[str, Any], ragged: RaggedBatch) -> list[Comparison]:
    """Compare output and lse with the float64 reference, over the pages after the step's own tokens were written."""
    cache, problem = plan.cache.cache, plan.problem
    after = jax.tree.map(np.asarray, output.state.layers[0])
    key, value = _split(cache, after)
    key_scale = after.key_scale
    if cache.rope_size:  # whole keys, of which a part has no scale
        key, key_scale = _with_rope(cache, after, key), None
    mask = page_mask(problem.mask)
    assert mask is not None
    query = np.asarray(jnp.asarray(arrays["query"], problem.runtime_dtype), np.float64)
    got, lse = np.asarray(output.attention_outputs), np.asarray(output.lse)
    worst = {"output": Worst(problem.runtime_dtype), "lse": Worst("float32")}
    rows, of_rows = plan.cache.local_pages, plan.cache.local_sequences
    for n in range(plan.cache.shards):
        shard = slice(n * rows, (n + 1) * rows)
        tokens = slice(n * problem.local_tokens, (n + 1) * problem.local_tokens)
        batch = ragged if ragged.shards is None else jax.tree.map(lambda x, n=n: np.asarray(x)[n], ragged)
        of_values = "key_scale" if cache.values_in_keys else "value_scale"
        held = {"key_scale": key_scale, "value_scale": getattr(after, of_values)}
        scales = {name: _of_shard(cache, scale, shard) for name, scale in held.items()}
        want = paged_reference(
            query[tokens],
            key[shard],
            value[shard],
            cu_q_lens=np.asarray(batch.cu_q_lens),
            kv_lens=np.asarray(batch.kv_lens),
            page_table=_stored_table(batch, rows),
            num_seqs=int(batch.num_seqs),
            softmax_scale=problem.softmax_scale,
            causal=mask.causal,
            sliding_window=mask.window,
            chunk_size=mask.chunk,
            logits_soft_cap=problem.logits_soft_cap,
            sinks=arrays["softmax_aux"],
            **_of_tokens(arrays, tokens, slice(n * of_rows, (n + 1) * of_rows)),
            score=problem.score,
            captures=held_captures(problem.score, problem.q_heads),
            **scales,
        )
        worst["output"].add(got[tokens], want.output, row_sizes(want.output, want.sizes))
        worst["lse"].add(lse[tokens], want.lse, lse_size(want.lse))
    against = "float64 reference over the pages"
    return [difference.compared(name, against, tolerance_of(plan)) for name, difference in worst.items()]


def _of_tokens(arrays: dict[str, Any], tokens: slice, rows: slice) -> dict[str, Any]:
    """What a shard's tokens and rows see besides the mask."""
    by_token, by_row = ("selected", "spans", "q_positions"), ("prefix_lengths", "draft_tree")
    parts = {**dict.fromkeys(by_token, tokens), **dict.fromkeys(by_row, rows)}
    return {name: None if arrays[name] is None else arrays[name][part] for name, part in parts.items()}


def _stored_table(batch: RaggedBatch, pages: int) -> np.ndarray:
    """The places of each sequence's pages in the arrays of `pages` of a shard."""
    table, n = np.asarray(batch.page_table), batch.sequence_shards
    return table if n == 1 else stored_ids(whole_table(table, pages), n, pages)


def _split(cache: CacheFields, pages: LayerPages) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [pages, page, kv_heads, dim] from any layout."""
    key, value = (None if x is None else np.asarray(x) for x in (pages.key, pages.value))
    return LAYOUTS[cache.layout].separate(key, value, cache.key_size, cache.value_size)


def _with_rope(cache: CacheFields, pages: LayerPages, latents: np.ndarray) -> np.ndarray:
    """Keys in float64: latents [pages, page, kv_heads, dim] times their scale, and the rotary keys beside them."""
    scale = np.asarray(pages.key_scale, np.float64)
    by_token = scale.swapaxes(1, 2)[..., None] if scale.ndim == 3 else scale.reshape(-1, 1)
    rope = np.asarray(pages.rope).swapaxes(1, 2)[..., : cache.rope_size]
    return np.concatenate([latents.astype(np.float64) * by_token, rope.astype(np.float64)], -1)


def _of_shard(cache: CacheFields, scale: Any, shard: slice) -> Any:
    if scale is None or np.ndim(scale) < 3:
        return scale
    return np.asarray(scale)[shard].swapaxes(1, 2) if cache.heads_at == 1 else np.asarray(scale)[shard]
