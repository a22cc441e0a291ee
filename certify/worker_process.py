"""The process of `worker`: lines of JSON in, the subject and then cases; a line of JSON out for each."""

from __future__ import annotations

import json
import os
from typing import Any

from ..errors import AttnOpsError, first_line
from .convention import Convention
from .families import case_of, runner_of
from .source import Subject

__all__ = ["main"]


def main() -> None:
    """Answer until standard input ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the target finds nothing to read
    os.dup2(2, 1)  # what the target prints stays out of the answers

    def send(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    name, convention, define = json.loads(requests.readline())
    subject = Subject(name, Convention.model_validate_json(convention), tuple(define))
    run = runner_of(subject)
    try:
        function = run.start()
    except Exception as error:  # the target's
        send({"error": f"{type(error).__name__}: {first_line(error)}"})
        return
    if not callable(function):
        send({"error": f"{type(function).__name__} is no function"})
        return
    send({})
    for line in requests:
        try:
            send(list(run(case_of(subject, json.loads(line)))))
        except AttnOpsError as error:  # of the convention
            send({"error": str(error)})


if __name__ == "__main__":
    main()
