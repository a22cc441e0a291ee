"""Mutated declarations, metadata, configs, masks, model configs, calls and command lines: refused in words, or right.

No exception but those of the AttnOpsError family, no unknown key taken, exit codes 0, 1 and 2, nothing over 10 s. A case is
made again by its kind and its number; the number of cases is that of its test.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from fuzz_cases import API_CASES, DECLARATIONS, MODELS, outcome, planned
from fuzz_commands import command_case, run_command

import attnops
from attnops import Declaration, ModelDeclaration
from attnops.errors import shown

# Of 300 cases in the quick suite, and of 10,000 beside them in the whole one.
QUICK = {"declaration": 60, "metadata": 45, "config": 45, "mask": 30, "model": 50, "call": 40}
SLOW, CHUNK = {"declaration": 2000, "metadata": 1500, "config": 1500, "mask": 800, "model": 1600, "call": 1600}, 200
QUICK_COMMANDS, SLOW_COMMANDS = 30, 1000
_TOLD = 5


def _run(kind: str, first: int, count: int) -> None:
    ended: collections.Counter[str] = collections.Counter()
    wrong = []
    for number in range(first, first + count):
        given, work = API_CASES[kind](Random(f"{kind}-{number}"))
        try:
            ended[outcome(work)] += 1
        except Exception as error:
            wrong.append(f"{kind} {number}: {type(error).__name__}: {str(error)[:300]}\n    {shown(given, 600)}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}:", *wrong[:_TOLD]])
    assert ended["accepted"], "nothing gets past the first check"
    assert ended["refused"], "nothing is refused"


def _run_commands(first: int, count: int, folder: Path) -> None:
    wrong, statuses = [], set()
    with contextlib.chdir(folder):
        for number in range(first, first + count):
            arguments, must_fail = command_case(Random(f"command-{number}"), folder)
            try:
                ended = run_command(arguments)
            except Exception as error:
                wrong.append(
                    f"command {number}: {type(error).__name__}: {str(error)[:300]}\n    {shown(arguments, 600)}"
                )
                continue
            statuses.add(ended.status)
            faults = [
                *[f"status {ended.status}"] * (ended.status not in (0, 1, 2)),
                *["a traceback"] * ("Traceback" in ended.err),
                *["no word"] * (ended.status != 0 and not ended.err.startswith(("attnops: ", "\nattnops: "))),
                *["not refused"] * (must_fail and ended.status == 0),
                *[f"a message of {len(ended.err)} characters"] * (len(ended.err) > 6000),
            ]
            wrong += [
                f"command {number}: {fault}\n    {shown(arguments, 600)}\n    {ended.err[:300]}" for fault in faults
            ]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}:", *wrong[:_TOLD]])
    assert {0, 2} <= statuses


@pytest.mark.parametrize("kind", API_CASES)
def test_api(kind: str) -> None:
    _run(kind, 0, QUICK[kind])


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    _run_commands(0, QUICK_COMMANDS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [(k, QUICK[k] + i) for k, n in SLOW.items() for i in range(0, n, CHUNK)])
def test_api_whole(kind: str, first: int) -> None:
    _run(kind, first, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK_COMMANDS, QUICK_COMMANDS + SLOW_COMMANDS, 100))
def test_commands_whole(first: int, tmp_path: Path) -> None:
    _run_commands(first, 100, tmp_path)


def test_there_are_as_many_as_promised() -> None:
    assert sum(QUICK.values()) + QUICK_COMMANDS == 300
    assert sum(SLOW.values()) + SLOW_COMMANDS == 10_000
    assert set(QUICK) == set(SLOW) == set(API_CASES)


@pytest.mark.parametrize("number", range(len(DECLARATIONS)))
def test_what_is_mutated_is_sound(number: int) -> None:
    assert planned(Declaration.from_dict(DECLARATIONS[number])).explain()


def test_the_models_that_are_mutated_are_sound() -> None:
    for model in MODELS:
        lengths = {} if "image_size" in model else {"q_len": 256}
        assert ModelDeclaration.from_config(model, **lengths).distinct


def _raises(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_what_counts_as_a_fault() -> None:
    """The fuzzer sees what it is there to see."""
    assert outcome(_raises(attnops.ConfigError("no"))) == "refused"
    for error in (
        ValueError("no"),
        TypeError("no"),
        RecursionError(),
        attnops.ConfigError(""),
        attnops.errors.MaskError("x" * 10**5),
    ):
        with pytest.raises((type(error), AssertionError)):
            outcome(_raises(error))
