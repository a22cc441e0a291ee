"""PagedFunction: attention over pages that another library owns, with that library's signature."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError, is_whole, shown
from ..operators.api.attention_keywords import is_operation_name, parse_attention
from ..operators.paged import PagedOperation
from ..operators.paged_cache import CacheState, LayerPages
from ..planning.paged.paged_plan import PagedPlan
from ..registry import OperationRegistry
from .foreign_step import ForeignStep, batch_of, prepare, scaled_query, with_more_heads

__all__ = ["PagedFunction"]

_Params = ParamSpec("_Params")
_Returned = TypeVar("_Returned")
_MAX_PLANS = 64


class PagedFunction(Generic[_Params, _Returned]):
    """A declared attention over pages, with another library's signature. `plans` holds the plans of the calls so far.

    `plan` and `explain` take the same arguments, and shapes in place of arrays. `declare` returns the same function for another
    declaration.
    """

    def __init__(
        self,
        read: Callable[_Params, ForeignStep],
        returned: Callable[[jax.Array, jax.Array], _Returned],
        operation: PagedOperation,
        kv_head_axis: str | tuple[str, ...] | None = "tp",
        max_length: int | None = None,
    ) -> None:
        self._read, self._returned, self.operation = read, returned, operation
        self._kv_head_axis, self._max_length = kv_head_axis, max_length
        self._plans: dict[PagedPlan, PagedPlan] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, read)
        self.__signature__ = inspect.signature(read).replace(return_annotation=inspect.Signature.empty)

    def declare(
        self,
        operation: str = "paged",
        *,
        kv_head_axis: str | tuple[str, ...] | None = "tp",
        max_length: int | None = None,
        **keywords: Any,
    ) -> PagedFunction[_Params, _Returned]:
        """The same function for an operation over pages, by name, with fields of OperationMetadata, such as mesh, or its config.

        kv_head_axis: the mesh axes that split the kv heads of the pages. max_length: the most tokens of a sequence; by default
        what its page table or the pages hold. Errors: ConfigError for another operation, and for options that a call has.
        """
        if not isinstance(operation, str) or not is_operation_name(operation):
            raise ConfigError(
                f"operation={shown(operation)}; wanted the name of an operation over pages, such as 'paged': the cache and the "
                "step come with each call."
            )
        if max_length is not None and not is_whole(max_length, 1):
            raise ConfigError(f"max_length={shown(max_length)}; wanted a number of tokens, or None.")
        parsed = parse_attention(operation, keywords)
        step = parsed.declaration.step
        if options := sorted(parsed.declaration.call.model_fields_set | (step.model_fields_set if step else set())):
            raise ConfigError(f"{', '.join(options)}: an argument of each call, not of the declaration; leave it out.")
        operation_class: Any = OperationRegistry.get(operation)
        if operation_class.family != "attention" or operation_class.keys_in != "pages":
            raise ConfigError(f"operation={shown(operation)} doesn't attend over pages; wanted 'paged'.")
        return PagedFunction(self._read, self._returned, operation_class(parsed.metadata), kv_head_axis, max_length)

    @property
    def plans(self) -> tuple[PagedPlan, ...]:
        """The distinct plans of the calls so far, in order (at most 64); under jit, those of the traces."""
        with self._lock:
            return tuple(self._plans.values())

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Returned:
        step = self._read(*args, **kwargs)
        ready = prepare(step, self._kv_head_axis, self._max_length)
        query = step.query if step.q_scale is None else scaled_query(step)
        query = with_more_heads(jnp.asarray(query).astype(ready.dtype), ready.query_padding(query.shape[1]))
        key, value = (None if x is None else with_more_heads(x, ready.padding) for x in (step.key, step.value))
        sinks = None if step.sinks is None else with_more_heads(step.sinks, ready.query_padding(step.query.shape[1]), 0)
        scales = (None, None)
        if ready.cache.quantised is not None:
            scales = tuple(np.float32(1 if x is None else x) for x in (step.k_scale, step.v_scale))  # type: ignore[assignment]
        state = CacheState((LayerPages(step.pages, None, *map(_array, scales)),), ready.cache)
        result = self.operation(
            query,
            key,
            value,
            state=state,
            layer=0,
            batch=batch_of(step, ready.cache),
            softmax_aux=sinks,
            **ready.options,
        )
        self._keep(result.plan, ready.remarks)
        output = result.attention_outputs
        assert output is not None  # the mode isn't 'insert'
        output = output[:, : step.query.shape[1]]
        if ready.cache.quantised is None and step.v_scale is not None:
            output = output.astype(jnp.float32) * np.float32(step.v_scale)
        return self._returned(output.astype(ready.returned), result.state.only_pages.key)

    def plan(self, *args: _Params.args, **kwargs: _Params.kwargs) -> PagedPlan:
        """The plan of the same call, from arrays or ShapeDtypeStructs; nothing runs."""
        step = self._read(*args, **kwargs)
        ready = prepare(step, self._kv_head_axis, self._max_length)
        padding, tokens = ready.query_padding(step.query.shape[1]), step.query.shape[0]
        shape = jax.ShapeDtypeStruct
        query = shape((tokens, step.query.shape[1] + padding, step.query.shape[2]), ready.dtype)
        key, value = (
            None if x is None else shape((tokens, x.shape[1] + ready.padding, x.shape[2]), x.dtype)
            for x in (step.key, step.value)
        )
        sinks = None if step.sinks is None else shape((query.shape[1],), jnp.float32)
        real = not any(isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer) for x in step.arrays)
        plan = self.operation.plan(
            query,
            key,
            value,
            cache=ready.cache,
            batch=batch_of(step, ready.cache) if real else None,
            softmax_aux=sinks,
            **ready.options,
        )
        return replace(plan, notes=(*plan.notes, *ready.remarks))

    def explain(self, *args: _Params.args, **kwargs: _Params.kwargs) -> str:
        """The plan of the same call as text."""
        return self.plan(*args, **kwargs).explain()

    def __repr__(self) -> str:
        return f"<{self._read.__name__} by {self.operation!r}>"

    def _keep(self, plan: PagedPlan | None, remarks: tuple[str, ...]) -> None:
        assert plan is not None  # the call itself sets it
        with self._lock:
            if plan not in self._plans and len(self._plans) < _MAX_PLANS:
                self._plans[plan] = replace(plan, notes=(*plan.notes, *remarks))


def _array(x: Any) -> Any:
    return None if x is None else jnp.asarray(x)
