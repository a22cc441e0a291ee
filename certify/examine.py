"""certify: run the cases of a subject and find out what it gets right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from .certificate import Certificate, FeatureVerdict, WrongCase
from .family import AttentionFamily, Family
from .features import Feature
from .judge import Judgement
from .source import Subject

__all__ = ["Examination", "certify"]

_SHRUNK = 12  # wrong cases that are made small; others have the features of one of these
_TRIES = {"no answer": 3, "the process ended": 8}  # each costs a new process


@dataclass
class Examination:
    """The cases that ran and what came of them. run: judges one case. tell: is told what is being done beside that."""

    subject: Subject
    family: Family
    run: Callable[[Any], Judgement]
    tell: Callable[[str], None] = lambda what: None
    results: list[tuple[Any, Judgement]] = field(default_factory=list)
    wrong_cases: list[WrongCase] = field(default_factory=list)
    causes: list[tuple[frozenset[Feature], ...]] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    def record(self, case: Any, result: Judgement) -> None:
        """Take in what came of a case. If it is wrong for a reason not known yet, find the smallest that is."""
        self.results.append((case, result))
        if result.verdict == "wrong" and self.cause(case) is None and len(self.causes) < _SHRUNK:
            self._shrink(case, result)

    def cause(self, case: Any) -> int | None:
        """The place of the shrunk case whose features this case has too."""
        features = frozenset(self.family.features_of(case))
        return next((n for n, causes in enumerate(self.causes) if any(cause <= features for cause in causes)), None)

    def _shrink(self, case: Any, result: Judgement) -> None:
        slow = result.what.startswith(tuple(_TRIES))
        last = {case: result}

        def fails(smaller: Any) -> bool:
            self.tell(f"making a wrong case small, {len(last)} tried")
            judgement = self.run(smaller)
            last[smaller] = judgement
            return judgement.verdict == "wrong" and judgement.what.startswith(tuple(_TRIES)) == slow

        most = _TRIES.get(next((words for words in _TRIES if result.what.startswith(words)), ""), 60)
        small = self.family.shrunk(case, fails, most)
        what = last[small].what
        essential = self.family.essential(small)
        names = tuple(one.name for one in self.family.features if one in essential) or (self.family.plain.name,)
        found = WrongCase(names, what, self.family.script(small, f"{self.subject.name}: {what}"))
        # Another level of the same factor may have taken the place of the one that was tried.
        factors = {one.factor for one in essential}
        tried = frozenset(one for one in self.family.essential(case) if one.factor in factors)
        if found in self.wrong_cases:
            self.causes[self.wrong_cases.index(found)] += (tried,)
        else:
            self.wrong_cases.append(found)
            self.causes.append((tried, essential))


def _judged(run: Callable[[Any], Judgement], cases: list[Any], together: int) -> Generator[Judgement, None, None]:
    """In the order of the cases, so many at once."""
    if together == 1:
        yield from map(run, cases)
        return
    pool = ThreadPoolExecutor(together)
    try:
        yield from map(Future.result, [pool.submit(run, case) for case in cases])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def certify(
    subject: Subject,
    run: Callable[[Any], Judgement],
    *,
    family: Family | None = None,
    features: Collection[Feature] | None = None,
    seed: int = 0,
    pairs: int = 0,
    quick: bool = False,
    together: int = 1,
    versions: dict[str, str] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> Certificate:
    """Each feature alone, then at most `pairs` cases in which those that are right meet. features: all by default.

    together: how many cases `run` may judge at once, in threads; what comes out is the same.
    """
    family = AttentionFamily(subject) if family is None else family
    unsaid = {one: why for one in family.features if (why := family.inexpressible(one)) is not None}
    asked = [one for one in family.features if features is None or one in features]
    wanted = [one for one in asked if one not in unsaid]
    first = list(family.alone(wanted, seed, quick))
    at, of = 0, len(first) + pairs
    examination = Examination(subject, family, run, lambda what: progress(at, of, what))
    refused: dict[Feature, str] = {}
    bad: set[Feature] = set()
    plain = Judgement("right")
    progress(at, of, family.plain.title)
    with closing(_judged(run, [case for _, case in first], together)) as results:
        for at, ((one, case), result) in enumerate(zip(first, results, strict=True)):
            progress(at, of, family.plain.title if one is None else one.title)
            examination.record(case, result)
            if one is None:
                plain = result
            elif result.verdict == "refused":
                refused.setdefault(one, result.what)
            elif result.verdict == "wrong":
                bad.add(one)
    if plain.verdict == "right" and pairs:
        meeting = [one for one in wanted if one not in refused and one not in bad]
        rows = family.paired(meeting, seed, pairs)
        of = len(first) + len(rows)
        with closing(_judged(run, rows, together)) as results:
            for at, (case, result) in enumerate(zip(rows, results, strict=True), len(first)):
                progress(at, of, f"{len(family.features_of(case))} features together")
                examination.record(case, result)
                if result.verdict == "refused" and result.what not in examination.refusals.values():
                    examination.refusals[" + ".join(one.name for one in family.features_of(case))] = result.what
    if plain.verdict == "refused":
        refused[family.plain] = plain.what
    table = tuple(_verdict(one, examination, unsaid, refused, asked) for one in (family.plain, *family.features))
    convention = subject.convention
    return Certificate(
        subject.name, convention.name, convention.about, seed, len(examination.results), versions or {}, table,
        tuple(examination.wrong_cases), tuple(examination.refusals.items()),
        quick, len(examination.results) - len(first), convention.family,
    )  # fmt: skip


def _verdict(
    one: Feature, examination: Examination, unsaid: dict[Feature, str], refused: dict[Feature, str], asked: list[Feature]
) -> FeatureVerdict:  # fmt: skip
    family = examination.family
    plain = one is family.plain
    if one in unsaid and one in asked:
        return FeatureVerdict(one.name, one.title, "not expressible", unsaid[one])
    if not plain and one not in asked:
        return FeatureVerdict(one.name, one.title, "not tried")
    counts: Counter[str] = Counter()
    for case, result in examination.results:
        if one in family.features_of(case) or (plain and not family.essential(case)):
            counts[result.verdict] += 1
    blamed = tuple(
        n
        for n, causes in enumerate(examination.causes)
        if any(one in cause for cause in causes) or (not causes[0] and (plain or counts["wrong"]))
    )
    verdict = "wrong" if blamed else "refused" if one in refused else "right" if counts["right"] else "not tried"
    why = refused.get(one, "") if verdict == "refused" else family.note(one) if verdict == "right" else ""
    return FeatureVerdict(
        one.name, one.title, verdict, why, counts["right"], counts["wrong"], counts["refused"], blamed
    )
