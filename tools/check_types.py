"""Type-check attnops under its import name; arguments are passed on to mypy.

The root of the repository is the package, whatever its folder is called. mypy names a package after its folder, so it gets
a link, `.types/attnops`, to the root.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / ".types" / "attnops"


def link() -> None:
    """Make the link."""
    LINK.parent.mkdir(exist_ok=True)
    if not LINK.is_symlink():
        LINK.symlink_to("..", target_is_directory=True)


def main() -> int:
    link()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wanted = [argument for package in settings["packages"] if package.count(".") == 1 for argument in ("-p", package)]
    command = [sys.executable, "-m", "mypy", *wanted, "-m", "attnops", "-m", "attnops.__main__", *sys.argv[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout.replace(".types/attnops/", ""), end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
