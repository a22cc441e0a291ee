"""differences: where a compiled program sends something other than its plan's strategy has to."""

from __future__ import annotations

from ..planning.traffic import Traffic
from .collectives import Collective

__all__ = ["differences"]

# Differences below these bytes, or this share of the total, are ignored: ids that two operands share, the compiler's scalars.
_SMALL, _SHARE = 4096, 0.01


def differences(least: Traffic, found: tuple[Collective, ...]) -> tuple[str, ...]:
    """Where a program sends a different number of bytes than it has to, one line per kind of collective."""
    if least.unknown:
        return ()
    total = sum(need.sent_bytes for need in least.needs)
    lines = []
    for kind in sorted({c.kind for c in found} | {n.kind for n in least.needs}):
        sent = sum(c.sent_bytes for c in found if c.kind == kind)
        needed = sum(n.sent_bytes for n in least.needs if n.kind == kind and not n.optional)
        most = sum(n.sent_bytes for n in least.needs if n.kind == kind)
        slack = max(_SHARE * total, _SMALL)
        if not needed - slack <= sent <= most + slack:
            lines.append(f"{kind}: {sent:.0f} bytes sent per device, {needed:.0f} needed")
    return tuple(lines)
