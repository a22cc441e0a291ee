"""DeclaredOperation: what an operation has besides its calls: metadata, identity, and the mesh in force."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, get_abstract_mesh

from ...compat import varies_over
from ...errors import ConfigError, FallbackWarning, warn_caller
from ...planning import PlannedOperation
from ...planning.decision import Decision
from ...registry import OperationMetadata
from ...sharding import current_mesh, devices_platform
from ...sharding.mesh import AnyMesh
from .check_devices import check_devices

__all__ = ["DeclaredOperation", "signature", "varying_axes"]

D = TypeVar("D", bound=Decision[Any, Any])


class DeclaredOperation(PlannedOperation):
    """An operation with its metadata; equal ones of one class compare and hash equal."""

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        if metadata is not None and not isinstance(metadata, OperationMetadata):
            raise ConfigError(
                f"{type(self).__name__}({type(metadata).__name__}): wanted an OperationMetadata; make one with "
                "OperationMetadata(...), .from_config(config) or .from_json(text)."
            )
        self.metadata = OperationMetadata() if metadata is None else metadata

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self.metadata == getattr(other, "metadata", None)

    def __hash__(self) -> int:
        return hash((type(self), self.metadata))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.metadata!r})"

    def _ready(self, decided: D, arrays: Any, mesh: AnyMesh | None) -> D:
        """The plan of a call that is about to run: required, told if it is a fallback, and on devices that are here."""
        decided.require()
        if decided.kind == "fallback" and decided.policy.fallback == "warn":
            _warn_of_fallback(decided)
        problem = decided.problem
        check_devices(jax.tree.leaves(arrays), mesh, problem.devices, problem.platform, problem.platform_source)
        return decided

    def _mesh(self) -> AnyMesh | None:
        """The caller's manual mesh if this runs inside a shard_map, else the declared mesh, else the context's.

        If the declared mesh and that of jax.set_mesh differ only in their axis types, the context's is in force:
        jax accepts no other inside it.
        """
        current = current_mesh()
        declared = self.metadata.declared_mesh
        if declared is None or current is None:
            return current if declared is None else declared
        if isinstance(current, AbstractMesh) and current.manual_axes:
            return current
        same = declared.axis_names == current.axis_names and declared.axis_sizes == current.axis_sizes
        kinds = {devices_platform(m) for m in (declared, current)} - {None}
        return current if same and len(kinds) <= 1 and not get_abstract_mesh().empty else declared


@functools.lru_cache(maxsize=1024)  # once; a warning turned into an error is raised each time
def _warn_of_fallback(decided: Decision[Any, Any]) -> None:
    warn_caller(
        f"{decided.implementation} runs instead of the platform's own method.\n{decided.refusal()}\n"
        "Declare fallback='allow' to accept this, fallback='error' to forbid it.",
        FallbackWarning,
    )


_array_types: set[type] = set()  # those seen so far; isinstance of jax.Array is slow


def signature(x: Any) -> Any:
    """What planning reads of an array: shape and dtype; inside shard_map also the axes over which it varies."""
    if type(x) in _array_types:
        return x.shape, x.dtype
    if isinstance(x, jax.core.Tracer):
        return x.shape, x.dtype, varying_axes(x)
    if isinstance(x, jax.Array | np.ndarray):
        _array_types.add(type(x))
        return x.shape, x.dtype
    return type(x)  # will be refused, so never cached


def varying_axes(x: object) -> frozenset[str]:
    """Manual mesh axes over which a traced array is known to vary; nonempty only inside a shard_map with check_vma=True."""
    return varies_over(x) if isinstance(x, jax.core.Tracer) else frozenset()
