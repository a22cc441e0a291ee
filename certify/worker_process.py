"""The process of `worker`: lines of JSON in, the subject and then cases; a line of JSON out for each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import AttnOpsError, first_line
from ..registry import OperationRegistry
from .case import Case
from .convention import Convention
from .recurrence import RecurrenceCase
from .run_case import CaseRunner
from .run_recurrence import RecurrenceRunner
from .source import Subject

__all__ = ["main"]


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the target prints stays out of the answers

    def send(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    name, convention, define = json.loads(sys.stdin.readline())
    subject = Subject(name, Convention.model_validate_json(convention), tuple(define))
    run: Any
    case_of: Callable[..., Any]
    if subject.convention.family == "recurrence":
        run, case_of = RecurrenceRunner(subject, OperationRegistry.get(name)), RecurrenceCase
    else:
        run, case_of = CaseRunner(subject), Case
    try:
        run.start()
    except Exception as error:  # the target's
        send({"error": f"{type(error).__name__}: {first_line(error)}"})
        return
    send({})
    for line in sys.stdin:
        try:
            send(list(run(case_of(**json.loads(line)))))
        except AttnOpsError as error:  # of the convention
            send({"error": str(error)})


if __name__ == "__main__":
    main()
