"""Build attnops-core: the package attnops without the dependency on eformer, for libraries to depend on.

python packaging/core/build.py [FOLDER]

FOLDER, dist by default, gets a wheel and an sdist. Works in a clone, and needs git and `pip install build`. The tree is the one
that attnops is built from; only pyproject.toml differs, by its name and that dependency.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def core_pyproject(text: str) -> str:
    """The text of attnops' pyproject.toml, with the name attnops-core and without eformer."""
    for line, other in ((r'^name = "attnops"\n', 'name = "attnops-core"\n'), (r'^    "eformer\b[^"]*",[^\n]*\n', "")):
        text, found = re.subn(line, other, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"pyproject.toml has {found} lines like {line!r}; wanted one.")
    return text


def main(folder: Path) -> None:
    """Build in a copy of the files that git knows or doesn't ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory() as copy:
        for name in names:
            if name and (ROOT / name).is_file():  # a file that was removed stays listed until that is committed
                to = Path(copy, name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, to)
        Path(copy, "pyproject.toml").write_text(core_pyproject((ROOT / "pyproject.toml").read_text("utf-8")), "utf-8")
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder.resolve()), copy], check=True)


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["dist"]))
