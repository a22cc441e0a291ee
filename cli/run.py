"""`attnops run`: compile, run, compare and check a call, write its results, and print what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from ..errors import ConfigError
from ..registry.declaration import Declaration
from .console import errors, fields, seconds_text, text, title
from .enabled import enabled_notes
from .inputs import check_output_path, write_arrays
from .json_output import print_json
from .plan import brief_rows, print_plan, rejected_rows, runs_row
from .progress import bar
from .ran_call import check_row, memory_text, not_finite, output_row, ran_call, ran_rows, verdict
from .run_call import time_calls
from .run_json import compared_json, ran_json
from .run_step import check_step, compile_step
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
    with bar("compile", quiet=options.quiet):
        ran = compile_step(declaration, options.mesh, options.mode, options.seed)
    output, plan = ran.compiled.result.attention_outputs, ran.plan
    with bar("run", quiet=options.quiet) as told:
        (seconds,) = time_calls([ran.compiled], options.repeats, told)
    checks = check_step(ran) if options.check else []
    unsound = not_finite(output, ran.arrays)
    notes = (*ran.notes, *enabled_notes(declaration))
    if options.output is not None:
        named = {"output": output, "lse": ran.compiled.result.lse}
        found = {name: np.asarray(x) for name, x in named.items()}
        notes = (*notes, *write_arrays(options.output, found), f"wrote {options.output}")
    if options.as_json:
        data = ran_json(plan, output, unsound, ran.compiled, seconds, options.repeats, checks, (*plan.notes, *notes))
        print_json(data | {"enabled": declaration.enabled})
    elif not options.quiet:
        if options.explain:
            print_step(plan, verbose=True)
        else:
            text().print(title(plan.problem.describe()))
        rows: list[tuple[str, str | Text]] = [] if options.explain else [runs_row(plan), *rejected_rows(plan)]
        if plan.reads is not None:
            rows.append(("reads", plan.reads.describe()))
        rows += [output_row(output, unsound)]
        runs = f"median of {options.repeats} runs" if options.repeats > 1 else "1 run"
        rows.append(
            (
                "time",
                f"{seconds_text(seconds)}, {runs}, the layer's pages copied; compile {ran.compiled.compile_seconds:.2f} s; "
                f"{memory_text(ran.compiled)}",
            )
        )
        rows += [check_row(comparison) for comparison in checks]
        rows += [("note", note) for note in (*(() if options.explain else plan.notes), *notes)]
        text().print(fields(rows))
    failed = [f"check failed: {verdict(c)}" for c in checks if not c.passed] + ([unsound] if unsound else [])
    return _status(failed)


def _status(failed: list[str]) -> int:
    for line in failed:
        errors().print(f"attnops: {line}", soft_wrap=True)
    return 1 if failed else 0


def _results(output: Any) -> dict[str, np.ndarray]:
    named = {"output": output.attention_outputs, "lse": output.lse, "weights": output.attention_weights}
    return {name: np.asarray(x) for name, x in named.items() if x is not None}
