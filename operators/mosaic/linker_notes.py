"""What a plan says of NVIDIA's linker."""

from __future__ import annotations

from ...planning.notes import note
from .kernel.linker import linker

__all__ = ["linker_notes"]


def linker_notes() -> tuple[str, ...]:
    """That the linker of this environment makes a kernel's binary."""
    if (installed := linker()) is None:
        return ()
    package, version = installed
    return (note("mosaic.linker", package=package, version=version),)
