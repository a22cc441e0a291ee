"""Tuned choices: what a choice of sizes depends on, and which one a plan uses.

A choice is looked up among those that `attnops tune` has stored on this machine (tune_cache.py), then in the operation's own
table. Otherwise the operation's heuristic decides. The plan says which.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..distribution import VERSION
from ..errors import ConfigError, first_line, shown
from ..sharding import ATTENTION
from . import tune_cache
from .notes import note
from .operation import PlannedOperation
from .operation_config import OperationConfig
from .placement import Placement
from .problem import AttentionProblem

__all__ = ["Chosen", "Tuning", "choose", "config_with", "tune_key", "versions"]

# Searches are found through an entry point, because the package that measures is in a higher layer.
_GROUP = "attnops.tuners"
_COMMAND = "`attnops tune` finds one"


class Tuning(NamedTuple):
    """Where a plan's sizes come from: source 'cache', 'table' or 'heuristic', why, and the chosen fields. trouble: why something
    that is stored can't be used.
    """

    source: str
    why: str
    fields: Mapping[str, Any]
    trouble: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan notes of it."""
        return () if self.trouble is None else (note("tuning.stored_unused", trouble=self.trouble),)

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON-ready values."""
        return {"source": self.source, "why": self.why, "fields": dict(self.fields), "trouble": self.trouble}


class Chosen(NamedTuple):
    """A tuning and the config that its fields make; None if it has no fields."""

    tuning: Tuning
    config: OperationConfig | None = None


def tune_key(method: str, problem: AttentionProblem, placement: Placement) -> dict[str, Any]:
    """All that a measured choice depends on, as JSON values: device, dtypes, one device's shapes, mask, config, versions."""
    local, bias = placement.local, problem.operand("bias")
    further = [[x.name, x.dtype, [n == 1 for n in x.shape]] for x in problem.operands if x.name not in ATTENTION]
    own = ({"operands": further} if further else {}) | ({"values_in_key": True} if problem.values_in_key else {})
    return own | {
        "operation": problem.operation,
        "method": method,
        "device": problem.device,
        "dtype": problem.runtime_dtype,
        "softmax_dtype": problem.softmax_dtype,
        "quantised": problem.quantised,
        "scales": sorted(problem.scales),
        "shapes": {**local._asdict(), "head_dim": problem.head_dim, "value_dim": problem.value_dim},
        "mask": problem.mask.describe(),
        "query_offset": "traced" if problem.dynamic_query_offset else problem.query_offset,
        "bias": None if bias is None else {"dtype": bias.dtype, "alike": [size == 1 for size in bias.shape]},
        "features": sorted(problem.features),
        "layout": problem.kernel_layout,
        "backward": problem.mode == "__train__",
        "config": problem.config.to_dict(),
        "versions": versions(),
    }


def choose(operation: type[PlannedOperation], method: str, problem: Any, placement: Any, policy: str) -> Chosen | None:
    """The choice for a problem; None if there is nothing to choose.

    policy: 'heuristic', 'tune' or 'error' decide what happens on a miss; 'off' looks up nothing. Errors: ConfigError on a
    miss with 'error'.
    """
    runs = operation.implementation(method, problem.config)
    names = runs.tuned_fields(problem, placement)
    if not names:
        return None
    key = operation.planner.tune_key(method, problem, placement)
    shipped = functools.partial(runs.shipped_choice, problem, placement)
    search = functools.partial(_searched, operation, method, problem, placement)
    resolve = functools.partial(config_with, operation, method, problem, placement)
    return _stored_or_searched(names, key, problem, policy, shipped, search, resolve)


def _searched(operation: type[PlannedOperation], method: str, problem: Any, placement: Any) -> Tuning:
    """Search now, for tuning='tune', and store the result."""
    if why := operation.planner.unsearched:
        return Tuning("heuristic", why, {})
    choice = _tuner()(operation, method, problem, placement)
    return Tuning("cache", f"{choice.how}, searched for this plan and stored", choice.fields)


def config_with(
    operation: type[PlannedOperation],
    method: str,
    problem: Any,
    placement: Any,
    fields: Mapping[str, Any],
) -> OperationConfig:
    """The whole config of a problem with chosen fields. Errors: ConfigError if they are refused."""
    requested = replace(problem, config=problem.config.with_fields(fields))
    return operation.implementation(method, requested.config).resolve(requested, placement)


def _stored_or_searched(
    names: tuple[str, ...],
    key: Mapping[str, Any],
    problem: Any,
    policy: str,
    shipped: Callable[[], tuple[str, Mapping[str, Any]] | None],
    search: Callable[[], Tuning],
    resolve: Callable[[Mapping[str, Any]], OperationConfig],
) -> Chosen:
    """The choice stored under a key, else the shipped one, else what the policy says. `problem` is described in errors.

    resolve: the whole config with some fields. A stored choice that it refuses is a miss.
    """
    if policy == "off":
        return Chosen(Tuning("heuristic", "tuning='off'", {}))
    entry = tune_cache.load(key)
    trouble = entry.trouble
    if entry.choice is not None and not set(entry.choice.fields) <= set(names):
        trouble = f"{entry.path} has fields that aren't searched here"
    elif entry.choice is not None:
        fields = entry.choice.fields
        try:
            return Chosen(Tuning("cache", f"{entry.choice.how}, stored in {entry.path}", fields), resolve(fields))
        except ConfigError as error:
            trouble = f"{entry.path} has sizes that are refused here ({first_line(error)})"
    table = shipped()
    if table is not None:
        return Chosen(Tuning("table", *table, trouble), resolve(table[1]))
    missing = trouble or f"no tuned choice is stored for this call on {problem.device}"
    if policy == "error":
        raise ConfigError(
            f"{problem.describe()}: {missing}, but tuning='error' is declared; {_COMMAND}, or declare 'heuristic'."
        )
    if policy == "tune":
        searched = search()._replace(trouble=trouble)
        return Chosen(searched, resolve(searched.fields) if searched.fields else None)
    return Chosen(Tuning("heuristic", f"{missing}; {_COMMAND}", {}, trouble))


def _tuner() -> Any:
    entries = list(importlib.metadata.entry_points(group=_GROUP))
    if len(entries) != 1:
        raise ConfigError(
            f"tuning='tune' requires one entry point in {shown(_GROUP)}; installed: "
            f"{', '.join(entry.value for entry in entries) or 'none (is attnops installed?)'}."
        )
    return entries[0].load()


@functools.cache
def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {"attnops": VERSION}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed
