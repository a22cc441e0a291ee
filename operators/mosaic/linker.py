"""NVIDIA's linker where it is installed: JAX then has it make the binaries of kernels in Mosaic GPU."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from ...planning.notes import note

__all__ = ["linker_notes", "registers_move"]

_PLUGIN, _LINKER = "jax-cuda13-plugin", "nvidia-nvjitlink"


def registers_move() -> bool:
    """Whether warpgroups can take registers that others give up. In a linker's binary all keep those that they begin with, since
    other binaries may call them."""
    return _linker() is None


def linker_notes() -> tuple[str, ...]:
    """That the linker of this environment makes a kernel's binary."""
    return () if registers_move() else (note("mosaic.linker", package=_LINKER, version=_linker()),)


@functools.cache
def _linker() -> str | None:
    """Its version beside JAX's plugin; None without one of them."""
    try:
        version(_PLUGIN)
        return version(_LINKER)
    except PackageNotFoundError:
        return None
