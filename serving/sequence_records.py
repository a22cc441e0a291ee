"""SequenceRecords: the sequences of a pool by their ids; PagePool and StateSlots keep one record for each."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..errors import InputError, InputTypeError, UnknownNameError, shown
from .checked_arguments import token_array, whole_number

__all__ = ["SequenceRecords"]


class _Record(Protocol):
    length: int


_State = TypeVar("_State", bound=_Record)


class SequenceRecords(Generic[_State]):
    """The records of a pool, which creates and changes them."""

    _sequences: dict[Hashable, _State]

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._sequences)

    def kv_lens(self, sequences: Sequence[Hashable | None]) -> np.ndarray:
        """int32 [sequences]: how many tokens each has, including those just appended; 0 where None stands for a sequence."""
        return np.array([0 if s is None else self._get(s).length for s in sequences], np.int32)

    def _find(self, sequence: Hashable) -> _State | None:
        if sequence is None:
            raise InputTypeError(
                "a sequence's id is None; wanted any other id: None marks an empty row of a page table."
            )
        try:
            return self._sequences.get(sequence)
        except TypeError:
            raise InputTypeError(
                f"sequence {shown(sequence)} isn't hashable; wanted an id such as an int or a str."
            ) from None

    def _get(self, sequence: Hashable) -> _State:
        state = self._find(sequence)
        if state is None:
            raise UnknownNameError(
                f"no sequence {shown(sequence)} is in the pool, which has {len(self._sequences)}. "
                "Hint: alloc, adopt or fork starts a sequence; free ends it, so free it only once."
            )
        return state

    def _must_be_new(self, sequence: Hashable) -> None:
        if self._find(sequence) is not None:
            raise InputError(
                f"sequence {shown(sequence)} is already in the pool; wanted a new id. Hint: free it first."
            )

    def _resumed(self, sequence: Hashable, token_ids: Iterable[int], length: int | None) -> tuple[array[int], int]:
        """The known ids of a new sequence that is restored, and its length. Errors: those of resume."""
        self._must_be_new(sequence)
        ids = token_array(token_ids)
        return ids, whole_number("length", len(ids) if length is None else length, len(ids))
