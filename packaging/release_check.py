"""Check that a release can be published: build it, look at its metadata, and try each file in a new environment.

python packaging/release_check.py [--python PYTHON ...] [--publish]

Needs git, and `pip install build twine`. PYTHON: the interpreters to try, by default those of 3.11, 3.12 and 3.13 that are found
on the path or in pyenv; it names those that aren't.
With each, the wheel and the sdist of attnops, and the wheel of attnops-core, are installed into a new environment, and the Python
of README.md runs there, outside the checkout. --publish: fail if packaging/address.toml still has the placeholder, the
changelog has no date, or one of these interpreters isn't here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from distributions import PLACEHOLDER, ROOT, address

_VERSIONS = ("3.11", "3.12", "3.13")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="an interpreter to try; may be given several times")
    parser.add_argument("--publish", action="store_true", help="also fail for what only a published release must have")
    chosen = parser.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run(sys.executable, str(ROOT / "packaging" / "distributions.py"), str(dist))
    files = sorted(dist.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    found = {} if chosen.python else {version: interpreter(version) for version in _VERSIONS}
    pythons = chosen.python or [python for python in found.values() if python is not None]
    if not pythons:
        raise SystemExit(f"none of python{', python'.join(_VERSIONS)} is here; give one by --python.")
    for python in pythons:
        for file in files:
            if file.suffix == ".whl" or file.name.startswith("attnops-"):
                _try(python, file)
    problems = [f"python{version} isn't here" for version, python in found.items() if python is None] + unpublishable()
    for problem in problems:
        print(f"not to be published: {problem}")
    return 1 if problems and chosen.publish else 0


def interpreter(version: str) -> str | None:
    """An interpreter of this version that runs: one of pyenv's shims may be on the path without doing so."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    on_path = shutil.which(f"python{version}")
    for path in ([] if on_path is None else [on_path]) + [str(x) for x in pyenv.glob(f"{version}.*/bin/python")]:
        asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return path
    return None


def unpublishable() -> list[str]:
    """What a release that is published must not have."""
    found = [
        f"packaging/address.toml: {key} is the placeholder {url}"
        for key, url in address().items()
        if PLACEHOLDER in url
    ]
    linked = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.ipynb"))]
    found += [
        f"{path.relative_to(ROOT)}: links to the placeholder; run tools/source_links.py --write and tools/notebook.py --write"
        for path in linked
        if f"://{PLACEHOLDER}" in path.read_text("utf-8") or f"/{PLACEHOLDER}/" in path.read_text("utf-8")
    ]
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines() if line.startswith("## "))
    if not re.search(r"\d{4}-\d{2}-\d{2}$", first):
        found.append(f"CHANGELOG.md: {first!r} has no date")
    return found


def _try(python: str, file: Path) -> None:
    """Install one file, and run the README and the command line with it."""
    with tempfile.TemporaryDirectory() as folder:
        _run(python, "-m", "venv", f"{folder}/environment")
        own = f"{folder}/environment/bin/python"
        _run(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(file))
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
        Path(folder, "readme.py").write_text("\n".join(blocks), "utf-8")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        environment.pop("PYTHONPATH", None)
        for command in (["readme.py"], ["-m", "attnops", "--version"], ["-m", "attnops", "list"]):
            subprocess.run([own, *command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    print(f"{file.name}: installed by {python}, ran the README")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
