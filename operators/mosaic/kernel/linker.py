"""NVIDIA's linker where it is installed: JAX then has it make the binaries of kernels in Mosaic GPU."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

__all__ = ["linker", "registers_move"]

_LINKERS = {"jax-cuda13-plugin": "nvidia-nvjitlink", "jax-cuda12-plugin": "nvidia-nvjitlink-cu12"}  # by JAX's plugin


@functools.cache
def linker() -> tuple[str, str] | None:
    """(package, version) of the linker of this environment's plugin; None without one of them."""
    for plugin, package in _LINKERS.items():
        try:
            version(plugin)
            return package, version(package)
        except PackageNotFoundError:
            continue
    return None


def registers_move() -> bool:
    """Whether warpgroups can take registers that others give up. In a linker's binary all keep those that they begin with, since
    other binaries may call them."""
    return linker() is None
