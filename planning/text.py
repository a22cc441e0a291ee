"""Specs, bytes and fields as text, for plans and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from ..symbolic import is_symbolic

__all__ = ["bytes_text", "fields_text", "seconds_text", "spec_text"]


def spec_text(spec: PartitionSpec) -> str:
    """`P(fsdp+dp, sp, tp, -)`: axes of one dimension are joined by +, and - means unsplit."""

    def entry(axes: str | tuple[str, ...] | None) -> str:
        return "-" if axes is None else axes if isinstance(axes, str) else "+".join(axes) or "-"

    return f"P({', '.join(entry(axes) for axes in spec)})"


def bytes_text(count: float) -> str:
    """`12.0 MiB`; `64*b bytes` if it depends on a symbolic size."""
    if is_symbolic(count):
        return f"{count} bytes"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def seconds_text(seconds: float) -> str:
    """`36.9 us`."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def fields_text(fields: Mapping[str, Any]) -> str:
    """`block_q=512, block_kv=256`."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())
