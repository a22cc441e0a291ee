"""A griffe extension: shows a docstring's parameters and errors, which are written as sentences, as a list.

`name: what it is.` begins a parameter if the function, or the class by its `__init__`, has one of that name.
`Errors: X for ...` begins the errors that it raises.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"(?:(?<=^)|(?<=[.;)] )|(?<=\n))\*{0,2}(?P<names>\w+(?:(?:, | and )\w+)*): ", re.MULTILINE)


def listed(text: str, parameters: set[str]) -> str:
    """The docstring with a list in place of its parameters and errors."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith((" ", "```", "|", "- ")):
            paragraphs.append(paragraph)
            continue
        found = [
            item
            for item in _ITEM.finditer(paragraph)
            if item["names"] == "Errors" or set(re.split(", | and ", item["names"])) <= parameters
        ]
        cuts = [*(item.start() for item in found), len(paragraph)]
        head = paragraph[: cuts[0]].strip()
        items = []
        for item, end in zip(found, cuts[1:], strict=True):
            names = item["names"]
            name = "**Raises**" if names == "Errors" else ", ".join(f"`{n}`" for n in re.split(", | and ", names))
            items.append(f"- {name}: " + " ".join(paragraph[item.end() : end].split()))
        paragraphs += [head] * bool(head) + ["\n".join(items)] * bool(items)
    return "\n\n".join(paragraphs)


class ListedDocstrings(griffe.Extension):
    """Applied to every function and class that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        of = obj.members.get("__init__", obj) if obj.is_class else obj
        names = {p.name for p in getattr(of, "parameters", ()) or ()} - {"self", "cls"}
        if obj.is_class:
            names |= {n for n, m in obj.members.items() if m.is_attribute and not n.startswith("_")}
        obj.docstring.value = listed(obj.docstring.value, names)
