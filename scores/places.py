"""Places: where logits are, for a score's definition and for the steps of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Places"]


class Places(NamedTuple):
    """Integer arrays that broadcast to the logits [batch, heads, q, kv] (or to a tile): the batch row, the query head, the
    position of the query (its row plus the call's query offset, or as the mask's `Positions` say) and of the key.

    row: the index of the query, without the offset.
    """

    batch: Any
    head: Any
    q: Any
    kv: Any

    @property
    def distance(self) -> Any:
        """How far the key is after the query; negative for earlier keys."""
        return self.kv - self.q
