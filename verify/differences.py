"""differences: where a compiled program sends something other than its plan's strategy has to."""

from __future__ import annotations

from ..planning.traffic import Traffic
from .collectives import Collective

__all__ = ["differences"]

# Differences below these bytes, or this share of the total, are ignored: ids that two operands share, the compiler's scalars.
_SMALL, _SHARE = 4096, 0.01


def differences(required: Traffic, sent_collectives: tuple[Collective, ...]) -> tuple[str, ...]:
    """Where a program sends a different number of bytes than it has to, one line per kind of collective."""
    if required.unknown:
        return ()
    total = sum(need.sent_bytes for need in required.needs)
    lines = []
    for kind in sorted({c.kind for c in sent_collectives} | {n.kind for n in required.needs}):
        sent = sum(c.sent_bytes for c in sent_collectives if c.kind == kind)
        needed = sum(n.sent_bytes for n in required.needs if n.kind == kind and not n.optional)
        max_bytes = sum(n.sent_bytes for n in required.needs if n.kind == kind)
        slack = max(_SHARE * total, _SMALL)
        if not needed - slack <= sent <= max_bytes + slack:
            lines.append(f"{kind}: {sent:.0f} bytes sent per device, {needed:.0f} needed")
    return tuple(lines)
