"""The least limit of VMEM that is enough, found by compiling: against a compiler that is known."""

from __future__ import annotations

import pytest

from attnops.verify.advice import min_limit
from attnops.verify.compiled import Failure

MIB = 1 << 20
MOST = int(63.94 * MIB)


class Compiler:
    """Takes programs of a need; with a failure it tells the excess over a limit, or less."""

    def __init__(self, need: float, told: float = 1.0) -> None:
        self.need, self.told = int(need * MIB), told
        self.limits: list[float] = []

    def __call__(self, limit: int) -> int | Failure:
        self.limits.append(limit / MIB)
        return self.need if self.need <= limit else self.failure(limit)

    def failure(self, limit: int) -> Failure:
        return Failure("too much", "vmem", limit + int((self.need - limit) * self.told), limit)


@pytest.mark.parametrize(
    ("need", "told", "least", "tried"),
    [
        (16.14, 1.0, 17, [17]),  # 143 KiB over 16 MiB
        (17.0, 1.0, 17, [17]),
        (18.16, 0.2, 19, [17, 18, 19]),
        (40.5, 0.1, 41, [19, 22, 24, MOST / MIB, 41]),
        (63.9, 1.0, 64, None),
    ],
)
def test_the_least_that_compiles(need: float, told: float, least: int, tried: list[float] | None) -> None:
    compiler = Compiler(need, told)
    found = min_limit(compiler, compiler.failure(16 * MIB), MOST)
    assert found == min(least * MIB, MOST)
    assert compiler.need <= found
    assert tried is None or compiler.limits == tried


def test_more_than_there_is() -> None:
    compiler = Compiler(70)
    assert min_limit(compiler, compiler.failure(16 * MIB), MOST) is None
    assert compiler.limits == [MOST / MIB]
    everything = Compiler(20)
    assert min_limit(everything, everything.failure(16 * MIB), 16 * MIB) is None
    assert everything.limits == []


def test_another_reason() -> None:
    assert min_limit(lambda limit: Failure("no such layout"), Failure("", "vmem", 17 * MIB, 16 * MIB), MOST) is None
