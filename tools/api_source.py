"""An mkdocs hook: links the package's own files, and nothing else, for the API reference.

The root of the repository is the package. Read directly, it would include everything in it: environments, and links to itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / ".api" / "attnops"


def on_startup(command: str, dirty: bool) -> None:
    """Link the package's folders and files into `.api/attnops`, before any plugin looks for them."""
    shutil.rmtree(SOURCE.parent, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), *(room.parent for room in ROOT.glob("*/__init__.py"))):
        (SOURCE / path.name).symlink_to(path, target_is_directory=path.is_dir())
