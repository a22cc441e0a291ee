"""MaskFunction: a leaf that refers to a registered function by name, so that it is hashable and serialisable."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np

from ..errors import MaskError, a_type, first_line, nearest, shown
from .bounds import BlockBounds, Blocks
from .checks import is_host
from .static import OffsetMask

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

__all__ = ["FunctionCode", "MaskFunction", "mask_function_names", "register_mask_function"]

Function = TypeVar("Function", bound=Callable[[Any, Any], Any])

_functions: dict[str, Callable[[Any, Any], Any]] = {}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def register_mask_function(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Register fn(query_position, key_index) -> bool, elementwise on integer arrays of NumPy or jax.

    The function must be pure: it is called on the host during planning, and inside kernels. A kernel takes arithmetic and
    comparisons; a function that looks up in an array runs in plain XLA.
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


class FunctionCode(NamedTuple):
    """A mask function as jax traces it. arrays: those that it holds, such as 'bool[8,8]', and single numbers held by a function
    under jax.jit in it; numbers: whether it holds others; operations: the names of jax's primitives; error: why it
    can't be traced, or ''."""

    arrays: tuple[str, ...]
    operations: frozenset[str]
    numbers: bool
    error: str


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
        object.__setattr__(self, "_function", _functions[self.name])  # not a field: a file can't set it

    @functools.cached_property
    def code(self) -> FunctionCode:
        """What a kernel would have to compile."""
        pair = [jax.ShapeDtypeStruct((8, 128), np.int32)] * 2
        try:
            with jax.enable_x64(False):  # as kernels are traced
                closed = jax.make_jaxpr(self.function)(*pair)
        except Exception as error:
            return FunctionCode((), frozenset(), False, f"{type(error).__name__}: {first_line(error)}")
        constants = [x for x in closed.consts if not _is_number(x)]
        arrays = tuple(jax.typeof(x).str_short() for x in (*constants, *_consts_inside(closed.jaxpr)))
        return FunctionCode(arrays, frozenset(_operations(closed.jaxpr)), any(map(_is_number, closed.consts)), "")

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The function that this mask holds."""
        function: Callable[[Any, Any], Any] = vars(self)["_function"]
        return function

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
        object.__setattr__(moved, "_function", self.function)
        return moved

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        x = self.position(rows, positions)
        seen = self._call(x, cols)
        if getattr(seen, "dtype", None) != np.bool_:
            got = f"an array of {seen.dtype}" if hasattr(seen, "dtype") else a_type(seen)
            hint = "end it with a comparison of the two"
            raise MaskError(f"mask function {shown(self.name)} returned {got}; wanted an array of bool: {hint}")
        expected = np.broadcast_shapes(np.shape(x), np.shape(cols))
        ends = zip(seen.shape[::-1], expected[::-1], strict=False)
        lost = len(seen.shape) < min(np.ndim(x), np.ndim(cols))
        if lost or len(seen.shape) > len(expected) or any(n not in (1, m) for n, m in ends):
            # One value for many pairs, as from np.all, would depend on the block.
            raise MaskError(
                f"mask function {shown(self.name)} returned shape {seen.shape} for positions {np.shape(x)} and keys "
                f"{np.shape(cols)}; wanted one that broadcasts to {expected}: compare element by element"
            )
        return seen

    def _call(self, x: Any, cols: Any) -> Any:
        """The function's result. Errors: MaskError that names the function."""
        try:
            if not is_host(x, cols):
                return self._with_literals(x, cols) if self.code.numbers else self.function(x, cols)
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

    def _with_literals(self, x: Any, cols: Any) -> Any:
        """The function's result for traced positions; arrays of one number that it holds become literals, as kernels require."""
        from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

        closed = jax.make_jaxpr(self.function)(x, cols)
        consts = [np.asarray(constant)[()] if _is_number(constant) else constant for constant in closed.consts]
        (seen,) = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(x, cols)
        return seen

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        # The function is known only elementwise: nothing follows for a block.
        some = blocks.rows.lo + blocks.cols.lo
        return BlockBounds(some == some, some != some)


def _is_number(constant: Any) -> bool:
    return np.ndim(constant) == 0 and not isinstance(constant, jax.core.Tracer)


def _inside(jaxpr: Jaxpr) -> Iterator[Any]:
    """The jaxprs in the parameters of its equations."""
    from jax.extend.core import ClosedJaxpr, Jaxpr  # with Pallas, so only where it is needed

    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, Jaxpr | ClosedJaxpr):
                    yield part


def _consts_inside(jaxpr: Jaxpr) -> Iterator[Any]:
    from jax.extend.core import ClosedJaxpr

    for part in _inside(jaxpr):
        closed = isinstance(part, ClosedJaxpr)
        yield from part.consts if closed else ()
        yield from _consts_inside(part.jaxpr if closed else part)


def _operations(jaxpr: Jaxpr) -> Iterator[str]:
    from jax.extend.core import ClosedJaxpr

    yield from (equation.primitive.name for equation in jaxpr.eqns)
    for part in _inside(jaxpr):
        yield from _operations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)


def _check_function(name: str, function: Any) -> None:
    expected = "wanted fn(query_position, key_index) -> bool"
    if not callable(function):
        raise MaskError(f"mask function {shown(name)} is {a_type(function)}; {expected}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(0, 0)
    except TypeError as error:
        raise MaskError(
            f"mask function {shown(name)} takes {shown(str(signature)).strip(chr(39))}, so it can't be called with two arguments "
            f"({error}); {expected}"
        ) from None


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        hint = "e.g. 'my_mask' or 'my_package.my_mask'"
        raise MaskError(f"mask function name {shown(name)} isn't usable; wanted an identifier, dots allowed: {hint}")
