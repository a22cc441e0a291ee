"""Run the lines of a case in this process, and judge what they give."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import first_line
from .case import Case
from .judge import Judgement, judged
from .source import Lines, Subject, lines_of

__all__ = ["CaseRunner"]

_CLEARED_EVERY = 100  # cases: jax keeps every compiled program


class CaseRunner:
    """Runs cases of one subject. `given`: what stands in for `f`, where the function is at hand and needn't be imported."""

    def __init__(self, subject: Subject, given: Any = None) -> None:
        self.subject = subject
        self.given = given
        self.count = 0

    def __call__(self, case: Case) -> Judgement:
        """An exception of the target is a refusal; NaN that jax found at its request is not."""
        self.count += 1
        if self.count % _CLEARED_EVERY == 0 and self.subject.convention.framework == "jax":
            import jax

            jax.clear_caches()
        lines, space = lines_of(case, self.subject), dict[str, Any]()
        if self.given is not None:
            space["f"] = self.given
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _execute(lines, space)
            except FloatingPointError as error:
                return Judgement("wrong", f"NaN under debug_nans: {first_line(error)}", -1.0)
            except Exception as error:  # the target's, of whatever class
                return Judgement("refused", f"{type(error).__name__}: {first_line(error)}")
            finally:
                _reset(case)
        return judged(case, self.subject.convention, space)


def _execute(lines: Lines, space: dict[str, Any]) -> None:
    text = "\n".join((*lines.imports, *lines.options, *lines.inputs, *lines.call))
    exec(compile(text, "<case>", "exec"), space)


def _reset(case: Case) -> None:
    option = {"x64": "jax_enable_x64", "debug_nans": "jax_debug_nans"}.get(case.levels["transform"])
    if option is not None:
        import jax

        jax.config.update(option, False)
