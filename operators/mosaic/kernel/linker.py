"""NVIDIA's linker where it is installed: JAX then has it make the binaries of kernels in Mosaic GPU."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

__all__ = ["LINKER", "linker", "registers_move"]

_PLUGIN, LINKER = "jax-cuda13-plugin", "nvidia-nvjitlink"


@functools.cache
def linker() -> str | None:
    """The version of the linker beside JAX's plugin; None without one of them."""
    try:
        version(_PLUGIN)
        return version(LINKER)
    except PackageNotFoundError:
        return None


def registers_move() -> bool:
    """Whether warpgroups can take registers that others give up. In a linker's binary all keep those that they begin with, since
    other binaries may call them."""
    return linker() is None
