"""Print what each implementation declares, as Markdown: where it runs, features, rules, tolerances.

`python tools/support_table.py` prints; with --write the tables go between the markers in docs/support.md. A test checks that
page against the declarations, so run `--write` after changing a capability.
"""

from __future__ import annotations

from collections.abc import Iterator

from written_page import WrittenPage, table

from attnops.planning import FEATURES, METHODS, Capability, PlannedOperation
from attnops.planning.capability import Tolerance
from attnops.registry import OperationRegistry


def main() -> None:
    """Print the tables, or write them into the page."""
    PAGE.main(__doc__ or "")


def tables() -> str:
    """All tables, with their headings."""
    operations = {name: OperationRegistry.get(name) for name in OperationRegistry.names()}
    own = {name: op for name, op in operations.items() if op.__module__.startswith("attnops.")}
    distinct = list(_distinct({name: op for name, op in own.items() if op.family != "recurrence"}))
    recurrent = {name: op for name, op in own.items() if op.family == "recurrence"}

    def over_arrays(name: str) -> bool:
        operation = own[name.partition(".")[0]]
        return operation.family == "attention" and operation.keys_in == "arrays"

    parts = [
        "## Which method runs where",
        _platforms(own),
        "## Features",
        "`.tpu` stands for `.forward_tpu`, and so on.",
        "### Attention over arrays",
        _features([(name, c) for name, c in distinct if c.tolerance and over_arrays(name)]),
        "### Pages, and the selection of keys",
        _features([(name, c) for name, c in distinct if c.tolerance and not over_arrays(name)]),
        "## Rules",
        "A rule is a condition on the sizes, dtypes and config of one call.",
        _rules(distinct),
        "## Published tolerances",
        "A tolerance limits the error of each row: its largest error against the float64 reference, divided by the size of the "
        "row. *Forward* is for outputs, *backward* for gradients.",
        "- A row is the output of one query and head, or the gradient of one query and head, or of one key and head. Each "
        "log-sum-exp, and the gradient of each sink, is a row of its own.\n"
        "- The size of a row is its largest absolute value, but at least the root of the sum of squares of the terms that are "
        "added to make it. The size of a log-sum-exp is at least 1.\n"
        "- An indexer's error is how far the greatest score that a query leaves out is above the least that it selects; the size "
        "is the sum over the heads of |weight| times scale times the lengths of query and longest key.",
        _tolerances(distinct),
        "## Recurrent operations",
        "Arrays are accepted in every layout. A call without one of the optional arrays leaves out what it does.",
        _recurrences(recurrent),
        _tolerances(list(_distinct(recurrent))),
    ]
    return "\n\n".join(parts)


def _distinct(operations: dict[str, type[PlannedOperation]]) -> Iterator[tuple[str, Capability]]:
    """Each implementation once: splash's forward_native is vanilla's own, and is listed there."""
    for name, operation in operations.items():
        for method in operation.declared_methods():
            if operation.listed_as(method) == f"{name}.{method}":
                yield f"{name}.{method}", operation.capability(method)


def _recurrences(operations: dict[str, type[PlannedOperation]]) -> str:
    names: dict[tuple[str, str], list[str]] = {}  # other names of an operation share its row
    for name, operation in operations.items():
        required, optional = (
            ", ".join(f"`{row.name}`" for row in operation.operands if row.optional is wanted)
            for wanted in (False, True)
        )
        names.setdefault((required, optional), []).append(f"`{name}`")
    return table(("Operation", "Arrays", "Optional"), ((", ".join(of), *arrays) for arrays, of in names.items()))


def _platforms(operations: dict[str, type[PlannedOperation]]) -> str:
    names: dict[tuple[str, ...], list[str]] = {}  # operations with the same methods share a row
    for name, operation in operations.items():
        methods = tuple(f"`{method}`" for method in operation.running_methods().values())
        names.setdefault(methods, []).append(f"`{name}`")
    return table(("Operation", *METHODS), ((", ".join(of), *methods) for methods, of in names.items()))


def _features(implementations: list[tuple[str, Capability]]) -> str:
    named = (name.split(".", 1) for name, _ in implementations)
    head = ("Feature", *(f"`{operation}`<br>`.{method.removeprefix('forward_')}`" for operation, method in named))
    rows = (
        (f"`{feature}`<br>{meaning}", *("yes" if feature in c.consumes else "-" for _, c in implementations))
        for feature, meaning in FEATURES.items()
        if any(feature in c.consumes for _, c in implementations)
    )
    return table(head, rows)


def _rules(implementations: list[tuple[str, Capability]]) -> str:
    codes: dict[tuple[str, str, str], list[str]] = {}  # rules that differ by nothing but their code share a row
    for name, capability in implementations:
        for rule in capability.rules:
            codes.setdefault((name, rule.field, rule.hint), []).append(f"`{rule.code}`")
    rows = ((f"`{name}`", ", ".join(of), f"`{field}`", hint) for (name, field, hint), of in codes.items())
    return table(("Implementation", "Code", "Field", "Hint"), rows)


def _tolerances(implementations: list[tuple[str, Capability]]) -> str:
    def both(bound: Tolerance | None) -> str:
        if bound is None:
            return "-"
        return f"{bound.forward:g}" + ("" if bound.backward is None else f", {bound.backward:g}")

    dtypes = ("float64", "float32", "bfloat16", "float16")
    rows = (
        (f"`{name}`", *(both(c.tolerance.get(dtype)) for dtype in dtypes)) for name, c in implementations if c.tolerance
    )
    return table(("Implementation: forward, backward", *dtypes), rows)


PAGE = WrittenPage("support.md", "support_table", tables)

if __name__ == "__main__":
    main()
