"""DeclaredArrays: what a declared call has as arrays, and the arguments of the call for them, by what its operation does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..call_arguments import CALL_ARGUMENTS, CALL_OPTIONS
from ..masks import Dense
from .call_declaration import CallDeclaration
from .index_declaration import index_arguments, index_arrays, index_shapes
from .recurrent_declaration import recurrent_arguments, recurrent_arrays, recurrent_shapes
from .registry import Family

__all__ = ["ARRAYS", "DeclaredArrays"]


@dataclass(frozen=True)
class DeclaredArrays(ABC):
    """The arrays of a call. dtype: theirs if the call declares none. configs: the declared configs of operations, by name."""

    operation: Any
    call: CallDeclaration
    dtype: str
    configs: Mapping[str, Any]

    @abstractmethod
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Their shapes, by argument name. Errors: ConfigError for missing sizes."""

    @abstractmethod
    def draw(self, seed: int) -> dict[str, np.ndarray]:
        """Random arrays of these shapes. The same seed gives the same arrays."""

    @abstractmethod
    def arguments(self, arrays: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
        """The keyword arguments of the call for these arrays. `mode` overrides the declared one."""


class _OfAttention(DeclaredArrays):
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.call.shapes(self.dtype, self.operation.operands)

    def draw(self, seed: int) -> dict[str, np.ndarray]:
        return self.call.draw(seed, self.dtype, self.operation.operands)

    def arguments(self, arrays: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
        call, mask = self.call, self.call.mask
        if "mask" in arrays:
            mask = arrays["mask"] if mask is None else mask & Dense(arrays["mask"])
        options = {name: getattr(call, name) for name in CALL_OPTIONS}
        arguments = {name: arrays.get(name, options.get(name)) for name in CALL_ARGUMENTS}
        # An operation's own operands, and the score's.
        arguments |= {name: x for name, x in arrays.items() if name not in arguments}
        return arguments | {"mask": mask, "score": call.score, "mode": call.mode if mode is None else mode}


class _OfIndexer(DeclaredArrays):
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return index_shapes(self.call, self.dtype)

    def draw(self, seed: int) -> dict[str, np.ndarray]:
        return index_arrays(self.call, seed, self.dtype)

    def arguments(self, arrays: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
        return index_arguments(self.call, arrays, mode)


class _OfRecurrence(DeclaredArrays):
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return recurrent_shapes(self.call, self.dtype, self.operation.operands, self._state_dtype())

    def draw(self, seed: int) -> dict[str, np.ndarray]:
        return recurrent_arrays(self.call, seed, self.dtype, self.operation.operands, self._state_dtype())

    def arguments(self, arrays: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
        packed: dict[str, Any] = self.operation.packed(
            recurrent_arguments(self.call, arrays, mode, self.operation.operands)
        )
        return packed

    def _state_dtype(self) -> str | None:
        """The dtype that the config declares for states; None for that of the tokens."""
        of_both = (self.configs.get(name) or {} for name in (self.operation.name, self.operation.backend_operation))
        declared = next((x["state_dtype"] for x in of_both if "state_dtype" in x), None)
        field = self.operation.config.model_fields.get("state_dtype")
        return declared or (None if field is None else field.default)


ARRAYS: Mapping[Family, type[DeclaredArrays]] = {
    "attention": _OfAttention,
    "selection": _OfIndexer,
    "recurrence": _OfRecurrence,
}
