"""CallCase: levels of the factors of a kind, and the sizes and numbers that make one call of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["DEFAULTS", "CallCase"]

DEFAULTS = {"dtype": "float32", "layout": "bthd", "transform": "jit"}


@dataclass(frozen=True)
class CallCase:
    """One call. levels: of the factors that aren't at their default, which is "no" unless DEFAULTS has another. Numbers are
    drawn by `seed`."""

    levels: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    seed: int = 0

    def __hash__(self) -> int:
        return hash(repr(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def level(self, factor: str) -> str:
        """Its level of a factor."""
        return self.levels.get(factor, DEFAULTS.get(factor, "no"))

    def has(self, factor: str) -> bool:
        """Whether a factor isn't at its default."""
        return factor in self.levels

    @property
    def junk(self) -> str:
        """What stands where nothing may be read; debug_nans would find it before the function does anything."""
        return "1e3" if self.level("transform") == "debug_nans" else "jnp.nan"
