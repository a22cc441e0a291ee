"""Mask: the base of all nodes, with everything that one can ask of a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import MaskError, a_type
from . import blocks, materialise
from .checks import LIMIT, whole
from .intervals import Intervals
from .reach import Blocks, Reach

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = ["Leaf", "Mask"]


class Leaf(NamedTuple):
    """One array of a mask: its name, the array (None in a structure) and the names of its dimensions."""

    name: str
    array: Any
    dims: tuple[str, ...]


class Mask:
    """What may attend to what. Combine with `&`, `|` and `~`; True means that the query may see the key.

    Row i and key j are global indices and `position = i + query_offset`. A leaf with `offset=None` looks at
    the position; one with an explicit offset looks at `i + offset`.
    """

    kind: ClassVar[str]
    is_slot: ClassVar[bool] = False
    # (field, public name, dimensions) of each array that a dynamic leaf holds.
    parts: ClassVar[tuple[tuple[str, str, tuple[str, ...]], ...]] = ()
    # Makes `numpy_array & mask` come to __rand__ instead of turning into an array of objects.
    __array_ufunc__ = None
    # How pydantic reads and writes a mask: set by schema.py, which stands above all nodes.
    field_schema: ClassVar[Callable[[type[Mask], GetCoreSchemaHandler], CoreSchema]]
    __pydantic_serializer__: ClassVar[Any]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Mask], handler: GetCoreSchemaHandler) -> CoreSchema:
        return Mask.field_schema(source, handler)

    def __and__(self, other: Any) -> Mask:
        from .algebra import And

        return And((self, _mask(other)))

    def __or__(self, other: Any) -> Mask:
        from .algebra import Or

        return Or((self, _mask(other)))

    def __invert__(self) -> Mask:
        from .algebra import Not

        return Not(self)

    def __rand__(self, other: Any) -> NoReturn:
        _refuse_operand(other)

    def __ror__(self, other: Any) -> NoReturn:
        _refuse_operand(other)

    def __bool__(self) -> NoReturn:
        raise MaskError("a mask has no truth value; use & | ~ for `and` `or` `not`, or `mask is not None`")

    def __str__(self) -> str:
        return self.describe()

    # What each node says for itself.

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        """Whether row sees key, elementwise, in the arrays' own library (NumPy, jnp, a Pallas kernel).

        rows, positions [..., q, 1] and cols [..., 1, kv]; the answer broadcasts to their common shape, so
        a Pallas kernel should pass all three as [q, kv]. Dynamic leaves answer as [batch, 1 | heads, q, kv],
        and their arrays must already be cut to these rows and keys (`narrow`).
        """
        raise NotImplementedError

    def reach(self, blocks: Blocks) -> Reach:
        """What is seen of whole blocks; arrays may be traced, and must be cut to these rows and keys."""
        raise NotImplementedError

    def children(self) -> tuple[Mask, ...]:
        """The masks that this node combines; none for a leaf."""
        return ()

    def with_children(self, children: Sequence[Mask]) -> Mask:
        """This node over other children."""
        return self

    def bounds(self) -> tuple[Mask, Mask]:
        """Static masks (lower, upper) with lower ⊆ self ⊆ upper, whatever the dynamic leaves hold."""
        return self, self

    def describe(self) -> str:
        """Short, deterministic text, such as `causal(offset=0) & segment_ids`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The mask as plain JSON values; dynamic leaves raise MaskError. Inverse: `mask_from_dict`."""
        raise NotImplementedError

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        """`row_intervals` for rows [R] at given positions [R]."""
        return None

    @property
    def is_static(self) -> bool:
        """Whether no leaf holds (or stands for) an array."""
        return all(child.is_static for child in self.children())

    @property
    def needs_offset(self) -> bool:
        """Whether some leaf looks at positions, that is, has no offset of its own."""
        return any(child.needs_offset for child in self.children())

    # Questions about the whole tree.

    def atoms(self) -> Iterator[Mask]:
        """The leaves of the tree, left to right."""
        if not self.children():
            yield self
        for child in self.children():
            yield from child.atoms()

    def map_atoms(self, change: Callable[[Mask], Mask]) -> Mask:
        """The same tree with every leaf changed."""
        if not self.children():
            return change(self)
        return self.with_children([child.map_atoms(change) for child in self.children()])

    def conjuncts(self) -> tuple[Mask, ...]:
        """Masks whose And is this mask; none for Full."""
        return (self,)

    def split_static(self) -> tuple[Mask, tuple[Mask, ...]]:
        """(the And of the conjuncts without dynamic leaves, the other conjuncts)."""
        from .algebra import And

        parts = self.conjuncts()
        return And([m for m in parts if m.is_static]), tuple(m for m in parts if not m.is_static)

    def features(self) -> frozenset[str]:
        """Kinds of static leaves and of dynamic conjuncts; "dynamic_or" for any other dynamic leaf."""
        found = set()
        for conjunct in self.conjuncts():
            for atom in conjunct.atoms():
                found.add(atom.kind if atom.is_static or atom is conjunct else "dynamic_or")
        return frozenset(found - {"full"})

    def bind(self, query_offset: int) -> Mask:
        """The same mask with every undeclared offset set to `query_offset`."""
        offset = whole(query_offset, "query_offset")
        return self.map_atoms(lambda atom: atom.with_offset(offset) if atom.needs_offset else atom)

    def with_offset(self, offset: int | None) -> Mask:
        """This leaf with another offset, if it is one that has offsets."""
        return self

    # Arrays: out, and back in.

    def split(self) -> tuple[Mask, tuple[Leaf, ...]]:
        """(hashable structure with a Slot for each dynamic leaf, its arrays); `merge` is the inverse."""
        leaves: list[Leaf] = []
        seen: dict[str, int] = {}
        for atom in self.atoms():
            for (_, name, dims), array in zip(atom.parts, atom.arrays(), strict=True):
                seen[name] = seen.get(name, 0) + 1
                leaves.append(Leaf(name if seen[name] == 1 else f"{name}_{seen[name]}", array, dims))
        return self.map_atoms(lambda atom: atom.slot()), tuple(leaves)

    def merge(self, arrays: Sequence[Any]) -> Mask:
        """The mask with these arrays in its slots, in the order in which `split` gave them."""
        wanted = sum(len(atom.parts) for atom in self.atoms() if atom.is_slot)
        if len(arrays) != wanted:
            raise MaskError(f"got {len(arrays)} arrays for {self}; wanted {wanted}, as split() gave them")
        queue = iter(arrays)

        def fill(atom: Mask) -> Mask:
            return atom.fill([next(queue) for _ in atom.parts]) if atom.is_slot else atom

        return self.map_atoms(fill)

    def arrays(self) -> tuple[Any, ...]:
        """The arrays that this leaf holds, one for each of `parts`."""
        return ()

    def slot(self) -> Mask:
        """This leaf without its arrays."""
        return self

    def fill(self, arrays: Sequence[Any]) -> Mask:
        """This slot with its arrays."""
        return self

    def narrow(self, q_slice: slice, kv_slice: slice) -> Mask:
        """The mask with its arrays cut to these global rows and keys."""
        return self.map_atoms(lambda atom: atom.cut(q_slice, kv_slice))

    def cut(self, q_slice: slice, kv_slice: slice) -> Mask:
        """`narrow` for one leaf."""
        return self

    # The meaning, and what planning needs of it.

    def materialise(self, q_slice: slice, kv_slice: slice, *, query_offset: Any = 0) -> Any:
        """What is visible, bool [batch | 1, heads | 1, q, kv], for global half-open slices: the meaning.

        query_offset: int, or integer array [batch]. NumPy comes out unless arrays or offset are jax's.
        """
        return materialise.materialise(self, q_slice, kv_slice, query_offset)

    def row_intervals(self, rows: ArrayLike, kv_len: int, *, query_offset: int = 0) -> Intervals | None:
        """The visible keys of each row as (lo, hi), int64 [K, rows], K >= 1; None where only a test can tell.

        Half-open, within [0, kv_len), sorted along K, disjoint and not adjacent; unused ones come last as
        lo == hi == kv_len. Exact for static masks without MaskFunction.
        """
        rows = np.asarray(rows, np.int64)
        return self.intervals(rows, rows + whole(query_offset, "query_offset"), kv_len)

    def live_blocks(
        self,
        block_q: int,
        block_kv: int,
        *,
        q_len: int,
        kv_len: int,
        q_start: int = 0,
        query_offset: int = 0,
        k_start: int = 0,
    ) -> NDArray[np.int8]:
        """0 dead, 1 partial, 2 full for each block: int8 [ceil(q_len / block_q), ceil(kv_len / block_kv)].

        Rows are q_start..q_start+q_len, keys k_start..k_start+kv_len; what is beyond their ends doesn't count.
        Exact for static masks; with dynamic leaves, dead and full are certain and partial is everything else.
        """
        return blocks.live_blocks(self, blocks.Grid(block_q, block_kv, q_len, kv_len, q_start, query_offset, k_start))

    def may_have_dead_rows(self, q_len: int, kv_len: int, *, q_start: int = 0, query_offset: int = 0) -> bool:
        """Whether some row of q_start..q_start+q_len sees no key; with dynamic leaves, whether one may."""
        return blocks.may_have_dead_rows(self, blocks.Grid(1, LIMIT, q_len, kv_len, q_start, query_offset))


def _mask(other: Any) -> Mask:
    return other if isinstance(other, Mask) else _refuse_operand(other)


def _refuse_operand(other: Any) -> NoReturn:
    mend = "wrap a boolean array in Dense(array) of shape [batch, heads, q, kv]"
    raise MaskError(f"a mask combines with masks only, not with {a_type(other)}; {mend}")
