"""TableProblem: one call of an operation whose arrays are all in its table; frozen, hashable, and all that its plan depends
on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...sharding import OperandShape, describe_mesh
from ..problem import Problem, platform_text

__all__ = ["TableProblem"]


@dataclass(frozen=True, kw_only=True)
class TableProblem(Problem):
    """What a call requests. `operands` are all arrays of the call, `results` what it returns, each with its declared spec;
    `sizes` the size of each dim; `options` the static arguments; `layout` the caller's."""

    results: tuple[OperandShape, ...]
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]
    layout: str

    @property
    def runtime_dtype(self) -> str:
        """The dtype of the arrays, whose tolerance is published."""
        return self.input_dtype

    @property
    def size(self) -> dict[str, int]:
        """The size of each dim, by name."""
        return dict(self.sizes)

    @property
    def option(self) -> dict[str, Any]:
        """The static arguments, by name."""
        return dict(self.options)

    def described_options(self) -> dict[str, Any]:
        """The sizes and the static arguments."""
        return {"sizes": self.size, "options": self.option, "layout": self.layout}

    def describe(self) -> str:
        """What is computed, and where, in one line."""
        sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in self.sizes)
        return (
            f"{platform_text(self)}: {sizes}, {self.input_dtype}, {self.layout}, mode {self.mode.strip('_')}, "
            f"mesh {describe_mesh(self.mesh)}"
        )
