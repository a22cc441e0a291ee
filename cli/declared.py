"""What a file declares, for the commands that plan, compile, search or run it: a call, a latent attention, a step over pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ConfigError
from ..operators.latent import Choice, choose_form, form_arguments, form_notes
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.step_operation import StepOperation
from ..planning import Plan
from ..planning.paged.paged_plan import PagedPlan
from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from ..registry.latent_dims import FORMS, Form
from .call_arrays import call_shapes
from .index_inputs import index_input_shapes
from .step import one_layer, refuse_inputs, step_of

if TYPE_CHECKING:  # what compiles, searches and runs is imported by the command that does it
    from ..verify.passes import Planned
    from ..verify.report import AnyPlan
    from ..verify.search import Progress, TuneReport
    from .ran import Runnable

__all__ = ["Declared", "declared"]


class Declared(ABC):
    """A declaration, the file of its arrays if they aren't drawn, and the mode."""

    beyond_jax: ClassVar[str] = ""  # what it is, if jax.nn can't express it

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        self.declaration, self.inputs, self.mode = declaration, inputs, mode

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how its arrays were read."""
        return ()

    @abstractmethod
    def plan(self, metadata: OperationMetadata) -> AnyPlan:
        """Its plan on these devices."""

    @abstractmethod
    def planned(self, metadata: OperationMetadata) -> Planned:
        """Its plan with the programs to compile."""

    @abstractmethod
    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        """The search for its sizes."""

    @abstractmethod
    def runnable(self, mesh: str | None, seed: int) -> Runnable:
        """It with its arrays on this machine's devices. Errors: RefusedError if nothing can run it."""


class _OfOperation(Declared):
    """A call of an operation, whose arrays are shapes for all but a run."""

    def read(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The shapes of its arrays, and notes on them. Default: as declared."""
        refuse_inputs(self.inputs)
        return self.declaration.shapes(), ()

    @cached_property
    def _read(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        return self.read()

    @property
    def notes(self) -> tuple[str, ...]:
        return self._read[1]

    @cached_property
    def kind(self) -> Any:
        """The operation's class."""
        return OperationRegistry.get(self.declaration.operation)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Those of a call, with shapes."""
        return self.declaration.call_arguments(self._read[0], mode=self.mode)

    def plan(self, metadata: OperationMetadata) -> Any:
        return self.kind(metadata).plan(**self.arguments)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        from ..verify.tune import tune_plan

        return tune_plan(self.plan(metadata), how=how, most=max_candidates, progress=progress)


class _Call(_OfOperation):
    def read(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        shapes, _, notes = call_shapes(self.declaration, self.inputs)
        return shapes, notes

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.call import PlannedCall

        return PlannedCall(self.kind(metadata), self.arguments)

    def runnable(self, mesh: str | None, seed: int) -> Runnable:
        from .ran_call import RunnableCall

        return RunnableCall(self.declaration, self.inputs, mesh, self.mode, seed)


class _Indexer(_OfOperation):
    """A call that selects keys and doesn't attend."""

    beyond_jax = "a selection"

    def read(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        return index_input_shapes(self.declaration, self.inputs)

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.index_call import PlannedIndexer

        return PlannedIndexer(self.kind(metadata), self.arguments)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        raise ConfigError(
            f"operation {self.kind.name!r} has no sizes to search: its blocks are chosen by rule, or declared in its config. The "
            "blocks of 'paged_indexer' can be searched."
        )

    def runnable(self, mesh: str | None, seed: int) -> Runnable:
        from .run_indexer import RunnableIndexer

        return RunnableIndexer(self.declaration, self.inputs, mesh, self.mode, seed)


class _Recurrence(_OfOperation):
    """A call that carries a state along its tokens."""

    beyond_jax = "a recurrence"

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.recurrent_call import PlannedRecurrence

        return PlannedRecurrence(self.kind(metadata), self.arguments)

    def runnable(self, mesh: str | None, seed: int) -> Runnable:
        from .run_recurrence import RunnableRecurrence

        return RunnableRecurrence(self.declaration, self.inputs, mesh, self.mode, seed)


class _Form(_Call):
    """The call inside a latent attention, in one form."""

    def __init__(self, declaration: Declaration, form: Form, mode: str | None) -> None:
        super().__init__(declaration, None, mode)
        self.arguments = form_arguments(declaration, form, mode)


class _Latent(Declared):
    """A latent attention, in the form that the devices it is planned for make cheaper. Planned and tuned is the attention inside;
    it is compiled and run with its projections."""

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        super().__init__(declaration, inputs, mode)
        if inputs is not None:
            raise ConfigError(f"--inputs {inputs} beside a latent attention; all its sizes are in the declaration.")
        assert declaration.latent is not None
        self.dims = declaration.latent
        self.forms = {form: _Form(declaration, form, mode) for form in FORMS}

    def _choice(self, metadata: OperationMetadata) -> Choice:
        return choose_form(self.dims, self.forms[self.dims.form or "expanded"].plan(metadata).problem)

    def plan(self, metadata: OperationMetadata) -> Plan:
        choice = self._choice(metadata)
        plan: Plan = self.forms[choice.form].plan(metadata)
        return replace(plan, notes=(*plan.notes, *form_notes(self.dims, choice, plan)))

    def planned(self, metadata: OperationMetadata) -> Planned:
        from ..verify.latent_call import PlannedLatent

        choice = self._choice(metadata)
        inside = self.forms[choice.form]
        return PlannedLatent(inside.kind(metadata), inside.arguments, self.dims, choice)

    def tune(self, metadata: OperationMetadata, how: str | None, max_candidates: int, progress: Progress) -> TuneReport:
        return self.forms[self._choice(metadata).form].tune(metadata, how, max_candidates, progress)

    def runnable(self, mesh: str | None, seed: int) -> Runnable:
        from .run_latent import RunnableLatent

        return RunnableLatent(self.declaration, mesh, self.mode, seed)


class _Step(Declared):
    """It is planned with the whole cache, and compiled and run with one layer, which is all that it uses."""

    beyond_jax = "a step"

    def __init__(self, declaration: Declaration, inputs: Path | None, mode: str | None) -> None:
        super().__init__(declaration, inputs, mode)
        refuse_inputs(inputs)

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

    def runnable(self, mesh: str | None, seed: int) -> Runnable:
        from .run_step import RunnableStep

        return RunnableStep(self.declaration, mesh, self.mode, seed)


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
