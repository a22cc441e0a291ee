"""Run a case of a recurrent operation in this process, and judge it against the float64 reference of its call."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ..errors import first_line
from ..verify.closeness import row_error
from .judge import TOLERANCES, Judgement
from .recurrence import RecurrenceCase, RecurrenceFamily
from .recurrence_source import recurrence_lines
from .source import Subject

__all__ = ["RecurrenceRunner"]


class RecurrenceRunner:
    """Runs cases of one recurrent operation, whose class is `operation`."""

    def __init__(self, subject: Subject, operation: Any) -> None:
        self.subject, self.operation = subject, operation
        self.family = RecurrenceFamily(subject, operation)

    def start(self) -> None:
        """Nothing has to be imported."""

    def __call__(self, case: RecurrenceCase) -> Judgement:
        """An exception of the operation is a refusal."""
        import jax

        lines, space = recurrence_lines(case, self.subject, self.operation), dict[str, Any]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(
                    "\n".join((lines.imports[0], *lines.options, *lines.imports[1:], *lines.inputs, *lines.call)), space
                )
            except FloatingPointError as error:
                return Judgement("wrong", f"NaN under debug_nans: {first_line(error)}", -1.0)
            except Exception as error:  # the operation's, of whatever class
                return Judgement("refused", f"{type(error).__name__}: {first_line(error)}")
            finally:
                jax.config.update("jax_enable_x64", False)
                jax.config.update("jax_debug_nans", False)
            exec("\n".join(lines.expected[:-1]), space)
        return self._judged(case, space)

    def _judged(self, case: RecurrenceCase, space: dict[str, Any]) -> Judgement:
        names = ["outputs", "state", *(f"gradient of {name}" for name in space.get("smooth", ()))]
        forward, backward = TOLERANCES[case.level("dtype")]
        found = []
        for n, (name, got, want) in enumerate(zip(names, space["got"], space["want"], strict=True)):
            if got.shape != want.shape:
                return Judgement("wrong", f"{name} has shape {got.shape}; expected {want.shape}", -1.0)
            if not np.isfinite(got).all():
                return Judgement("wrong", f"{name} has NaN or infinity", -1.0)
            if n < 2:  # a row is as large as its largest number, and no smaller than is usual
                rows = np.abs(want).max(axis=-1, keepdims=True, initial=0.0)
                sizes, tolerance = np.maximum(rows, np.sqrt((want**2).mean())), forward
            else:  # the terms of a derivative in a direction may cancel
                of = name.removeprefix("gradient of ")
                terms = np.sqrt(((space["slopes"][of] * space["u"][of]) ** 2).sum())
                sizes, tolerance = np.maximum(np.abs(want), terms), backward
            error = row_error(got, want, sizes, case.level("dtype"))
            if error > tolerance:
                return Judgement(
                    "wrong", f"{name} is wrong by {error:.2g} of its size; rounding explains {tolerance:.2g}", error
                )
            found.append(Judgement("right", name, error))
        return max(found, key=lambda one: one.error)
