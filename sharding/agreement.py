"""What the processes of a job must have in common, as texts under names, and who differs from the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..errors import InputTypeError
from .mesh import AnyMesh, axes_of, describe_mesh, devices_platform
from .rendezvous import Facts, by_name

__all__ = ["compare", "facts_of"]

_MESH = "the mesh"
_MOST = 5  # differences that one error tells
_LONGEST = 200  # characters of a value in an error


def facts_of(mesh: AnyMesh | Mapping[str, int] | None, agree: Mapping[str, Any]) -> Facts:
    """What this process says of itself. Errors: InputTypeError for a value of `agree` that isn't JSON."""
    facts = {"the version of attnops": version("attnops"), "the version of jax": jax.__version__}
    facts[_MESH] = describe_mesh(axes_of(mesh))
    if isinstance(mesh, Mesh):
        facts[f"{_MESH}'s platform"] = " ".join(devices_platform(mesh) or ("none",))
        names = [axis.name for axis in axes_of(mesh)]
        for index, device in np.ndenumerate(mesh.devices):
            at = ", ".join(f"{name}={i}" for name, i in zip(names, index, strict=True))
            facts[f"{_MESH} at {at}"] = f"device {device.id}"
    for name, value in agree.items():
        value = value.to_dict() if hasattr(value, "to_dict") else value
        try:
            plain = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise InputTypeError(f"agree[{name!r}]: {error}; wanted a JSON value, or what has to_dict().") from error
        facts |= {path: json.dumps(leaf) for path, leaf in _leaves(f"agree[{name!r}]", plain)}
    return facts


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf under its path, so that an error shows the field and not the whole."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inside or not value:
        yield path, value
        return
    for name, inner in inside:
        yield from _leaves(f"{path}[{name!r}]", inner)


def compare(collected: Mapping[int, Facts]) -> tuple[tuple[int, ...], str] | None:
    """Return who differs from the most and on what; None when all agree."""
    outside: set[int] = set()
    texts: dict[str, str] = {}
    for name in dict.fromkeys(name for facts in collected.values() for name in facts):
        if _MESH in texts and name.startswith(f"{_MESH} at "):
            continue  # another mesh has its devices elsewhere
        groups: dict[str, list[int]] = {}
        for process in sorted(collected):
            groups.setdefault(collected[process].get(name, "nothing"), []).append(process)
        if len(groups) == 1:
            continue
        # The largest group is the measure; of equals, the one with the lowest process.
        most, *others = sorted(groups, key=lambda value: -len(groups[value]))
        outside.update(process for value in others for process in groups[value])
        texts[name] = f"{name}: " + ", ".join(_has(groups[value], value) for value in (*others, most))
    if not texts:
        return None
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    text = f"the processes don't agree. {'; '.join([*texts.values()][:_MOST])}{more}."
    return tuple(sorted(outside)), f"{text} All of them have to declare the same, with the devices in the same order."


def _has(processes: list[int], value: str) -> str:
    shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    return f"{by_name(processes)} {'has' if len(processes) == 1 else 'have'} {shown}"
