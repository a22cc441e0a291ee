"""A declared call or step that ran: compiled, compared, checked and timed, for `attnops run` and for a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.text import Text

from ..planning.text import bytes_text, seconds_text
from ..verify.report import AnyPlan
from .check import Comparison
from .compared import Compared
from .progress import ReportProgress, bar
from .run_call import Compiled, time_calls

__all__ = ["Ran", "Runnable", "main_result", "ran_rows", "timed"]


def main_result(output: Any) -> tuple[str, jax.Array]:
    """(name, array) of what was computed: the attention's output, or the positions that an indexer selected."""
    if (positions := getattr(output, "positions", None)) is not None:
        return "positions", positions
    return "output", output.attention_outputs


class Ran(NamedTuple):
    """A call or a step that ran `repeats` times. `seconds` has its median time, and that of the same work by jax.nn if that was
    compiled; compared: None for a step, which jax.nn can't express. unsound: what isn't finite, '' if all is."""

    plan: AnyPlan
    compiled: Compiled
    compared: Compared | None
    seconds: tuple[float, ...]
    repeats: int
    checks: tuple[Comparison, ...]
    unsound: str
    notes: tuple[str, ...]

    @property
    def output(self) -> Any:
        """The operation's own: an AttentionOutput, a StepOutput, or an indexer's."""
        return self.compiled.result

    @property
    def failures(self) -> list[str]:
        """What is wrong with the result, one line each."""
        failed = [f"check failed: {_verdict(c)}" for c in self.checks if not c.passed]
        return failed + ([self.unsound] if self.unsound else [])


class Runnable(ABC):
    """A planned call or step with its arrays on this machine's devices. unchecked: notes on a run without its check."""

    plan: AnyPlan
    arrays: dict[str, Any]
    notes: tuple[str, ...]
    unchecked: tuple[str, ...] = ()

    @abstractmethod
    def compile(self) -> Compiled:
        """Compile it and run it once."""

    def compare(self, output: Any) -> Compared | None:
        """The same work by jax.nn. Default: it can't be expressed."""
        return None

    @abstractmethod
    def check(self, output: Any, progress: ReportProgress) -> Sequence[Comparison]:
        """The output compared with the float64 reference, and with what the arrays' file expects."""


def timed(runnable: Runnable, repeats: int, *, checked: bool, compares: bool = True, quiet: bool = False) -> Ran:
    """Compile, run, time and check it."""
    with bar("compile", quiet=quiet):
        compiled = runnable.compile()
    compared: Compared | None = Compared(None, "", True, "")
    if compares:
        with bar("compile jax.nn", quiet=quiet):
            compared = runnable.compare(compiled.result)
    other = None if compared is None else compared.compiled
    with bar("run", quiet=quiet) as progress:
        seconds = time_calls([compiled, *([] if other is None else [other])], repeats, progress)
    checks: Sequence[Comparison] = ()
    if checked:
        with bar("check against the float64 reference", quiet=quiet) as progress:
            checks = runnable.check(compiled.result, progress)
    unsound = _not_finite(main_result(compiled.result)[1], runnable.arrays)
    notes = (*runnable.notes, *(() if checked else runnable.unchecked))
    return Ran(runnable.plan, compiled, compared, tuple(seconds), repeats, tuple(checks), unsound, notes)


def ran_rows(ran: Ran) -> list[tuple[str, str | Text]]:
    """The rows for the output, times, the comparison and the checks."""
    name, output = main_result(ran.output)
    shape = f"{'x'.join(map(str, output.shape))} {output.dtype.name}, "
    finite = Text("NOT FINITE: " + ran.unsound, style="red") if ran.unsound else Text("every value finite")
    runs = f"median of {ran.repeats} runs" if ran.repeats > 1 else "1 run"
    runs += ", the layer's pages copied" if ran.plan.cache is not None else ""
    took = f"{seconds_text(ran.seconds[0])}, {runs}; compile {ran.compiled.compile_seconds:.2f} s"
    rows: list[tuple[str, str | Text]] = [(name, Text.assemble(shape, finite))]
    rows.append(("time", f"{took}; {_memory_text(ran.compiled)}"))
    if ran.compared is not None:
        rows += _compared_rows(ran, ran.compared)
    return rows + [_check_row(comparison) for comparison in ran.checks]


def _compared_rows(ran: Ran, other: Compared) -> list[tuple[str, str]]:
    if other.compiled is not None:
        ratio = f"{ran.seconds[1] / ran.seconds[0]:.2f} of the time above"
        return [
            ("compare", f"jax.nn.dot_product_attention, {other.mask}; {other.agreement}"),
            ("compare", f"{seconds_text(ran.seconds[1])}, {ratio}; {_memory_text(other.compiled)}"),
        ]
    if not other.expressible:
        return [("compare", f"not expressible in jax.nn.dot_product_attention: {other.reason}")]
    skipped = f"skipped: jax.nn.dot_product_attention, {other.mask}, {other.reason}"
    return [("compare", skipped)] if other.reason else []


def _not_finite(output: jax.Array, arrays: dict[str, Any]) -> str:
    """What is wrong with an output that isn't finite; '' if it is finite."""
    count = int((~np.isfinite(np.asarray(output, np.float32))).sum())
    if not count:
        return ""
    names = [n for n in ("query", "key", "value", "key_scale", "value_scale") if arrays.get(n) is not None]
    not_finite = [n for n in names if not np.isfinite(np.asarray(arrays[n], np.float32)).all()]
    cause = (
        f"; so are values of {', '.join(not_finite)}"
        if not_finite
        else f", though {', '.join(names[:-1])} and {names[-1]} are"
    )
    return f"{count} of {output.size} output values are not finite{cause}"


def _memory_text(compiled: Compiled) -> str:
    """`temporary memory 1.0 MiB per device`."""
    used = "unknown" if compiled.temp_bytes is None else f"{bytes_text(compiled.temp_bytes)} per device"
    return f"temporary memory {used}"


def _verdict(comparison: Comparison) -> str:
    """How much the two differ, and the tolerance."""
    tolerance = "no tolerance" if comparison.tolerance is None else f"tolerance {comparison.tolerance:g}"
    remark = f" ({comparison.remark})" if comparison.remark else ""
    return (
        f"{comparison.what} against {comparison.against}: max error {comparison.max_abs:.2e}, "
        f"{comparison.relative:.2e} of a row's size, {tolerance}{remark}"
    )


def _check_row(comparison: Comparison) -> tuple[str, Text]:
    """The row for a check: whether it passed, and by how much."""
    word, style = ("pass", "bold green") if comparison.passed else ("FAIL", "bold red")
    return "check", Text.assemble((word, style), f"  {_verdict(comparison)}")
