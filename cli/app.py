"""The `attnops` command. Exit status: 0 success, 1 refused or a check failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import AttnOpsError, FallbackWarning, MaskWarning, RefusedError, ShardingWarning, UnfitError
from .absent_devices import leave_absent_devices_alone
from .advise_command import advise
from .commands import Refused, app

__all__ = ["app", "main"]

# From 0.22 on typer contains click; earlier versions depend on it. Either way this is its ClickException.
_UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


app.command()(advise)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. Errors that attnops raises become one message on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    leave_absent_devices_alone()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # don't fail on a name that the terminal can't encode
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=FallbackWarning)
        for category in (MaskWarning, ShardingWarning):  # plans and runs print what they say
            warnings.filterwarnings("ignore", category=category)
        warnings.showwarning = _short_warning(warnings.showwarning)
        try:
            status = app(args=given or ["--help"], prog_name="attnops", standalone_mode=False) or 0
            sys.stdout.flush()
            # typer returns 130 for an interrupt and prints nothing; older versions raise Abort.
            return status if status != 130 else _fail("interrupted.", 130)
        except (Refused, RefusedError, UnfitError) as error:
            return _fail(str(error), 1)
        except AttnOpsError as error:
            return _fail(str(error), 2)
        except _UsageProblem as error:
            return _fail(f"{error.format_message()} Try `attnops --help`.", 2)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted.", 130)
        except MemoryError as error:
            return _fail(f"not enough memory: {error}; make the call smaller.", 2)
        except BrokenPipeError:  # the reader has closed the pipe, as in `attnops schema | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _fail(message: str, status: int) -> int:
    print(f"attnops: {message}", file=sys.stderr)
    return status


def _short_warning(otherwise: Any) -> Any:
    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, FallbackWarning):
            print(f"attnops: warning: {str(message).splitlines()[0]}", file=sys.stderr)
        else:
            otherwise(message, category, filename, lineno, file, line)

    return show


if __name__ == "__main__":
    sys.exit(main())
