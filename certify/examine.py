"""certify: run the cases of a subject and find out what it gets right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from .case import Case
from .cases import alone, inexpressible, paired
from .certificate import Certificate, FeatureVerdict, WrongCase
from .features import DEAD, FEATURES, Feature, implied
from .judge import Judgement
from .shrink import shrunk
from .source import Subject, script

__all__ = ["PLAIN", "Examination", "certify"]

PLAIN = Feature("plain", "yes", "softmax(q k / sqrt(dim)) v")
_SHRUNK = 12  # wrong cases that are made small; others have the features of one of these
_TRIES = {"no answer": 3, "the process ended": 8}  # each costs a new process


@dataclass
class Examination:
    """The cases that ran and what came of them. run: judges one case. keep: factors that every case of the subject needs."""

    subject: Subject
    run: Callable[[Case], Judgement]
    keep: frozenset[str] = frozenset()
    results: list[tuple[Case, Judgement]] = field(default_factory=list)
    wrong_cases: list[WrongCase] = field(default_factory=list)
    causes: list[tuple[frozenset[Feature], ...]] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    def judge(self, case: Case) -> Judgement:
        """Run one case. If it is wrong for a reason not known yet, find the smallest that is."""
        result = self.run(case)
        self.record(case, result)
        return result

    def record(self, case: Case, result: Judgement) -> None:
        """Take in what came of a case."""
        self.results.append((case, result))
        if result.verdict == "wrong" and self.cause(case) is None and len(self.causes) < _SHRUNK:
            self._shrink(case, result)

    def cause(self, case: Case) -> int | None:
        """The place of the shrunk case whose features this case has too."""
        features = frozenset(case.features)
        return next((n for n, causes in enumerate(self.causes) if any(cause <= features for cause in causes)), None)

    def essential(self, case: Case) -> frozenset[Feature]:
        """The features that a case is about."""
        beside = self.keep | implied(case.levels)
        return frozenset(one for one in case.features if one.factor not in beside)

    def _shrink(self, case: Case, result: Judgement) -> None:
        slow = result.what.startswith(tuple(_TRIES))
        last = {case: result}

        def fails(smaller: Case) -> bool:
            judgement = self.run(smaller)
            last[smaller] = judgement
            return judgement.verdict == "wrong" and judgement.what.startswith(tuple(_TRIES)) == slow

        most = _TRIES.get(next((words for words in _TRIES if result.what.startswith(words)), ""), 60)
        small = shrunk(case, fails, self.keep, most)
        what = last[small].what
        essential = self.essential(small)
        names = tuple(one.name for one in FEATURES if one in essential) or (PLAIN.name,)
        self.wrong_cases.append(WrongCase(names, what, script(small, self.subject, f"{self.subject.name}: {what}")))
        # Another level of the same factor may have taken the place of the one that was tried.
        factors = {one.factor for one in essential}
        self.causes.append((frozenset(one for one in self.essential(case) if one.factor in factors), essential))


def certify(
    subject: Subject,
    run: Callable[[Case], Judgement],
    *,
    features: Collection[Feature] = FEATURES,
    seed: int = 0,
    pairs: int = 0,
    quick: bool = False,
    versions: dict[str, str] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> Certificate:
    """Each feature alone, then at most `pairs` cases in which those that are right meet."""
    convention = subject.convention
    unsaid = {one: why for one in FEATURES if (why := inexpressible(one, convention)) is not None}
    wanted = [one for one in features if one not in unsaid]
    keep = {"transform"} if convention.framework == "torch" else set()
    keep |= {"layout"} if "bthd" not in convention.layouts else set()
    examination = Examination(subject, run, frozenset(keep))
    first = list(alone(convention, wanted, seed, quick=quick))
    refused: dict[Feature, str] = {}
    bad: set[Feature] = set()
    plain = Judgement("right")
    for n, (one, case) in enumerate(first):
        progress(n, len(first) + pairs, "plain attention" if one is None else one.title)
        result = examination.judge(case)
        if one is None:
            plain = result
        elif result.verdict == "refused":
            refused.setdefault(one, result.what)
        elif result.verdict == "wrong":
            bad.add(one)
    if plain.verdict == "right" and pairs:
        meeting = [one for one in wanted if one not in refused and one not in bad]
        rows = paired(convention, meeting, seed, pairs)
        for n, case in enumerate(rows):
            progress(len(first) + n, len(first) + len(rows), f"{len(case.features)} features together")
            result = examination.judge(case)
            if result.verdict == "refused":
                together = " + ".join(one.name for one in case.features)
                if result.what not in examination.refusals.values():
                    examination.refusals[together] = result.what
    if plain.verdict == "refused":
        refused[PLAIN] = plain.what
    table = tuple(_verdict(one, examination, unsaid, refused, wanted) for one in (PLAIN, *FEATURES))
    return Certificate(
        subject.name, convention.name, convention.about, seed, len(examination.results), versions or {}, table,
        tuple(examination.wrong_cases), tuple(examination.refusals.items()),
    )  # fmt: skip


def _verdict(
    one: Feature,
    examination: Examination,
    unsaid: dict[Feature, str],
    refused: dict[Feature, str],
    wanted: list[Feature],
) -> FeatureVerdict:
    if one in unsaid:
        return FeatureVerdict(one.name, one.title, "not expressible", unsaid[one])
    if one is not PLAIN and one not in wanted:
        return FeatureVerdict(one.name, one.title, "not tried")
    counts: Counter[str] = Counter()
    for case, result in examination.results:
        if one in case.features or (
            one is PLAIN and not [f for f in case.features if f.factor not in examination.keep]
        ):
            counts[result.verdict] += 1
    blamed = tuple(
        n
        for n, causes in enumerate(examination.causes)
        if any(one in cause for cause in causes) or (not causes[0] and (one is PLAIN or counts["wrong"]))
    )
    verdict = "wrong" if blamed else "refused" if one in refused else "right" if counts["right"] else "not tried"
    why = refused.get(one, "") if verdict == "refused" else ""
    if verdict == "right" and one.name in DEAD and examination.subject.convention.dead_rows == "unspecified":
        why = "not documented what such a row is: anything but NaN counts"
    return FeatureVerdict(
        one.name, one.title, verdict, why, counts["right"], counts["wrong"], counts["refused"], blamed
    )
