"""MaskFunction: a leaf named by a string, so that it stays hashable and serialisable; and the names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

from ..errors import MaskError, nearest
from .checks import is_host
from .reach import Blocks, Reach
from .static import OffsetMask

__all__ = ["MaskFunction", "mask_function_names", "register_mask_function"]

Function = TypeVar("Function", bound=Callable[[Any, Any], Any])

_functions: dict[str, Callable[[Any, Any], Any]] = {}
_generation: dict[str, int] = {}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def register_mask_function(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Register fn(query_position, key_index) -> bool, elementwise on integer arrays of any one library.

    The function must be pure: it is called on the host for planning and inside kernels for running.
    Registering a name twice raises MaskError unless override=True.
    """
    _check_name(name)

    def register(function: Function) -> Function:
        if name in _functions and not override:
            mend = "choose another name, or pass override=True to replace it"
            raise MaskError(f"mask function {name!r} is already registered; {mend}")
        _functions[name] = function
        _generation[name] = _generation.get(name, 0) + 1
        return function

    return register


def mask_function_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_functions))


@dataclass(frozen=True)
class MaskFunction(OffsetMask):
    """Key j is visible when the function registered under `name` says so of (x, j)."""

    kind: ClassVar[str] = "mask_function"
    name: str
    offset: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        self._check_offset()

    def __hash__(self) -> int:
        # Plans are cached by mask. Replacing a function (override=True) must miss plans of the old one.
        return hash((self.name, self.offset, _generation.get(self.name, 0)))

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        function = _functions.get(self.name)
        if function is None:
            known = ", ".join(mask_function_names()) or "none"
            mend = f"register it with @register_mask_function({self.name!r})"
            hint = nearest(self.name, _functions)
            raise MaskError(f"no mask function is named {self.name!r} (registered: {known}); {mend}.{hint}")
        x = self.place(rows, positions)
        if is_host(x, cols):
            # A function written in jnp would trace when planning happens under jit.
            with jax.ensure_compile_time_eval():
                seen = np.asarray(function(x, cols))
        else:
            seen = function(x, cols)
        if getattr(seen, "dtype", None) != np.bool_:
            got = getattr(seen, "dtype", type(seen).__name__)
            mend = "end it with a comparison"
            raise MaskError(f"mask function {self.name!r} returned {got}; wanted bool: {mend}")
        return seen

    def reach(self, blocks: Blocks) -> Reach:
        # Elementwise is all that is known of the function: nothing follows for a block.
        some = blocks.rows.lo + blocks.cols.lo
        return Reach(some == some, some != some)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        mend = "e.g. 'my_mask' or 'my_package.my_mask'"
        raise MaskError(f"mask function name {name!r} isn't usable; wanted an identifier, dots allowed: {mend}")
