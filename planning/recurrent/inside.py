"""Where the arrays of a recurrence lie while it runs: which mesh axes split each dim."""

from __future__ import annotations

from ..tables.table_plan import TablePlacement

__all__ = ["KEY_HEADS", "inside_axes", "repeats_keys"]

KEY_HEADS = ("query", "key", "B", "C")  # arrays with heads of queries and keys


def inside_axes(placement: TablePlacement) -> dict[str, tuple[str, ...]]:
    """The axes that split each dim. Queries and keys are split as the heads of the state are, repeated where they have fewer."""
    state = next(x for x in placement.tensors if x.tensor == "state")
    heads = next(dim for dim in state.dims if dim in ("heads", "channels"))
    rows = placement.axes("state", "slots")  # of a step, whose tokens are with their rows and slots
    passed = placement.strategy == "state" and not placement.manual
    return {
        "batch": placement.axes("state", "batch"),
        heads: placement.axes("state", heads),
        "kv_heads": placement.axes("state", heads),
        "value_dim": placement.axes("state", "value_dim"),
        "q_len": placement.over if passed else (),
        **dict.fromkeys(("slots", "tokens", "shards"), rows),
    }


def repeats_keys(placement: TablePlacement) -> bool:
    """Whether queries and keys are repeated for each head, as the mesh splits heads further than groups of them."""
    names = ("key", "B")
    dims = next((x for x in placement.tensors if x.tensor in names), None)
    return dims is not None and placement.axes(dims.tensor, "kv_heads") != placement.axes("state", "heads")
