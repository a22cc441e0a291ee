"""Run the lines of a case in this process, and judge what they give."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .case import Case
from .judge import Judgement, judged
from .lines_runner import LinesRunner
from .source import Lines, Subject, lines_of

__all__ = ["CaseRunner"]


class CaseRunner(LinesRunner):
    """Runs cases of attention."""

    def __init__(self, subject: Subject, given: Any = None) -> None:
        super().__init__(subject, given)
        self.imported: dict[str, Any] = {}

    def __call__(self, case: Case) -> Judgement:
        """The judgement of a case."""
        lines = lines_of(case, self.subject)
        space = self._imported(lines)
        raised = self.ran((*lines.options, *lines.prepare, *lines.inputs, *lines.call), space)
        return judged(case, self.subject.convention, space) if raised is None else raised

    def start(self) -> Any:
        """Import the target, and return it. Errors: those of the import."""
        return self._imported(lines_of(Case(), self.subject))["f"]

    def _imported(self, lines: Lines) -> dict[str, Any]:
        """What a case starts with; imported once."""
        if not self.imported:
            exec("\n".join(lines.imports), self.imported)
            if self.given is not None:
                self.imported["f"] = self.given
        return dict(self.imported)

    def unwritten(self, why: str) -> ConfigError:
        return ConfigError(
            f"convention {self.subject.convention.name}: {why}; wanted a call with q, k, v, mask, bias, q_segments, kv_segments, "
            "kv_lengths, sinks, slopes, and what the convention imports."
        )
