"""What another library's attention function is given of a mask and a bias, and which rows of its output count."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .local_mask import LocalMask
from .primitives import where

__all__ = ["LibraryMask", "library_mask"]


class LibraryMask(NamedTuple):
    """mask: what the function's flags don't say, [#batch, #heads, #q, #kv], None if nothing. bias: without -inf, which is in
    the mask. rows: [#batch, #heads, #q, 1], which of them see a key; None if all do."""

    mask: Bool[Array, "#batch #heads #q #kv"] | None
    bias: Float[Array, "#batch #heads #q #kv"] | None
    rows: Bool[Array, "#batch #heads #q 1"] | None

    def zero_dead_rows(self, output: Float[Array, "batch q heads dim"]) -> Float[Array, "batch q heads dim"]:
        """The output, 0 in rows that see no key."""
        return output if self.rows is None else where(self.rows.swapaxes(1, 2), output, 0)

    def without_dead_rows(self) -> LibraryMask:
        """With every key visible in rows that see none, for functions that don't say what they make of such a row."""
        return self if self.rows is None or self.mask is None else self._replace(mask=self.mask | ~self.rows)


def library_mask(mask: LocalMask, bias: Any, by_flags: bool) -> LibraryMask:
    """The mask and bias of a call. by_flags: the function's flags say all of the mask, which leaves no row without a key."""
    array = None if by_flags else _array(mask)
    if bias is None:
        return LibraryMask(array, None, None if array is None or mask.all_rows_see else _sees(array))
    finite = bias != -jnp.inf
    passed = finite if array is None else finite & array
    # What the flags hide counts too: of a row, all keys that they leave may have a bias of -inf.
    of_flags = _array(mask) if by_flags else None
    return LibraryMask(passed, where(finite, bias, 0), _sees(passed if of_flags is None else passed & of_flags))


def _array(mask: LocalMask) -> Bool[Array, "#batch #heads #q #kv"] | None:
    array = mask.array()
    return None if array is None else jnp.asarray(array)


def _sees(visible: Bool[Array, "#batch #heads #q #kv"]) -> Bool[Array, "#batch #heads #q 1"]:
    return visible.any(axis=-1, keepdims=True)
