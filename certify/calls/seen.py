"""Which keys a query of a dense call sees, as source: [batch, q, kv] of positions, lengths and segments."""

from __future__ import annotations

from .case import CallCase

__all__ = ["CHANGES", "FACTORS", "SIZES", "STEPS", "offset_of", "seen_lines", "sides", "small_arrays"]

FACTORS = {
    "causal": {"no": "not causal"},
    "window": {"left": "window that looks back", "both": "window on both sides", "open": "window with a limit on one side"},
    "segments": {"yes": "segment ids"},
    "lengths": {"yes": "key lengths by row", "zero": "a key length of 0"},
    "offset": {"yes": "the queries' position given", "rows": "a position of the queries for each row"},
    "lens": {"odd": "odd lengths", "one": "one query"},
}  # fmt: skip
SIZES = {"batch": 2, "q_len": 8, "kv_len": 8}
CHANGES = {
    "offset": {"q_len": 3}, "offset.rows": {"q_len": 3}, "lens.odd": {"q_len": 7, "kv_len": 7}, "lens.one": {"q_len": 1},
}  # fmt: skip
STEPS = ({"batch": 1}, *({"q_len": n, "kv_len": n} for n in (2, 3, 5)))
_SIDES = {"left": (2, 0), "both": (2, 1), "open": (1, None)}


def offset_of(case: CallCase) -> int:
    """The position of the first query, where rows don't have their own."""
    return case.sizes["kv_len"] - case.sizes["q_len"] if case.has("offset") or case.level("lens") == "one" else 0


def sides(case: CallCase) -> tuple[int | None, int | None]:
    """Of the case's window."""
    return _SIDES.get(case.level("window"), (None, None))


def small_arrays(case: CallCase) -> list[str]:
    """Lines that define the arrays of integers that a case has: `segments`, `kv_lengths`, `offsets`."""
    batch, q_len, kv_len = (case.sizes[name] for name in ("batch", "q_len", "kv_len"))
    lines = []
    if case.has("segments"):
        lines.append(
            f"kv_segments = np.broadcast_to(np.arange({kv_len}) * 3 // {kv_len + 1}, {(batch, kv_len)}).astype(np.int32)"
        )
        first = offset_of(case)
        lines.append(f"q_segments = kv_segments[:, {first} : {first + q_len}]")
    if case.has("lengths"):
        last = "; kv_lengths[-1] = 0" if case.level("lengths") == "zero" else ""
        lines.append(f"kv_lengths = np.maximum({kv_len} - 1 - np.arange({batch}), 1).astype(np.int32){last}")
    if case.level("offset") == "rows":
        lines.append(f"offsets = np.maximum({kv_len - q_len} - np.arange({batch}), 0).astype(np.int32)")
    return lines


def seen_lines(case: CallCase) -> list[str]:
    """Lines that define `i`, `j` and bool `see`, [batch, q, kv]."""
    batch, q_len, kv_len = (case.sizes[name] for name in ("batch", "q_len", "kv_len"))
    at = "offsets[:, None, None]" if case.level("offset") == "rows" else f"{offset_of(case)}"
    left, right = sides(case)
    terms = [] if case.has("causal") else ["(j <= i)"]
    terms += [] if left is None else [f"(j >= i - {left})"]
    terms += [] if right is None else [f"(j <= i + {right})"]
    terms += ["(q_segments[..., None] == kv_segments[:, None])"] if case.has("segments") else []
    terms += ["(j < kv_lengths[:, None, None])"] if case.has("lengths") else []
    return [
        f"i, j = np.arange({q_len})[:, None] + {at}, np.arange({kv_len})",
        f"see = np.broadcast_to({' & '.join(terms) or 'True'}, {(batch, q_len, kv_len)})",
    ]
