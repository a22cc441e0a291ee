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
        self.values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def fill(self, name: str, default: int, none: int = LANES) -> None:
        declared = getattr(self.config, name)
        self.values[name] = declared if declared is not None else none if self.config.is_set(name) else default

    def fill_inner(self, inner: str, outer: str, cap: int, multiple: int = LANES) -> None:
        """A block within another: it must divide it and be a multiple of `multiple`."""
        self.fill(inner, dividing_block(self.values[outer], cap, multiple), self.values[outer])
        if self.values[outer] % self.values[inner]:
            raise ConfigError(
                f"SplashConfig: {outer}={self.values[outer]} is not a multiple of {inner}={self.values[inner]}."
            )


def choose_block(length: int, cap: int, multiple: int = LANES) -> int:
    """The largest multiple of `multiple` up to `cap` that pads at most a fiftieth more than blocks of `multiple` would."""
    min_length = math.ceil(length / multiple) * multiple
    candidates = range(multiple, max(multiple, min(cap, min_length)) + 1, multiple)
    return max(b for b in candidates if math.ceil(length / b) * b <= 1.02 * min_length)


def dividing_block(block: int, cap: int, multiple: int = LANES) -> int:
    """The largest multiple of `multiple` up to `cap` that divides a block; the block itself if that would be 128, or there is
    none."""
    divisors = [b for b in range(multiple, min(block, cap) + 1, multiple) if block % b == 0]
    return block if not divisors or divisors[-1] == LANES < min(block, cap) else divisors[-1]
