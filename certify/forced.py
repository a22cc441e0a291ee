"""only: an operation that counts as refused where another of its methods runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import RefusedError

__all__ = ["only"]


def only(method: str, operation: Any) -> Callable[..., Any]:
    """The operation's call; RefusedError if its plan ran another method. A step that only writes may run any."""

    def call(*arrays: Any, **keywords: Any) -> Any:
        output = operation(*arrays, **keywords)
        plan = output.plan
        if plan.method != method and plan.problem.mode != "insert":
            raise RefusedError(f"{plan.method} runs in the place of {method}")
        return output

    call.plan = operation.plan  # type: ignore[attr-defined]
    return call
