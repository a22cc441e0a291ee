"""Certificate: what a function gets right, feature by feature, with the smallest case of each thing that it gets wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["VERDICTS", "Certificate", "FeatureVerdict", "WrongCase"]

VERDICTS = ("right", "wrong", "refused", "not expressible", "not tried")


@dataclass(frozen=True)
class WrongCase:
    """A shrunk case: the features that it needs, what is wrong, and a script that shows it."""

    features: tuple[str, ...]
    what: str
    script: str


@dataclass(frozen=True)
class FeatureVerdict:
    """One row. right, wrong, refused: numbers of cases with the feature. why: a refusal's message, or why it can't be expressed.

    wrong_cases: places in the certificate's list.
    """

    feature: str
    title: str
    verdict: str
    why: str = ""
    right: int = 0
    wrong: int = 0
    refused: int = 0
    wrong_cases: tuple[int, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """What `attnops certify` found out. versions: of the packages involved. quick: each feature once. met: cases in which
    features meet. family: of the convention.
    """

    target: str
    convention: str
    about: str
    seed: int
    cases: int
    versions: dict[str, str]
    features: tuple[FeatureVerdict, ...]
    wrong_cases: tuple[WrongCase, ...]
    refusals: tuple[tuple[str, str], ...]  # (features that are refused together, the message)
    quick: bool = False
    met: int = 0
    family: str = "attention"

    def count(self, verdict: str) -> int:
        """How many features have a verdict."""
        return sum(one.verdict == verdict for one in self.features)

    @property
    def wrong(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.wrong_cases)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Certificate:
        """The inverse of to_dict."""
        features = tuple(FeatureVerdict(**one | {"wrong_cases": tuple(one["wrong_cases"])}) for one in data["features"])
        wrong = tuple(WrongCase(tuple(one["features"]), one["what"], one["script"]) for one in data["wrong_cases"])
        refusals = tuple((one[0], one[1]) for one in data["refusals"])
        return cls(**data | {"features": features, "wrong_cases": wrong, "refusals": refusals})
