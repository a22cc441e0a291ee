"""What a file declares, for the commands that plan, compile or search it: a call, a latent attention, or a step over pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..operators import Operation
from ..operators.latent import Choice, choose_form, form_arguments, form_notes
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.step_operation import StepOperation
from ..planning import Plan
from ..planning.paged.paged_plan import PagedPlan
from ..planning.selection.index_plan import IndexPlan
from ..planning.tables.table_plan import TablePlan
from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from ..registry.latent_dims import FORMS, Form
from .call_arrays import call_shapes
from .index_inputs import index_input_shapes
from .step import one_layer, refuse_inputs, step_of

if TYPE_CHECKING:  # what compiles and searches is imported by the command that does it
    from ..verify.passes import Planned
    from ..verify.report import AnyPlan
    from ..verify.search import Progress, TuneReport

__all__ = ["Declared", "declared"]


class Declared(ABC):
    """notes: on how its arrays were read."""

    notes: tuple[str, ...] = ()

    @abstractmethod
    def plan(self, metadata: OperationMetadata) -> AnyPlan:
        """Its plan on these devices."""

    @abstractmethod
    def planned(self, metadata: OperationMetadata) -> Planned:
        """Its plan with the programs to compile."""

    @abstractmethod
    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        """The search for its sizes."""


class _Call(Declared):
    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        shapes = call_shapes(declaration, inputs)
        self._set(declaration, declaration.call_arguments(shapes.arrays, mode=mode))
        self.notes = shapes.notes

    def _set(self, declaration: Declaration, arguments: dict[str, Any]) -> None:
        self.kind: Any = OperationRegistry.get(declaration.operation)
        self.arguments = arguments

    def plan(self, metadata: OperationMetadata) -> Plan:
        operation: Operation = self.kind(metadata)
        return operation.plan(**self.arguments)

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.call import PlannedCall

        return PlannedCall(self.kind(metadata), self.arguments)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        from ..verify.tune import tune_plan

        return tune_plan(self.plan(metadata), how=how, most=max_candidates, progress=progress)


class _Indexer(Declared):
    """A call that selects keys and doesn't attend."""

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        arrays, self.notes = index_input_shapes(declaration, inputs)
        self.kind: Any = OperationRegistry.get(declaration.operation)
        self.arguments = declaration.call_arguments(arrays, mode=mode)

    def plan(self, metadata: OperationMetadata) -> IndexPlan:
        decided: IndexPlan = self.kind(metadata).plan(**self.arguments)
        return decided

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.index_call import PlannedIndexer

        return PlannedIndexer(self.kind(metadata), self.arguments)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        del metadata, how, max_candidates, progress
        raise ConfigError(
            f"operation {self.kind.name!r} has no sizes to search: its blocks are chosen by rule, or declared in its config. The "
            "blocks of 'paged_indexer' can be searched."
        )


class _Recurrence(Declared):
    """A call that carries a state along its tokens."""

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        refuse_inputs(inputs)
        self.kind: Any = OperationRegistry.get(declaration.operation)
        self.arguments = declaration.call_arguments(declaration.shapes(), mode=mode)

    def plan(self, metadata: OperationMetadata) -> TablePlan:
        decided: TablePlan = self.kind(metadata).plan(**self.arguments)
        return decided

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.recurrent_call import PlannedRecurrence

        return PlannedRecurrence(self.kind(metadata), self.arguments)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        from ..verify.tune import tune_plan

        return tune_plan(self.plan(metadata), how=how, most=max_candidates, progress=progress)


class _Form(_Call):
    """The call inside a latent attention, in one form."""

    def __init__(self, declaration: Declaration, form: Form, mode: str | None) -> None:
        self._set(declaration, form_arguments(declaration, form, mode))


class _Latent(Declared):
    """A latent attention, in the form that the devices it is planned for make cheaper. Planned and tuned is the attention inside;
    it is compiled with its projections."""

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        if inputs is not None:
            raise ConfigError(f"--inputs {inputs} beside a latent attention; all its sizes are in the declaration.")
        assert declaration.latent is not None
        self.dims = declaration.latent
        self.forms = {form: _Form(declaration, form, mode) for form in FORMS}

    def _choice(self, metadata: OperationMetadata) -> Choice:
        return choose_form(self.dims, self.forms[self.dims.form or "expanded"].plan(metadata).problem)

    def plan(self, metadata: OperationMetadata) -> Plan:
        choice = self._choice(metadata)
        plan = self.forms[choice.form].plan(metadata)
        return replace(plan, notes=(*plan.notes, *form_notes(self.dims, choice, plan)))

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.latent_call import PlannedLatent

        choice = self._choice(metadata)
        inside = self.forms[choice.form]
        return PlannedLatent(inside.kind(metadata), inside.arguments, self.dims, choice)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        return self.forms[self._choice(metadata).form].tune(metadata, how, max_candidates, progress)


class _Step(Declared):
    """It is planned with the whole cache, and compiled with one layer, which is all that it uses."""

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        refuse_inputs(inputs)
        self.declaration, self.mode = declaration, mode

    def plan(self, metadata: OperationMetadata) -> PagedPlan:
        from ..verify.drawn_step import plan_declared

        return plan_declared(*step_of(self.declaration, metadata, self.mode))

    def _alone(self, metadata: OperationMetadata) -> tuple[StepOperation, DeclaredStep]:
        return step_of(one_layer(self.declaration, metadata)[0], metadata, self.mode)

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.paged_step import PlannedStep

        return PlannedStep(*self._alone(metadata))

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        from ..verify.tune_step import tune_step

        return tune_step(*self._alone(metadata), how=how, most=max_candidates, progress=progress)


def declared(declaration: Declaration, inputs: Path | None, mode: str | None) -> Declared:
    """What the file declares. Errors: ConfigError for --inputs beside a step or a latent attention, whose sizes are declared."""
    if declaration.latent is not None and declaration.family != "attention":
        raise ConfigError(
            f"the file declares a latent attention, but operation {declaration.operation!r} selects keys or has a "
            "state; declare one that attends, or leave latent out."
        )
    if declaration.latent is not None and declaration.in_pages:
        return _Step(declaration.of_form("absorbed"), inputs, mode)
    if declaration.latent is not None:
        return _Latent(declaration, inputs, mode)
    kinds: dict[str, type[Any]] = {"attention": _Call, "selection": _Indexer, "recurrence": _Recurrence}
    kind = _Step if declaration.in_pages else kinds[declaration.family]
    return kind(declaration, inputs, mode)
