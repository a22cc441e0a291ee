"""Make docs/certificates.md from what `attnops certify` found out of each library, which docs/certificates has as JSON.

`--run jax.nn` certifies anew in this interpreter, where the library has to be installed, and replaces its JSON and the scripts of
its wrong cases. `--write` writes the page, and without an option it is compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

from attnops.certify import Certificate

ROOT = Path(__file__).resolve().parent.parent
FOLDER, PAGE = ROOT / "docs" / "certificates", ROOT / "docs" / "certificates.md"
SHORT = {"right": "right", "wrong": "**wrong**", "refused": "refused", "not expressible": "-", "not tried": ""}

# The sections, by the family of the calls. Beyond softmax attention the targets are attnops' own operations.
FAMILIES = {
    "attention": "Softmax attention", "pages": "attnops: steps over pages", "latent": "attnops: latent attention",
    "indexer": "attnops: indexers", "paged_indexer": "attnops: indexers over pages", "selected": "attnops: selected keys",
    "recurrence": "attnops: recurrences", "slots": "attnops: recurrences over slots",
}  # fmt: skip

HEAD = """# Certificates

What functions of attention get right, found by [`attnops certify`](certify.md), with each library called as its own documentation
says. attnops' own operations are among them. `tools/certificates.py` makes this page of the results in `docs/certificates`.

- **right**: every case with the feature is within what rounding explains of the float64 reference.
- **wrong**: some case isn't. The number leads to the smallest one, a script that needs only NumPy and the library.
- refused: the call raises an exception.
- -: the function has no argument for it, or its documentation gives it another meaning. Which, is below the tables.

[What was run](#what-was-run) has the number of cases. Unless a run is called quick, each feature ran without and with a gradient.

A row that sees no key is judged where the library documents what it is; elsewhere anything but NaN counts as right. Everything
ran on a CPU; kernels of TPUs and GPUs in Pallas' interpreter. `jax.nn:cudnn`, which needs a GPU, isn't here.
"""


def certificates() -> list[Certificate]:
    """The saved results: libraries first, then operations of attnops."""
    found = [
        Certificate.from_dict(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.json"))
    ]
    return sorted(found, key=lambda one: (one.convention.startswith("attnops"), one.target))


def file_name(target: str) -> str:
    """A target as a file's name."""
    return target.replace(":", "-")


def save(certificate: Certificate) -> None:
    """Replace the target's JSON and scripts."""
    name = file_name(certificate.target)
    for old in FOLDER.glob(f"{name}-[0-9]*.py"):
        old.unlink()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(certificate.to_dict(), indent=1) + "\n", encoding="utf-8")
    for n, case in enumerate(certificate.wrong_cases):
        (FOLDER / f"{name}-{n + 1}.py").write_text(case.script, encoding="utf-8")


def issues() -> dict[str, str]:
    """Public issues by target and feature, such as `keras window.left`."""
    return tomllib.loads((FOLDER / "issues.toml").read_text(encoding="utf-8"))["issues"]


def page() -> str:
    """The page."""
    every, known = certificates(), issues()
    parts = [HEAD]
    for family, title in FAMILIES.items():
        if some := [one for one in every if one.family == family]:
            parts.append(f"## {title}\n")
            parts += _tables(some)
    parts.append("## Wrong cases\n")
    wrong = [line for one in every for line in _wrong_cases(one, known)]
    parts += wrong or ["None.\n"]
    parts.append("## What was run\n")
    parts.append("| Target | Called as documented in | Cases | Versions |\n| --- | --- | --- | --- |")
    parts += [f"| `{c.target}` | {_cell(c.about)} | {_run(c)} | {_versions(c)} |" for c in every]
    parts.append("\n## Refused, and not expressible\n")
    parts += [line for one in every for line in _why(one)]
    return "\n".join(parts).rstrip() + "\n"


def _tables(some: list[Certificate]) -> list[str]:
    """One column a target, five to a table so that it isn't cut."""
    lines = []
    for at in range(0, len(some), 5):
        columns = some[at : at + 5]
        lines.append(f"| Feature | {' | '.join(f'`{one.target}`' for one in columns)} |")
        lines.append(f"| --- |{' --- |' * len(columns)}")
        by_name = [{row.feature: row for row in one.features} for one in columns]
        for feature in columns[0].features:
            cells = []
            for one, rows in zip(columns, by_name, strict=True):
                row = rows[feature.feature]
                links = [f"[{n + 1}](certificates/{file_name(one.target)}-{n + 1}.py)" for n in row.wrong_cases]
                cells.append(" ".join([SHORT[row.verdict], *links]))
            lines.append(f"| {feature.title} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _wrong_cases(certificate: Certificate, known: dict[str, str]) -> list[str]:
    lines = []
    for n, case in enumerate(certificate.wrong_cases):
        public = [
            known[f"{certificate.target} {name}"] for name in case.features if f"{certificate.target} {name}" in known
        ]
        issue = f" Public: {', '.join(public)}." if public else " No public issue of it was found."
        link = f"[{file_name(certificate.target)}-{n + 1}.py](certificates/{file_name(certificate.target)}-{n + 1}.py)"
        lines.append(
            f"- `{certificate.target}`, {' and '.join(f'`{name}`' for name in case.features)}: {case.what}. {link}{issue}"
        )
    return [*lines, ""] if lines else []


def _versions(certificate: Certificate) -> str:
    return ", ".join(f"{name} {number}" for name, number in certificate.versions.items())


def _run(certificate: Certificate) -> str:
    how = "quick, " if certificate.quick else ""
    return f"{how}{certificate.cases}, features meet in {certificate.met}, seed {certificate.seed}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or "-"


def _why(certificate: Certificate) -> list[str]:
    lines: list[str] = []
    for verdict in ("refused", "not expressible"):
        reasons: dict[str, list[str]] = {}
        for row in certificate.features:
            if row.verdict == verdict:
                reasons.setdefault(row.why, []).append(row.title)
        lines += [f"- {verdict}: {', '.join(titles)}. `{_cell(why)}`" for why, titles in reasons.items()]
    lines += [f"- refused together: {names}. `{_cell(why)}`" for names, why in certificate.refusals]
    return [f"### {certificate.target}\n", *lines, ""] if lines else []


def main() -> None:
    """Run, write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", default=[], metavar="TARGET")
    parser.add_argument("--cases", type=int, default=200, help="in which features meet")
    parser.add_argument("--quick", action="store_true", help="each feature once, and ten cases in which they meet")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    for target in arguments.run:
        command = [sys.executable, "-m", "attnops", "certify", target, "--json", "--timeout", "300"]
        command += ["--quick"] if arguments.quick else ["--cases", str(arguments.cases)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if not ran.stdout:
            sys.exit(f"{target}: status {ran.returncode}")
        save(Certificate.from_dict(json.loads(ran.stdout)))
    if arguments.write:
        PAGE.write_text(page(), encoding="utf-8")
    elif not arguments.run and PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/certificates.md isn't what tools/certificates.py --write makes")


if __name__ == "__main__":
    main()
