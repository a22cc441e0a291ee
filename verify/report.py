"""TargetReport: what a compiler says of a call, or of a step over pages, on one target; one PassReport for each of its passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..planning import Plan
from ..planning.paged.paged_plan import PagedPlan
from ..planning.selection.index_plan import IndexPlan
from ..planning.tables.table_plan import TablePlan
from ..planning.traffic import Need
from .collectives import Collective
from .compiled import Failure
from .devices import AnyKernelUse, DeviceLimits
from .outcome import Outcome, outcome_of

__all__ = ["AnyPlan", "KernelCycles", "PassReport", "TargetReport", "refusals"]

AnyPlan = Plan | PagedPlan | IndexPlan | TablePlan
_UNREAD = "this jaxlib can't read programs of this libtpu"


def refusals(plan: AnyPlan) -> tuple[str, ...]:
    """Why a call or a step can't run, or its cache can't be created; empty if it can."""
    if plan.implementation is None:
        return (plan.refusal(),)
    return tuple(map(str, plan.cache.refused)) if plan.cache is not None else ()


class KernelCycles(NamedTuple):
    """All of a kernel in one pass on one device: cycles of the compiler's schedule, without waits for memory, and the seconds
    that they take; or why they can't be read."""

    name: str
    cycles: int | None
    seconds: float | None
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return self._asdict()


@dataclass(frozen=True)
class PassReport:
    """One pass, per device: 'forward' or 'forward and backward' of a call, or 'step'. Bytes and operations are the compiler's
    counts. For GPUs the compiler counts neither: operations are attnops' count, and bytes are those of arguments and outputs,
    each once. For a step attnops counts both: operations of the products over visible keys and values, bytes of the pages that
    the batch has to read and of the step's own keys as written.

    compiled: False where the pass was only lowered, or where compiling was given up; `uncompiled` says why. failure: why it
    didn't compile, or doesn't fit though it compiled. held: what the failed kernel holds in VMEM, as (what, bytes), largest
    first, by attnops' count. kernels, collectives: None where the compiled program's text can't be read. roofline_seconds: the
    longer of arithmetic and HBM traffic at the device's published rates; `bound` names which. intensity: operations per byte.
    needs: the least that has to be sent. differences: where the program sends something else; empty where its text can't be
    read, or where (unknown) what has to be sent can't be worked out. looped: the program has loops, whose bodies the compiler
    counts once: operations are attnops' count, and bytes_moved is 0, unknown. alias_bytes: of donated arguments that outputs
    take; they count once in peak_bytes. cycles: of each kernel by the TPU compiler's schedule, if that was asked for.
    """

    name: str
    compiled: bool
    failure: Failure | None
    advice: str | None = None
    held: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    kernels: tuple[AnyKernelUse, ...] | None = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0
    roofline_seconds: float = 0.0
    bound: str = ""
    intensity: float = 0.0
    collectives: tuple[Collective, ...] | None = ()
    needs: tuple[Need, ...] = ()
    differences: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    looped: bool = False
    uncompiled: str = ""
    cycles: tuple[KernelCycles, ...] = ()

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Why what a compiled pass of several devices sends couldn't be compared with what is needed."""
        if not self.compiled or self.failure is not None:
            return ()
        return (*((_UNREAD,) if self.collectives is None else ()), *self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        sent = self.collectives
        return vars(self) | {
            "failure": None if self.failure is None else self.failure._asdict(),
            "kernels": None if self.kernels is None else [kernel.to_dict() for kernel in self.kernels],
            "collectives": None
            if sent is None
            else [vars(collective) | {"sent_bytes": collective.sent_bytes} for collective in sent],
            "needs": [need._asdict() for need in self.needs],
            "differences": list(self.differences),
            "unknown": list(self.unknown),
            "cycles": [kernel.to_dict() for kernel in self.cycles],
        }


@dataclass(frozen=True)
class TargetReport:
    """A call or a step on one target. `device` is known for TPUs and NVIDIA GPUs, VMEM for TPUs.

    names: of all passes; `passes` has those that are done. lower_only: compiling wasn't asked for.
    """

    target: str
    plan: AnyPlan
    device: DeviceLimits | None
    vmem_default: int
    vmem_most: int
    passes: tuple[PassReport, ...]
    warnings: tuple[str, ...]
    names: tuple[str, ...] = ()
    lower_only: bool = False

    @property
    def outcome(self) -> Outcome:
        """`passed` if an implementation may run it, and every pass was compiled, fits, and is known to send what it has to."""
        return outcome_of(
            failed=bool(refusals(self.plan)) or any(p.failure or p.differences for p in self.passes),
            compiled=len(self.passes) == len(self.names) and all(p.compiled for p in self.passes),
            lower_only=self.lower_only,
            unchecked=self.unchecked,
        )

    @property
    def passed(self) -> bool:
        """Whether everything was checked and is as it should be."""
        return self.outcome is Outcome.PASSED

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(axis.size for axis in self.plan.problem.mesh)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Why what compiled passes send couldn't be compared with what is needed."""
        if self.devices == 1:
            return ()
        return tuple(dict.fromkeys(f"{p.name}: what is sent: {why}" for p in self.passes for why in p.unchecked))

    @property
    def pending(self) -> str:
        """The pass that is next; empty after the last."""
        return next(iter(self.names[len(self.passes) :]), "")

    @property
    def progress(self) -> tuple[int, int, str]:
        """(passes done, of how many, the next one's name)."""
        return len(self.passes), len(self.names), self.pending

    def abandoned(self, why: str) -> TargetReport:
        """The report if compiling the next pass is given up, and with it those after it."""
        first, *rest = (PassReport(name, False, None, uncompiled=why) for name in self.names[len(self.passes) :])
        others = (replace(untried, uncompiled=f"not tried: {first.name} was {why}") for untried in rest)
        return replace(self, passes=(*self.passes, first, *others))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values. A step has one pass, whose values are the report's own."""
        data: dict[str, Any] = {"passes": [report.to_dict() for report in self.passes]}
        if self.plan.cache is not None:
            data = (*self.passes, PassReport("step", False, None))[0].to_dict()
            data["page_bytes"] = data.pop("bytes_moved")
        return data | {
            "target": self.target,
            "passed": self.passed,
            "outcome": str(self.outcome),
            "unchecked": list(self.unchecked),
            "device": None if self.device is None else self.device._asdict(),
            "vmem_default_bytes": self.vmem_default,
            "vmem_most_bytes": self.vmem_most,
            "warnings": list(self.warnings),
            "plan": self.plan.to_dict(),
        }
