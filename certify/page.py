"""A certificate as one HTML page, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from ..drawing.html import code, document, paragraph, rows, section, subsection, table, title
from .certificate import Certificate, FeatureVerdict

__all__ = ["certificate_page", "result_text"]

_CLASSES = {
    "right": "ao-good",
    "wrong": "ao-warned",
    "refused": "",
    "not expressible": "ao-told",
}


def result_text(one: FeatureVerdict, *, noted: bool = True) -> str:
    """What a row says beside its verdict. noted: with what has to be known of a feature that is right."""
    if one.verdict in ("not expressible", "refused"):
        return one.why
    if one.verdict == "wrong":
        return f"case {', '.join(str(n + 1) for n in one.wrong_cases)}"
    if one.verdict == "not tried":
        return ""
    counted = f"{one.right} case{'' if one.right == 1 else 's'}"
    return f"{counted}; {one.why}" if one.why and noted else counted


def certificate_page(certificate: Certificate) -> str:
    """The page as HTML."""
    c = certificate
    versions = ", ".join(f"{name} {number}" for name, number in c.versions.items())
    about = [
        ("target", c.target), ("convention", f"{c.convention}: {c.about}" if c.about else c.convention), ("versions", versions),
        ("cases", f"{c.cases}, seed {c.seed}"),
    ]  # fmt: skip
    tried = [one for one in c.features if one.verdict != "not tried"]
    lines = [((one.title, ""), (one.verdict, _CLASSES[one.verdict]), (result_text(one), "")) for one in tried]
    sections = [
        ("features", "Features", [rows(about), table(("feature", "verdict", ""), lines)]),
        *([("wrong", "Smallest wrong cases", [part for n in range(len(c.wrong_cases)) for part in _wrong(c, n)])] * c.wrong),
        *([("refusals", "Refused together", [rows(c.refusals)])] if c.refusals else []),
    ]  # fmt: skip
    head = title(f"{c.target}: what it gets right", [(anchor, heading) for anchor, heading, _ in sections])
    body = "".join(section(heading, parts, anchor) for anchor, heading, parts in sections)
    return document(f"attnops certify {c.target}", head + body)


def _wrong(certificate: Certificate, n: int) -> tuple[str, ...]:
    case = certificate.wrong_cases[n]
    return subsection(f"Case {n + 1}: {', '.join(case.features)}"), paragraph(case.what, warns=True), code(case.script)
