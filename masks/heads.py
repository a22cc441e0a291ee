"""What the leaves of a mask have to agree on: the number of heads, once kv heads are repeated, and the batch."""

from __future__ import annotations

from typing import Any, TypeVar

from ..errors import MaskError
from .node import Node

__all__ = ["check_batches", "with_equal_heads"]

M = TypeVar("M", bound=Node[Any])


def with_equal_heads(mask: M) -> M:
    """The mask with all leaves for one head or for the same number of heads.

    Blocks of kv heads are repeated for the query heads of their groups, as in a call. Errors: MaskError for numbers that don't
    divide, and for another leaf with fewer heads.
    """
    counts = {n: leaf for leaf in mask.leaves() for n in _sizes(leaf, "heads") if n > 1}
    if len(counts) < 2:
        return mask
    limit = max(counts)

    def repeated(leaf: Any) -> Any:
        (heads,) = _sizes(leaf, "heads") or (1,)
        if heads in (1, limit):
            return leaf
        if not hasattr(leaf, "repeated") or limit % heads:
            raise MaskError(
                f"{leaf} has {heads} heads and {counts[limit]} has {limit}; wanted the same number, or 1; blocks may have the "
                "number of kv heads, which divides it"
            )
        return leaf.repeated(limit // heads)

    changed: M = mask.map_leaves(repeated)
    return changed


def check_batches(mask: Node[Any], offsets: int = 1) -> None:
    """Errors: MaskError for arrays with different batches. offsets: the number of query offsets."""
    batches: dict[int, object] = {offsets: "query_offset"} if offsets != 1 else {}
    for leaf in mask.leaves():
        batches |= {size: leaf for size in _sizes(leaf, "batch") if size != 1 and size not in batches}
    if len(batches) > 1:
        (first_batch, first), (second_batch, second), *_ = batches.items()
        raise MaskError(f"{first} has batch {first_batch} and {second} has batch {second_batch}; wanted the same, or 1")


def _sizes(leaf: Node[Any], dim: str) -> tuple[int, ...]:
    """The sizes of a dimension in a leaf's arrays; () if it has none, or in a structure without arrays."""
    if leaf.kind == "blocks" and dim == "heads":
        return (leaf.heads,)  # type: ignore[attr-defined]
    parts = zip(leaf.parts, leaf.arrays(), strict=True)
    return tuple(
        array.shape[dims.index(dim)]
        for (_, _, dims), array in parts
        if dim in dims and len(getattr(array, "shape", ())) == len(dims)
    )
