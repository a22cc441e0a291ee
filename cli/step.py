"""The declared step of a file: whether there is one, and its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..operators.api.declared_config import declared_config
from ..operators.paged.declared_step import DeclaredStep, declared_step
from ..operators.paged.step_operation import StepOperation
from ..planning.cache.kv_cache import KVCache
from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from .cache import plan_cache

__all__ = ["one_layer", "refuse_inputs", "step_of"]


def step_of(
    declaration: Declaration, metadata: OperationMetadata, mode: str | None
) -> tuple[StepOperation, DeclaredStep]:
    """(the operation, the arguments of its step)."""
    operation: Any = OperationRegistry.create(declaration.operation, metadata)
    cache = plan_cache(declaration, metadata)
    if cache is None:
        raise ConfigError(
            f"operation {declaration.operation!r} attends to a cache's pages; declare `cache` in the file."
        )
    config: Any = declared_config(type(operation), metadata)[0]
    return operation, declared_step(declaration, cache.require(), config.update, mode)


def one_layer(declaration: Declaration, metadata: OperationMetadata) -> tuple[Declaration, tuple[str, ...]]:
    """The declaration with a cache of one layer, which is all that a step reads, and a note about it. If layers are in groups,
    it has the pages that the plan gives the layer's group."""
    cache, step = declaration.cache, declaration.step
    if cache is None or step is None or cache.layer_count == 1:
        return declaration, ()
    # A layer without pages is the second of two, which reads the first.
    reads = cache.layer_read(step.layer) != step.layer
    count, layer = (2, 1) if reads else (1, 0)
    group, fields = step.group(cache), cache.to_dict() | {"layers": count}
    if len(cache.groups) > 1:
        cache_plan = plan_cache(declaration, metadata)
        assert cache_plan is not None
        group_plan = cache_plan.require().groups[group]
        fields = group_plan.cache.to_dict() | {"layers": [group_plan.cache.to_dict()["layers"][0] | {"layers": count}]}
    elif not isinstance(cache.layers, int):
        fields["layers"] = [cache.to_dict()["layers"][0] | {"layers": count}]
    for name in ("reads_layer", "stateless_layers"):
        fields.pop(name, None)
    fields |= {"reads_layer": [[1, 0]]} if reads else {}
    if cache.bytes_per_device is not None and "bytes_per_device" in fields:
        fields["bytes_per_device"] = max(1, cache.bytes_per_device // len(cache.stored_layers))
    changed = declaration.model_copy(
        update={"cache": KVCache.from_dict(fields), "step": step.model_copy(update={"layer": layer})}
    ).checked()
    which = "" if len(cache.groups) == 1 else f", layer {step.layer}"
    return changed, (f"one of the cache's {cache.layer_count} layers{which}: a step uses one",)


def refuse_inputs(inputs: Path | None) -> None:
    """Refuse --inputs, of a step or a recurrence: all its sizes are in its declaration."""
    if inputs is not None:
        raise ConfigError(
            f"--inputs {inputs}: only calls of attention and of indexers read a file; these sizes are in the declaration."
        )
