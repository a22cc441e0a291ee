"""Print which model types of transformers are read from tables, and why each other one isn't, as Markdown.

`python tools/model_types.py` prints; with --write the tables go between the markers in docs/model-types.md. A test checks that
page against models/plain_families.json, which tools/plain_families.py makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from written_page import WrittenPage, table

from attnops.models.families import ALIASES, COMPOSITES, FAMILIES, PARTS
from attnops.models.plain_families import PLAIN

_REASONS = (
    ("has no model class", "It has a config, but no model of its own"),
    ("has configs of several parts", "It has several parts with configs of their own, and no text_config"),
    ("has a text_config of", "Its text isn't read"),
    ("its model makes masks", "Its model makes masks of its own, or attends to other parts"),
    ("its model is one whose", "Tokens of one image see each other there, which the config of its text doesn't say"),
    ("its code doesn't call", "It has no attention, or its code doesn't call it through transformers' interface"),
    ("passes attention", "It passes attention more than a mask, such as a bias or selected keys"),
    ("its mask has holes", "Its mask has holes"),
    ("takes ", "Its inputs are neither tokens, one image nor sound, so that it wasn't run"),
    ("a small model", "A small model of it couldn't be built or run without more than tokens, an image or sound"),
    ("took more than", "A small model of it couldn't be built or run without more than tokens, an image or sound"),
    ("its config can't", "A small model of it couldn't be built or run without more than tokens, an image or sound"),
    ("is read otherwise", "Its attention has what the common keys don't say"),
    ("its attention depends", "Its attention has what the common keys don't say"),
    ("no rule of attnops", "Its attention has what the common keys don't say"),
    ("", "It has a key that may concern attention, which couldn't be tried"),
)  # fmt: skip


def main() -> None:
    """Print the tables, or write them into the page."""
    PAGE.main(__doc__ or "")


def tables() -> str:
    """All tables, with their headings."""
    by_hand = {name.partition(" ")[0] for name in FAMILIES} - PLAIN["families"].keys()
    others = {*ALIASES, *COMPOSITES}
    count = len(by_hand) + len(PLAIN["families"]) + len(others)
    unread = {name: why for name, why in PLAIN["unread"].items() if name not in PARTS}
    return "\n\n".join(
        [
            f"attnops reads {count} model types. Of the {len(by_hand)} in [Families](model-configs.md#families) the rules are\n"
            f"written by hand, those of {len(PLAIN['families'])} are made from transformers {PLAIN['transformers']}, and "
            f"{len(others)} have parts that are\nof these.",
            "## Made from transformers",
            _families(PLAIN["families"]),
            "## Of several parts",
            "`text` is read, or the `part` that you give. A part that isn't listed is not read.",
            _composites(),
            "## Not read",
            f"Of the other {len(unread)} types of that version:",
            _unread(unread),
        ]
    )


def _families(rows: Mapping[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for name, row in rows.items():
        groups.setdefault(_layers(row), []).append(name)
    return table(("Layers", "`model_type`"), [(rule, _names(names)) for rule, names in sorted(groups.items())])


def _layers(row: Mapping[str, Any]) -> str:
    if "image_size" in row["defaults"]:
        extra = row["extra_tokens"]
        keys = [f"`{key}`" for key in row["defaults"] if "token" in key]
        beside = " and ".join([*([str(extra)] if extra or not keys else []), *keys])
        more = "token" if beside == "1" else "tokens"
        return f"Of an image: all patches and {beside} more {more}" if extra or keys else "Of an image: all patches"
    how = (
        "causal"
        if row["causal"]
        else "bidirectional" + "; causal with `is_decoder`" * ("is_decoder" in row["defaults"])
    )
    how += ", with sinks" * row["sinks"] + ", latent" * ("kv_lora_rank" in row["defaults"])
    layers = row["layers"]
    if layers == "none":
        return f"Global, {how}"
    if layers == "all":
        return f"Local if there is a `sliding_window`, {how}"
    if layers == "late":
        return f"Local from layer `max_window_layers` on, {how}"
    period, first, *last = layers
    last_one = " and the last one" if last else ""
    return f"Layer {first}, every {period} layers after it{last_one} global, the others local, {how}"


def _composites() -> str:
    groups: dict[str, list[str]] = {}
    for name, whole in sorted(COMPOSITES.items()):
        parts = ", ".join(f"{part}: `{family}`" for part, family in whole.parts.items())
        groups.setdefault(parts, []).append(name)
    return table(("Parts", "`model_type`"), [(parts, _names(names)) for parts, names in sorted(groups.items())])


def _unread(rows: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {text: [] for _, text in _REASONS}
    for name, why in rows.items():
        groups[next(text for begins, text in _REASONS if why.startswith(begins))].append(name)
    return table(("Why", "Types"), [(f"{why} ({len(names)})", _names(names)) for why, names in groups.items() if names])


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGE = WrittenPage("model-types.md", "model_types", tables)

if __name__ == "__main__":
    main()
