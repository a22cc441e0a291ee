"""Type-check attnops under its import name, then what its users write; arguments are passed on to mypy.

The root of the repository is the package, whatever its folder is called. mypy names a package after its folder, so it gets
a link, `.types/attnops`, to the root. What users write is the Python of README.md and docs/start.md, and
tests/house/typed_calls.py: mypy and pyright check it in strict mode, less what jax's own annotations leave unknown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / ".types" / "attnops"
WRITTEN = ROOT / ".types" / "written"
_PAGES = ("README.md", "docs/start.md")
_OF_JAX = ("Member", "Variable", "Argument", "Lambda", "Parameter")  # what pyright can't infer of jax's functions


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
    return done.returncode or check_written()


def check_written() -> int:
    """Check what users write with both checkers."""
    WRITTEN.mkdir(parents=True, exist_ok=True)
    for page in _PAGES:
        blocks = re.findall(
            r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        (WRITTEN / f"{Path(page).stem.lower()}.py").write_text("\n".join(blocks), encoding="utf-8")
    (WRITTEN / "typed_calls.py").write_text((ROOT / "tests" / "house" / "typed_calls.py").read_text(encoding="utf-8"))
    unknown = {f"reportUnknown{what}Type": False for what in _OF_JAX}
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(LINK.parent)], "include": ["."], **unknown}
    (WRITTEN / "pyrightconfig.json").write_text(json.dumps(settings))
    names = [path.name for path in sorted(WRITTEN.glob("*.py"))]
    # jax's ShapeDtypeStruct has no annotations.
    mypy = ["mypy", "--strict", "--allow-untyped-calls", "--follow-imports=silent", "--config-file=", *names]
    pyright = ["basedpyright", "--pythonpath", sys.executable]
    environment = {**os.environ, "MYPYPATH": str(LINK.parent)}
    return max(
        subprocess.run([sys.executable, "-m", *command], cwd=WRITTEN, env=environment).returncode
        for command in (mypy, pyright)
    )


if __name__ == "__main__":
    raise SystemExit(main())
