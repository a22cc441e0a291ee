"""How splash's block sizes are filled in: declared sizes, a kernel's own default for None, else chosen ones."""

from __future__ import annotations

import math
from typing import Any

from ...errors import ConfigError
from .splash_config import LANES, SplashConfig

__all__ = ["BlockSizes", "choose_block", "dividing_block"]


class BlockSizes:
    """Sizes being filled in: declared ones, the kernel's default for None, else those given here."""

    def __init__(self, config: SplashConfig) -> None:
        self.config = config
        self.found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def fill(self, name: str, default: int, none: int = LANES) -> None:
        given = getattr(self.config, name)
        self.found[name] = given if given is not None else none if self.config.is_set(name) else default

    def fill_inner(self, inner: str, outer: str, cap: int, unit: int = LANES) -> None:
        """A block within another: it must divide it and be a multiple of `unit`."""
        self.fill(inner, dividing_block(self.found[outer], cap, unit), self.found[outer])
        if self.found[outer] % self.found[inner]:
            raise ConfigError(
                f"SplashConfig: {outer}={self.found[outer]} is not a multiple of {inner}={self.found[inner]}."
            )


def choose_block(length: int, cap: int, unit: int = LANES) -> int:
    """The largest multiple of `unit` up to `cap` that pads at most a fiftieth more than blocks of `unit` would."""
    least = math.ceil(length / unit) * unit
    candidates = range(unit, max(unit, min(cap, least)) + 1, unit)
    return max(b for b in candidates if math.ceil(length / b) * b <= 1.02 * least)


def dividing_block(block: int, cap: int, unit: int = LANES) -> int:
    """The largest multiple of `unit` up to `cap` that divides a block; the block itself if that would be 128, or there is
    none."""
    found = [b for b in range(unit, min(block, cap) + 1, unit) if block % b == 0]
    return block if not found or found[-1] == LANES < min(block, cap) else found[-1]
