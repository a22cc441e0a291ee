"""Program: everything static in a planned call or step, and the one jitted function that runs them all.

Equal programs share one entry of jax's own caches, whichever object asked: a model whose layers each make their operation
traces, lowers and compiles it once, as `jax.jit` does for any function that is called twice.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax

from ...planning.decision import Decision
from ...sharding.mesh import AnyMesh

__all__ = ["Program", "attention"]


class Program:
    """An operation, its plan, the mesh and the options of a call. Compared by value; the hash is computed once."""

    __slots__ = ("_hash", "mesh", "operation", "options", "plan")

    def __init__(self, operation: Any, plan: Decision[Any, Any], mesh: AnyMesh | None, options: Hashable) -> None:
        self.operation, self.plan, self.mesh, self.options = operation, plan, mesh, options
        self._hash = hash(self._key())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Program) and self._hash == other._hash and self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        return self.operation, self.plan, self.mesh, self.options

    def __hash__(self) -> int:
        return self._hash


@functools.partial(jax.jit, static_argnums=0)
def attention(program: Program, arrays: Any) -> Any:
    """Run a planned call or step. This is its name in a profile and in a program's text."""
    return program.operation.run_program(program, arrays)
