"""The `attnops` command. Exit status: 0 success, 1 refused or a check failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import AttnOpsError, RefusedError, RefusedShardingError
from .absent_devices import leave_absent_devices_alone
from .advise_command import advise
from .certify_command import certify
from .commands import Refused, app
from .short_warnings import short_warnings

__all__ = ["app", "main"]

# From 0.22 on typer contains click; earlier versions depend on it. Either way this is its ClickException.
_UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

# Options that had other names.
_FORMER = dict.fromkeys(
    ("--platform", "--topology"), "Use --target, which names platforms, devices and topologies alike."
)


app.command()(advise)
app.command()(certify)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. Errors that attnops raises become one message on stderr."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    leave_absent_devices_alone()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # don't fail on a name that the terminal can't encode
            stream.reconfigure(errors="backslashreplace")
    with short_warnings():
        try:
            status = app(args=argv or ["--help"], prog_name="attnops", standalone_mode=False) or 0
            sys.stdout.flush()
            # typer returns 130 for an interrupt and prints nothing; older versions raise Abort.
            return status if status != 130 else _fail("interrupted.", 130)
        except (Refused, RefusedError, RefusedShardingError) as error:
            return _fail(str(error), 1)
        except AttnOpsError as error:
            return _fail(str(error), 2)
        except _UsageProblem as error:
            former = _FORMER.get(getattr(error, "option_name", ""), "")
            return _fail(f"{error.format_message()} {former or 'Try `attnops --help`.'}", 2)
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


if __name__ == "__main__":
    sys.exit(main())
