"""MaskFunction: a leaf that refers to a registered function by name, so that it is hashable and serialisable."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

from ..errors import MaskError, a_type, first_line, nearest, shown
from .bounds import BlockBounds, Blocks
from .checks import is_host
from .static import OffsetMask

__all__ = ["MaskFunction", "mask_function_names", "register_mask_function"]

Function = TypeVar("Function", bound=Callable[[Any, Any], Any])

_functions: dict[str, Callable[[Any, Any], Any]] = {}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def register_mask_function(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Register fn(query_position, key_index) -> bool, elementwise on integer arrays of NumPy or jax.

    The function must be pure: it is called on the host during planning, and inside kernels.
    Registering a name twice raises MaskError unless override=True. Existing masks keep their function.
    """
    _check_name(name)

    def register(function: Function) -> Function:
        _check_function(name, function)
        if name in _functions and not override:
            hint = "choose another name, or pass override=True to replace it"
            raise MaskError(f"mask function {shown(name)} is already registered; {hint}")
        _functions[name] = function
        return function

    return register


def mask_function_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_functions))


@dataclass(frozen=True, eq=False)
class MaskFunction(OffsetMask):
    """Key j is visible when the function registered under `name` returns True for (x, j).

    The mask holds the function that was registered when the mask was created: plans and compiled programs are cached by mask,
    so a mask's meaning must not change. Two are equal if name, offset and function are; JSON and pickle store only the name.
    Errors: MaskError for a name that isn't registered.
    """

    kind: ClassVar[str] = "mask_function"
    name: str
    offset: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        self._check_offset()
        if self.name not in _functions:
            known = ", ".join(mask_function_names()) or "none"
            hint = f"register it first, with @register_mask_function({shown(self.name)})"
            close = nearest(self.name, _functions)
            raise MaskError(f"no mask function is named {shown(self.name)} (registered: {known}); {hint}.{close}")
        object.__setattr__(self, "_held", _functions[self.name])  # not a field: a file can't set it

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The function that this mask holds."""
        held: Callable[[Any, Any], Any] = vars(self)["_held"]
        return held

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskFunction):
            return NotImplemented
        return (self.name, self.offset) == (other.name, other.offset) and self.function is other.function

    def __hash__(self) -> int:
        return hash((self.name, self.offset))

    def __reduce__(self) -> Any:
        return type(self), (self.name, self.offset)

    def __copy__(self) -> MaskFunction:
        return self  # immutable; __reduce__ could give it another function

    def __deepcopy__(self, memo: Any) -> MaskFunction:
        return self

    def with_offset(self, offset: int | None) -> MaskFunction:
        moved = type(self)(self.name, offset)
        object.__setattr__(moved, "_held", self.function)
        return moved

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        x = self.position(rows, positions)
        seen = self._call(x, cols)
        if getattr(seen, "dtype", None) != np.bool_:
            got = f"an array of {seen.dtype}" if hasattr(seen, "dtype") else a_type(seen)
            hint = "end it with a comparison of the two"
            raise MaskError(f"mask function {shown(self.name)} returned {got}; wanted an array of bool: {hint}")
        wanted = np.broadcast_shapes(np.shape(x), np.shape(cols))
        ends = zip(seen.shape[::-1], wanted[::-1], strict=False)
        lost = len(seen.shape) < min(np.ndim(x), np.ndim(cols))
        if lost or len(seen.shape) > len(wanted) or any(n not in (1, m) for n, m in ends):
            # One value for many pairs, as from np.all, would depend on the block.
            raise MaskError(
                f"mask function {shown(self.name)} returned shape {seen.shape} for positions {np.shape(x)} and keys "
                f"{np.shape(cols)}; wanted one that broadcasts to {wanted}: compare element by element"
            )
        return seen

    def _call(self, x: Any, cols: Any) -> Any:
        """The function's result. Errors: MaskError that names the function."""
        try:
            if not is_host(x, cols):
                return self.function(x, cols)
            # A function written with jnp would be traced when planning happens under jit.
            with jax.ensure_compile_time_eval():
                return np.asarray(self.function(x, cols))
        except (MaskError, MemoryError):
            raise
        except Exception as error:
            asks = isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError)
            asks = asks or "truth value" in str(error)
            hint = (
                "it asks for the value of an array, as `if`, `and`, `or`, `not` and bool() do; write & | ~ and jnp.where"
                if asks
                else "it is called with two integer arrays, of NumPy or traced by jax"
            )
            raise MaskError(
                f"mask function {shown(self.name)} raised {type(error).__name__}: {first_line(error)}; wanted "
                f"fn(query_position, key_index) -> bool, element by element: {hint}"
            ) from error

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        # The function is known only elementwise: nothing follows for a block.
        some = blocks.rows.lo + blocks.cols.lo
        return BlockBounds(some == some, some != some)


def _check_function(name: str, function: Any) -> None:
    wanted = "wanted fn(query_position, key_index) -> bool"
    if not callable(function):
        raise MaskError(f"mask function {shown(name)} is {a_type(function)}; {wanted}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(0, 0)
    except TypeError as error:
        raise MaskError(
            f"mask function {shown(name)} takes {shown(str(signature)).strip(chr(39))}, so it can't be called with two arguments "
            f"({error}); {wanted}"
        ) from None


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        hint = "e.g. 'my_mask' or 'my_package.my_mask'"
        raise MaskError(f"mask function name {shown(name)} isn't usable; wanted an identifier, dots allowed: {hint}")
