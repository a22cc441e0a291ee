"""Route: which of several algorithms inside one implementation a call uses, and why. It is part of the plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Route"]


@dataclass(frozen=True)
class Route:
    """A route's name and why it was chosen. Subclasses add its sizes."""

    name: str
    why: str

    @property
    def whole(self) -> bool:
        """Whether it builds all logits of a device."""
        return False

    def tile(self, backward: bool) -> tuple[int | None, int | None]:
        """The queries and keys that it works on together; None: all."""
        return None, None

    def describe(self) -> str:
        """`blockwise, block_q=512, block_kv=512: the logits would take 512.0 MiB`."""
        sizes = [f"{n}={v}" for n, v in self.to_dict().items() if n not in ("name", "why") and v is not None]
        return f"{', '.join((self.name, *sizes))}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """The route as JSON-ready values."""
        return dataclasses.asdict(self)
