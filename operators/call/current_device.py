"""Where a call without a mesh runs: on the devices of its committed arrays, else jax's default device, else its backend."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from ...errors import InputError
from ...sharding.mesh import gpu_vendor

__all__ = ["CurrentDevice", "current_device"]

_config: Any = jax.config  # type checkers don't know its options


class CurrentDevice(NamedTuple):
    """A platform ('tpu', 'cpu', 'cuda', 'rocm', or 'gpu' of unknown vendor), the kind of its device, and the source of both."""

    platform: str
    device_kind: str
    source: str

    def serves(self, platform: str) -> bool:
        """Whether this is the planned platform; 'gpu' matches any vendor."""
        vendors = ("gpu", "cuda", "rocm")
        return platform == self.platform or (
            "gpu" in (platform, self.platform) and {platform, self.platform} <= {*vendors}
        )


def current_device(arrays: Iterable[Any]) -> CurrentDevice:
    """The platform on which jax runs a jitted call of these arrays, by jax's own rules.

    The first committed array that isn't a tracer decides it, else `jax.default_device`, else the default backend; under jit the
    arrays' devices aren't known. Anything that isn't an array (None, a ShapeDtypeStruct) is skipped. It is cheap, because it is
    part of the key under which an operation caches its calls.
    """
    for x in arrays:
        if not isinstance(x, jax.core.Tracer) and getattr(x, "committed", False):
            return _of_device(next(iter(x.sharding.device_set)), "the arrays' devices")
    default = _config.jax_default_device
    if default is not None:
        return _of_device(_first(default) if isinstance(default, str) else default, "jax.default_device")
    return _of_device(jax.devices()[0], "jax's default backend")


def _first(platform: str) -> jax.Device:
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise InputError(
            f"jax.default_device is {platform!r}, but there is none here ({error}); leave it out."
        ) from None


@functools.lru_cache(maxsize=1024)
def _of_device(device: jax.Device, source: str) -> CurrentDevice:
    return CurrentDevice(gpu_vendor(device.platform, device.client), device.device_kind, source)
