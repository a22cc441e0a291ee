"""Stored measurements of searches: one JSON file per call and device kind, safe with several writers.

Files are replaced atomically, and a writer holds the file's lock while it adds to what others have measured. So an interrupted
search continues where it stopped, and two searches for the same call share their work.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, InputError, shown

try:
    import fcntl
except ImportError:  # Windows: files are still replaced atomically, but of two simultaneous writers the later one wins
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "ENVIRONMENT",
    "Choice",
    "Measured",
    "StoredSearch",
    "best_of",
    "cache_generation",
    "folder",
    "keep",
    "load",
    "mark_refused",
    "state",
]  # fmt: skip

ENVIRONMENT = "ATTNOPS_TUNE_CACHE"
_VERSION = 1
_KINDS = ("device", "static")  # a time on the device takes precedence over an estimate
_counter = itertools.count(1)
_generation = 0


class Measured(NamedTuple):
    """A candidate of one pass and its result. how: 'device' or 'static'. seconds: None if it failed."""

    part: str
    fields: dict[str, Any]
    how: str
    seconds: float | None
    failure: str | None = None
    detail: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @property
    def name(self) -> tuple[str, str, str]:
        """The identity of a measurement."""
        return self.part, self.how, json.dumps(self.fields, sort_keys=True)


class Choice(NamedTuple):
    """The fields to use, and how they were found."""

    fields: dict[str, Any]
    how: str


class StoredSearch(NamedTuple):
    """What is stored for a call. path: None if there is no folder for it. choice: None until a search has finished. trouble: why
    a file can't be read, or why there is no folder.
    """

    path: Path | None
    measured: tuple[Measured, ...]
    choice: Choice | None
    trouble: str | None = None


def folder() -> Path:
    """The folder of stored choices: $ATTNOPS_TUNE_CACHE, else attnops/tune in the user's cache folder.

    Errors: InputError if that is in a home folder that can't be determined.
    """
    named = os.environ.get(ENVIRONMENT)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "attnops" / "tune"
    except RuntimeError:  # no HOME, and no such user
        place = f"{ENVIRONMENT}={shown(named)}" if named else "~/.cache/attnops/tune"
        raise InputError(
            f"{place} is in a home folder that can't be determined; set {ENVIRONMENT} to a folder."
        ) from None


def cache_generation() -> int:
    """A number that changes whenever this process stores something, for caches of decisions that depend on it."""
    return _generation


def state(device: str) -> tuple[str, int, int]:
    """A value that changes when any process stores something for a device: folder, time of change, and `cache_generation`."""
    try:
        place = os.path.join(folder(), _folder_name(device))
    except InputError as error:
        return str(error), 0, _generation
    try:
        changed = os.stat(place).st_mtime_ns
    except OSError:  # nothing stored yet, or not readable
        changed = 0
    return place, changed, _generation


def load(key: Mapping[str, Any]) -> StoredSearch:
    """What is stored under a key. This never raises: an unreadable file, or no folder, is a miss with its reason."""
    try:
        path = _path(key)
    except InputError as error:
        return StoredSearch(None, (), None, str(error).removesuffix("."))
    try:
        data = json.loads(path.read_bytes())
        if data["schema_version"] != _VERSION:
            return StoredSearch(path, (), None, f"{path} is from another version")
        if json.dumps(data["key"], sort_keys=True) != json.dumps(key, sort_keys=True):
            return StoredSearch(path, (), None, f"{path} is for another call")
        measured = tuple(_checked(Measured(**row)) for row in data["measured"])
        return StoredSearch(path, measured, _choice(measured, tuple(data["finished"])))
    except FileNotFoundError:
        return StoredSearch(path, (), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return StoredSearch(path, (), None, f"{path} can't be read ({type(error).__name__})")


def keep(key: Mapping[str, Any], measured: list[Measured], *, finished: str | None = None) -> StoredSearch:
    """Add measurements to what is stored. `finished` names a way of measuring whose search has finished.

    Errors: InputError if there is no folder, or if it can't be written to.
    """
    global _generation
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            before = load(key)
            joined = {measurement.name: measurement for measurement in (*before.measured, *measured)}
            ended = {*_finished(path, before), *([finished] if finished else [])}
            data = {
                "schema_version": _VERSION,
                "key": dict(key),
                "finished": sorted(ended),
                "measured": [measurement._asdict() for measurement in joined.values()],
            }
            _replace(path, json.dumps(data, indent=1))
    except OSError as error:
        raise InputError(
            f"{path}: can't be written: {error.strerror or error}; set {ENVIRONMENT} to a writable folder."
        ) from None
    _generation = next(_counter)
    return load(key)


def mark_refused(key: Mapping[str, Any], resolve: Callable[[Mapping[str, Any]], object]) -> None:
    """Mark stored measurements as failed if `resolve` refuses their fields with a ConfigError, so that no search chooses them: a
    file may have been changed by hand. Errors: InputError if they can't be written.
    """
    for measurement in load(key).measured:
        if measurement.seconds is not None:
            try:
                resolve(measurement.fields)
            except ConfigError as error:
                keep(key, [measurement._replace(seconds=None, failure=str(error))])


def best_of(measured: tuple[Measured, ...], how: str) -> dict[str, Measured]:
    """The fastest candidate of each part."""
    fastest: dict[str, Measured] = {}
    for measurement in measured:
        if measurement.how == how and measurement.seconds is not None:
            best = fastest.get(measurement.part)
            if best is None or best.seconds is None or measurement.seconds < best.seconds:
                fastest[measurement.part] = measurement
    return fastest


def _checked(measurement: Measured) -> Measured:
    """A measurement from a file. Errors: TypeError, ValueError if it isn't one."""
    texts = (
        isinstance(measurement.part, str) and measurement.how in _KINDS and isinstance(measurement.failure, str | None)
    )
    if not (texts and isinstance(measurement.fields, dict) and isinstance(measurement.detail, dict)):
        raise TypeError(measurement)
    if measurement.seconds is not None and not 0 <= measurement.seconds < math.inf:
        raise ValueError(measurement)
    return measurement


def _choice(measured: tuple[Measured, ...], finished: tuple[str, ...]) -> Choice | None:
    for how in _KINDS:
        best = best_of(measured, how) if how in finished else {}
        if best:
            fields = {name: value for measurement in best.values() for name, value in measurement.fields.items()}
            return Choice(fields, "measured on the device" if how == "device" else "static clock, an estimate")
    return None


def _finished(path: Path, before: StoredSearch) -> list[str]:
    return list(json.loads(path.read_bytes())["finished"]) if before.measured else []


def _path(key: Mapping[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True)
    name = f"{key['operation']}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
    return folder() / _folder_name(key["device"]) / name


def _folder_name(device: object) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", str(device))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("a") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
