"""The kind of attnops' steps of recurrences over slots."""

from __future__ import annotations

from typing import Any

from ...planning.recurrent.step_operands import CONV_ROWS
from ..features import Feature
from ..source import Subject
from .case import CallCase
from .kind import DTYPES, TRANSFORMS, CallParts, Kind
from .lines import called
from .recurrence import ARRAYS, NARROW, STATE_VALUES, absent_from, drawn_arrays

__all__ = ["steps_over_slots"]

# Tokens of each row, and its tokens before them.
_ROWS = {
    "no": ((1, 3, 2), (4, 0, 2)),
    "decode": ((1, 1, 1), (4, 0, 2)),
    "prefill": ((3, 2, 4), (0, 0, 0)),
    "empty": ((2, 0, 3), (1, 4, 0)),
    "chunks": ((70, 3, 66), (2, 0, 0)),
}


def steps_over_slots(operation: Any) -> Kind:
    """Of steps of one operation."""

    def parts(case: CallCase, subject: Subject) -> CallParts:
        table, size = operation.operands, _sizes(case)
        names = [row.name for row in table if not row.optional or case.has(row.name) or _convolves(case, row.name)]
        windows = [name for name in names if name.endswith(CONV_ROWS[2])]
        inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}"]
        inputs += drawn_arrays(table, names, size, case, "thd")
        of_tokens = [name for name in names if table[name].dims[0] == "tokens"]
        inputs += _batch(case, size, ["state", *windows], of_tokens)
        run = called(case, subject.convention, longest=size["longest"])
        run.append(f"return r.attention_outputs, r.state, *(r.windows[n] for n in {windows})")
        level = case.level("conv_activation")
        activation = "" if level == "no" else f", conv_activation={level!r}"
        expected = (
            f"plan = f.plan(**x, batch=batch{activation})",
            "found = recurrent_reference(plan.problem, arrays(some) | batch.arrays, type(f), plan.config)",
            f"return [found[n] for n in {['attention_outputs', 'state', *windows]}]",
        )
        imports = ("from attnops.verify.recurrent_of_call import recurrent_reference",)
        return CallParts(imports, tuple(inputs), tuple(run), expected, ("outputs", "states", *windows))

    def absent(one: Feature) -> str | None:
        if one.factor in ("conv", "conv_activation"):
            has = any(row.name.endswith(CONV_ROWS) for row in operation.operands)
            return None if has else "no convolution before the recurrence"
        return absent_from(operation, ARRAYS)(one)

    return Kind(
        "the required arrays alone, rows of several lengths",
        {name: {"yes": title} for name, title in ARRAYS.items()}
        | {
            "conv": {"yes": "convolutions before the recurrence", "bias": "convolutions with a bias"},
            "conv_activation": {"silu": "convolutions with an activation"},
            "rows": {
                "decode": "one token of each sequence", "prefill": "whole prompts", "empty": "a row without tokens",
                "chunks": "more than one chunk of tokens",
            },
            "drafts": {"yes": "states without the last tokens"},
            "slots": {"same": "a state written where it was read", "none": "a state that isn't written"},
            "unused": {"tokens": "tokens of no sequence", "rows": "rows that aren't in use"},
            "longest": {"yes": "a longest row declared"},
            "heads": {"gqa": "grouped heads"},
            "dims": {"value": "value dim of its own"},
            "values": STATE_VALUES,
            "dtype": DTYPES,
            "transform": {name: title for name, title in TRANSFORMS.items() if name != "remat"},
        },
        {"rows": 3, "kv_heads": 2, "group": 1, "dim": 8, "value_dim": 8, "spare": 0, "spare_rows": 0, "columns": 1},
        parts,
        changes={
            "heads.gqa": {"group": 2}, "dims.value": {"value_dim": 6}, "unused.tokens": {"spare": 3},
            "unused.rows": {"spare_rows": 2}, "drafts": {"columns": 3},
        },
        steps=({"rows": 1}, {"rows": 2}, {"kv_heads": 1}, *({"dim": n, "value_dim": n} for n in (1, 2, 4))),
        brings={"conv_activation.silu": {"conv": "yes"}},
        apart=NARROW,
        asked=("longest", "conv_activation"),
        absent=absent,
    )  # fmt: skip


def _convolves(case: CallCase, name: str) -> bool:
    """Whether an array is of a convolution that the case has."""
    level = case.level("conv")
    return name.endswith(CONV_ROWS if level == "bias" else (CONV_ROWS[0], CONV_ROWS[2])) and level != "no"


def _rows(case: CallCase) -> tuple[list[int], list[int]]:
    lengths, pasts = _ROWS[case.level("rows")]
    return list(lengths[: case.sizes["rows"]]), list(pasts[: case.sizes["rows"]])


def _sizes(case: CallCase) -> dict[str, int]:
    size = dict(case.sizes)
    heads = size["kv_heads"] * size["group"]
    lengths, _ = _rows(case)
    return size | {
        "tokens": sum(lengths) + size["spare"], "slots": len(lengths) * (1 + size["columns"]) + 1, "heads": heads,
        "head_dim": size["dim"], "channels": heads * size["value_dim"], "state_dim": size["dim"], "width": 4, "history": 3,
        "longest": max(lengths),
    }  # fmt: skip


def _batch(case: CallCase, size: dict[str, int], of_slots: list[str], of_tokens: list[str]) -> list[str]:
    """Lines that make `batch`, and put junk where nothing may be read. of_slots, of_tokens: names of arrays."""
    lengths, pasts = _rows(case)
    slots, columns = size["slots"], size["columns"]
    order = [(5 * n + 3) % slots for n in range(slots)] if slots % 5 else list(range(slots))[::-1]
    ids = iter(order)
    read, write = [], []
    for n, (length, past) in enumerate(zip(lengths, pasts, strict=True)):
        own = next(ids)
        read.append(own if past else slots)
        kept = [
            own if case.level("slots") == "same" and not j else next(ids) for j in range(min(columns, max(length, 1)))
        ]
        if case.level("slots") == "none" and not n:
            kept = [slots for _ in kept]
        write.append([slots] * columns if not length else kept + [slots] * (columns - len(kept)))
    nobodys = list(ids)
    lines = [
        f'x["{n}"] = x["{n}"].at[np.array({nobodys})].set({case.junk})  # slots of nobody' for n in of_slots if nobodys
    ]
    if size["spare"]:
        lines += [
            f"nobody = lambda y: y.at[{sum(lengths)}:].set({case.junk})",
            f"x |= {{n: nobody(x[n]) for n in {of_tokens}}}",
        ]
    lines += [
        f"lengths, pasts = np.array({lengths}), np.array({pasts})",
        f"batch = StateBatch.make({slots}, cu_q_lens=np.cumsum([0, *lengths]), kv_lens=lengths + pasts, read_slots={read}, "
        f"write_slots={write}, max_sequences={len(lengths) + size['spare_rows']}, tokens={size['tokens']})",
    ]
    return lines
