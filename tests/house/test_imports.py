"""What `import attnops`, `from attnops import Attention` and the first Attention load beside jax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


# What the class itself is written with. The planner, the registry, pydantic and the others come with the first Attention.
LIGHT = (
    "attnops.call_arguments", "attnops.compat", "attnops.distribution", "attnops.errors", "attnops.lazy", "attnops.masks",
    "attnops.pytree_export", "attnops.scores", "attnops.symbolic",
)  # fmt: skip
CLASS = {"attnops", "attnops.operators", "attnops.operators.api", "attnops.operators.api.attention"} | {
    "attnops.operators.call", "attnops.operators.call.options"
}  # fmt: skip


def _within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("names", ["Attention", "Attention, Causal, SlidingWindow, ALiBi"])
def test_the_class_loads_little(names: str) -> None:
    loaded = _loaded(f"from attnops import {names}")
    assert "attnops.operators.api.attention" in loaded
    own = [name for name in loaded if name.split(".")[0] == "attnops"]
    assert [name for name in own if name not in CLASS and not _within(name, LIGHT)] == []
    assert {name.split(".")[0] for name in loaded} <= {"attnops", "numpy"}
    assert not {"attnops.masks.schema", "attnops.scores.schema"} & set(loaded)


def test_the_first_attention_loads_what_a_declaration_needs() -> None:
    names = _loaded("from attnops import Attention; from attnops.operators.api import attention_parts")
    assert "attnops.registry.declaration" in names
    assert [name for name in names if _within(name, HEAVY)] == []


def test_the_package_alone_loads_nothing_else() -> None:
    beyond = [name for name in _loaded("import attnops") if name.startswith(("attnops.", "pydantic"))]
    assert beyond == ["attnops.distribution", "attnops.lazy"]
