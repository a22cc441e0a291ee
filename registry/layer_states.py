"""The declarations of a layer's operation with a state and of its convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..models.layers import Convolution, LayerState
from ..sharding.modes import GENERATION, canonical_mode
from .declaration import Declaration

__all__ = ["state_declarations"]

_COMMON = ("batch", "q_len", "mode", "layout", "dtype")


def state_declarations(
    state: LayerState, call: Mapping[str, Any], metadata: Mapping[str, Any], source: str
) -> tuple[Declaration | None, Declaration | None]:
    """(the operation with a state, the convolution before it). call: the fields of attention's call, of which lengths, mode,
    layout and dtype are theirs too; if it has a past, they start from a state. metadata: fields of OperationMetadata."""
    common = {name: call[name] for name in _COMMON if name in call}
    past = "query_offset" in call or call.get("kv_lengths") is not None
    if (mode := call.get("mode")) is not None:
        past = past or canonical_mode(mode) in GENERATION
    carried = {"initial_state": True} if past else {}
    recurrence = convolution = None
    if state.operation is not None:
        sizes = {name: dict(value) if name == "dims" else value for name, value in state.call}
        operands = {name: list(x) if isinstance(x, tuple) else x for name, x in state.operands}
        fields = common | sizes | {"operands": operands | carried}
        recurrence = _declared(state.operation, fields, dict(state.config), metadata, source)
    if state.convolution is not None:
        convolution = _of_convolution(state.convolution, common, carried, metadata, source)
    return recurrence, convolution


def _of_convolution(
    found: Convolution, common: Mapping[str, Any], carried: dict[str, Any], metadata: Mapping[str, Any], source: str
) -> Declaration:
    fields = {**common, "dims": {"channels": found.channels, "width": found.width}}
    if operands := ({"bias": True} if found.bias else {}) | carried:
        fields["operands"] = operands
    config = {} if found.activation is None else {"activation": found.activation}
    return _declared("causal_conv1d", fields, config, metadata, source)


def _declared(
    operation: str, call: Mapping[str, Any], config: dict[str, Any], metadata: Mapping[str, Any], source: str
) -> Declaration:
    """A declaration whose config has the model's fields; those of `metadata` go before them."""
    configs = dict(metadata.get("operation_configs") or {})
    own = config | dict(configs.get(operation) or {})
    if own:
        configs[operation] = own
    fields = dict(metadata) | ({"operation_configs": configs} if configs else {})
    return Declaration.from_dict({"operation": operation, "metadata": fields, "call": dict(call)}, source)
