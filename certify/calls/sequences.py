"""Sequences in pages as source: which token of a step is whose, and where the keys of each sequence are."""

from __future__ import annotations

from .case import CallCase

__all__ = ["CHANGES", "ROWS", "SIZES", "STEPS", "UNUSED", "paged_lines", "paged_sizes", "sequences"]

# Tokens of each row in the step, and of its sequence including these.
_ROWS = {
    "no": ((1, 3, 5), (9, 7, 5)),
    "decode": ((1, 1, 1), (9, 4, 1)),
    "prefill": ((5, 4, 1), (5, 4, 1)),
    "empty": ((2, 0, 3), (9, 4, 7)),
    "full": ((1, 3, 4), (8, 4, 4)),
}
ROWS = {
    "decode": "one token of each sequence",
    "prefill": "whole prompts",
    "empty": "a row without tokens",
    "full": "sequences that fill their pages",
}
UNUSED = {"tokens": "tokens of no sequence", "rows": "rows that aren't in use"}
SIZES = {"rows": 3, "longest": 9, "page": 4, "spare": 0, "spare_rows": 0}
CHANGES = {"unused.tokens": {"spare": 3}, "unused.rows": {"spare_rows": 2}, "page": {"page": 1}}
STEPS = ({"rows": 1}, {"rows": 2}, *({"longest": n} for n in (1, 2, 3, 5)))


def sequences(case: CallCase) -> tuple[list[int], list[int]]:
    """(tokens in the step, tokens including these) of each row."""
    count, longest = case.sizes["rows"], case.sizes["longest"]
    of_step, lengths = _ROWS[case.level("rows")]
    kept = [min(n, longest) for n in lengths[:count]]
    return [min(n, length) for n, length in zip(of_step[:count], kept, strict=True)], kept


def paged_sizes(case: CallCase) -> dict[str, int]:
    """What a convention may name besides the case's sizes."""
    of_step, lengths = sequences(case)
    width = max(-(-n // case.sizes["page"]) for n in lengths)
    return {
        "tokens": sum(of_step) + case.sizes["spare"], "width": width, "pages": len(lengths) * width + 1,
        "table_rows": len(lengths) + case.sizes["spare_rows"], "count": len(lengths), "longest_row": max(of_step),
    }  # fmt: skip


def paged_lines(case: CallCase) -> list[str]:
    """Lines that define the step. before: tokens of each row that are stored already. Of all tokens of all sequences, one
    sequence after the other: `ends`, where each ends; `old` and `new`, those that are stored and those of the step; `page_of`
    and `slot_of`, where each is."""
    of_step, lengths = sequences(case)
    size, page = paged_sizes(case), case.sizes["page"]
    free = [(3 * n + 2) % size["pages"] for n in range(size["pages"])]
    free = free if len(set(free)) == len(free) else list(range(size["pages"]))[::-1]
    table, at = [], 0
    for length in lengths:
        used = -(-length // page)
        table.append(free[at : at + used])
        at += used
    spare = case.sizes["spare"]
    return [
        f"q_lens, kv_lens, table = np.array({of_step}), np.array({lengths}), {table}",
        "cu_q_lens, ends = (np.cumsum([0, *n]) for n in (q_lens, kv_lens))",
        f"before = {'kv_lens' if case.level('update') == 'none' else 'kv_lens - q_lens'}",
        "old = np.concatenate([np.arange(b - n, b - n + m) for b, n, m in zip(ends[1:], kv_lens, before)])",
        "new = np.concatenate([np.arange(b - m, b) for b, m in zip(ends[1:], q_lens)]"
        + (f" + [np.zeros({spare}, int)])  # and {spare} tokens of nobody" if spare else ")"),
        f"page_of = np.concatenate([np.repeat(ids, {page})[:n] for ids, n in zip(table, kv_lens)])",
        f"slot_of = np.concatenate([np.arange(n) % {page} for n in kv_lens])",
    ]
