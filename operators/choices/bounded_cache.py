"""BoundedCache: a mapping of bounded size that drops what hasn't been used for long."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Keeps at least the `size` most recently used values, and at most twice as many. A value is never None.

    It keeps two generations instead of a list in order of use: a hit in the young one, which is nearly every hit, is one look-up
    in a dict, without a lock. When the young one is full it becomes the old one, and what wasn't used since is dropped.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}

    def find(self, key: Hashable) -> Value | None:
        """The value under a key, which now counts as used; None if there is none."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value."""
        if len(self._young) >= self._size:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young | self._old)
