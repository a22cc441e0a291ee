"""paged_indexer: for each token of a ragged batch the keys that it will attend to, of index keys in a cache's pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from ...call_arguments import CallArray
from ...compat import tree_of
from ...errors import InputError, InputTypeError, nearest, shown
from ...masks import Mask
from ...masks.causal_window import causal_window
from ...planning.cache.kv_cache import KVCache
from ...planning.notes import note
from ...planning.paged.paged_plan import PagedPlan
from ...planning.paged.step_operands import INDEX_STEP, RESULTS_OF_INDEX_STEPS
from ...pytree_export import exported
from ...registry import OperationMetadata
from ..call.arrays import shaped
from ..call.program import Program
from ..call.same_arguments import explained
from ..notes.unread_fields import unread_fields
from ..paged.run_step import StepInputs, written_when
from ..paged.step_arguments import Step, StepArrays, cache_of, step_of
from ..paged.step_operation import POLICY_OF_SEQUENCES, StepOperation
from ..paged_cache.batch import RaggedBatch
from ..paged_cache.insert import insert
from ..paged_cache.paged_call import PagedSizes
from ..paged_cache.state import CacheState
from .index_checks import selected_count
from .index_config import PagedIndexerConfig
from .paged_implementations import INDEX_ON_PAGES
from .select_keys import select_keys

__all__ = ["IndexStepArguments", "IndexStepOutput", "PagedIndexer"]


class IndexStepArguments(TypedDict, total=False):
    """The keywords of an indexer's step; those that a step of attention has too have the same meaning."""

    top_k: int | None
    mask: Mask | None
    causal: bool | None
    sliding_window: int | tuple[int | None, int | None] | None
    key_scale: CallArray | None
    softmax_scale: float | None
    mode: str | None
    update: str | None
    max_q_len: int | None
    debug: bool


@exported()
@tree_of(["positions", "counts", "state"], dropped=["plan"])
@dataclass(frozen=True)
class IndexStepOutput:
    """A JAX pytree. positions: int32 [tokens, top_k] in each token's sequence, ascending, then -1, as `selected` of a step takes
    them; counts: int32 [tokens], how many are used; None in mode 'insert'. state: the cache after the step. plan: what ran and
    why; not part of the tree, so the result of jit has None here."""

    positions: jax.Array | None
    counts: jax.Array | None
    state: CacheState
    plan: PagedPlan | None = field(default=None, kw_only=True)


class PagedIndexer(StepOperation):
    """For each token exactly the top_k of its visible keys with the greatest scores, of keys in pages; writes its own first.

    Scores are those of `indexer`; of equal ones, the lower position is selected.
    """

    name = "paged_indexer"
    convention = "attnops:paged_indexer"
    config = PagedIndexerConfig
    operands = INDEX_STEP
    results = RESULTS_OF_INDEX_STEPS
    token_names = ("index_query", "index_key", "value")
    family = "selection"
    sums_heads = True
    forward_native = INDEX_ON_PAGES

    @classmethod
    def default_scale(cls, cache: KVCache) -> float:
        return float(cache.head_dim**-0.5)

    @classmethod
    def computed_in(cls, metadata: OperationMetadata, input_dtype: str) -> tuple[str, str, list[str]]:
        unread = unread_fields(metadata, POLICY_OF_SEQUENCES)
        return input_dtype, "float32", [note("index.unread", fields=unread)] if unread else []

    def __call__(
        self,
        index_query: CallArray | None,
        index_key: CallArray | None = None,
        index_weights: CallArray | None = None,
        *,
        state: CacheState,
        layer: int,
        batch: RaggedBatch,
        **call: Unpack[IndexStepArguments],
    ) -> IndexStepOutput:
        """Write a step's index keys into their pages, and select from all index keys of the sequences.

        Shapes: index_query [tokens, index_heads, dim], index_key [tokens, dim] in the cache's dtype or quantised with key_scale
        [tokens], index_weights [tokens, index_heads]; the batch assigns tokens to sequences. The layer is one of a group of kind
        'latent' whose head_dim is dim. Call it inside jit with the state donated. A selection is a constant: it has no gradient.
        Errors: InputError, InputTypeError (bad arguments, known invalid batches), RefusedError (nothing can run it).
        """
        if not isinstance(state, CacheState):
            raise InputTypeError(f"state is {shown(state)}; wanted a CacheState, as paged_cache.init makes it.")
        tokens, step, arrays = self._step(index_query, index_key, index_weights, state.cache, layer, call)
        decided, (positions, counts, after) = self._run(state, layer, batch, tokens, step, arrays)
        return IndexStepOutput(positions, counts, after, plan=decided)

    def plan(
        self,
        index_query: CallArray | None = None,
        index_key: CallArray | None = None,
        index_weights: CallArray | None = None,
        *,
        cache: KVCache | CacheState | None = None,
        layer: int | None = None,
        batch: RaggedBatch | None = None,
        **call: Unpack[IndexStepArguments],
    ) -> PagedPlan:
        """The plan of the same step, from arrays or ShapeDtypeStructs; nothing runs. Specify `layer` if the cache's layers are in
        several groups."""
        declared = cache_of(cache)
        tokens, step, arrays = self._step(index_query, index_key, index_weights, declared, layer, call)
        return self._planned(declared, layer, batch, tokens, step, arrays)

    explain = explained(plan)

    def run_program(self, program: Program, inputs: StepInputs) -> Any:
        """Run a planned step; traceable. (positions, counts, the state after)."""
        plan: Any = program.plan
        debug = bool(program.options)
        state, batch, query, key, _, arrays = inputs
        problem, config = plan.problem, plan.config
        if problem.mode == "insert":
            return None, None, insert(state, 0, batch, key, None, key_scale=arrays.key_scale, debug=debug)
        mask = causal_window(problem.mask)
        assert mask is not None  # otherwise nothing would run it
        update = written_when(type(self), plan)
        assert update != "fused"  # no method writes pages
        positions, state = select_keys(
            state,
            0,
            batch,
            query,
            key,
            arrays.index_weights,
            top_k=problem.top_k,
            softmax_scale=problem.softmax_scale,
            key_scale=arrays.key_scale,
            update=update,
            mesh=program.mesh,
            kv_heads=plan.policy.kv_heads,
            causal=mask.causal,
            sliding_window=mask.window,
            max_q_len=problem.max_q_len,
            debug=debug,
            method=getattr(self, plan.method),
            platform=problem.platform,
            sizes=PagedSizes(config.pages_per_block, config.queries_per_block),
            check_vma=self.capability(plan.method).check_vma,
        )
        return positions, jnp.sum(positions >= 0, axis=1, dtype=jnp.int32), state

    def _step(
        self, query: Any, key: Any, weights: Any, cache: KVCache, layer: int | None, call: Mapping[str, Any]
    ) -> tuple[tuple[Any, Any, None], Step, StepArrays]:
        """(arrays by token, static arguments, other arrays) as a step of attention has them. Errors: those of a call."""
        for name in call:
            if name not in IndexStepArguments.__annotations__:
                raise InputTypeError(
                    f"unknown argument {shown(name)} of an indexer's step."
                    + nearest(name, IndexStepArguments.__annotations__)
                )
        step, arrays = step_of({n: x for n, x in call.items() if n != "top_k"}, self.metadata.causal, query)  # type: ignore[arg-type]
        if step.mode == "insert":
            for name, x in (("index_query", query), ("index_weights", weights), ("top_k", call.get("top_k"))):
                if x is not None:
                    raise InputError(f"{name} is given in mode 'insert', which selects nothing; leave it out.")
        else:
            _check_query(query, weights)
            config = self.metadata.operation_configs.get(self.name)
            step = step._replace(top_k=selected_count(call.get("top_k"), getattr(config, "top_k", None)))
        _check_group(cache, layer)
        scale = arrays.key_scale
        key = _with_a_head("index_key", key, ("tokens", "dim"))
        scale = _with_a_head("key_scale", scale, ("tokens",), at=1)
        return (query, key, None), step, arrays._replace(key_scale=scale, index_weights=weights)


def _check_query(query: Any, weights: Any) -> None:
    if query is None or weights is None:
        name = "index_query" if query is None else "index_weights"
        raise InputError(f"{name} is missing; pass it, or mode='insert' to only write index keys.")
    q, w = shaped("index_query", query), shaped("index_weights", weights)
    if len(q.shape) != 3:
        raise InputError(f"index_query has shape {tuple(q.shape)}; wanted [tokens, index_heads, dim].")
    if tuple(w.shape) != tuple(q.shape[:2]):
        raise InputError(
            f"index_weights has shape {tuple(w.shape)}; wanted {tuple(q.shape[:2])}, [tokens, index_heads]."
        )
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise InputTypeError(f"index_weights is {w.dtype}; wanted a float dtype.")


def _check_group(cache: KVCache, layer: int | None) -> None:
    """Refuse a layer whose pages aren't one key of each token. Errors: InputError."""
    if layer is None and len(cache.groups) > 1:
        return  # refused by the plan
    group = cache.part(cache.group_of(0 if layer is None else int(layer)), 1)
    if not group.values_in_keys:
        raise InputError(
            f"layer {0 if layer is None else layer} of the cache has keys and values of {group.kv_heads} heads; wanted one index "
            "key of each token: declare a group of kind 'latent' whose head_dim and value_dim are the index keys'."
        )


def _with_a_head(name: str, x: Any, dims: tuple[str, ...], at: int = 1) -> Any:
    """Tokens as the pages store them, with one head; None for none."""
    if x is None:
        return None
    form = shaped(name, x)
    if len(form.shape) != len(dims):
        raise InputError(f"{name} has shape {tuple(form.shape)}; wanted [{', '.join(dims)}].")
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*x.shape[:at], 1, *x.shape[at:]), x.dtype)
    return jnp.expand_dims(jnp.asarray(x), at)
