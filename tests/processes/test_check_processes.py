"""Processes that disagree are named in every process; real ones on loopback, with gloo."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import jax
import pytest
from process_jobs import Ended, free_port, run_job, told

from attnops import OperationMetadata, ShardingError, check_processes
from attnops.errors import InputTypeError

START = 60.0  # seconds for a busy machine to import and compile


def job(what: str, devices: tuple[int, ...]) -> tuple[list[dict[str, Any]], list[Ended]]:
    """What each process found by name, and how it ended."""
    for last in (False, True):
        address = f"127.0.0.1:{free_port()}"
        arguments = [[address, len(devices), process, what] for process in range(len(devices))]
        ended = run_job("process_agree.py", arguments, devices=devices, bound=START)
        if last or not any("ddress already in use" in one.text for one in ended):
            break
    assert all(one.status is not None for one in ended), told(ended)  # none was still running at the bound
    lines = [[json.loads(line) for line in one.text.splitlines() if line.startswith("{")] for one in ended]
    return [{line["name"]: line for line in one} for one in lines], ended


MOST = "processes 0, 2 have"
DIFFERENCES = {  # processes that are named, and on what
    "mesh": ([1], f"the mesh: process 1 has sp=6,tp=1, {MOST} sp=3,tp=2."),
    "sizes": ([1], f"the mesh: process 1 has sp=4, {MOST} sp=2."),
    "types": ([1], f"the mesh: process 1 has sp=3(explicit),tp=2(explicit), {MOST} sp=3,tp=2."),
    "order": ([1], f"the mesh's devices[0]: process 1 has 4097, {MOST} 0; the mesh's devices[1]: process 1 has 4096,"),
    "platform": ([1], f"the mesh's devices[0]: process 1 has nothing, {MOST} 0;"),
    "declaration": ([1], f"agree['attention']['sequence_parallel']: process 1 has \"ulysses\", {MOST} \"ring\"."),
    "leaf": ([1], f"agree['attention']['operation_configs']['vanilla']['block_q']: process 1 has 256, {MOST} 128."),
    "plan": ([1], "agree['plan']['mask']"),
    "one process lacks it": (
        [1],
        f"agree['step'][0]: process 1 has nothing, {MOST} 1; agree['step'][1]: process 1 has nothing, {MOST} {{}}.",
    ),
    # Of groups as large as each other the lowest is the measure.
    "all differ": ([1, 2], f'process 1 has "{"x" * 199}..., process 2 has "{"x" * 199}..., process 0 has "".'),
    "many": ([0], "agree['4']: process 0 has \"yyy"),
    "version": ([1], f"the version of jax: process 1 has 0.0.1, {MOST} {jax.__version__}."),
}


@pytest.mark.slow
def test_processes_that_disagree() -> None:
    found, ended = job("differ", (2, 2, 2))
    assert [one.status for one in ended] == [0, 0, 0], told(ended)
    for one in found:
        assert one.keys() == DIFFERENCES.keys() | {"nothing", "same"}
        for name, (processes, text) in DIFFERENCES.items():
            line = one[name]
            assert (line["error"], line["processes"]) == ("ProcessError", processes), line
            assert text in line["text"], line
            assert line == found[0][name]
        assert one["nothing"]["error"] == one["same"]["error"] == "NoneType", told(ended)
        assert "step" not in one["declaration"]["text"]
        assert "processes 1-2 have" in one["many"]["text"]
        assert "; and 4 more." in one["many"]["text"]
        assert "agree['5']" not in one["many"]["text"]


@pytest.mark.slow
def test_processes_with_different_numbers_of_devices() -> None:
    found, ended = job("devices", (2, 1, 2))
    assert [one.status for one in ended] == [0, 0, 0], told(ended)
    for one in found:
        assert one["devices"]["processes"] == [1]
        assert f"the number of devices: process 1 has 1, {MOST} 2." in one["devices"]["text"]


@pytest.mark.slow
def test_jax_ends_the_others_when_one_dies() -> None:
    """They wait for it in the check; jax's heartbeats find it, and say its number."""
    _, ended = job("die", (1, 1))
    assert ended[1].status == -signal.SIGKILL
    assert ended[0].status == -signal.SIGABRT, told(ended)
    named = r"The following tasks are unhealthy \(stopped sending heartbeats\):\s+1\b"
    assert re.search(named, ended[0].text), told(ended)
    assert ended[0].seconds - ended[1].seconds < 5 + 15


def test_one_process_has_nobody_to_ask() -> None:
    check_processes()
    check_processes({"sp": 3}, {})
    check_processes(jax.make_mesh((8,), ("sp",)), {"step": 1, "attention": OperationMetadata()})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mesh": "sp=2"}, InputTypeError, r"mesh='sp=2', a str; wanted a mesh, or axis names to sizes"),
        ({"mesh": {"sp": 0}}, ShardingError, "axis 'sp' has size 0"),
        ({"agree": [1]}, InputTypeError, r"agree=\[1\]; wanted names to values"),
        ({"agree": {1: 2}}, InputTypeError, r"agree=\{1: 2\}; wanted names to values"),
        (
            {"agree": {"x": {1, 2}}},
            InputTypeError,
            r"agree\['x'\]=\{1, 2\}: .*not JSON serializable. Wanted a JSON value",
        ),
        ({"agree": {"x": [float("nan")]}}, InputTypeError, r"agree\['x'\]=\[nan\]: as JSON: NaN is not a JSON number"),
        ({"agree": {"x": {1: 2, "1": 3}}}, InputTypeError, r"the key '1' appears twice"),
        ({"agree": {"m": OperationMetadata}}, InputTypeError, r"agree\['m'\]=.*to_dict\(\) missing"),
    ],
)
def test_arguments_without_a_meaning(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_processes(**arguments)


def test_values_without_an_end() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InputTypeError, match=r"agree\['x'\]=\[.*Circular reference"):
        check_processes(agree={"x": value})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputTypeError, match=r"agree\['x'\]="):
        check_processes(agree={"x": deep})
