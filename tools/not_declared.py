"""Print what can't be declared or run on any implementation, as Markdown, from the declared rules and tables.

`python tools/not_declared.py` prints; with --write the tables go between the markers in docs/not-declared.md, which a test
checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from written_page import WrittenPage, table

from attnops.masks.serial import DYNAMIC_KINDS
from attnops.models.keys import REFUSED
from attnops.models.plain_families import PLAIN
from attnops.planning import FEATURES, PlannedOperation
from attnops.planning.capability import ALL_FEATURES
from attnops.registry import OperationRegistry


def main() -> None:
    """Print the tables, or write them into the page."""
    PAGE.main(__doc__ or "")


def tables() -> str:
    """All tables, with their headings."""
    return "\n\n".join(
        [
            "## On no implementation",
            "Rules of `forward_native`, plain XLA, which runs what the platforms' kernels refuse. What it refuses is refused "
            "everywhere.",
            table(("Operation", "Field", "Code", "Instead"), _rules()),
            "## By an operation as a whole",
            "Features of a call that no implementation of an operation takes. The call is refused; `vanilla` takes all of them.",
            table(("Operation", "Features"), _features()),
            "## In a file",
            "A declaration file has no arrays. These masks are passed in the call: "
            + ", ".join(f"`{kind}`" for kind in sorted(DYNAMIC_KINDS))
            + ". A file can say where the call's segment ids go: [images and prefixes](masks.md#images-and-prefixes).",
            "## Of a model's config",
            table(("Key", "Why"), ((f"`{key}`", why) for key, (_, why) in REFUSED.items())),
            f"Of {len(PLAIN['unread'])} types of models nothing is read; [Model types](model-types.md#not-read) says why.",
        ]
    )


def _own() -> dict[str, type[PlannedOperation]]:
    every = {name: OperationRegistry.get(name) for name in OperationRegistry.names()}
    return {name: op for name, op in every.items() if op.__module__.startswith("attnops.")}


def _rules() -> Iterator[tuple[str, ...]]:
    seen: dict[tuple[str, ...], list[str]] = {}
    for name, operation in _own().items():
        for rule in operation.capability("forward_native").rules:
            seen.setdefault((f"`{rule.field}`", f"`{rule.code}`", rule.hint), []).append(f"`{name}`")
    for (field, code, hint), names in sorted(seen.items(), key=lambda row: row[1]):
        yield ", ".join(names), field, code, hint


def _features() -> Iterator[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name, operation in _own().items():
        if operation.family != "attention" or operation.keys_in != "arrays":
            continue
        taken = frozenset().union(*(operation.capability(method).consumes for method in operation.declared_methods()))
        missing = [feature for feature in FEATURES if feature in ALL_FEATURES - taken]
        if missing:
            groups.setdefault(", ".join(f"{FEATURES[one]} (`{one}`)" for one in missing), []).append(f"`{name}`")
    for features, names in groups.items():
        yield ", ".join(names), features


PAGE = WrittenPage("not-declared.md", "not_declared", tables)

if __name__ == "__main__":
    main()
