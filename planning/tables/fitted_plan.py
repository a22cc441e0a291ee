"""FittedPlan: the plan of a call whose placement is its arrays and results, each with a spec fitted to the mesh."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from ...errors import RefusedShardingError
from ...sharding import FittedSpec
from ..decision import WHY, Decision, Screen
from ..notes import is_info
from ..problem import Problem
from ..text import bytes_text, spec_text

__all__ = ["FittedPlan", "refuse_unfit"]

P = TypeVar("P", bound=Problem)
L = TypeVar("L")


@dataclass(frozen=True, eq=False, repr=False)
class FittedPlan(Decision[P, L]):
    """A plan that is told by a few lines and a table of tensors."""

    @abstractmethod
    def rows(self, verbose: bool = False) -> list[tuple[str, str]]:
        """The labelled lines after what runs: those of one screen, or all of them."""

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

    def spec_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of the call, before the call starts."""
        return self.specs[name]

    @property
    def on_one_device(self) -> bool:
        """Whether specs split nothing, so that a plan's screen leaves them out."""
        return math.prod(axis.size for axis in self.problem.mesh) == 1

    def config_rows(self, verbose: bool = False) -> list[tuple[str, str]]:
        """The fields of the config in one row, without defaults unless all are wanted; none if nothing runs."""
        lines = [] if self.method is None else [x for x in self.config_lines() if verbose or x.origin != "default"]
        return [("config", ", ".join(lines))] if lines else []

    def tensor_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Rows (tensor, spec, shape, per-device shape, per-device bytes)."""

        def shape(sizes: tuple[int, ...]) -> str:
            return "x".join(map(str, sizes))

        return [
            (x.tensor, spec_text(x.spec), shape(x.shape), shape(x.local_shape), bytes_text(x.local_bytes))
            for x in self.tensors
        ]

    def screen(self, more: str, notes: tuple[str, ...] = (), verbose: bool = False) -> Screen:
        """See Decision."""
        every_note = (*self.notes, *notes)
        shown = [note for note in every_note if verbose or not is_info(note)]
        rows = [*self.rejected_rows, *self.rows(verbose), *(("note", str(note)) for note in shown)]
        whole = verbose or not self.on_one_device
        tensors = (("tensor", "fitted", "shape", "per device", "bytes"), *self.tensor_rows()) if whole else ()
        if verbose:
            return Screen(rows, tensors)
        asides = len(every_note) - len(shown)
        hidden = ["defaults of the config", *([] if whole else ["arrays"]), *([f"{asides} notes"] if asides else [])]
        return Screen(rows, tensors, (("more", f"{more} adds {', '.join(hidden)}"),))

    def page_rows(self) -> list[tuple[str, str]]:
        """One screen of it as labelled lines, after what runs, for a page."""
        tensors = [
            ("tensor", f"{name}: {spec}, {shape} -> {local}, {size}")
            for name, spec, shape, local, size in self.tensor_rows()
        ]
        return [*self.rejected_rows, *self.rows(), *(("note", note) for note in self.notes), *tensors]

    def explain(self, verbose: bool = False) -> str:
        """The decision as text: what runs and why, and what needs your attention. With `verbose`, all of it."""
        lines = [self.problem.describe(), f"runs      {self.implementation or 'nothing'} ({WHY[self.kind]})"]
        lines += [f"{label:<9} {line}" for label, line in self.rows(verbose)]
        for rejected in self.rejected:
            lines.append(f"not       {rejected.implementation}:")
            lines.extend(f"            {reason}" for reason in rejected.reasons)
        whole = verbose or not self.on_one_device
        if whole:
            lines.append("tensors   spec, shape -> per device, bytes per device")
            for name, spec, shape, local, size in self.tensor_rows():
                lines.append(f"  {name:<15} {spec}  {shape} -> {local}  {size}")
        lines += [f"note      {x}" for x in self.notes if verbose or not is_info(x)]
        if self.cache is not None:
            lines += ["", self.cache.explain(arrays=whole)]
        if not verbose:
            lines.append(f"more      verbose=True adds defaults of the config{'' if whole else ', arrays'}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        tensors = {
            x.tensor: {
                "spec": spec_text(x.spec),
                "shape": list(x.shape),
                "device_shape": list(x.local_shape),
                "device_bytes": x.local_bytes,
                "dropped": [asdict(drop) for drop in x.dropped],
            }
            for x in self.tensors
        }
        return self.decision_dict() | self.facts() | {"tensors": tensors}


def refuse_unfit(problem: Problem, tensors: Iterable[FittedSpec], idle: Sequence[str]) -> None:
    """Errors: ShardingError for what `strict` refuses: axes that don't fit, and those, `idle`, that only repeat work."""
    unfit = [f"{x.tensor}: {drop.axis!r}: {drop.reason}" for x in tensors for drop in x.dropped if not drop.harmless]
    if idle:
        unfit.append(f"all devices along {', '.join(idle)} do the same work")
    if unfit:
        raise RefusedShardingError(f"strict: {problem.describe()}: " + "; ".join(unfit) + ".")
