"""The scope of a search: numbers of devices, batches, and what a declaration leaves open."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigError, shown
from ..registry.declaration import Declaration
from .machine import Machine, with_devices

__all__ = ["open_choices", "requested_devices", "with_batch", "with_mode"]

_RANGE = re.compile(r"([1-9]\d{0,5})(?:\.\.([1-9]\d{0,5}))?")
_ORDERS = ("contiguous", "zigzag")


def requested_devices(machine: Machine, devices: int | str | None) -> tuple[int, ...]:
    """The numbers of devices in range that a target has parts of. Errors: ConfigError if there are none."""
    if devices is None:
        return (machine.count,)
    match = None if isinstance(devices, bool) else _RANGE.fullmatch(str(devices))
    if match is None:
        raise ConfigError(f"devices={shown(devices)}; wanted a number, or a range such as 8..64.")
    low, high = int(match[1]), int(match[2] or match[1])
    possible = [n for n in range(1, machine.count + 1) if machine.count % n == 0 and with_devices(machine.target, n)]
    counts = tuple(n for n in possible if low <= n <= high)
    if not counts:
        raise ConfigError(
            f"devices={shown(devices)}: {machine.target} has {machine.count} devices, and no part of that size; it has parts of "
            f"{', '.join(map(str, possible))}."
        )
    return counts


def with_batch(declaration: Declaration, batch: int | None) -> Declaration:
    """The declaration with another batch."""
    return declaration if batch is None else _with_call(declaration, "batch", batch)


def with_mode(declaration: Declaration, mode: str | None) -> Declaration:
    """The declaration with another mode."""
    return declaration if mode is None else _with_call(declaration, "mode", mode)


def _with_call(declaration: Declaration, name: str, value: Any) -> Declaration:
    data = declaration.to_dict()
    return Declaration.from_dict({**data, "call": {**data.get("call", {}), name: value}})


def open_choices(
    declaration: Declaration, operation: Any, strategies: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """(strategies, ring orders) to try: those declared or implied by the operation's name, else all of its family."""
    declared = operation.sequence_parallel or declaration.metadata.get("sequence_parallel", "auto")
    strategies = strategies if declared == "auto" else (declared,)
    order = declaration.metadata.get("ring_order")
    return strategies, _ORDERS if order is None else (order,)
