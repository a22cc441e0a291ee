"""`attnops run`: compile, run, compare, check, write; and what is told about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.text import Text

from ..errors import ConfigError
from ..planning import Plan
from ..planning.text import bytes_text
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from .baseline import NotExpressible, baseline
from .cache import cache_notes
from .call_arrays import call_arrays
from .check import Comparison, check
from .console import errors, fields, text
from .enabled import enabled_notes
from .inputs import check_output_path, write_arrays
from .json_output import print_json
from .materials import canonical
from .plan import brief_rows, print_plan, rejected_rows, runs_row
from .progress import bar
from .run_call import Compiled, compile_call, compile_declared, on_devices, time_calls
from .run_json import compared_json, ran_json
from .run_step import check_step, compile_step
from .step import is_paged, print_step, refuse_inputs
from .target import run_metadata

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


def run(options: RunOptions) -> int:
    """Do it. Returns the exit status: 1 for a failed check or an output that isn't finite."""
    if options.as_json:
        for name in ("quiet", "explain"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name} beside --json, which prints the whole plan and all else; leave one of them out."
                )
    if options.output is not None:
        check_output_path(options.output)
    declaration = options.declaration
    if is_paged(declaration):
        return _run_step(declaration, options)
    kind: Any = OperationRegistry.get(declaration.operation)
    operation = kind(run_metadata(declaration, mesh=options.mesh))
    arrays, expected, notes = call_arrays(declaration.call, options.inputs, options.seed)
    notes = (*notes, *enabled_notes(declaration), *cache_notes(declaration))
    plan = operation.plan(**declaration.call_arguments(arrays, mode=options.mode)).require()
    mesh = operation.metadata.mesh
    placed = on_devices(arrays, plan, mesh if isinstance(mesh, Mesh) else None)
    with bar("compile", quiet=options.quiet):
        compiled = compile_declared(operation, declaration, placed, options.mode)
        other = baseline(plan, placed)
        theirs = None if isinstance(other, NotExpressible) else compile_call(other.function, other.arguments)
    output = compiled.result
    calls = [compiled] if theirs is None else [compiled, theirs]
    with bar("run", quiet=options.quiet) as told:
        seconds = time_calls(calls, options.repeats, told)
    checks: list[Comparison] = []
    if options.check:
        with bar("check against the float64 reference", quiet=options.quiet) as told:
            source = "" if options.inputs is None else options.inputs.name
            checks += check(plan, output, arrays, expected, source, told)
    elif expected is not None:
        notes = (*notes, "expected is in the inputs file; --check compares with it")
    unsound = _not_finite(output.attention_outputs, arrays)
    if options.output is not None:
        notes = (*notes, *write_arrays(options.output, _results(output)), f"wrote {options.output}")
    if options.as_json:
        agreement = "" if theirs is None else _agreement(plan, output, theirs)
        data = ran_json(
            plan,
            output.attention_outputs,
            unsound,
            compiled,
            seconds[0],
            options.repeats,
            checks,
            (*plan.notes, *notes),
        )
        compared = compared_json(other, theirs, None if theirs is None else seconds[1], agreement)
        print_json(data | {"compare": compared, "enabled": declaration.enabled})
    elif not options.quiet:
        if options.explain:
            print_plan(plan, verbose=True)
        else:
            text().print(Text(plan.problem.describe(), style="bold"))
        rows = [] if options.explain else brief_rows(plan)
        rows += [_output_row(output.attention_outputs, unsound)]
        runs = f"median of {options.repeats} runs" if options.repeats > 1 else "1 run"
        cost = f"{_seconds(seconds[0])}, {runs}; compile {compiled.compile_seconds:.2f} s; {_memory(compiled)}"
        rows.append(("time", cost))
        if isinstance(other, NotExpressible):
            rows.append(("compare", f"not expressible in jax.nn.dot_product_attention: {other.reason}"))
        elif theirs is not None:
            rows.append(("compare", f"jax.nn.dot_product_attention, {other.mask}; {_agreement(plan, output, theirs)}"))
            ratio = f"{seconds[1] / seconds[0]:.2f} of the time above"
            rows.append(("compare", f"{_seconds(seconds[1])}, {ratio}; {_memory(theirs)}"))
        rows += [_check_row(comparison) for comparison in checks]
        rows += [("note", note) for note in (*(() if options.explain else plan.notes), *notes)]
        text().print(fields(rows))
    failed = [f"check failed: {_verdict(c)}" for c in checks if not c.passed]
    if unsound:
        failed.append(unsound)
    for line in failed:
        errors().print(f"attnops: {line}", soft_wrap=True)
    return 1 if failed else 0


def _run_step(declaration: Declaration, options: RunOptions) -> int:
    """The same of a step over pages."""
    refuse_inputs(options.inputs)
    with bar("compile", quiet=options.quiet):
        ran = compile_step(declaration, options.mesh, options.mode, options.seed)
    output, plan = ran.compiled.result.attention_outputs, ran.plan
    with bar("run", quiet=options.quiet) as told:
        (seconds,) = time_calls([ran.compiled], options.repeats, told)
    checks = check_step(ran) if options.check else []
    unsound = _not_finite(output, ran.arrays)
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
            text().print(Text(plan.problem.describe(), style="bold"))
        rows: list[tuple[str, str | Text]] = [] if options.explain else [runs_row(plan), *rejected_rows(plan)]
        if plan.reads is not None:
            rows.append(("reads", plan.reads.describe()))
        rows += [_output_row(output, unsound)]
        runs = f"median of {options.repeats} runs" if options.repeats > 1 else "1 run"
        rows.append(
            (
                "time",
                f"{_seconds(seconds)}, {runs}, the layer's pages copied; compile {ran.compiled.compile_seconds:.2f} s; "
                f"{_memory(ran.compiled)}",
            )
        )
        rows += [_check_row(comparison) for comparison in checks]
        rows += [("note", note) for note in (*(() if options.explain else plan.notes), *notes)]
        text().print(fields(rows))
    failed = [f"check failed: {_verdict(c)}" for c in checks if not c.passed] + ([unsound] if unsound else [])
    for line in failed:
        errors().print(f"attnops: {line}", soft_wrap=True)
    return 1 if failed else 0


def _results(output: Any) -> dict[str, np.ndarray]:
    named = {"output": output.attention_outputs, "lse": output.lse, "weights": output.attention_weights}
    return {name: np.asarray(x) for name, x in named.items() if x is not None}


def _not_finite(output: jax.Array, arrays: dict[str, Any]) -> str:
    """What is wrong with an output that isn't finite, '' if it is."""
    count = int((~np.isfinite(np.asarray(output, np.float32))).sum())
    if not count:
        return ""
    names = [n for n in ("query", "key", "value", "key_scale", "value_scale") if n in arrays]
    given = [n for n in names if not np.isfinite(np.asarray(arrays[n], np.float32)).all()]
    cause = (
        f"; so are values of {', '.join(given)}" if given else f", though {', '.join(names[:-1])} and {names[-1]} are"
    )
    return f"{count} of {output.size} output values are not finite{cause}"


def _output_row(output: jax.Array, unsound: str) -> tuple[str, Text]:
    shape = f"{'x'.join(map(str, output.shape))} {output.dtype.name}, "
    finite = Text("NOT FINITE: " + unsound, style="red") if unsound else Text("every value finite")
    return "output", Text.assemble(shape, finite)


def _memory(compiled: Compiled) -> str:
    used = "unknown" if compiled.temp_bytes is None else f"{bytes_text(compiled.temp_bytes)} a device"
    return f"temporary memory {used}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _agreement(plan: Plan, output: Any, theirs: Compiled) -> str:
    """How far the other result is off, without fully masked rows: 0 here, the mean of the values there."""
    problem = plan.problem
    ours = canonical(np.asarray(output.attention_outputs, np.float32), problem.layout)
    other = np.asarray(theirs.result, np.float32)
    live: np.ndarray = np.ones(ours.shape[:-1], bool)
    if problem.mask.may_have_dead_rows(problem.q_len, problem.kv_len):
        live = np.asarray(ours.any(axis=-1))
    ours, other = ours[live], other[live]
    finite = np.isfinite(ours) & np.isfinite(other)
    text = f"differs by at most {float(np.abs(ours[finite] - other[finite]).max(initial=0.0)):.1e}"
    text += "" if live.all() else f", {int((~live).sum())} fully masked rows left out"
    return text if finite.all() else f"{text}, {int((~finite).sum())} values that are not finite left out"


def _verdict(comparison: Comparison) -> str:
    tolerance = "no tolerance" if comparison.tolerance is None else f"tolerance {comparison.tolerance:g}"
    remark = f" ({comparison.remark})" if comparison.remark else ""
    return (
        f"{comparison.what} against {comparison.against}: max error {comparison.max_abs:.2e}, "
        f"{comparison.relative:.2e} of a row's size, {tolerance}{remark}"
    )


def _check_row(comparison: Comparison) -> tuple[str, Text]:
    word, style = ("pass", "bold green") if comparison.passed else ("FAIL", "bold red")
    return "check", Text.assemble((word, style), f"  {_verdict(comparison)}")
