"""`attnops certify`: run the cases of a target in a worker process, and print a table."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from ..certify.badge import badge
from ..certify.calls import every_kind
from ..certify.certificate import Certificate
from ..certify.convention import built_in_conventions
from ..certify.examine import certify
from ..certify.families import family_of
from ..certify.features import FEATURES
from ..certify.page import certificate_page, result_text
from ..certify.suite import chosen_features
from ..certify.targets import rivals, subject_named, versions_of
from ..certify.worker import Workers
from ..errors import ConfigError
from .console import fields, table, text, title
from .progress import bar

__all__ = ["CertifyOptions", "check_files", "list_names", "print_certificate", "run_certify", "write_files"]

_QUICK = 10  # cases in which features meet
_STYLES = {"right": "green", "wrong": "bold red", "refused": "yellow", "not expressible": "dim", "not tried": "dim"}


class CertifyOptions(NamedTuple):
    """The options of `attnops certify`."""

    target: str
    convention: str | None
    seed: int
    cases: int
    features: tuple[str, ...]
    quick: bool
    seconds: float


def run_certify(options: CertifyOptions) -> Certificate:
    """Certify the target."""
    subject = subject_named(options.target, options.convention)
    family = family_of(subject)
    features = chosen_features(options.features, family.features, subject.convention.family)
    pairs = min(options.cases, _QUICK) if options.quick else options.cases
    with bar(options.target) as progress, Workers(subject, options.seconds) as workers:
        return certify(
            subject, workers, family=family, features=features, seed=options.seed, pairs=pairs, quick=options.quick,
            together=len(workers.each), versions=versions_of(subject), progress=progress,
        )  # fmt: skip


def check_files(*paths: Path | None) -> None:
    """Errors: ConfigError for a file that can't be written, before anything runs."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; wanted a file to write to.")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: {path.parent} is not a folder; wanted a file to write to.")


def write_files(certificate: Certificate, html: Path | None, svg: Path | None) -> list[Path]:
    """Write the page and the badge. Returns what was written."""
    written = []
    for path, make in ((html, certificate_page), (svg, badge)):
        if path is not None:
            try:
                path.write_text(make(certificate), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror or error}; wanted a file to write to.") from None
            written.append(path)
    return written


def print_certificate(certificate: Certificate, written: list[Path]) -> None:
    """Print the table, and a script for each wrong case."""
    console, c = text(), certificate
    console.print(title(f"{c.target}, called as {c.convention}"))
    rows = table("feature", "verdict", "")
    for one in c.features:
        if one.verdict == "not tried":
            continue
        said = result_text(one, noted=False) if one.verdict in ("right", "wrong") else ""
        rows.add_row(one.title, Text(one.verdict, style=_STYLES[one.verdict]), said)
    console.print(rows)
    for n, case in enumerate(c.wrong_cases):
        console.print("", title(Text(f"case {n + 1}: {', '.join(case.features)}", style="bold red")), sep="\n")
        console.print(case.script, soft_wrap=True)  # whole lines, to be pasted
    counts = ", ".join(f"{c.count(word)} {word}" for word in _STYLES if c.count(word))
    ending: list[tuple[str, str | Text]] = [
        (word, f"{one.title}: {one.why}")
        for word in ("right", "refused", "not expressible")
        for one in c.features
        if one.verdict == word and one.why
    ]
    ending += [("refused together", f"{names}: {why}") for names, why in c.refusals]
    ending += [("features", counts), ("cases", f"{c.cases}, seed {c.seed}")]
    ending += [("versions", ", ".join(f"{name} {number}" for name, number in c.versions.items()))]
    ending += [("wrote", str(path)) for path in written]
    console.print("", fields(ending), sep="\n")


def list_names() -> None:
    """Print the names that targets, --as and --feature take."""
    rows = [
        ("targets", "operations of attnops, latent, module:function with --as"), ("targets", ", ".join(rivals())),
        ("--as", f"{', '.join(built_in_conventions())}, or a .toml file"),
        *(("--feature", f"{one.name}: {one.title}") for one in FEATURES),
        *((f"of {family}", f"{one.name}: {one.title}") for family, kind in every_kind().items() for one in kind.features),
    ]  # fmt: skip
    text().print(fields(rows))
