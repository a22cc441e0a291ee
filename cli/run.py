"""`attnops run`: compile, run, compare and check a call or a step, write its results, and print what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from ..registry.declaration import Declaration
from .console import errors, fields, text, title
from .declared import declared
from .file_notes import file_notes
from .inputs import check_output_path, write_arrays
from .json_output import print_json
from .plan import brief_rows, print_plan
from .ran import Ran, ran_rows, timed
from .run_json import ran_json

__all__ = ["RunOptions", "ran_declared", "run"]


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
    explain: bool = False
    quiet: bool = False
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
    ran = ran_declared(options)
    plan, notes = ran.plan, ran.notes
    if options.output is not None:
        notes = (*notes, *write_arrays(options.output, _results(ran.output)), f"wrote {options.output}")
    if options.as_json:
        print_json(ran_json(ran, (*plan.notes, *notes)) | {"enabled": declaration.enabled})
    elif not options.quiet:
        if options.explain:
            print_plan(plan, verbose=True)
        else:
            text().print(title(plan.problem.describe()))
        rows = [*([] if options.explain else brief_rows(plan)), *ran_rows(ran)]
        rows += [("note", note) for note in (*(() if options.explain else plan.notes), *notes)]
        text().print(fields(rows))
    for line in ran.failures:
        errors().print(f"attnops: {line}", soft_wrap=True)
    return 1 if ran.failures else 0


def ran_declared(options: RunOptions) -> Ran:
    """Compile, run, time and check what the file declares. Errors: those of planning, and RefusedError if nothing can run it."""
    what = declared(options.declaration, options.inputs, options.mode)
    if what.beyond_jax and not options.compares:
        raise ConfigError(
            f"--no-compare has no effect for {what.beyond_jax}, which jax.nn can't express; leave it out."
        )
    runnable = what.runnable(options.mesh, options.seed)
    runnable.notes += file_notes(options.declaration)
    return timed(runnable, options.repeats, checked=options.check, compares=options.compares, quiet=options.quiet)


def _results(output: Any) -> dict[str, np.ndarray]:
    names = {"attention_outputs": "output", "attention_weights": "weights"}
    every = (*names, "lse", "positions", "counts", "state")
    named = {names.get(field, field): getattr(output, field, None) for field in every}
    return {name: np.asarray(x) for name, x in named.items() if hasattr(x, "shape")}
