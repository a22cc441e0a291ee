"""A declared call that ran: compiled, compared, checked and timed, for `attnops run` and for a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.text import Text

from ..operators import AttentionOutput
from ..planning import Plan
from ..planning.text import bytes_text
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from .cache import cache_notes
from .call_arrays import call_arrays
from .check import Comparison, check
from .compared import Compared, compare
from .console import seconds_text
from .enabled import enabled_notes
from .materials import canonical
from .progress import bar
from .run_call import Compiled, compile_declared, on_devices, time_calls
from .target import run_metadata

__all__ = ["Ran", "check_row", "memory_text", "not_finite", "output_row", "ran_call", "ran_rows", "verdict"]


class Ran(NamedTuple):
    """A call that ran `repeats` times. `seconds` has its median time, and that of the same work by jax.nn if that was
    compiled."""

    plan: Plan
    output: AttentionOutput
    compiled: Compiled
    compared: Compared
    seconds: tuple[float, ...]
    repeats: int
    checks: tuple[Comparison, ...]
    unsound: str
    notes: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """What is wrong with the result, one line each."""
        failed = [f"check failed: {verdict(c)}" for c in self.checks if not c.passed]
        return failed + ([self.unsound] if self.unsound else [])

    @property
    def agreement(self) -> str:
        """How much the two results differ."""
        theirs = self.compared.compiled
        return "" if theirs is None else agreement(self.plan, self.output, theirs)


def ran_call(
    declaration: Declaration,
    inputs: Path | None,
    mesh: str | None,
    mode: str | None,
    seed: int,
    repeats: int,
    *,
    checked: bool,
    compares: bool = True,
    quiet: bool = False,
) -> Ran:
    """Compile, run, time and check the call. Errors: those of planning, and RefusedError if nothing can run it."""
    kind: Any = OperationRegistry.get(declaration.operation)
    operation = kind(run_metadata(declaration, mesh=mesh))
    arrays, expected, notes = call_arrays(declaration, inputs, seed)
    notes = (*notes, *enabled_notes(declaration), *cache_notes(declaration))
    plan = operation.plan(**declaration.call_arguments(arrays, mode=mode)).require()
    devices = operation.metadata.mesh
    placed = on_devices(arrays, plan, devices if isinstance(devices, Mesh) else None)
    with bar("compile", quiet=quiet):
        compiled = compile_declared(operation, declaration, placed, mode)
    output = compiled.result
    if compares:
        with bar("compile jax.nn", quiet=quiet):
            compared = compare(plan, placed)
    else:
        compared = Compared(None, "", True, "")
    with bar("run", quiet=quiet) as told:
        seconds = time_calls([compiled, *([compared.compiled] if compared.compiled else [])], repeats, told)
    checks: list[Comparison] = []
    if checked:
        with bar("check against the float64 reference", quiet=quiet) as told:
            checks += check(plan, output, arrays, expected, "" if inputs is None else inputs.name, told)
    elif expected is not None:
        notes = (*notes, "expected is in the inputs file; --check compares with it")
    unsound = not_finite(output.attention_outputs, arrays)
    return Ran(plan, output, compiled, compared, tuple(seconds), repeats, tuple(checks), unsound, notes)


def ran_rows(ran: Ran) -> list[tuple[str, str | Text]]:
    """The rows for the output, times, the comparison and the checks."""
    rows: list[tuple[str, str | Text]] = [output_row(ran.output.attention_outputs, ran.unsound)]
    runs = f"median of {ran.repeats} runs" if ran.repeats > 1 else "1 run"
    cost = f"{seconds_text(ran.seconds[0])}, {runs}; compile {ran.compiled.compile_seconds:.2f} s; {memory_text(ran.compiled)}"
    rows.append(("time", cost))
    other = ran.compared
    if other.compiled is not None:
        rows.append(("compare", f"jax.nn.dot_product_attention, {other.mask}; {ran.agreement}"))
        ratio = f"{ran.seconds[1] / ran.seconds[0]:.2f} of the time above"
        rows.append(("compare", f"{seconds_text(ran.seconds[1])}, {ratio}; {memory_text(other.compiled)}"))
    elif not other.expressible:
        rows.append(("compare", f"not expressible in jax.nn.dot_product_attention: {other.reason}"))
    elif other.reason:
        rows.append(("compare", f"skipped: jax.nn.dot_product_attention, {other.mask}, {other.reason}"))
    return rows + [check_row(comparison) for comparison in ran.checks]


def not_finite(output: jax.Array, arrays: dict[str, Any]) -> str:
    """What is wrong with an output that isn't finite; '' if it is finite."""
    count = int((~np.isfinite(np.asarray(output, np.float32))).sum())
    if not count:
        return ""
    names = [n for n in ("query", "key", "value", "key_scale", "value_scale") if n in arrays]
    given = [n for n in names if not np.isfinite(np.asarray(arrays[n], np.float32)).all()]
    cause = (
        f"; so are values of {', '.join(given)}" if given else f", though {', '.join(names[:-1])} and {names[-1]} are"
    )
    return f"{count} of {output.size} output values are not finite{cause}"


def output_row(output: jax.Array, unsound: str) -> tuple[str, Text]:
    """The output's shape and dtype, and whether it is finite."""
    shape = f"{'x'.join(map(str, output.shape))} {output.dtype.name}, "
    finite = Text("NOT FINITE: " + unsound, style="red") if unsound else Text("every value finite")
    return "output", Text.assemble(shape, finite)


def memory_text(compiled: Compiled) -> str:
    """`temporary memory 1.0 MiB per device`."""
    used = "unknown" if compiled.temp_bytes is None else f"{bytes_text(compiled.temp_bytes)} per device"
    return f"temporary memory {used}"


def agreement(plan: Plan, output: Any, theirs: Compiled) -> str:
    """How much the other result differs. Fully masked rows are left out: they are 0 here, and the mean of the values there."""
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


def verdict(comparison: Comparison) -> str:
    """How much the two differ, and the tolerance."""
    tolerance = "no tolerance" if comparison.tolerance is None else f"tolerance {comparison.tolerance:g}"
    remark = f" ({comparison.remark})" if comparison.remark else ""
    return (
        f"{comparison.what} against {comparison.against}: max error {comparison.max_abs:.2e}, "
        f"{comparison.relative:.2e} of a row's size, {tolerance}{remark}"
    )


def check_row(comparison: Comparison) -> tuple[str, Text]:
    """The row for a check: whether it passed, and by how much."""
    word, style = ("pass", "bold green") if comparison.passed else ("FAIL", "bold red")
    return "check", Text.assemble((word, style), f"  {verdict(comparison)}")
