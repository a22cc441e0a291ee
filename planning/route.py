"""Route: which of several ways inside one implementation a call takes, and why; part of its plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Route"]


@dataclass(frozen=True)
class Route:
    """A way's name and why it was chosen; subclasses add the sizes that it works with."""

    name: str
    why: str

    def describe(self) -> str:
        """`blockwise, block_q=512, block_kv=512: the logits would take 512.0 MiB`."""
        sizes = [f"{n}={v}" for n, v in self.to_dict().items() if n not in ("name", "why") and v is not None]
        return f"{', '.join((self.name, *sizes))}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return dataclasses.asdict(self)
