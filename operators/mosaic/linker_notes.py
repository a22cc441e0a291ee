"""What a plan says of NVIDIA's linker."""

from __future__ import annotations

from ...planning.notes import note
from .kernel.linker import LINKER, linker

__all__ = ["linker_notes"]


def linker_notes() -> tuple[str, ...]:
    """That the linker of this environment makes a kernel's binary."""
    installed = linker()
    return () if installed is None else (note("mosaic.linker", package=LINKER, version=installed),)
