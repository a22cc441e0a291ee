"""A candidate as a declaration, and the metadata for planning it: abstract devices, nothing compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from ..compat import abstract_device
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..sharding import mesh_to_dict
from .candidates import Candidate
from .machine import Machine

__all__ = ["SEARCHED", "declared_as", "metadata_for"]

_OF_TARGET = ("mesh", "platform", "backend")
SEARCHED = ("tune", "error")  # tuning policies under which a plan would search or fail


def metadata_for(
    given: Declaration, machine: Machine, sizes: Mapping[str, int], fields: Mapping[str, Any]
) -> OperationMetadata:
    """The declared metadata on a mesh of the machine's devices. What would fall back to another path is refused, unless
    something else is declared."""
    said = {name: value for name, value in given.metadata.items() if name not in _OF_TARGET}
    if said.get("tuning") in SEARCHED:
        said["tuning"] = "heuristic"
    mesh = _mesh(machine, sizes)
    return OperationMetadata.from_dict({"fallback": "error", **said, **fields} | {"mesh": mesh})


def declared_as(given: Declaration, candidate: Candidate, machine: Machine) -> Declaration:
    """The declaration with the candidate's operation, mesh and strategy. Planned as it stands, it gives the candidate's plan."""
    said = {name: value for name, value in given.metadata.items() if name not in _OF_TARGET}
    metadata = {"fallback": "error", **said, **candidate.fields(), "mesh": mesh_to_dict(_mesh(machine, candidate.mesh))}
    update = {"operation": candidate.operation, "metadata": metadata}
    return given.model_copy(update=update).checked()


def _mesh(machine: Machine, sizes: Mapping[str, int]) -> AbstractMesh:
    platform = "gpu" if machine.platform == "cuda" else machine.platform
    device = abstract_device(machine.kind, machine.cores, platform)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
