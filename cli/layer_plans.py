"""The plans of one layer of a model: of its attention, of its operation with a state, of its convolution; and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..planning import Plan
from ..planning.notes import is_info
from ..planning.tables.table_plan import TablePlan
from ..planning.text import bytes_text
from ..registry.declaration import Declaration
from ..registry.layer_cache import bytes_of
from ..registry.model_declaration import LayerDeclaration, ModelDeclaration
from .declared import declared
from .target import plan_metadata

__all__ = [
    "NOTHING", "STATE_CELLS", "LayerPlans", "cache_fields", "cache_json", "cache_rows", "has_states", "layer_json",
    "layer_plans", "state_cells", "state_rows",
]  # fmt: skip

NOTHING = "nothing: these layers have neither attention nor a state"
STATE_CELLS = ("state", "conv", "cache")
_LENGTHS = {"32k": 32768, "1M": 1048576}  # tokens for which bytes are told


@dataclass(frozen=True)
class LayerPlans:
    """A layer and a plan for each of its declarations."""

    layer: LayerDeclaration
    attention: Plan | None = None
    recurrence: TablePlan | None = None
    convolution: TablePlan | None = None

    @property
    def every(self) -> tuple[Plan | TablePlan, ...]:
        """The plans that there are."""
        return tuple(plan for plan in (self.attention, self.recurrence, self.convolution) if plan is not None)


def layer_plans(layer: LayerDeclaration) -> LayerPlans:
    """Plan each declaration of a layer."""
    return LayerPlans(layer, *map(_plan, (layer.declaration, layer.recurrence, layer.convolution)))


def _plan(declaration: Declaration | None) -> Any:
    return None if declaration is None else declared(declaration, None, None).plan(plan_metadata(declaration))


def layer_json(one: LayerPlans) -> dict[str, Any]:
    """The declarations and plans of a layer, and the bytes that one such layer keeps of a sequence."""

    def both(declaration: Declaration | None, plan: TablePlan | None) -> dict[str, Any] | None:
        if declaration is None or plan is None:
            return None
        return {"declaration": declaration.to_dict(), "plan": plan.to_dict()}

    layer = one.layer
    return {
        "layers": list(layer.layers),
        "kind": layer.kind,
        "name": layer.name,
        "indexer": dict(layer.indexer),
        "reads_layer": layer.reads_layer,
        "declaration": None if layer.declaration is None else layer.declaration.to_dict(),
        "plan": None if one.attention is None else one.attention.to_dict(),
        "recurrence": both(layer.recurrence, one.recurrence),
        "convolution": both(layer.convolution, one.convolution),
        "cache": {str(tokens): _shapes(layer.cache(tokens)) for tokens in _LENGTHS.values()},
    }


def _shapes(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    return {name: {"shape": list(x.shape), "dtype": x.dtype.name} for name, x in shapes.items()}


def cache_json(model: ModelDeclaration) -> dict[str, Any]:
    """The bytes that the model keeps of one sequence, and those of a model whose layers all attend to all tokens."""
    return {
        str(tokens): {"model": model.cache_bytes(tokens), "full_attention": model.full_attention_bytes(tokens)}
        for tokens in _LENGTHS.values()
    }


def cache_fields(model: ModelDeclaration) -> dict[str, Any]:
    """The fields of a KVCache that say which layers keep what; none for a model without states."""
    if not has_states(model):
        return {}
    fields: dict[str, Any] = {"layers": [group.model_dump(mode="json") for group in model.layer_groups]}
    if reads := model.reads_layer:
        fields["reads_layer"] = [list(pair) for pair in reads.items()]
    return fields | ({"stateless_layers": list(model.stateless_layers)} if model.stateless_layers else {})


def has_states(model: ModelDeclaration) -> bool:
    """Whether any layer carries something besides keys and values."""
    return any(layer.recurrence is not None or layer.convolution is not None for layer in model.distinct)


def cache_rows(model: ModelDeclaration) -> list[tuple[str, str]]:
    """What a model with states keeps of one sequence, beside a full-attention model's."""
    if not has_states(model):
        return []
    rows = []
    for name, tokens in _LENGTHS.items():
        whole = model.full_attention_bytes(tokens)
        beside = "" if whole is None else f"; with full attention {bytes_text(whole)}"
        rows.append(("keeps", f"{bytes_text(model.cache_bytes(tokens))} of a sequence of {name} tokens{beside}"))
    return rows


def state_cells(layer: LayerDeclaration) -> dict[str, str]:
    """What one layer keeps of a sequence: `32x128x128`, `3x8192` and `2.0 MiB`, or the bytes of a token."""
    kept = layer.cache(1)
    of_tokens = {name: x for name, x in kept.items() if name not in ("state", "convolution")}
    fixed = bytes_of(kept) - bytes_of(of_tokens)
    state, convolution = (kept.get(name) for name in ("state", "convolution"))
    window = bytes_of(layer.cache(2)) - bytes_of(kept)
    many = {tokens: bytes_of(layer.cache(tokens)) for tokens in (2**20, 2**21)}
    each = f"{bytes_text(window)} a token" if of_tokens else ""
    if of_tokens and many[2**20] == many[2**21]:
        each += f", up to {bytes_text(many[2**20] - fixed)}"
    return {
        "state": "" if state is None else "x".join(map(str, state.shape)),
        "conv": "" if convolution is None else "x".join(map(str, convolution.shape)),
        "cache": " + ".join(part for part in (bytes_text(fixed) if fixed else "", each) if part),
    }


def state_rows(one: LayerPlans) -> list[tuple[str, str]]:
    """What runs a layer's operation with a state and its convolution, why others don't, and what to act on."""
    rows = []
    for plan in (one.recurrence, one.convolution):
        if plan is not None:
            rows.append(("runs", plan.implementation or f"{plan.problem.operation}: nothing"))
            rows += [("not", f"{r.implementation}: {reason}") for r in plan.rejected for reason in r.reasons]
            rows += [("note", str(note)) for note in plan.notes if not is_info(note)]
    return rows
