"""Check that all processes of a job declare the same before they compute together. They communicate through jax."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from ..distribution import VERSION
from ..errors import ConfigError, InputTypeError, ProcessError, a_type, shown
from ..strict_json import parse_json
from .mesh import AnyMesh, axes_of, describe_mesh, devices_platform

__all__ = ["check_processes"]

_MAX = 5  # differences shown in one error
_LONGEST = 200  # characters of a value in an error
_DIGEST = 32  # bytes of a SHA-256


def check_processes(mesh: AnyMesh | Mapping[str, int] | None = None, agree: Mapping[str, Any] | None = None) -> None:
    """Wait until all processes of the job have called this. Return if they declare the same, else raise in each of them.

    It compares the versions of jax and attnops, the number of devices, the axis names, sizes and types of `mesh`, its platform
    and the ids of its devices in order, and `agree`: names to JSON values, or to objects with `to_dict()`, such as metadata and
    plans. Call it after `jax.distributed.initialize`, in every process. It is a computation on all devices and, as any other,
    waits for a process that doesn't join. With a single process it returns at once.

    Errors: ProcessError that names the processes that differ from the majority, and how. InputTypeError, ShardingError
    for invalid arguments, before anything is sent.
    """
    facts = _facts(mesh, {} if agree is None else agree)
    if jax.process_count() == 1:
        return
    # Known without communication. process_allgather needs the same number everywhere.
    owners = Counter(device.process_index for device in jax.devices())
    _compare({process: {"the number of devices": str(owners[process])} for process in range(jax.process_count())})
    digest = hashlib.sha256(json.dumps(facts).encode()).digest()
    text = json.dumps([jax.process_index(), facts]).encode()
    # Every process must gather the same number of bytes: so lengths come before texts, which are sent only if they differ.
    marks = _gather(digest + len(text).to_bytes(8, "big"))
    if len({mark[:_DIGEST] for mark in marks}) > 1:
        longest = max(int.from_bytes(mark[_DIGEST:], "big") for mark in marks)
        _compare(dict(json.loads(reply) for reply in _gather(text.ljust(longest))))


def _gather(data: bytes) -> list[bytes]:
    """The data of every process. All must pass the same number of bytes."""
    return [row.tobytes() for row in multihost_utils.process_allgather(np.frombuffer(data, np.uint8))]


def _facts(mesh: AnyMesh | Mapping[str, int] | None, agree: Mapping[str, Any]) -> dict[str, str]:
    """What this process declares, as texts by name."""
    if not isinstance(mesh, Mesh | AbstractMesh | Mapping | None):
        raise InputTypeError(f"mesh={shown(mesh)}, {a_type(mesh)}; wanted a mesh, or axis names to sizes.")
    if not isinstance(agree, Mapping) or not all(isinstance(name, str) for name in agree):
        raise InputTypeError(f"agree={shown(agree)}; wanted names to values, such as {{'attention': metadata}}.")
    facts = {"the version of attnops": VERSION, "the version of jax": jax.__version__}
    facts["the mesh"] = describe_mesh(axes_of(mesh))
    if isinstance(mesh, Mesh | AbstractMesh):
        facts["the mesh's platform"] = " ".join(devices_platform(mesh) or ("none",))
    if isinstance(mesh, Mesh):
        facts |= {f"the mesh's devices[{at}]": str(device.id) for at, device in enumerate(mesh.devices.flat)}
    leaves: dict[str, str] = {}
    for name, value in agree.items():
        path = f"agree[{name!r}]"
        try:
            plain = parse_json(json.dumps(value.to_dict() if hasattr(value, "to_dict") else value), "as JSON")
            leaves |= {at: json.dumps(leaf) for at, leaf in _leaves(path, plain)}
        except (ConfigError, TypeError, ValueError, RecursionError) as error:
            text = f"{path}={shown(value)}: {str(error).rstrip('.')}. Wanted a JSON value, or an object with to_dict()."
            raise InputTypeError(text) from error
    return facts | dict(sorted(leaves.items()))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf with its path, so that an error shows only the field."""
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{path}[{name!r}]", inner)


def _compare(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Errors: ProcessError that names who differs from the majority. If groups are equally large, the one with the lowest
    process is the majority."""
    outside: set[int] = set()
    texts: list[str] = []
    for name in dict.fromkeys(name for process in sorted(facts) for name in facts[process]):
        groups: dict[str, list[int]] = {}
        for process in sorted(facts):
            groups.setdefault(facts[process].get(name, "nothing"), []).append(process)
        majority, *others = sorted(groups, key=lambda value: -len(groups[value]))
        outside.update(process for value in others for process in groups[value])
        if others:
            texts.append(f"{name}: " + ", ".join(_has(groups[value], value) for value in (*others, majority)))
    if texts:
        more = f"; and {len(texts) - _MAX} more" if len(texts) > _MAX else ""
        text = f"the processes don't agree. {'; '.join(texts[:_MAX])}{more}."
        text += " All of them must declare the same, with the devices in the same order."
        raise ProcessError(text, sorted(outside))


def _has(processes: list[int], value: str) -> str:
    who = f"process {processes[0]} has" if len(processes) == 1 else f"processes {_ranges(processes)} have"
    return f"{who} {value if len(value) <= _LONGEST else f'{value[:_LONGEST]}...'}"


def _ranges(numbers: Iterable[int]) -> str:
    """'3, 5-7' for 3, 5, 6, 7, which must be sorted."""
    by_gap = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])  # constant within a run
    runs = [[number for _, number in run] for _, run in by_gap]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
