"""DeclaredOperation: what an operation has besides its calls: metadata, identity, and the mesh in force."""

from __future__ import annotations

from jax.sharding import AbstractMesh, get_abstract_mesh

from ..errors import ConfigError
from ..planning import PlannedOperation
from ..registry import OperationMetadata
from ..sharding import current_mesh, devices_platform
from ..sharding.mesh import AnyMesh

__all__ = ["DeclaredOperation"]


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
