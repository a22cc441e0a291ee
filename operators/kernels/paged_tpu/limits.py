"""What the kernels can't take, with reasons; and sizes of blocks by rule."""

from __future__ import annotations

from .geometry import Geometry, Options

__all__ = ["chosen_sizes", "reasons_against"]


def chosen_sizes(geometry: Geometry, vmem_limit_bytes: int | None) -> tuple[int, int, int]:
    return max(1, min(256 // geometry.page, geometry.width, 32)), 64, 4


def reasons_against(geometry: Geometry, options: Options) -> list[tuple[str, str, str]]:
    return []
