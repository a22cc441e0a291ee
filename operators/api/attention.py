"""Attention: a declaration from a file or from keywords, ready for a model to call."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import jax

from ...call_arguments import CallArguments, CallArray, PlainArguments
from ...errors import ConfigError
from ...lazy import LazyModule, LazySerializer
from ..call.options import takes_call_arguments

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

    from ...planning import Plan
    from ...planning.cache.kv_cache import KVCache
    from ...planning.paged.paged_plan import PagedPlan
    from ...registry import declaration
    from ..call.output import AttentionOutput
    from ..paged.step_arguments import StepArguments
    from ..paged.step_output import StepOutput
    from ..paged_cache.batch import RaggedBatch
    from ..paged_cache.state import CacheState
    from ..recurrent.output import RecurrentOutput
    from . import attention_parts as parts
    from .attention_types import ArrayOperation, AttentionKeywords
else:
    declaration = LazyModule("attnops.registry.declaration")
    parts = LazyModule("attnops.operators.api.attention_parts")  # with the first Attention, not by its import

__all__ = ["Attention"]

_MAX_PLANS = 64


class Attention:
    """A declared attention: an operation with the options of its calls. Hashable, so it can be a static argument of jit.

    declared: an operation's name; or a Declaration, its dict, or the path of its JSON file. keywords: with a name, whatever is
    the same in all calls (mask, causal, sliding_window and the other static arguments of a call), fields of OperationMetadata
    (or `metadata`, a whole one) and fields of the operation's config, such as block_q. With a declaration, fields of
    OperationMetadata that replace its own, such as a mesh that the program has made.

    What a call passes besides its arrays is combined with the declaration: masks intersect; an option given in both must be
    equal. Heads, dims and dtypes that a file declares are checked; its batch and lengths are only for `attnops plan`. Errors:
    ConfigError for a declaration that is disabled or disagrees with a call; InputTypeError for unknown keywords; InputError for
    declared arrays that are missing.
    """

    @overload
    def __init__(self, declared: ArrayOperation, **keywords: Unpack[AttentionKeywords]) -> None: ...

    @overload
    def __init__(self, declared: declaration.Declaration | Mapping[str, Any] | str | Path, **keywords: Any) -> None: ...

    def __init__(self, declared: declaration.Declaration | Mapping[str, Any] | str | Path, **keywords: Any) -> None:
        self.declaration, metadata, self._stated = parts.parse_attention(declared, keywords)
        if self.declaration.latent is not None:
            raise ConfigError("the declaration has latent; use attnops.LatentAttention, whose arrays are latents.")
        name = self.declaration.operation
        operation: Any = parts.OperationRegistry.get(name)
        calls = parts.calls_of(self.declaration)
        if calls is None:
            raise ConfigError(
                f"operation {name!r} selects keys and doesn't attend; call it by OperationRegistry.create, and declare the "
                "attention by its own operation."
            )
        self.operation: Any = operation(metadata)
        self._calls = calls(self.declaration, self.operation, self._stated)
        self._plans: dict[Any, Any] = {}
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """The file's value: whether attnops runs or, in an adapter, the framework's own attention."""
        return self.declaration.enabled

    @property
    def plans(self) -> tuple[Any, ...]:
        """The distinct plans of the calls so far, in order (at most 64); under jit, those of the traces."""
        with self._lock:
            return tuple(self._plans.values())

    def states(self, field: str) -> bool:
        """Whether the file or the program specifies a field of the metadata, so that its value isn't just a default."""
        return field in self._stated

    # fmt: off
    @overload
    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, *, return_weights: Literal[True], return_lse: Literal[True],
        **call: Unpack[PlainArguments]
    ) -> AttentionOutput[jax.Array, jax.Array, Plan]: ...

    @overload
    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, *, return_weights: Literal[False] = ...,
        return_lse: Literal[True], **call: Unpack[PlainArguments]
    ) -> AttentionOutput[jax.Array | None, jax.Array, Plan]: ...

    @overload
    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, *, return_weights: Literal[True],
        return_lse: Literal[False] = ..., **call: Unpack[PlainArguments]
    ) -> AttentionOutput[jax.Array, jax.Array | None, Plan]: ...
    # fmt: on

    @overload
    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]
    ) -> AttentionOutput[jax.Array | None, jax.Array | None, Plan]: ...

    @overload
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
    ) -> StepOutput: ...

    @overload
    def __call__(self, *arrays: CallArray, **call: Any) -> RecurrentOutput: ...

    @takes_call_arguments  # type: ignore[misc]  # the state, layer and batch of a step are among its `call`
    def __call__(
        self, query: Any = None, key: Any = None, value: Any = None, *more: Any, **call: Unpack[CallArguments]
    ) -> Any:
        """Attend; `call` is what the operation's own call takes: a call's arguments, or a recurrence's, or, over pages, a step's
        with its state."""
        return self.run((), query, key, value, *more, **call)

    def run(
        self, remarks: tuple[str, ...], query: Any = None, key: Any = None, value: Any = None, *more: Any, **call: Any
    ) -> Any:
        """Like a call. `remarks` are added to the notes of its plan in `plans`: what an adapter made of its arguments."""
        self._check_enabled()
        arrays, options = self._calls.passed((query, key, value, *more), call)
        output = self.operation(*arrays, **options)
        decided = output.plan
        # With array masks, plan again: plan() also looks at their values.
        again = self._calls.sees_values and decided.problem.leaves
        self._keep(decided, remarks, (lambda: self.operation.plan(*arrays, **options)) if again else None)
        return output

    def _keep(self, decided: Any, remarks: tuple[str, ...], again: Callable[[], Any] | None = None) -> None:
        """Add a call's plan to `plans` if it is new. again: makes it with more notes."""
        with self._lock:
            new = decided not in self._plans and len(self._plans) < _MAX_PLANS
        if new:
            noted = decided if again is None else again()
            with self._lock:
                self._plans[decided] = replace(noted, notes=(*noted.notes, *remarks)) if remarks else noted

    @overload
    def plan(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> Plan: ...

    @overload
    def plan(
        self,
        query: CallArray | None = None,
        key: CallArray | None = None,
        value: CallArray | None = None,
        *,
        cache: KVCache | CacheState,
        layer: int | None = None,
        batch: RaggedBatch | None = None,
        **call: Unpack[StepArguments],
    ) -> PagedPlan: ...

    @takes_call_arguments  # type: ignore[misc]
    def plan(
        self, query: Any = None, key: Any = None, value: Any = None, *more: Any, **call: Unpack[CallArguments]
    ) -> Any:
        """The plan of the same call, from arrays or ShapeDtypeStructs; nothing runs. A step's takes `cache=` in place of the
        state; default: the file's."""
        self._check_enabled()
        arrays, options = self._calls.planned((query, key, value, *more), {**call})
        return self.operation.plan(*arrays, **options)

    @takes_call_arguments
    def explain(
        self, query: Any = None, key: Any = None, value: Any = None, *more: Any, **call: Unpack[CallArguments]
    ) -> str:
        """The plan of the same call or step as text."""
        explained: str = self.plan(query, key, value, *more, **call).explain()
        return explained

    @takes_call_arguments
    def options(self, query: Any, key: Any = None, value: Any = None, **call: Unpack[CallArguments]) -> dict[str, Any]:
        """The options of a call or a step combined with the declared ones."""
        self._check_enabled()
        return self._calls.options((query, key, value), {**call})

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise ConfigError(
                f"this declaration of {self.declaration.operation!r} has enabled=false, which selects a framework's own "
                "attention, but there is none here; call that one, or remove 'enabled' from the file."
            )

    def _key(self) -> tuple[Any, ...]:
        # In an adapter a specified causal or dropout_prob is more than a default of the same value.
        stated = self._stated & {"causal", "dropout_prob"}
        declared = self.declaration
        return (
            declared.operation,
            self.operation.metadata,
            declared.call,
            declared.step,
            declared.cache,
            self.enabled,
            stated,
        )

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Attention) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def declared(self) -> declaration.Declaration:
        """The declaration with what the program specified in its place; an Attention of it equals this one."""
        unsaid = parts.OperationMetadata().to_dict()
        metadata = {
            name: value
            for name, value in self.operation.metadata.to_dict().items()
            if name != "schema_version" and (name in self._stated or value != unsaid[name])
        }
        return self.declaration.model_copy(update={"metadata": metadata}).checked()

    def __reduce__(self) -> Any:
        return type(self), (self.declared().to_dict(),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Self], handler: GetCoreSchemaHandler) -> CoreSchema:
        return parts.attention_schema(cls, handler)

    def __repr__(self) -> str:
        data = self.declared().to_dict()
        del data["schema_version"]
        if "partition_axis" in data.get("metadata", {}):
            data["metadata"]["partition_axis"] = parts.short_axes(data["metadata"]["partition_axis"])
        return f"Attention({json.dumps(data, allow_nan=False)})"

    def _repr_html_(self) -> str:
        return parts.attention_html(self.declared(), self.plans)


Attention.__pydantic_serializer__ = LazySerializer(Attention)  # type: ignore[attr-defined]
