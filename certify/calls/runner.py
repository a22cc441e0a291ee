"""CallRunner: run a case of a kind in this process, and judge it against its float64 reference."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...verify.closeness import row_error
from ..judge import DENORMAL, TOLERANCES, USUAL_LOGIT, Judgement
from ..lines_runner import LinesRunner
from ..source import Subject
from .case import CallCase
from .kind import Kind
from .lines import lines_of

__all__ = ["CallRunner"]

_LEAST = 0.1  # of the loss: no derivative counts as smaller


class CallRunner(LinesRunner):
    """Runs cases of a kind of call."""

    def __init__(self, subject: Subject, kind: Kind, given: Any = None) -> None:
        super().__init__(subject, given)
        self.kind = kind

    def start(self) -> Any:
        """Import the target, and return it. Errors: those of the import."""
        space: dict[str, Any] = {}
        lines = ("import jax, jax.numpy as jnp, numpy as np", *self.subject.convention.imports, *self.subject.define)
        exec("\n".join(lines), space)
        return space["f"]

    def __call__(self, case: CallCase) -> Judgement:
        """The judgement of a case."""
        lines, space = lines_of(self.kind.parts(case, self.subject), case, self.subject), dict[str, Any]()
        exec("\n".join(lines.imports), space)
        if self.given is not None:
            space["f"] = self.given
        raised = self.ran((*lines.options, *lines.inputs, *lines.call), space)
        if raised is not None:
            return raised
        shapes = [x.shape for x in space["got"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec("\n".join(lines.expected), space)
            except (ValueError, IndexError):  # of what was given, whose shape isn't the one that is expected
                return Judgement("wrong", f"results have shapes {', '.join(map(str, shapes))}", -1.0)
        return self._judged(case, lines.names, space)

    def unwritten(self, why: str) -> ConfigError:
        convention = self.subject.convention
        return ConfigError(
            f"convention {convention.name}: {why}; docs/certify.md lists what a call of family {convention.family} may name."
        )

    def _judged(self, case: CallCase, names: tuple[str, ...], space: dict[str, Any]) -> Judgement:
        grown = max(1.0, self.kind.largest_logit(case.levels) / USUAL_LOGIT)
        forward, backward = (tolerance * grown for tolerance in TOLERANCES[case.level("dtype")])
        found = []
        # Where a gradient is 0, as of the logit of a row's only key, rounding is in terms of what the loss is a sum of.
        terms = [np.where(np.isfinite(y), y * z, 0) for y, z in zip(space["want"], space.get("d", ()), strict=False)]
        least = _LEAST * np.sqrt(sum((y**2).sum() for y in terms))
        for n, (name, got, want) in enumerate(zip(names, space["got"], space["want"], strict=True)):
            if got.shape != want.shape:
                return Judgement("wrong", f"{name} has shape {got.shape}; expected {want.shape}", -1.0)
            same = ~np.isfinite(want) & np.where(
                np.isnan(want), np.isnan(got), got == want
            )  # an lse of no key, an unused slot
            got, want = (np.where(same, 0, x) for x in (got, want))
            if not np.isfinite(got).all():
                return Judgement("wrong", f"{name} {self.kind.infinite}", -1.0)
            tolerance = forward
            if name.startswith("gradient of "):  # the terms of a derivative in a direction may cancel
                of, tolerance = name.removeprefix("gradient of "), backward
                sizes = np.maximum(np.abs(want), np.sqrt(((space["slopes"][of] * space["u"][of]) ** 2).sum()))
                sizes = np.maximum(sizes, least)
            elif "sizes" in space:
                sizes = np.asarray(space["sizes"][n])
            else:  # a row is as large as its largest number, and no smaller than is usual
                rows = np.abs(want).max(axis=-1, keepdims=True, initial=0.0)
                sizes = np.maximum(rows, np.sqrt((want**2).mean()))
            if case.level("values") == "denormal":
                sizes = np.maximum(sizes, DENORMAL)
            error = row_error(got, want, sizes, case.level("dtype"))
            if error > tolerance:
                return Judgement(
                    "wrong", f"{name} is wrong by {error:.2g} of its size; rounding explains {tolerance:.2g}", error
                )
            found.append(Judgement("right", name, error))
        return max(found, key=lambda one: one.error)
