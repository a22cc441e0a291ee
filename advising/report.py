"""Entries as rows of a table and as JSON: estimated times and memory, traffic, bounds, and why the others lose."""

from __future__ import annotations

from typing import Any

from ..planning.text import bytes_text, seconds_text
from .entries import Entry
from .estimate import Estimate

__all__ = ["COLUMNS", "ESTIMATES", "TIES", "entries_json", "loses", "rows", "term_rows"]

COLUMNS = ("mesh", "runs", "strategy", "forward", "backward", "memory", "sends", "binds", "compiled peak", "why not")
ESTIMATES = "~ marks estimates by published rates (docs/advise.md): nothing was run. A compiled peak is the compiler's."
TIES = "equal times rank by memory, then by the smaller tp, then by the order of the search"
SHOWN = 12


def entries_json(entries: tuple[Entry, ...]) -> list[dict[str, Any]]:
    """JSON-ready values."""
    return [
        {
            **entry.candidate._asdict(),
            "sizes": entry.candidate.mesh,
            "implementation": entry.plan.implementation,
            "sequence_parallel": entry.strategy or None,
            "ring_order": entry.order,
            "estimate": entry.estimate.to_dict(),
            "loses": None if entry is entries[0] else loses(entry, entries[0]),
            "compiled": None if entry.compiled is None else entry.compiled.to_dict(),
            "declaration": entry.declaration.to_dict(),
            "notes": list(entry.notes),
        }
        for entry in entries
    ]


def rows(entries: tuple[Entry, ...], max_rows: int = SHOWN) -> list[tuple[str, ...]]:
    """The first entries, as cells of COLUMNS."""
    table: list[tuple[str, ...]] = []
    several = len({(e.candidate.batch, e.candidate.target) for e in entries}) > 1
    for entry in entries[:max_rows]:
        mesh = ",".join(f"{name}={size}" for name, size in entry.candidate.sizes)
        where = f"{mesh} batch {entry.candidate.batch} {entry.candidate.target}" if several else mesh
        passes = [f"~{seconds_text(estimated.seconds)}" for estimated in entry.estimate.passes]
        first = entry is entries[0]
        table.append(
            (
                where,
                entry.plan.implementation or "",
                " ".join(w for w in (entry.strategy, entry.order) if w),
                passes[0],
                passes[1] if len(passes) > 1 else "",
                f"~{bytes_text(entry.estimate.about_bytes)}",
                bytes_text(entry.estimate.sent_bytes),
                entry.estimate.bound,
                "" if entry.peak_bytes is None else bytes_text(entry.peak_bytes),
                "" if first else loses(entry, entries[0]),
            )
        )
    return table


def term_rows(entry: Entry) -> list[tuple[str, str]]:
    """(pass, its terms), which add up to its seconds; then the compiler's report, if requested."""
    rows = []
    for estimated in entry.estimate.passes:
        parts = [f"work {seconds_text(estimated.work)} (bound by {estimated.bound})"]
        parts += [f"{term.name} {seconds_text(term.seconds)}" for term in estimated.terms[1:] if term.seconds]
        rows.append((estimated.name, f"~{seconds_text(estimated.seconds)} = {' + '.join(parts)}"))
        for send in estimated.sends:
            hidden = send.seconds - send.waited
            overlap = f", {seconds_text(hidden)} of it beside the work" if hidden else ""
            cost = f"{bytes_text(send.sent_bytes)}, {seconds_text(send.seconds)}{overlap}: {send.what}"
            rows.append(("sends", f"{send.kind} over {'+'.join(send.axes)}: {cost}"))
    guess = entry.estimate
    parts = [f"operands {bytes_text(guess.argument_bytes)}", f"results {bytes_text(guess.output_bytes)}"]
    if guess.held_bytes:
        parts.append(f"about {bytes_text(guess.held_bytes)} that the strategy holds")
    passes = "of both passes " if len(guess.passes) > 1 else ""
    rows.append(("memory", f"~{bytes_text(guess.about_bytes)} per device = {passes}{' + '.join(parts)}"))
    for compiled in () if entry.compiled is None else entry.compiled.passes:
        sent = "sends exactly what is needed"
        if compiled.differences or compiled.unchecked:
            sent = "; ".join(
                (*compiled.differences, *(f"what it sends isn't known: {why}" for why in compiled.unchecked))
            )
        rows.append(("compiled", f"{compiled.name}: {bytes_text(compiled.peak_bytes)} at the peak; {sent}"))
    return rows


def loses(entry: Entry, winner: Entry) -> str:
    """What takes longer than in the winner, the largest first."""
    if entry.differs and not winner.differs:
        return "its program doesn't send exactly what is needed"
    if entry.estimate.unknown and not winner.estimate.unknown:
        return f"its traffic isn't known: {entry.estimate.unknown[0]}"
    candidate, best = _by_term(entry.estimate), _by_term(winner.estimate)
    per_row = winner.candidate.batch, entry.candidate.batch
    longer = {name: seconds / per_row[1] - best.get(name, 0.0) / per_row[0] for name, seconds in candidate.items()}
    longest = sorted((item for item in longer.items() if item[1] > 0), key=lambda item: -item[1])[:2]
    gap = entry.seconds_a_row - winner.seconds_a_row
    causes = [f"{name} +{seconds_text(seconds * per_row[1])}" for name, seconds in longest if seconds > 0.1 * gap]
    if entry.ranked_seconds == winner.ranked_seconds:
        return f"as fast by the estimate; {_tie(entry, winner)}"
    return ", ".join(causes) or f"+{seconds_text(gap * per_row[1])} in small parts"


def _by_term(estimate: Estimate) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for estimated in estimate.passes:
        for term in estimated.terms:
            seconds[term.name] = seconds.get(term.name, 0.0) + term.seconds
    return seconds


def _tie(entry: Entry, winner: Entry) -> str:
    """What decides between equal times."""
    if (extra_bytes := entry.estimate.about_bytes - winner.estimate.about_bytes) > 0:
        return f"{bytes_text(extra_bytes)} more memory"
    tp, best = (candidate.candidate.mesh.get("tp", 1) for candidate in (entry, winner))
    return f"tp={tp} splits heads more" if tp > best else "searched later"
