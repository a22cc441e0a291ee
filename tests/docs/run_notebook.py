"""Run the cells of a notebook in one process and in their order, as Jupyter does, and print what each printed as JSON.

`%pip` lines are left out: what they install is here. `!` lines are commands of the shell, whose failure ends the run.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(notebook: Path) -> list[str]:
    """What each cell of code printed to standard output."""
    space: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith("%pip ")]
        out = io.StringIO()
        for line in lines:
            if line.startswith("!"):
                ran = subprocess.run(line[1:], shell=True, text=True, stdout=subprocess.PIPE, check=True)
                out.write(ran.stdout)
        code = "\n".join("" if line.startswith("!") else line for line in lines)
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"<{cell['id']}>", "exec"), space)
        printed.append(out.getvalue())
    return printed


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    print(json.dumps(found))
