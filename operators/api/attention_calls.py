"""Calls: what an Attention's calls pass to its operation, combined with its declaration, by what the operation does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...errors import InputTypeError
from ...planning.score_operands import captured_names
from ...registry.declaration import Declaration
from ...registry.registry import Family
from ...scores import Score
from ..call.arguments import check_names
from ..call.arrays import is_array
from .declared_options import call_options, step_options
from .declared_recurrence import declared_call

__all__ = ["Calls", "calls_of"]


class Passed(NamedTuple):
    """The arguments of the operation: by position and by name."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Calls:
    """Calls of attention over arrays. operation: the one that the declaration made. stated: the fields of its metadata that the
    file or the program specifies."""

    declaration: Declaration
    operation: Any
    stated: frozenset[str]

    needed: ClassVar[tuple[str, ...]] = ()  # by name to run, besides arrays
    sees_values: ClassVar = True  # a plan of known array masks says more than that of the call

    def options(self, arrays: tuple[Any, Any, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """The options of a call or a step combined with the declared ones."""
        score = self.declaration.call.score if arguments.get("score") is None else arguments["score"]
        captured = captured_names(score) if isinstance(score, Score) else ()
        check_names(arguments, (*self.operation.operands.names, *captured))
        options = call_options(self.declaration, *arrays, arguments)
        if is_array(options.get("mask")) and options.get("causal") is None and "causal" in self.stated:
            options["causal"] = self.operation.metadata.causal  # declared, so not just a default
        return options

    def passed(self, arrays: tuple[Any, ...], call: dict[str, Any]) -> Passed:
        """The arguments of a call that runs."""
        query, key, value, *more = arrays
        if more:
            raise InputTypeError(f"{len(arrays)} arrays by position; wanted query, key and value.")
        options = self.options((query, key, value), call)
        if missing := [name for name in self.needed if name not in options]:
            raise InputTypeError(
                f"operation {self.declaration.operation!r} attends to a cache's pages, and the call has no "
                f"{', '.join(missing)}; pass state=, layer= and batch=."
            )
        return Passed((query, key, value), options)

    def planned(self, arrays: tuple[Any, ...], call: dict[str, Any]) -> Passed:
        """The arguments of a call that is planned."""
        query, key, value, *_ = arrays
        return Passed((query, key, value), self.options((query, key, value), call))


class _Steps(Calls):
    needed = ("state", "layer", "batch")
    sees_values = False

    def options(self, arrays: tuple[Any, Any, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        return step_options(self.declaration, arrays[0], arguments)

    def planned(self, arrays: tuple[Any, ...], call: dict[str, Any]) -> Passed:
        passed = super().planned(arrays, call)
        if self.declaration.cache is not None:
            passed.options.setdefault("cache", self.declaration.cache)
        return passed


class _Recurrences(Calls):
    sees_values = False

    def passed(self, arrays: tuple[Any, ...], call: dict[str, Any]) -> Passed:
        return Passed((), declared_call(self.declaration, self.operation.operands, arrays, call))

    planned = passed


_CALLS: Mapping[Family, type[Calls]] = {"attention": Calls, "recurrence": _Recurrences}


def calls_of(declaration: Declaration) -> type[Calls] | None:
    """Those of a declared operation; None for one that doesn't attend."""
    calls = _CALLS.get(declaration.family)
    return _Steps if calls is not None and declaration.in_pages else calls
