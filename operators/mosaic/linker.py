"""NVIDIA's linker where it is installed: JAX then has it make the binaries of kernels in Mosaic GPU."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from ...planning.notes import note

__all__ = ["linker_notes"]

_PLUGIN, _LINKER = "jax-cuda13-plugin", "nvidia-nvjitlink"


def linker_notes() -> tuple[str, ...]:
    """That the linker of this environment makes a kernel's binary. A linker keeps the registers of all warpgroups as they begin,
    since other binaries may call them, and lets each product wait for the one before."""
    linker = _linker()
    return () if linker is None else (note("mosaic.linker", package=_LINKER, version=linker),)


@functools.cache
def _linker() -> str | None:
    """Its version beside JAX's plugin; None without one of them."""
    try:
        version(_PLUGIN)
        return version(_LINKER)
    except PackageNotFoundError:
        return None
