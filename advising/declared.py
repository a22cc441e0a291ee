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
    declaration: Declaration, machine: Machine, sizes: Mapping[str, int], fields: Mapping[str, Any]
) -> OperationMetadata:
    """The declared metadata on a mesh of the machine's devices. What would fall back to another path is refused, unless
    something else is declared."""
    declared = {name: value for name, value in declaration.metadata.items() if name not in _OF_TARGET}
    if declared.get("tuning") in SEARCHED:
        declared["tuning"] = "heuristic"
    mesh = _mesh(machine, sizes)
    return OperationMetadata.from_dict({"fallback": "error", **declared, **fields} | {"mesh": mesh})


def declared_as(declaration: Declaration, candidate: Candidate, machine: Machine) -> Declaration:
    """The declaration with the candidate's operation, mesh and strategy. Planned as it stands, it gives the candidate's plan."""
    declared = {name: value for name, value in declaration.metadata.items() if name not in _OF_TARGET}
    metadata = {
        "fallback": "error",
        **declared,
        **candidate.fields(),
        "mesh": mesh_to_dict(_mesh(machine, candidate.mesh)),
    }
    update = {"operation": candidate.operation, "metadata": metadata}
    return declaration.model_copy(update=update).checked()


def _mesh(machine: Machine, sizes: Mapping[str, int]) -> AbstractMesh:
    platform = "gpu" if machine.platform == "cuda" else machine.platform
    device = abstract_device(machine.kind, machine.cores, platform)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
