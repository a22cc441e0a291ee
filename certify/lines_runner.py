"""LinesRunner: run the lines of a case in this process; what the target raises is judged."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError, RefusedError, first_line
from .judge import Judgement
from .source import Subject

__all__ = ["LinesRunner"]

_FILE = "<case>"
_LONGEST = 300  # letters of a message
_CLEARED_EVERY = 100  # cases: jax keeps every compiled program
_OPTIONS = ("jax_enable_x64", "jax_debug_nans")  # that lines may set


class LinesRunner(ABC):
    """Runs cases of one subject. `given`: what stands in for `f`, where the function is at hand and needn't be imported."""

    def __init__(self, subject: Subject, given: Any = None) -> None:
        self.subject, self.given = subject, given
        self.count = 0

    @abstractmethod
    def unwritten(self, why: str) -> ConfigError:
        """The error of a convention whose lines can't be run."""

    def ran(self, lines: Iterable[str], space: dict[str, Any]) -> Judgement | None:
        """Run lines; None if nothing was raised. An exception of the target is a refusal; NaN that jax found at its request is
        not. Errors: ConfigError for what isn't the target's."""
        self.count += 1
        jax: Any = sys.modules.get("jax")
        if self.count % _CLEARED_EVERY == 0 and jax is not None:
            jax.clear_caches()
        try:
            program = compile("\n".join(lines), _FILE, "exec")
        except SyntaxError as error:
            raise self.unwritten(f"{error.msg} in {(error.text or '').strip()}") from None
        before = {} if jax is None else {option: getattr(jax.config, option) for option in _OPTIONS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(program, space)
            except FloatingPointError as error:
                return Judgement("wrong", f"NaN under debug_nans: {first_line(error)}", -1.0)
            except Exception as error:  # the target's, of whatever class
                if isinstance(error, NameError) and _raised_here(error):
                    raise self.unwritten(str(error)) from None
                return Judgement("refused", _message_of(error))
            finally:
                for option in _OPTIONS if (jax := sys.modules.get("jax")) is not None else ():
                    jax.config.update(option, before.get(option, False))
        return None


def _message_of(error: BaseException) -> str:
    """An exception in one line. attnops' own refusals begin with the whole call; their reasons follow."""
    reasons = str(error).strip().splitlines()[1:] if isinstance(error, RefusedError) else []
    text = " ".join(line.strip() for line in reasons) or first_line(error)
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else f'{text[: _LONGEST - 3]}...'}"


def _raised_here(error: BaseException) -> bool:
    """Whether a line of the case raised an error, and not the target."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == _FILE
