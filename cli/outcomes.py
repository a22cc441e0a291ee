"""The word for the outcome of a target: `passes` only if everything was checked."""

from __future__ import annotations

from ..verify.outcome import Outcome

__all__ = ["STYLES", "WORDS"]

WORDS = {
    Outcome.PASSED: "passes",
    Outcome.COMPILED: "compiles",
    Outcome.LOWERED: "lowers",
    Outcome.NOT_COMPILED: "NOT COMPILED",
    Outcome.FAILED: "FAILS",
}
STYLES = {
    Outcome.PASSED: "bold green",
    Outcome.COMPILED: "bold yellow",
    Outcome.LOWERED: "bold yellow",
    Outcome.NOT_COMPILED: "bold red",
    Outcome.FAILED: "bold red",
}
