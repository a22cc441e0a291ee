"""Node, the base of all masks: the methods of a single node, and what follows from the tree: leaves, features, arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from numpy.typing import NDArray

from ..errors import MaskError
from .bounds import BlockBounds, Blocks
from .checks import whole
from .intervals import Intervals

__all__ = ["Leaf", "Node"]

M = TypeVar("M", bound="Node[Any]")


class Leaf(NamedTuple):
    """One array of a mask: its name, the array (None in a structure), and the names of its dimensions."""

    name: str
    array: Any
    dims: tuple[str, ...]


class Node(Generic[M]):
    """A node of a tree of masks. M is the type of all nodes, `Mask`, which adds how they combine."""

    kind: ClassVar[str]
    label: ClassVar[str] = ""  # used in `describe` instead of the kind
    feature: ClassVar[str | None] = None  # the feature that a call with it requests; None: its kind
    is_slot: ClassVar[bool] = False
    # (field, public name, dimensions) of each array that a dynamic leaf holds.
    parts: ClassVar[tuple[tuple[str, str, tuple[str, ...]], ...]] = ()

    # Methods of a single node.

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        """Whether each row sees each key, elementwise, in the arrays' own library (NumPy, jnp, a Pallas kernel).

        rows, positions [..., q, 1] and cols [..., 1, kv]. The result broadcasts to their common shape, so
        a Pallas kernel should pass all three as [q, kv]. Dynamic leaves return [batch, 1 | heads, q, kv],
        and their arrays must already be cut to these rows and keys (`narrow`).
        """
        raise NotImplementedError

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        """The block bounds of this node. Arrays may be traced, and must be cut to these rows and keys."""
        raise NotImplementedError

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        """`row_intervals` for rows [R] at positions [R]."""
        return None

    def fixed_lengths(self) -> tuple[int | None, int | None]:
        """The numbers of rows and of keys that this leaf is made for; None for any number."""
        return None, None

    def describe(self) -> str:
        """Short, deterministic text, such as `causal(offset=0) & segment_ids`."""
        fields = {name: value for name, value in self._fields().items() if (name, value) != ("offset", None)}
        text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return f"{self.label or self.kind}({text})" if text else self.label or self.kind

    def to_dict(self) -> dict[str, Any]:
        """Return the mask as plain JSON values. Dynamic leaves raise MaskError. Inverse: `mask_from_dict`."""
        return {"kind": self.kind} | self._fields()

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(cast(Any, self))}

    def children(self) -> tuple[M, ...]:
        """The masks that this node combines; empty for a leaf."""
        return ()

    @property
    def by_distance(self) -> bool:
        """Of a leaf: whether only the distance of a key from its row matters, not where they are."""
        return False

    def with_children(self, children: Sequence[M]) -> M:
        """This node with other children. The node must not be a leaf."""
        raise NotImplementedError

    def conjuncts(self) -> tuple[M, ...]:
        """The masks whose And is this mask; empty for Full."""
        return (cast(M, self),)

    @property
    def is_static(self) -> bool:
        """Whether no leaf holds (or stands for) an array."""
        return all(child.is_static for child in self.children())

    @property
    def needs_offset(self) -> bool:
        """Whether some leaf uses positions, that is, has no offset of its own."""
        return any(child.needs_offset for child in self.children())

    # Methods of the whole tree.

    def leaves(self) -> Iterator[M]:
        """The leaves of the tree, left to right."""
        if not self.children():
            yield cast(M, self)
        for child in self.children():
            yield from child.leaves()

    def part_names(self) -> tuple[str, ...]:
        """The names of the tree's arrays, in the order of `split`; equal ones aren't numbered yet."""
        if not self.children():
            return tuple(name for _, name, _ in self.parts)
        return tuple(name for child in self.children() for name in child.part_names())

    def map_leaves(self, change: Callable[[M], M]) -> M:
        """The same tree with `change` applied to every leaf."""
        if not self.children():
            return change(cast(M, self))
        return self.with_children([child.map_leaves(change) for child in self.children()])

    def features(self) -> frozenset[str]:
        """The kinds of static leaves and of dynamic conjuncts, and "dynamic_or" for any other dynamic leaf."""
        features = set()
        for conjunct in self.conjuncts():
            for leaf in conjunct.leaves():
                features.add((leaf.feature or leaf.kind) if leaf.is_static or leaf is conjunct else "dynamic_or")
        return frozenset(features - {"full"})

    def bind(self, query_offset: int) -> M:
        """The same mask with every undeclared offset set to `query_offset`."""
        offset = whole(query_offset, "query_offset")
        return self.map_leaves(lambda leaf: leaf.with_offset(offset) if leaf.needs_offset else leaf)

    def with_offset(self, offset: int | None) -> M:
        """This leaf with another offset, if its kind has offsets."""
        return cast(M, self)

    # Take arrays out, put them back, and cut them.

    def split(self) -> tuple[M, tuple[Leaf, ...]]:
        """(hashable structure with a Slot for each dynamic leaf, its arrays); `merge` is the inverse."""
        leaves: list[Leaf] = []
        seen: dict[str, int] = {}
        names = iter(self.part_names())
        for leaf in self.leaves():
            for (_, _, dims), array in zip(leaf.parts, leaf.arrays(), strict=True):
                name = next(names)
                seen[name] = seen.get(name, 0) + 1
                leaves.append(Leaf(name if seen[name] == 1 else f"{name}_{seen[name]}", array, dims))
        return self.map_leaves(lambda leaf: leaf.slot() if leaf.parts else leaf), tuple(leaves)

    def merge(self, arrays: Sequence[Any]) -> M:
        """The mask with these arrays in its slots, in the order of `split`."""
        expected = sum(len(leaf.parts) for leaf in self.leaves() if leaf.is_slot)
        if len(arrays) != expected:
            raise MaskError(f"got {len(arrays)} arrays for {self}; wanted {expected}, as returned by split()")
        queue = iter(arrays)

        def fill(leaf: M) -> M:
            return leaf.fill([next(queue) for _ in leaf.parts]) if leaf.is_slot else leaf

        return self.map_leaves(fill)

    def narrow(self, q_slice: slice, kv_slice: slice) -> M:
        """The mask with its arrays cut to these global rows and keys."""
        return self.map_leaves(lambda leaf: leaf.cut(q_slice, kv_slice) if leaf.parts else leaf)

    # Methods of a leaf with `parts`.

    def arrays(self) -> tuple[Any, ...]:
        """The arrays of this leaf, one for each of `parts`."""
        return ()

    def slot(self) -> M:
        """This leaf without its arrays."""
        raise NotImplementedError

    def fill(self, arrays: Sequence[Any]) -> M:
        """This slot with its arrays."""
        raise NotImplementedError

    def cut(self, q_slice: slice, kv_slice: slice) -> M:
        """`narrow` for one leaf."""
        raise NotImplementedError
