"""What `import attnops` and `from attnops import Attention` load beside jax: only what a declaration and its plan need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attnops

# Loaded where they are used: by a call, a model's config, a picture, a command, a test.
HEAVY = (
    "jax.extend", "jax.experimental", "jax._src.pallas", "jax._src.extend", "libtpu", "eformer", "flax", "torch", "typer", "rich",
    "tomllib", "attnops.adapters", "attnops.advising", "attnops.certify", "attnops.cli", "attnops.devices", "attnops.drawing",
    "attnops.models", "attnops.serving", "attnops.verify", "attnops.operators.flash", "attnops.operators.hopper",
    "attnops.operators.paged", "attnops.operators.paged_cache", "attnops.operators.recurrent", "attnops.operators.selection",
    "attnops.operators.sequence.ring", "attnops.operators.splash", "attnops.operators.vanilla", "attnops.operators.call.execute",
    "attnops.operators.call.mapped_batch", "attnops.planning.cache.fit_cache", "attnops.planning.plan_html",
)  # fmt: skip
_PROGRAM = """
import json, sys
import jax
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _loaded(statement: str) -> list[str]:
    """The modules that a statement loads beside those of jax."""
    path = [str(Path(attnops.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _PROGRAM.format(statement=statement)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    names: list[str] = json.loads(ran.stdout)
    return names


def test_attention_loads_what_a_declaration_needs() -> None:
    names = _loaded("from attnops import Attention")
    assert "attnops.operators.api.attention" in names
    assert [name for name in names if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)] == []


def test_the_package_alone_loads_nothing_else() -> None:
    beyond = [name for name in _loaded("import attnops") if name.startswith(("attnops.", "pydantic"))]
    assert beyond == ["attnops.distribution"]
