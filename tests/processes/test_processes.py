"""Training and decoding on a mesh over several processes give what the float64 reference gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import process_compute
import process_layer
import pytest
from process_jobs import free_port, run_job, told

from attnops.verify.closeness import row_error, row_sizes

TOLERANCE = 1e-5  # of a row's size; float32
STEP_TOLERANCE = 2e-4  # ... of the change of a weight, a hundredth of the weight
OFTEN = ("zigzag_of_two", "ulysses")


def _run(
    folder: Path, count: int, devices: int, kind: str, cases: tuple[str, ...], **how: bool
) -> list[dict[str, np.ndarray]]:
    for last in (False, True):
        address = f"127.0.0.1:{free_port()}"
        results = [folder / f"{process}.npz" for process in range(count)]
        arguments = [[address, count, process, results[process], kind, *cases] for process in range(count)]
        job = run_job("process_compute.py", arguments, devices=[devices] * count, bound=150 * count, **how)
        if last or not any("ddress already in use" in one.text for one in job):
            break
    assert [one.status for one in job] == [0] * count, told(job)
    loaded = []
    for result in results:
        with np.load(result) as file:
            loaded.append(dict(file))
    return loaded


def _agree(got: np.ndarray, want: np.ndarray, what: str, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape, what
    # What a row is made of isn't known here: one that is small among its like may be a difference of theirs.
    typical = np.sqrt(np.mean(np.square(want)))
    error = row_error(got, want, np.maximum(row_sizes(np.atleast_1d(want)), typical))
    assert error <= tolerance, f"{what}: error {error:.1e} of a row's size"


def _check(found: list[dict[str, np.ndarray]], cases: tuple[str, ...]) -> None:
    trained, decoded, before = process_layer.trained(), process_layer.decoded(), process_layer.draw().weights
    want: dict[str, Any] = {}
    for case in cases:
        want |= {f"{case}.{name}": value for name, value in trained.items()}
        if case in process_compute.DECODED:
            want[f"{case}.decoded"] = decoded
    for process, values in enumerate(found):
        assert values.keys() == want.keys()
        for name, value in want.items():
            what, weight = f"process {process}, {name}", name.partition(".")[2]
            _agree(values[name], value, what)
            if weight in before:
                _agree(values[name] - before[weight], value - before[weight], f"step of {what}", STEP_TOLERANCE)


def test_two_processes_train_and_decode(tmp_path: Path) -> None:
    _check(_run(tmp_path, 2, 4, "auto", OFTEN), OFTEN)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices", "kind"), [(2, 4, "explicit"), (4, 2, "auto")])
def test_other_jobs_train_and_decode(tmp_path: Path, count: int, devices: int, kind: str) -> None:
    every = tuple(process_compute.CASES)
    _check(_run(tmp_path, count, devices, kind, every, optimised=True), every)
