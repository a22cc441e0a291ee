"""Run the lines of a case in this process, and judge what they give."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import ConfigError, RefusedError, first_line
from .case import Case
from .judge import Judgement, judged
from .source import Lines, Subject, lines_of

__all__ = ["CaseRunner", "message_of", "raised_in"]

_FILE = "<case>"
_LONGEST = 300  # letters of a message
_CLEARED_EVERY = 100  # cases: jax keeps every compiled program


class CaseRunner:
    """Runs cases of one subject. `given`: what stands in for `f`, where the function is at hand and needn't be imported."""

    def __init__(self, subject: Subject, given: Any = None) -> None:
        self.subject = subject
        self.given = given
        self.count = 0
        self.imported: dict[str, Any] = {}

    def __call__(self, case: Case) -> Judgement:
        """An exception of the target is a refusal; NaN that jax found at its request is not."""
        self.count += 1
        if self.count % _CLEARED_EVERY == 0 and self.subject.convention.framework == "jax":
            import jax

            jax.clear_caches()
        lines = lines_of(case, self.subject)
        program, space = self._compiled(lines), self._imported(lines)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(program, space)
            except FloatingPointError as error:
                return Judgement("wrong", f"NaN under debug_nans: {first_line(error)}", -1.0)
            except Exception as error:  # the target's, of whatever class
                if isinstance(error, NameError) and raised_in(error, _FILE):
                    raise self._unwritten(str(error)) from None
                return Judgement("refused", message_of(error))
            finally:
                _reset(case)
        return judged(case, self.subject.convention, space)

    def start(self) -> Any:
        """Import the target, and return it. Errors: those of the import."""
        return self._imported(lines_of(Case(), self.subject))["f"]

    def _compiled(self, lines: Lines) -> Any:
        text = "\n".join((*lines.options, *lines.prepare, *lines.inputs, *lines.call))
        try:
            return compile(text, _FILE, "exec")
        except SyntaxError as error:
            raise self._unwritten(f"{error.msg} in {(error.text or '').strip()}") from None

    def _imported(self, lines: Lines) -> dict[str, Any]:
        """What a case starts with; imported once."""
        if not self.imported:
            exec("\n".join(lines.imports), self.imported)
            if self.given is not None:
                self.imported["f"] = self.given
        return dict(self.imported)

    def _unwritten(self, why: str) -> ConfigError:
        return ConfigError(
            f"convention {self.subject.convention.name}: {why}; wanted a call with q, k, v, mask, bias, q_segments, kv_segments, "
            "kv_lengths, sinks, slopes, and what the convention imports."
        )


def message_of(error: BaseException) -> str:
    """An exception in one line. attnops' own refusals begin with the whole call; their reasons follow."""
    reasons = str(error).strip().splitlines()[1:] if isinstance(error, RefusedError) else []
    text = " ".join(line.strip() for line in reasons) or first_line(error)
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else f'{text[: _LONGEST - 3]}...'}"


def raised_in(error: BaseException, file: str) -> bool:
    """Whether a line of the case, compiled as this file, raised an error, and not the target."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == file


def _reset(case: Case) -> None:
    option = {"x64": "jax_enable_x64", "debug_nans": "jax_debug_nans"}.get(case.levels["transform"])
    if option is not None:
        import jax

        jax.config.update(option, False)
