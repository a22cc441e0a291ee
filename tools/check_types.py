"""Type-check attnops under the names by which it is imported.

The repository has no folder called `attnops`: pyproject.toml maps api/ to `attnops`, masks/ to
`attnops.masks` and so on, and no type checker reads that map. So this builds `.types/attnops` out of symbolic
links by the same map, runs mypy over it, and prints mypy's findings with the real paths. Arguments are handed
on to mypy.

Editors: after one `make types`, add `.types` to the checker's search path (pyright, Pylance: `extraPaths`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".types"


def build_tree(package_dir: dict[str, str]) -> None:
    """Make `.types/<package>` anew: the root package's files and, beside them, one link per room."""
    shutil.rmtree(TREE, ignore_errors=True)  # removes the links, never what they point to
    for package, folder in sorted(package_dir.items()):
        source = ROOT / folder
        if not source.is_dir():
            raise SystemExit(f"pyproject.toml maps {package} to {folder}/, which does not exist")
        link = TREE.joinpath(*package.split("."))
        if "." not in package:
            link.mkdir(parents=True)
            for entry in sorted(source.iterdir()):
                if entry.name != "__pycache__":
                    (link / entry.name).symlink_to(entry)
        elif not link.exists():
            link.symlink_to(source)
        elif link.resolve() != source:  # a nested package comes with its parent's link
            raise SystemExit(f"{package} is mapped to {folder}/, but its parent has it elsewhere")


def real_path(line: str, package_dir: dict[str, str]) -> str:
    """Replace `.types/attnops/masks/x.py` by `masks/x.py`, and `.types/attnops/x.py` by `api/x.py`."""

    def replace(match: re.Match[str]) -> str:
        package, rest = match.groups()
        room, _, file = rest.partition("/")
        folder = package_dir.get(f"{package}.{room}")
        return f"{folder}/{file}" if folder and file else f"{package_dir[package]}/{rest}"

    return re.sub(rf"^{re.escape(TREE.name)}/([^/]+)/([^:]+)", replace, line)


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package_dir: dict[str, str] = settings["tool"]["setuptools"]["package-dir"]
    build_tree(package_dir)
    roots = sorted(name for name in package_dir if "." not in name)
    packages = [argument for name in roots for argument in ("-p", name)]
    command = [sys.executable, "-m", "mypy", *packages, *sys.argv[1:]]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    for line in result.stdout.splitlines():
        print(real_path(line, package_dir))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
