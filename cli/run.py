"""`attnops run`: compile, run, compare and check a call, write its results, and print what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from ..errors import ConfigError
from ..registry.declaration import Declaration
from .console import errors, fields, text, title
from .enabled import enabled_notes
from .inputs import check_output_path, write_arrays
from .json_output import print_json
from .plan import brief_rows, print_plan, rejected_rows, runs_row
from .ran_call import ran_call, ran_rows
from .run_json import compared_json, ran_json
from .run_step import timed_step, timed_step_rows
from .step import is_paged, print_step, refuse_inputs

__all__ = ["RunOptions", "run"]


class RunOptions(NamedTuple):
    """The options of `attnops run`."""

    declaration: Declaration
    inputs: Path | None
    output: Path | None
    mesh: str | None
    mode: str | None
    seed: int
    check: bool
    repeats: int
    explain: bool
    quiet: bool
    as_json: bool = False
    compares: bool = True


def run(options: RunOptions) -> int:
    """Run the command. Returns the exit status: 1 for a failed check or an output that isn't finite."""
    if options.as_json:
        for name in ("quiet", "explain"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name} has no effect with --json, which prints everything; leave one of them out."
                )
    if options.output is not None:
        check_output_path(options.output)
    declaration = options.declaration
    if is_paged(declaration):
        return _run_step(declaration, options)
    ran = ran_call(
        declaration, options.inputs, options.mesh, options.mode, options.seed, options.repeats,
        checked=options.check, compares=options.compares, quiet=options.quiet,
    )  # fmt: skip
    plan, notes = ran.plan, ran.notes
    if options.output is not None:
        notes = (*notes, *write_arrays(options.output, _results(ran.output)), f"wrote {options.output}")
    if options.as_json:
        told = (*plan.notes, *notes)
        output = ran.output.attention_outputs
        data = ran_json(plan, output, ran.unsound, ran.compiled, ran.seconds[0], ran.repeats, ran.checks, told)
        compared = compared_json(ran.compared, ran.seconds[-1], ran.agreement)
        print_json(data | {"compare": compared, "enabled": declaration.enabled})
    elif not options.quiet:
        if options.explain:
            print_plan(plan, verbose=True)
        else:
            text().print(title(plan.problem.describe()))
        rows = [*([] if options.explain else brief_rows(plan)), *ran_rows(ran)]
        rows += [("note", note) for note in (*(() if options.explain else plan.notes), *notes)]
        text().print(fields(rows))
    return _status(ran.failures)


def _run_step(declaration: Declaration, options: RunOptions) -> int:
    """The same for a step over pages."""
    refuse_inputs(options.inputs)
    if not options.compares:
        raise ConfigError("--no-compare has no effect for a step, which jax.nn can't express; leave it out.")
    timed = timed_step(
        declaration, options.mesh, options.mode, options.seed, options.repeats,
        checked=options.check, quiet=options.quiet,
    )  # fmt: skip
    plan, compiled = timed.ran.plan, timed.ran.compiled
    output = compiled.result.attention_outputs
    notes = (*timed.ran.notes, *enabled_notes(declaration))
    if options.output is not None:
        named = {"output": output, "lse": compiled.result.lse}
        found = {name: np.asarray(x) for name, x in named.items()}
        notes = (*notes, *write_arrays(options.output, found), f"wrote {options.output}")
    if options.as_json:
        told = (*plan.notes, *notes)
        data = ran_json(plan, output, timed.unsound, compiled, timed.seconds, options.repeats, timed.checks, told)
        print_json(data | {"enabled": declaration.enabled})
    elif not options.quiet:
        if options.explain:
            print_step(plan, verbose=True)
        else:
            text().print(title(plan.problem.describe()))
        rows: list[tuple[str, str | Text]] = [] if options.explain else [runs_row(plan), *rejected_rows(plan)]
        rows += timed_step_rows(timed)
        rows += [("note", note) for note in (*(() if options.explain else plan.notes), *notes)]
        text().print(fields(rows))
    return _status(timed.failures)


def _status(failed: list[str]) -> int:
    for line in failed:
        errors().print(f"attnops: {line}", soft_wrap=True)
    return 1 if failed else 0


def _results(output: Any) -> dict[str, np.ndarray]:
    named = {"output": output.attention_outputs, "lse": output.lse, "weights": output.attention_weights}
    return {name: np.asarray(x) for name, x in named.items() if x is not None}
