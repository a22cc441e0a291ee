"""Program: everything static in a planned call, and the one jitted function that runs every such call.

Equal programs share one entry of jax's own caches, whichever object asked: a model whose layers each make their operation
traces, lowers and compiles it once, as `jax.jit` does for any function that is called twice.
"""

from __future__ import annotations

import functools

import jax

from ..planning import Plan, PlannedOperation
from ..sharding.mesh import AnyMesh
from .arguments import Options
from .arrays import Arrays
from .execute import execute
from .local import LocalOutput

__all__ = ["Program", "attention"]


class Program:
    """An operation, its plan, the mesh and the options of a call. Compared by value; the hash is computed once."""

    __slots__ = ("_hash", "default_causal", "mesh", "operation", "options", "plan")

    def __init__(
        self, operation: PlannedOperation, plan: Plan, mesh: AnyMesh | None, options: Options, *, default_causal: bool
    ) -> None:
        self.operation, self.plan, self.mesh, self.options = operation, plan, mesh, options
        self.default_causal = default_causal
        self._hash = hash(self._key())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Program) and self._hash == other._hash and self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        return self.operation, self.plan, self.mesh, self.options, self.default_causal

    def __hash__(self) -> int:
        return self._hash


@functools.partial(jax.jit, static_argnums=0)
def attention(program: Program, arrays: Arrays) -> LocalOutput:
    """Run a planned call. This is its name in a profile and in a program's text."""
    operation, decided = program.operation, program.plan
    return execute(
        operation.forward(decided.method or "", decided.config),
        decided,
        program.mesh,
        program.options,
        arrays,
        default_causal=program.default_causal,
        check_vma=operation.implementation(decided.method or "", decided.config).check_vma(decided.config),
    )
