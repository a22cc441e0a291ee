"""Print every argument of a call of attention as Markdown: arrays with their shapes, options with their defaults, other names.

`python tools/call_reference.py` prints; with --write the tables go between the markers in docs/api/call.md. A test checks
that page against the operand table and the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from written_page import WrittenPage, table

from attnops.call_arguments import CallArguments, CallOptions
from attnops.operators.call.options import Options
from attnops.planning.other_names import NAMES_ELSEWHERE
from attnops.sharding import ATTENTION, Operand

_DTYPES = {
    "floats": "float", "stored": "float, int8 or fp8", "integers": "integer", "booleans": "boolean", "key": "key of jax.random",
}  # fmt: skip
_SEMANTICS, _MASKS = "../semantics.md", "../masks.md"
MEANINGS: dict[str, tuple[str, str]] = {
    "query": ("Queries", _SEMANTICS),
    "key": ("Keys. Fewer heads than queries have: each is read by a group of them", _SEMANTICS),
    "value": ("Values; their head dim may differ. `KeyColumns(n)`: the first n numbers of each key", _SEMANTICS),
    "key_scale": ("What the stored keys are multiplied by; 1 in place of any size", f"{_SEMANTICS}#quantised-keys-and-values"),
    "value_scale": ("The same for the values", f"{_SEMANTICS}#quantised-keys-and-values"),
    "bias": ("Added to the logits; 1 in place of any size", _SEMANTICS),
    "softmax_aux": ("Sinks: logits without a value, that the softmax counts", f"{_SEMANTICS}#sinks"),
    "q_segment_ids": ("Packed sequences: a query sees the keys with its id", f"{_MASKS}"),
    "kv_segment_ids": ("Ids of the keys; without them those of the queries", f"{_MASKS}"),
    "kv_lengths": ("How many keys of a row are valid", f"{_MASKS}"),
    "kv_starts": ("The first valid key of a row", f"{_MASKS}"),
    "query_offset": ("The position of the first query among the keys", f"{_SEMANTICS}#the-arguments-of-a-call"),
    "dropout_rng": ("Which weights are dropped", f"{_SEMANTICS}#dropout"),
    "mask": ("A `Mask`, or a boolean array [batch, heads, q, kv], 1 in place of any size: True where a query may attend", _MASKS),
    "score": ("A function of a logit and its place, applied after the soft cap", f"{_SEMANTICS}#scores"),
    "causal": ("Whether keys after the query are hidden. Default: metadata's, which is True", _MASKS),
    "sliding_window": ("Inclusive distances (left, right), None for no bound, or one for both sides", _MASKS),
    "softmax_scale": ("What q.k is multiplied by. Default: `1 / sqrt(head_dim)`", _SEMANTICS),
    "logits_soft_cap": ("`cap * tanh(logits / cap)`", _SEMANTICS),
    "dropout_prob": ("The probability of dropping a weight. Default: metadata's", f"{_SEMANTICS}#dropout"),
    "deterministic": ("False: drop weights", f"{_SEMANTICS}#dropout"),
    "mode": ("`train`, `prefill`, `autoregressive` or `insert`: which PartitionSpecs are used", "../sharding.md"),
    "layout": ("`bthd`, `bhtd` or `thd`, of query, key, value and output", f"{_SEMANTICS}#layouts"),
    "return_weights": ("Whether the output has `attention_weights`", _SEMANTICS),
    "return_lse": ("Whether the output has `lse`", _SEMANTICS),
}  # fmt: skip


def main() -> None:
    """Print the tables, or write them into the page."""
    PAGE.main(__doc__ or "")


def tables() -> str:
    """All tables, with their headings."""
    return "\n\n".join(
        [
            "## Arrays",
            table(("Argument", "Shape", "Dtype", "Gradient", "Meaning"), _arrays()),
            "## Masks and scores",
            table(("Argument", "Meaning"), [(_name(name), _meaning(name)) for name in ("mask", "score")]),
            "## Options",
            "They are static: a change compiles again. A declaration file has a field for each.",
            table(("Argument", "Type", "Default", "Meaning"), _options()),
            "## Names in other libraries",
            "What an argument of another library is here. The error for an unknown argument says the same.",
            table(("There", "Here"), [(f"`{name}`", text) for name, text in sorted(NAMES_ELSEWHERE.items())]),
        ]
    )


def _arrays() -> Iterator[tuple[str, ...]]:
    for operand in ATTENTION:
        gradient = "yes" if operand.gradient else "-"
        yield _name(operand.name), _shape(operand), _DTYPES[operand.dtype], gradient, _meaning(operand.name)


def _shape(operand: Operand) -> str:
    def text(dims: Iterable[str]) -> str:
        return f"[{', '.join(dim or '1' for dim in dims)}]"

    shapes = [text(operand.dims), *map(text, operand.also)]
    packed = text(operand.dims_in("thd"))
    follows = bool(operand.order) and operand.dims_in("bhtd") != operand.dims
    if not operand.order or packed in shapes:
        return " or ".join(shapes)
    return f"{'`bthd`: ' * follows}{' or '.join(shapes)}; `thd`: {packed}"


def _options() -> Iterator[tuple[str, ...]]:
    for name, kind in CallOptions.__annotations__.items():
        if name == "query_offset":
            continue
        written = str(getattr(kind, "__forward_arg__", kind)).replace(" | ", " or ")
        yield _name(name), f"`{written}`", f"`{Options._field_defaults[name]!r}`", _meaning(name)


def _name(name: str) -> str:
    return f"`{name}`"


def _meaning(name: str) -> str:
    text, page = MEANINGS[name]
    return f"{text}. [More]({page})"


def documented() -> set[str]:
    """The arguments that the tables have."""
    return {*ATTENTION.names, "mask", "score", *CallOptions.__annotations__}


def known() -> set[str]:
    """The arguments that there are."""
    return {"query", "key", "value", *CallArguments.__annotations__}


PAGE = WrittenPage("api/call.md", "call_reference", tables)

if __name__ == "__main__":
    main()
