"""A call whose arrays lie on different devices: translates jax's error into one about the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from ...errors import InputError
from ...sharding.mesh import device_name
from .arrays import Arrays

__all__ = ["explain_devices"]

_MAX_NAMES = 8  # the most devices to name


def explain_devices(arrays: Arrays, error: ValueError) -> None:
    """Raise InputError that names the arguments if their devices made a call fail; else return.

    It is called only after jax refuses a call, so successful calls pay nothing for it.
    """
    by_devices: dict[frozenset[jax.Device], list[str]] = {}
    for name, array in _named(arrays):
        # A tracer has no devices, and uncommitted arrays go where the others are.
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.committed:
            by_devices.setdefault(frozenset(array.sharding.device_set), []).append(name)
    if len(by_devices) < 2:
        return
    lying = "; ".join(f"{', '.join(names)} on {_devices_text(devices)}" for devices, names in by_devices.items())
    raise InputError(
        f"the arrays of a call are committed to different devices: {lying}. Move them to the same devices, for example with "
        f"jax.device_put({next(reversed(by_devices.values()))[0]}, {next(iter(by_devices.values()))[0]}.sharding), or declare "
        "a mesh."
    ) from error


def _named(arrays: Arrays) -> Iterator[tuple[str, Any]]:
    yield from arrays.by_name.items()
    yield from (("mask", leaf) for leaf in arrays.mask_leaves)


def _devices_text(devices: frozenset[jax.Device]) -> str:
    names = [device_name(device) for device in sorted(devices, key=lambda device: device.id)]
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
