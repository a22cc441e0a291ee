"""Options: everything static in a call, with its defaults; and the keywords that a method with `**call` shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ...call_arguments import CallArguments
from ...masks import Mask
from ...scores import Score

__all__ = ["Options", "takes_call_arguments"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Options(NamedTuple):
    """Everything static in a call, with its defaults. `mask` is a structure whose arrays are in Arrays.mask_leaves.
    `score` is one whose arrays are operands; a soft cap that it begins with is in `logits_soft_cap`. value_columns: the count
    of KeyColumns; the call then has no array of values."""

    mask: Mask | None = None
    score: Score | None = None
    mask_is_array: bool = False
    causal: bool | None = None
    sliding_window: tuple[int | None, int | None] | None = None
    query_offset: int | None = None
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    dropout_prob: float | None = None
    deterministic: bool = True
    return_weights: bool = False
    return_lse: bool = False
    mode: str | None = None
    layout: str = "bthd"
    value_columns: int | None = None


def takes_call_arguments(function: Function) -> Function:
    """Show the `**call` of a method as its actual keywords, for help() and inspect.signature; arrays that only a recurrence has
    aren't shown."""
    signature = inspect.signature(function)
    shown_as = [p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name, kind in CallArguments.__annotations__.items():
        written, default = getattr(kind, "__forward_arg__", kind), Options._field_defaults.get(name)
        shown_as.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=written))
    function.__signature__ = signature.replace(parameters=shown_as)  # type: ignore[attr-defined]
    return function
