"""DynamicMask, the base class of leaves that hold arrays, and Slot, such a leaf without its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import jax

from ..errors import InputTypeError, MaskError
from .algebra import Full, Mask, Not
from .bounds import Blocks
from .int_arrays import int_array

__all__ = ["SEGMENT_IDS", "DynamicMask", "Slot", "has_place"]

_classes: dict[str, type[DynamicMask]] = {}


class _Unknown(Mask):
    """Base class of dynamic leaves and slots: nothing is known about them before the call."""

    @property
    def is_static(self) -> bool:
        return False

    def bounds(self) -> tuple[Mask, Mask]:
        return Not(Full()), Full()

    def to_dict(self) -> dict[str, Any]:
        raise MaskError(f"{self} holds arrays, which a config can't; pass it in the call")


class DynamicMask(_Unknown):
    """A leaf that holds arrays: of NumPy or jax, tracers, or ShapeDtypeStructs for planning.

    Leaves are equal only if they are the same object, and have no hash; `split()[0]` can be compared and hashed.
    """

    def __init_subclass__(cls) -> None:
        _classes[cls.kind] = cls

    def __post_init__(self) -> None:
        self.check()

    def __hash__(self) -> NoReturn:
        raise InputTypeError(f"{self} holds arrays and has no hash; use the structure, mask.split()[0]")

    def arrays(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field) for field, _, _ in self.parts)

    def slot(self) -> Slot:
        return Slot(self.kind)

    @classmethod
    def from_slot(cls, slot: Slot, arrays: Sequence[Any]) -> Mask:
        """The leaf of `slot` with these arrays."""
        return cls(*arrays)

    @staticmethod
    def related(leaf: Any, parts: Sequence[Any], cols: Any) -> Any:
        """The test on parts that broadcast with each other. `leaf` (or its slot) has the static parameters, `parts` the arrays.

        For kernels, which shape the parts of a tile themselves.
        """
        raise NotImplementedError

    def describe(self) -> str:
        return self.slot().describe()

    def check(self) -> None:
        """Refuse arrays of a wrong rank or dtype: here, all but integers with one batch size."""
        for array, (_, name, dims) in zip(self.arrays(), self.parts, strict=True):
            int_array(array, name, dims)
        batches = [array.shape[0] for array in self.arrays()]
        if batches[0] != batches[-1]:
            got, hint = f"{batches[0]} for queries, {batches[-1]} for keys", "e.g. with jnp.broadcast_to"
            raise MaskError(f"{self.kind} has batch {got}; wanted the same: repeat the one with batch 1, {hint}")

    def usable(self) -> None:
        """Refuse arrays without values: jax rebuilds leaves without calling check."""
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in self.arrays()):
            raise MaskError(f"{self.kind} holds shapes without values; wanted arrays: use jax.eval_shape for shapes")
        self.check()

    def cut(self, q_slice: slice, kv_slice: slice) -> Mask:
        self.usable()
        cuts = {"q": q_slice, "kv": kv_slice}
        parts = zip(self.arrays(), self.parts, strict=True)
        arrays = [self._cut_one(array, name, dims, cuts) for array, (_, name, dims) in parts]
        return self.from_slot(self.slot(), arrays)

    def _cut_one(self, array: Any, name: str, dims: tuple[str, ...], cuts: dict[str, slice]) -> Any:
        index = []
        for dim, size in zip(dims, array.shape, strict=True):
            cut = cuts.get(dim, slice(None))
            if cut.stop is not None and not self._broadcasts(size) and size != cut.stop and size < cut.stop:
                expected = f"{cut.start}:{cut.stop}"
                raise MaskError(f"{name} has {size} along {dim}; wanted {expected}: pass an array that covers it")
            index.append(slice(None) if self._broadcasts(size) else cut)
        return array[tuple(index)]

    def _broadcasts(self, size: int) -> bool:
        return False


@dataclass(frozen=True)
class Slot(_Unknown):
    """The place of a dynamic leaf in a structure: its kind and static parameters, without arrays. Hashable.

    left, right: those of Positions. broadcast: which of [batch, heads, q, kv] have size 1 in a dense mask. block_q, block_kv:
    those of ChosenBlocks.
    """

    kind: str  # type: ignore[misc]  # a class variable of every other mask
    left: int | None = None
    right: int | None = None
    broadcast: tuple[bool, ...] = ()
    block_q: int = 0
    block_kv: int = 0
    is_slot: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:  # type: ignore[override]
        return _classes[self.kind].parts

    def to_dict(self) -> dict[str, Any]:
        """The place of a call's segment ids has a form in files; other slots raise MaskError."""
        return {"kind": self.kind} if self == SEGMENT_IDS else super().to_dict()

    def arrays(self) -> tuple[Any, ...]:
        return (None,) * len(self.parts)

    def slot(self) -> Slot:
        return self

    def fill(self, arrays: Sequence[Any]) -> Mask:
        return _classes[self.kind].from_slot(self, arrays)

    def related(self, parts: Sequence[Any], cols: Any) -> Any:
        """The leaf's test, on parts that broadcast with each other and with cols."""
        return _classes[self.kind].related(self, parts, cols)

    def describe(self) -> str:
        if self.kind == "positions":
            return f"positions(left={self.left!r}, right={self.right!r})"
        if self.block_q:
            return f"{self.kind}(block_q={self.block_q}, block_kv={self.block_kv})"
        if self.broadcast:
            dims = zip(("batch", "heads", "q", "kv"), self.broadcast, strict=True)
            return f"{self.kind}[{', '.join('1' if single else dim for dim, single in dims)}]"
        return self.kind

    def test(self, rows: Any, positions: Any, cols: Any) -> NoReturn:
        raise MaskError(f"{self} is a slot without arrays; call structure.merge(arrays) first")

    def block_bounds(self, blocks: Blocks) -> NoReturn:
        self.test(None, None, None)

    def cut(self, q_slice: slice, kv_slice: slice) -> NoReturn:
        self.test(None, None, None)


def has_place(mask: Any) -> bool:
    """Whether this is a mask with the place of a call's segment ids."""
    return isinstance(mask, Mask) and any(leaf == SEGMENT_IDS for leaf in mask.leaves() if leaf.is_slot)


SEGMENT_IDS = Slot("segment_ids")
"""In a mask, the place of a call's q_segment_ids and kv_segment_ids, which else intersect with the whole mask."""
