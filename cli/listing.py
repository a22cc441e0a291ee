"""`attnops list`: operations by platform, what each implementation consumes, and its published tolerances."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from ..errors import AttnOpsError
from ..planning import FEATURES, METHODS, PlannedOperation
from ..registry import OperationRegistry
from .console import table, text, title

__all__ = ["listing", "print_listing"]


def listing() -> dict[str, Any]:
    """All registered operations, as JSON-ready values. An operation that fails to import is listed with its error."""
    operations = {}
    for name in OperationRegistry.names():
        try:
            operation: Any = OperationRegistry.get(name)
            operations[name] = _operation(operation)
        except AttnOpsError as error:
            operations[name] = {"error": str(error)}
    return {"features": dict(FEATURES), "operations": operations}


def _operation(operation: type[PlannedOperation]) -> dict[str, Any]:
    methods = operation.declared_methods()
    implementations = {}
    for method in methods:
        capability = operation.capability(method)
        listed = operation.listed_as(method)
        implementations[method] = {
            "borrowed_from": None if listed == f"{operation.name}.{method}" else listed,
            "consumes": sorted(capability.consumes),
            "rules": [rule.code for rule in capability.rules],
            "tolerance": {dtype: value._asdict() for dtype, value in capability.tolerance.items()},
        }
    return {
        "family": operation.family,
        "config": operation.config.__name__,
        "about": (operation.__doc__ or "").strip().partition("\n")[0],
        "platforms": operation.running_methods(),
        "implementations": implementations,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def print_listing(data: dict[str, Any]) -> None:
    """Print the listing as three tables."""
    console = text()
    sound = {name: entry for name, entry in data["operations"].items() if "error" not in entry}
    runs = table("operation", *METHODS)
    for name, entry in sound.items():
        methods = entry["platforms"].items()
        runs.add_row(
            Text(name, style="bold"),
            *(Text(m.removeprefix("forward_"), style="green" if m in METHODS[p] else "dim") for p, m in methods),
        )
    console.print(Text("Which method runs where (forward_...)", style="bold underline"), runs, "", sep="\n")
    for name, entry in sound.items():
        console.print(title(Text.assemble((name, "bold"), f": {entry['about']}")))
    columns, borrowed = [], []
    for name, entry in sound.items():
        for method, able in entry["implementations"].items():
            if not able["tolerance"] or entry["family"] == "recurrence":
                continue  # refuses every call, or consumes no features
            if able["borrowed_from"] is None:
                columns.append((f"{name}.{method}", able))
            else:
                borrowed.append(f"{name}.{method} is {able['borrowed_from']}")
    heads = (name.replace(".forward_", "\n") for name, _ in columns)
    abilities = table("consumes", *heads)
    for feature in data["features"]:
        abilities.add_row(feature, *("yes" if feature in i["consumes"] else Text("-", style="dim") for _, i in columns))
    console.print(
        "", Text("What each implementation consumes (forward_...)", style="bold underline"), abilities, sep="\n"
    )
    for line in borrowed:
        console.print(Text(line, style="dim"))
    console.print(
        title(Text("A feature that isn't consumed is refused; `attnops plan` gives every reason.", style="dim"))
    )
    bounds = table("implementation", "dtype", "forward", "backward")
    for method, implementation in columns:
        for dtype, value in implementation["tolerance"].items():
            bounds.add_row(method, dtype, f"{value['forward']:g}", _number(value["backward"]))
    head = "Published error against the float64 reference, per row and relative to the row's size"
    console.print("", title(Text(head, style="bold underline")), bounds, sep="\n")
    for name, entry in data["operations"].items():
        if "error" in entry:
            console.print("", Text.assemble((name, "bold red"), f": {entry['error']}"), sep="\n")
