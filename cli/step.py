"""`attnops plan` for an operation over pages: print the plans of the step and its cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.text import Text

from ..errors import ConfigError
from ..operators.declared_config import declared_config
from ..operators.paged import PagedOperation
from ..operators.paged.declared_step import DeclaredStep, declared_step
from ..planning.cache.cache_plan import CachePlan
from ..planning.notes import is_info
from ..planning.paged.paged_plan import PagedPlan, step_rows, token_rows
from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from .cache import plan_cache, print_cache
from .console import fields, table, text, title
from .enabled import enabled_json
from .json_output import print_json
from .plan import rejected_rows, runs_row

__all__ = ["is_paged", "plan_step", "print_step", "refuse_inputs", "show_step", "step_of"]


def is_paged(declaration: Declaration) -> bool:
    """Whether the operation runs steps over pages. Errors: ConfigError if the file declares the other kind of call."""
    operation: Any = OperationRegistry.get(declaration.operation)
    paged = issubclass(operation, PagedOperation)
    if paged and declaration.is_set("call"):
        raise ConfigError(
            f"operation {declaration.operation!r} runs steps over pages; declare `step` instead of `call`."
        )
    if not paged and declaration.step is not None:
        raise ConfigError(
            f"the file declares a step, but operation {declaration.operation!r} runs calls; use 'paged', or declare `call`."
        )
    return paged


def step_of(
    declaration: Declaration, metadata: OperationMetadata, mode: str | None
) -> tuple[PagedOperation, DeclaredStep]:
    """(the operation, the arguments of its step)."""
    operation: Any = OperationRegistry.create(declaration.operation, metadata)
    cache = plan_cache(declaration, metadata)
    if cache is None:
        raise ConfigError(
            f"operation {declaration.operation!r} attends to a cache's pages; declare `cache` in the file."
        )
    config: Any = declared_config(type(operation), metadata)[0]
    return operation, declared_step(declaration, cache.require(), config.update, mode)


def plan_step(
    declaration: Declaration, metadata: OperationMetadata, mode: str | None, inputs: Path | None = None
) -> PagedPlan:
    """The plan of the declared step, including what it reads."""
    refuse_inputs(inputs)
    operation, step = step_of(declaration, metadata, mode)
    tokens, options = (step.query, step.key, step.value), step.options | {"softmax_aux": step.sinks}
    return operation.plan(*tokens, cache=step.cache, layer=step.layer, batch=step.batch, **options)


def refuse_inputs(inputs: Path | None) -> None:
    """Refuse --inputs: a step's sizes are all in its declaration."""
    if inputs is not None:
        raise ConfigError(f"--inputs {inputs}: a step over pages reads no file; its sizes are in the declaration.")


def show_step(
    plan: PagedPlan, cache: CachePlan | None, notes: tuple[str, ...], platform_source: str | None, as_json: bool,
    *, verbose: bool = False,
) -> None:  # fmt: skip
    """Print the plans of the step and of the whole cache, as text or JSON. Errors: RefusedError, after printing, if nothing can
    run the step."""
    whole = plan.cache if cache is None or not cache.parts else cache
    if as_json:
        print_json(enabled_json(plan.to_dict() | {"cache": whole.to_dict()}, notes))
    else:
        print_step(plan, notes, platform_source, whole, verbose=verbose)
    plan.require()


def print_step(
    plan: PagedPlan,
    notes: tuple[str, ...] = (),
    platform_source: str | None = None,
    cache: CachePlan | None = None,
    *,
    verbose: bool = False,
) -> None:
    """Print one screen, or with `verbose` the whole decision, and then the cache's plan: that of the layer's group unless another
    is given."""
    console = text()
    console.print(title(plan.problem.describe()))
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *rejected_rows(plan)]
    for name, line in step_rows(plan, verbose=verbose):
        source = name == "platform" and platform_source is not None
        rows.append((name, f"{plan.problem.platform}, from {platform_source}" if source else line))
    told = [note for note in (*plan.notes, *notes) if verbose or not is_info(note)]
    console.print(fields([*rows, *[("note", note) for note in told]]), "", sep="\n")
    # On one device specs split nothing, so the table is left out.
    whole = verbose or math.prod(axis.size for axis in plan.problem.mesh) > 1
    if whole:
        tensors = table("tensor", "fitted", "shape", "per device", "bytes")
        for row in token_rows(plan):
            tensors.add_row(*row)
        console.print(tensors, "", sep="\n")
    print_cache(plan.cache if cache is None else cache, arrays=whole)
    if not verbose:
        asides = sum(is_info(note) for note in (*plan.notes, *notes))
        hidden = ["defaults of the config", *([] if whole else ["arrays"]), *([f"{asides} notes"] if asides else [])]
        console.print("", fields([("more", f"--verbose adds {', '.join(hidden)}")]), sep="\n")
