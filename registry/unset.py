"""UNSET: the value of a field that wasn't given, which differs from None."""

from __future__ import annotations

import enum
from typing import Final, Literal

__all__ = ["UNSET", "Unset"]


class _Unset(enum.Enum):
    """An enum with one member, so that it compares, hashes and pickles as itself."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = _Unset.UNSET
Unset = Literal[_Unset.UNSET]
