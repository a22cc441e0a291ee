"""A process that disagrees, never comes or dies is named in every other one, in bounded time.

Real processes on loopback, with gloo. Beside what attnops raises this holds what jax does by itself, as the manual has it.
"""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
from process_jobs import Ended, free_port, run_job, told

START = 60.0  # seconds for a busy machine to import and compile


def job(what: str, *, who: int, count: int = 2, bound: float = START) -> tuple[list[dict[str, Any]], list[Ended]]:
    """What each process found by name, and how it ended."""
    for last in (False, True):
        port = free_port()
        addresses = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
        arguments = [[*addresses, count, process, what, who] for process in range(count)]
        ended = run_job("process_failing.py", arguments, devices=2, bound=bound)
        if last or not any("ddress already in use" in one.text for one in ended):
            break
    assert all(one.status is not None for one in ended), told(ended)  # none was still running at the bound
    lines = [[json.loads(line) for line in one.text.splitlines() if line.startswith("{")] for one in ended]
    return [{line["name"]: line for line in one} for one in lines], ended


def says(line: dict[str, Any], processes: list[int], bound: float, *texts: str) -> None:
    assert line["error"] == "ProcessError", line
    assert line["processes"] == processes, line
    assert line["seconds"] < bound, line
    for text in texts:
        assert text in line["text"], line


def test_processes_that_disagree() -> None:
    found, ended = job("disagree", who=1)
    assert [one.status for one in ended] == [0, 0], told(ended)
    for one in found:
        says(one["mesh"], [1], 10, "the mesh: process 1 has sp=4,tp=1, process 0 has sp=2,tp=2.")
        says(one["order"], [1], 10, "the mesh at sp=0, tp=0: process 1 has device 2049, process 0 has device 0;")
        says(
            one["agree"],
            [1],
            10,
            "agree['attention']['sequence_parallel']: process 1 has \"ulysses\", process 0 has \"ring\".",
        )
        assert one["before"]["error"] == one["same"]["error"] == "NoneType", told(ended)
    says(found[0]["late"], [1], 8, "process 1 of 2 did not come within the 1.")


def test_a_process_that_is_never_started() -> None:
    """jax.distributed.initialize itself ends the others without a name; a check that stands before it has one."""
    found, ended = job("never_started", who=1)
    assert [one.status for one in ended] == [0, 0], told(ended)
    says(found[0]["before"], [1], 10, "process 1 of 2 did not come within the 3.")


def test_a_process_that_dies_before_the_check() -> None:
    found, ended = job("dead_before_check", who=1)
    says(found[0]["check"], [1], 8, "process 1 of 2 did not come within the 2.")
    assert ended[1].status == -signal.SIGKILL
    # jax's own goodbye doesn't wait for ever for the dead: shutdown_timeout_seconds is 5.
    assert ended[0].status == -signal.SIGABRT, told(ended)
    assert ended[0].seconds - ended[1].seconds < 2 + 5 + 15


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_that_dies_in_a_step(count: int) -> None:
    who = count - 1
    found, ended = job("compute", who=who, count=count)
    assert ended[who].status == -signal.SIGKILL
    for process in range(who):
        lost = f"process {who} of {count} was lost"
        says(found[process]["compute"], [who], START, lost, f"connection to process {who} ended")
        assert f"\n{lost}" in ended[process].text  # logged, when it happened
        assert ended[process].seconds - ended[who].seconds < 5 + 5 + 15, told(ended)


@pytest.mark.slow
def test_process_0_dies_in_a_step() -> None:
    """jax's service dies with it, and jax ends the others at once: maybe before they can raise."""
    found, ended = job("compute", who=0, count=3)
    assert ended[0].status == -signal.SIGKILL
    for process in (1, 2):
        if "compute" in found[process]:
            says(found[process]["compute"], [0], START, "process 0 of 3 was lost")
        named = "process 0 of 3 was lost", "Either the leader task was preempted/died"
        assert any(text in ended[process].text for text in named), told(ended)
        assert ended[process].seconds - ended[0].seconds < 15, told(ended)


@pytest.mark.slow
def test_a_process_that_does_not_come_to_a_step() -> None:
    found, ended = job("stuck", who=1, count=3)
    for process in (0, 2):
        says(found[process]["compute"], [1], START, "process 1 stayed behind: process", "process 1 has come to wait 2")
    assert ended[1].status is not None


@pytest.mark.slow
def test_without_a_check_jax_ends_the_others_and_names_the_dead() -> None:
    found, ended = job("dead_before_devices", who=1)
    assert found[0].keys() == {"before"}
    assert ended[0].status == -signal.SIGABRT, told(ended)
    assert re.search(r"The following tasks are unhealthy \(stopped sending heartbeats\):\s+1\b", ended[0].text), told(
        ended
    )
    assert ended[0].seconds - ended[1].seconds < 10 + 20
