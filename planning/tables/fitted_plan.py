"""FittedPlan: the plan of a call whose placement is its arrays and results, each with a spec fitted to the mesh."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from ...sharding import FittedSpec
from ..decision import WHY, Decision
from ..notes import is_info
from ..problem import Problem
from ..text import bytes_text, spec_text

__all__ = ["FittedPlan"]

P = TypeVar("P", bound=Problem)
L = TypeVar("L")


@dataclass(frozen=True, eq=False, repr=False)
class FittedPlan(Decision[P, L]):
    """A plan that is told by a few lines and a table of tensors."""

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """The labelled lines after what runs."""

    def facts(self) -> dict[str, Any]:
        """What `to_dict` has besides the decision and the tensors. Default: nothing."""
        return {}

    @property
    def tensors(self) -> tuple[FittedSpec, ...]:
        """The call's arrays and its results."""
        placement: Any = self.placement
        tensors: tuple[FittedSpec, ...] = placement.tensors
        return tensors

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """The spec of each array and result, by name."""
        return MappingProxyType({fitted.tensor: fitted.spec for fitted in self.tensors})

    def config_rows(self) -> list[tuple[str, str]]:
        """The fields of the config that are more than defaults, in one row; none if nothing runs."""
        lines = [] if self.method is None else [line for line in self.config_lines() if line.origin != "default"]
        return [("config", ", ".join(lines))] if lines else []

    def explain(self, verbose: bool = False) -> str:
        """The decision as text: what runs and why, and what needs your attention."""
        problem = self.problem
        lines = [problem.describe(), f"runs      {self.implementation or 'nothing'} ({WHY[self.kind]})"]
        lines += [f"{label:<9} {line}" for label, line in self.rows()]
        for rejected in self.rejected:
            lines.append(f"not       {rejected.implementation}:")
            lines.extend(f"            {reason}" for reason in rejected.reasons)
        if verbose or math.prod(axis.size for axis in problem.mesh) > 1:
            lines.append("tensors   spec, shape -> per device, bytes per device")
            width = max(len(x.tensor) for x in self.tensors)
            for x in self.tensors:
                shapes = "x".join(map(str, x.shape)), "x".join(map(str, x.local_shape))
                size = bytes_text(x.local_bytes)
                lines.append(f"  {x.tensor:<{width}} {spec_text(x.spec)}  {shapes[0]} -> {shapes[1]}  {size}")
        if verbose:
            lines += [f"config    {line}" for line in self.config_lines()]
        return "\n".join([*lines, *(f"note      {x}" for x in self.notes if verbose or not is_info(x))])

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        tensors = {
            x.tensor: {
                "spec": spec_text(x.spec),
                "shape": list(x.shape),
                "local_shape": list(x.local_shape),
                "local_bytes": x.local_bytes,
            }
            for x in self.tensors
        }
        return self.decision_dict() | self.facts() | {"tensors": tensors}
