"""Methods with the arguments of another one: the plan of a call, and its text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["explained", "planned"]

P = ParamSpec("P")
R = TypeVar("R")


def explained(plan: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Any, P], str]:
    """The method `explain` of a class, from its method `plan`."""

    def explain(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> str:
        text: str = self.plan(*args, **kwargs).explain()
        return text

    return _named(explain, plan, "explain", "str", "The plan of the same call as text.")


def planned(call: Callable[Concatenate[Any, P], Any], made: type[R]) -> Callable[Concatenate[Any, P], R]:
    """The method `plan` of a class from its `__call__`, whose positional arguments are arrays and whose keywords have a name.

    The class's `_plan(arrays by name, keywords)` makes it. made: the class of the plan.
    """
    signature = inspect.signature(call)
    _, *names, rest = signature.parameters  # self, the arrays, and the name of the keywords

    def plan(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(self, *args, **kwargs).arguments
        decided: R = self._plan({name: given[name] for name in names}, given.get(rest, {}))
        return decided

    about = "The plan of the same call, from arrays or ShapeDtypeStructs; nothing runs."
    return _named(plan, call, "plan", made.__name__, about)


def _named(method: Any, of: Callable[..., Any], name: str, returns: str, about: str) -> Any:
    functools.update_wrapper(method, of)
    method.__name__, method.__doc__ = name, about
    method.__qualname__ = f"{of.__qualname__.rpartition('.')[0]}.{name}"
    method.__annotations__ = {**of.__annotations__, "return": returns}
    method.__signature__ = inspect.signature(of).replace(return_annotation=returns)
    return method
