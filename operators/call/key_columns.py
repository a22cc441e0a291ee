"""KeyColumns: values that are the first numbers of their keys, passed in place of an array of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import InputError, a_type, is_whole, shown
from .arrays import is_array

__all__ = ["KeyColumns"]


@dataclass(frozen=True)
class KeyColumns:
    """The value of a call whose values are the first `count` numbers of their keys, as in the absorbed form of latent attention.

    The call has no array of values: nothing is stored or sent for them, and their gradient is a part of their keys'. A kernel
    that can loads each of them once; the others get these columns as an array of their own.
    """

    count: int

    def of(self, key: Any) -> KeyColumns:
        """Itself, of this key. Errors: InputError for more columns than the key has, and for a key that isn't an array."""
        if not is_array(key) or not key.shape:
            raise InputError(f"key is {a_type(key)} with values that are a part of it; wanted an array.")
        if not is_whole(self.count, 1, key.shape[-1]):
            raise InputError(
                f"KeyColumns({shown(self.count)}) of a key of {key.shape[-1]} numbers; wanted 1 to {key.shape[-1]}."
            )
        return self
