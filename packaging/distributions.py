"""Build the distributions: attnops, and attnops-core, which is the same package without the dependency on eformer.

python packaging/distributions.py [FOLDER]

FOLDER, dist by default, gets a wheel and an sdist of each. Works in a clone, and needs git and `pip install build`. Each is built
from a copy of the tree, in which pyproject.toml has the project's URLs and the links of README.md are absolute, from
packaging/address.toml. attnops-core's differs by its name and that dependency.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "example.invalid"
# The target of a Markdown link, or of the src or srcset of a picture.
_LINK = re.compile(r"""(?:(?<=\]\()|(?<= src=")|(?<= srcset="))(?![a-z]+:|#)([^)#\s"]+)(#[^)\s"]*)?(?=[)"])""")


def address() -> dict[str, str]:
    """packaging/address.toml."""
    return tomllib.loads((ROOT / "packaging" / "address.toml").read_text("utf-8"))


def core_pyproject(text: str) -> str:
    """The text of attnops' pyproject.toml, with the name attnops-core and without eformer."""
    for line, other in ((r'^name = "attnops"\n', 'name = "attnops-core"\n'), (r'^    "eformer\b[^"]*",[^\n]*\n', "")):
        text, found = re.subn(line, other, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"pyproject.toml has {found} lines like {line!r}; wanted one.")
    return text


def with_urls(text: str, where: Mapping[str, str]) -> str:
    """The text of pyproject.toml with the project's URLs."""
    repository = where["repository"]
    urls = {
        "Documentation": where["documentation"],
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{where['branch']}/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return text.replace("\n[project.scripts]\n", f"\n[project.urls]\n{lines}\n[project.scripts]\n", 1)


def absolute_links(readme: str, where: Mapping[str, str]) -> str:
    """The README with absolute links: the package index has no other files. Errors: SystemExit for a file that isn't there."""

    def absolute(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        if not (ROOT / path).exists():
            raise SystemExit(f"README.md links to {path}, which isn't there.")
        raw = "raw" if Path(path).suffix in (".png", ".svg") else "blob"
        return f"{where['repository']}/{raw}/{where['branch']}/{path}{anchor}"

    return _LINK.sub(absolute, readme)


def main(folder: Path) -> None:
    """Build in copies of the files that git knows or doesn't ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    where = address()
    with tempfile.TemporaryDirectory() as copy:
        for name in names:
            if name and (ROOT / name).is_file():  # a file that was removed stays listed until that is committed
                to = Path(copy, name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, to)
        readme, project = (Path(copy, name) for name in ("README.md", "pyproject.toml"))
        readme.write_text(absolute_links(readme.read_text("utf-8"), where), "utf-8")
        whole = with_urls(project.read_text("utf-8"), where)
        for text in (whole, core_pyproject(whole)):
            project.write_text(text, "utf-8")
            subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder.resolve()), copy], check=True)


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["dist"]))
