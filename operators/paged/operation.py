"""paged: attention of a ragged batch, prefill chunks and decoding rows, over a declared KV cache's pages."""

from __future__ import annotations

from typing import Unpack

from ...call_arguments import CallArray
from ...planning.cache.kv_cache import KVCache
from ...planning.paged.paged_plan import PagedPlan
from ..call.same_arguments import explained
from ..paged_cache.batch import RaggedBatch
from ..paged_cache.state import CacheState
from .implementations import PAGES_ON_BLACKWELL, PAGES_ON_HOPPER, PAGES_ON_TPU, PAGES_ON_XLA
from .paged_config import PagedConfig
from .step_arguments import StepArguments, cache_of, step_of
from .step_operation import StepOperation
from .step_output import StepOutput

__all__ = ["Paged", "PagedOperation"]


class PagedOperation(StepOperation):
    """Base class of attention over the pages of a declared KV cache. `Operation(metadata)(query, key, value, ...)` runs one."""

    convention = "attnops:pages"

    def __call__(
        self,
        query: CallArray | None,
        key: CallArray | None = None,
        value: CallArray | None = None,
        *,
        state: CacheState,
        layer: int,
        batch: RaggedBatch,
        **call: Unpack[StepArguments],
    ) -> StepOutput:
        """Write a step's keys and values into their pages, and attend to all keys of the sequences.

        Shapes: query [tokens, heads, head_dim], key [tokens, kv_heads, head_dim], value [tokens, kv_heads, value_dim] in the
        cache's dtype, value None for a cache of latents; the batch assigns tokens to sequences. See docs/serving.md for every
        argument. Call it inside jit with the state donated: outside, the layer's pages are copied. There is no
        gradient. Errors: InputError, InputTypeError (bad arguments, known invalid batches), RefusedError (nothing can run it).
        """
        step, step_arrays = step_of(call, self.metadata.causal, query)
        decided, (output, lse, after) = self._run(state, layer, batch, (query, key, value), step, step_arrays)
        return StepOutput(output, lse if step.return_lse else None, after, plan=decided)

    def plan(
        self,
        query: CallArray | None = None,
        key: CallArray | None = None,
        value: CallArray | None = None,
        *,
        cache: KVCache | CacheState | None = None,
        layer: int | None = None,
        batch: RaggedBatch | None = None,
        **call: Unpack[StepArguments],
    ) -> PagedPlan:
        """Return the plan of the same step, made from arrays or ShapeDtypeStructs; nothing runs.

        Specify `layer` if the cache's layers are in several groups.
        For a batch with known values the plan also says which pages are read. A plan of kind 'refused' is returned, not raised.
        """
        declared = cache_of(cache)
        step, step_arrays = step_of(call, self.metadata.causal, query)
        return self._planned(declared, layer, batch, (query, key, value), step, step_arrays)

    explain = explained(plan)


class Paged(PagedOperation):
    """Attention over the pages of a declared KV cache; writes the step's keys first."""

    name = "paged"
    config = PagedConfig
    forward_tpu = PAGES_ON_TPU
    forward_blackwell = PAGES_ON_BLACKWELL
    forward_hopper = PAGES_ON_HOPPER
    forward_native = PAGES_ON_XLA
