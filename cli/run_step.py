"""`attnops run` for a declared step over pages: compile it, run it, check it against float64, and print what was found."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from ..errors import ConfigError
from ..masks.causal_window import causal_window
from ..operators.paged_cache import LayerPages, RaggedBatch
from ..operators.paged_cache.sequence_shards import stored_ids, whole_table
from ..page_layouts import LAYOUTS
from ..planning.cache.cache_fields import CacheFields
from ..planning.cache.kv_cache import KVCache
from ..planning.paged.paged_plan import PagedPlan
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..verify.closeness import lse_size, row_error, row_sizes
from ..verify.drawn_step import draw_step
from ..verify.paged_reference import paged_reference
from .cache import plan_cache
from .check import Comparison
from .console import seconds_text
from .progress import bar
from .ran_call import check_row, memory_text, not_finite, output_row, verdict
from .run_call import Compiled, compile_call, time_calls
from .step import step_of
from .target import run_metadata

__all__ = ["RanStep", "TimedStep", "check_step", "compile_step", "one_layer", "timed_step", "timed_step_rows"]

_AGAINST = "float64 reference over the pages"


class RanStep(NamedTuple):
    """A step that ran: its plan, the compiled step (result: a StepOutput), its input arrays, and notes."""

    plan: PagedPlan
    compiled: Compiled
    arrays: dict[str, Any]
    batch: RaggedBatch
    notes: tuple[str, ...]


class TimedStep(NamedTuple):
    """A step that ran `repeats` times in a median of `seconds`, with its checks, and what isn't finite ('' if all is)."""

    ran: RanStep
    seconds: float
    repeats: int
    checks: tuple[Comparison, ...]
    unsound: str

    @property
    def failures(self) -> list[str]:
        """What is wrong with the result, one line each."""
        failed = [f"check failed: {verdict(c)}" for c in self.checks if not c.passed]
        return failed + ([self.unsound] if self.unsound else [])


def timed_step(
    declaration: Declaration, mesh: str | None, mode: str | None, seed: int, repeats: int, *,
    checked: bool, quiet: bool = False,
) -> TimedStep:  # fmt: skip
    """Compile, run, time and check the step. Errors: RefusedError if nothing can run it."""
    with bar("compile", quiet=quiet):
        ran = compile_step(declaration, mesh, mode, seed)
    with bar("run", quiet=quiet) as told:
        (seconds,) = time_calls([ran.compiled], repeats, told)
    checks = check_step(ran) if checked else []
    unsound = not_finite(ran.compiled.result.attention_outputs, ran.arrays)
    return TimedStep(ran, seconds, repeats, tuple(checks), unsound)


def timed_step_rows(timed: TimedStep) -> list[tuple[str, str | Text]]:
    """The rows for what was read, the output, times and checks."""
    compiled, plan = timed.ran.compiled, timed.ran.plan
    rows: list[tuple[str, str | Text]] = [] if plan.reads is None else [("reads", plan.reads.describe())]
    rows.append(output_row(compiled.result.attention_outputs, timed.unsound))
    runs = f"median of {timed.repeats} runs" if timed.repeats > 1 else "1 run"
    took = f"{seconds_text(timed.seconds)}, {runs}, the layer's pages copied"
    rows.append(("time", f"{took}; compile {compiled.compile_seconds:.2f} s; {memory_text(compiled)}"))
    return rows + [check_row(comparison) for comparison in timed.checks]


def one_layer(declaration: Declaration, metadata: OperationMetadata) -> tuple[Declaration, tuple[str, ...]]:
    """The declaration with a cache of one layer, which is all that a step reads, and a note about it. If layers are in groups,
    it has the pages that the plan gives the layer's group."""
    cache, step = declaration.cache, declaration.step
    if cache is None or step is None or cache.layer_count == 1:
        return declaration, ()
    group, fields = step.group(cache), cache.to_dict() | {"layers": 1}
    if len(cache.groups) > 1:
        whole = plan_cache(declaration, metadata)
        assert whole is not None
        own = whole.require().groups[group]
        fields = own.cache.to_dict() | {"layers": [own.cache.to_dict()["layers"][0] | {"layers": 1}]}
    elif not isinstance(cache.layers, int):
        fields["layers"] = [cache.to_dict()["layers"][0] | {"layers": 1}]
    if cache.bytes_per_device is not None and "bytes_per_device" in fields:
        fields["bytes_per_device"] = max(1, cache.bytes_per_device // cache.layer_count)
    changed = declaration.model_copy(
        update={"cache": KVCache.from_dict(fields), "step": step.model_copy(update={"layer": 0})}
    ).checked()
    which = "" if len(cache.groups) == 1 else f", layer {step.layer}"
    return changed, (f"one of the cache's {cache.layer_count} layers{which}: a step uses one",)


def compile_step(declaration: Declaration, mesh: str | None, mode: str | None, seed: int) -> RanStep:
    """Draw pages and tokens, compile the step, and run it once. Errors: RefusedError if nothing can run it."""
    metadata = run_metadata(declaration, mesh=mesh)
    alone, notes = one_layer(declaration, metadata)
    operation, step = step_of(alone, metadata, mode)
    shapes = (step.query, step.key, step.value)
    options = step.options | {"softmax_aux": step.sinks}
    plan = operation.plan(*shapes, cache=step.cache, layer=step.layer, batch=step.batch, **options).require()
    if plan.problem.mode == "insert":
        raise ConfigError("step.mode is 'insert', which writes and returns no output; `attnops plan` plans it.")
    drawn = draw_step(operation, step, seed)
    compiled = compile_call(drawn.run, drawn.arguments)
    return RanStep(plan, compiled, drawn.arrays, step.batch, (f"pages and tokens drawn at random, seed {seed}", *notes))


def check_step(ran: RanStep) -> list[Comparison]:
    """Compare output and lse with the float64 reference, over the pages after the step's own tokens were written."""
    plan, output = ran.plan, ran.compiled.result
    cache, problem = plan.cache.cache, plan.problem
    after = jax.tree.map(np.asarray, output.state.layers[0])
    key, value = _split(cache, after)
    found = causal_window(problem.mask)
    assert found is not None
    query = np.asarray(jnp.asarray(ran.arrays["query"], problem.runtime_dtype), np.float64)
    shards, rows = plan.cache.shards, plan.cache.local_pages
    wanted = []
    for n in range(shards):
        own = slice(n * rows, (n + 1) * rows)
        tokens = slice(n * problem.local_tokens, (n + 1) * problem.local_tokens)
        batch = ran.batch if ran.batch.shards is None else jax.tree.map(lambda x, n=n: np.asarray(x)[n], ran.batch)
        scales = {name: _of_shard(cache, getattr(after, name), own) for name in ("key_scale", "value_scale")}
        wanted.append(
            paged_reference(
                query[tokens],
                key[own],
                value[own],
                cu_q_lens=np.asarray(batch.cu_q_lens),
                kv_lens=np.asarray(batch.kv_lens),
                page_table=_stored_table(batch, rows),
                num_seqs=int(batch.num_seqs),
                softmax_scale=problem.softmax_scale,
                causal=found.causal,
                sliding_window=found.window,
                logits_soft_cap=problem.logits_soft_cap,
                sinks=ran.arrays["sinks"],
                **scales,
            )
        )
    want, sizes = (np.concatenate([getattr(x, name) for x in wanted]) for name in ("output", "sizes"))
    got = np.asarray(output.attention_outputs, np.float64)
    capability = plan.operation.capability(plan.method or "")
    published = capability.tolerance.get(problem.runtime_dtype)
    tolerance = None if published is None else published.forward
    error = row_error(got, want, row_sizes(want, sizes), problem.runtime_dtype)
    worst = float(np.abs(got - want).max(initial=0.0))
    lse = _compare_lse(np.asarray(output.lse, np.float64), np.concatenate([x.lse for x in wanted]), tolerance)
    return [Comparison("output", _AGAINST, worst, error, tolerance), lse]


def _compare_lse(got: np.ndarray, want: np.ndarray, tolerance: float | None) -> Comparison:
    """Compare lse. -inf, for a row that attends to nothing, must be -inf in both; other errors are relative to the row's
    size."""
    both = np.isfinite(got) & np.isfinite(want)
    error = row_error(got[both], want[both], lse_size(want[both])) if both.any() else 0.0
    if not np.array_equal(got[~both], want[~both]):
        error = np.inf
    worst = float(np.abs(got[both] - want[both]).max(initial=0.0))
    return Comparison("lse", _AGAINST, worst if np.isfinite(error) else np.inf, error, tolerance)


def _stored_table(batch: RaggedBatch, pages: int) -> np.ndarray:
    """The places of each sequence's pages in the arrays of `pages` of a shard."""
    table, n = np.asarray(batch.page_table), batch.sequence_shards
    return table if n == 1 else stored_ids(whole_table(table, pages), n, pages)


def _split(cache: CacheFields, pages: LayerPages) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [pages, page, kv_heads, dim] from any layout."""
    key, value = (None if x is None else np.asarray(x) for x in (pages.key, pages.value))
    return LAYOUTS[cache.layout].separate(key, value, cache.head_dim, cache.value_size)


def _of_shard(cache: CacheFields, scale: Any, own: slice) -> Any:
    if scale is None or np.ndim(scale) < 3:
        return scale
    return np.asarray(scale)[own].swapaxes(1, 2) if cache.heads_at == 1 else np.asarray(scale)[own]
