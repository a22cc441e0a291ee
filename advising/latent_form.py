"""A latent attention in a search: its form is chosen on the target, and the attention inside is what is planned and estimated."""

from __future__ import annotations

from typing import Any

from ..operators import Operation
from ..operators.latent import LatentPlan, choose_form, form_arguments, projection_needs
from ..planning import Plan
from ..planning.traffic import Need
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from ..verify.call import PlannedCall
from ..verify.latent_call import PlannedLatent
from .declared import metadata_for
from .machine import Machine

__all__ = ["call_arguments_of", "latent_note", "needs_around", "planned_of", "with_form"]


def with_form(declaration: Declaration, machine: Machine) -> Declaration:
    """The declaration with its latent attention's form; itself without one. Planned on one device: no mesh changes the choice."""
    latent = declaration.latent
    if latent is None or latent.form is not None:
        return declaration
    kind: Any = OperationRegistry.get(declaration.operation)
    metadata = metadata_for(declaration.of_form("expanded"), machine, {"fsdp": 1}, {})
    form = choose_form(latent, kind(metadata).plan(**form_arguments(declaration, "expanded")).problem).form
    return declaration.model_copy(update={"latent": latent.model_copy(update={"form": form})}).checked()


def call_arguments_of(declaration: Declaration) -> dict[str, Any]:
    """The arguments of the call, or of that inside a latent attention with a form."""
    if declaration.latent is not None:
        assert declaration.latent.form is not None
        return form_arguments(declaration, declaration.latent.form)
    return declaration.call_arguments(declaration.shapes())


def planned_of(declaration: Declaration, operation: Operation) -> PlannedCall:
    """What is compiled: the call, or the latent attention with its projections."""
    planned = PlannedCall(operation, call_arguments_of(declaration))
    if declaration.latent is None:
        return planned
    choice = choose_form(declaration.latent, planned.call.problem)
    return PlannedLatent(operation, planned.arguments, declaration.latent, choice)


def needs_around(declaration: Declaration, plan: Plan) -> tuple[Need, ...]:
    """What the projections of a latent attention send in its backward pass; nothing for a call. plan: of the attention inside."""
    if declaration.latent is None:
        return ()
    return projection_needs(LatentPlan(declaration.latent, choose_form(declaration.latent, plan.problem), plan))


def latent_note(declaration: Declaration) -> tuple[str, ...]:
    """What an estimate of latent attention leaves out."""
    if declaration.latent is None:
        return ()
    return ("times are of the attention inside; of its projections only what their gradients send is estimated",)
