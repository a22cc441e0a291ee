"""ScoreFunction: a function registered by name; and the registry, which Distance and Buckets use as well."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ScoreError, a_type, first_line, nearest, shown
from .node import GIVEN, Capture, Captured, Score, capture_array
from .places import Places
from .steps import Function, Lowering

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

__all__ = ["Named", "ScoreFunction", "checked_function", "register_score_function", "score_function_names"]

F = TypeVar("F", bound=Callable[..., Any])

_functions: dict[str, Callable[..., Any]] = {}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
# What computes each element from its own: a kernel evaluates a function a tile at a time.
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "custom_jvp_call", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "jit", "le", "lgamma", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pjit", "pow", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip
_TILE = (8, 128)  # traced with such a tile


def register_score_function(name: str, *, override: bool = False) -> Callable[[F], F]:
    """Register a function by name, for ScoreFunction, Distance or Buckets; elementwise, in jax.numpy.

    A ScoreFunction calls fn(logit, batch, head, q, kv, *captures) and expects a logit; a Distance fn(distance), a float to add;
    Buckets fn(distance), an integer. Registering a name twice raises ScoreError unless override=True. Existing scores keep their
    function.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ScoreError(
            f"score function name {shown(name)} isn't usable; wanted an identifier, dots allowed, e.g. 'my_package.decay'"
        )

    def register(function: F) -> F:
        if not callable(function):
            raise ScoreError(f"score function {shown(name)} is {a_type(function)}; wanted a function")
        if name in _functions and not override:
            raise ScoreError(
                f"score function {shown(name)} is already registered; choose another name, or pass override=True"
            )
        _functions[name] = function
        return function

    return register


def score_function_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_functions))


@dataclass(frozen=True, eq=False)
class Named:
    """What holds the function that was registered under its name when it was made. JSON and pickle have the name only."""

    name: str
    function: Callable[..., Any] = field(init=False, repr=False)

    def _hold(self) -> None:
        if not isinstance(self.name, str) or self.name not in _functions:
            known = ", ".join(score_function_names()) or "none"
            raise ScoreError(
                f"no score function is named {shown(self.name)} (registered: {known}); register it first, with "
                f"@register_score_function({shown(self.name)}).{nearest(str(self.name), _functions)}"
            )
        object.__setattr__(self, "function", _functions[self.name])

    def primitives(self, arguments: Sequence[Any]) -> frozenset[str]:
        """The names of the primitives of the function, for tiles of these dtypes, and of its derivative."""
        return _primitives_of(self.function, tuple(np.dtype(dtype) for dtype in arguments))

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, item.name) for item in fields(self) if item.init)


def checked_function(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], result: Any, wanted: str
) -> None:
    """Trace a function as a kernel would. arguments: dtypes, each of a tile; result: the dtype that it has to return, 'float' for
    any. Errors: ScoreError that names the function if it can't be called or traced, isn't elementwise, or returns something else.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ScoreError(
            f"score function {shown(name)} can't be called with {len(arguments)} arguments ({error}); wanted {wanted}"
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass
    tiles = [jax.ShapeDtypeStruct(_TILE, dtype) for dtype in arguments]
    try:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*tiles)
    except Exception as error:
        asks = isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError)
        hint = (
            "it asks for the value of an array, as `if`, `and`, `or` and float() do; write jnp.where, & and |"
            if asks
            else "it is called with arrays that jax traces"
        )
        raise ScoreError(
            f"score function {shown(name)} raised {type(error).__name__}: {first_line(error)}; wanted {wanted}: {hint}"
        ) from error
    if not hasattr(out, "dtype"):
        raise ScoreError(f"score function {shown(name)} returned {a_type(out)}; wanted {wanted}")
    fits = jnp.issubdtype(out.dtype, np.floating if result == "float" else result)
    if not fits:
        raise ScoreError(f"score function {shown(name)} returned dtype {out.dtype}; wanted {wanted}")
    if out.shape not in (_TILE, ()):
        raise ScoreError(
            f"score function {shown(name)} returned shape {out.shape} for a tile of {_TILE}; wanted {wanted}, element by element"
        )
    arrays = [x for x in closed.consts if np.ndim(x)]
    if arrays:
        raise ScoreError(
            f"score function {shown(name)} holds an array of shape {np.shape(arrays[0])}; pass it as a capture, which is placed, "
            "differentiated and cut into tiles"
        )
    others = sorted(set(_not_elementwise(closed.jaxpr)))
    if others:
        raise ScoreError(
            f"score function {shown(name)} uses {', '.join(others)}, not elementwise; "
            f"wanted {wanted}, each element from its own: what it looks up belongs into a capture or a RelativeBias"
        )


def _not_elementwise(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        aval: Any = equation.invars[0].aval if equation.invars else None
        result: Any = equation.outvars[0].aval
        scalar = name == "broadcast_in_dim" and not aval.shape
        same = name in ("broadcast_in_dim", "reshape") and aval.shape == result.shape
        if name not in _ELEMENTWISE and not scalar and not same:
            yield name
        for part in _parts(equation):
            yield from _not_elementwise(part)


@functools.lru_cache(maxsize=256)
def _primitives_of(function: Callable[..., Any], dtypes: tuple[np.dtype, ...]) -> frozenset[str]:
    def with_derivative(*tiles: jax.Array) -> Any:
        floats = [n for n, tile in enumerate(tiles) if jnp.issubdtype(tile.dtype, np.floating)]

        def of_floats(*chosen: jax.Array) -> Any:
            every = list(tiles)
            for n, tile in zip(floats, chosen, strict=True):
                every[n] = tile
            return function(*every)

        result, pull = jax.vjp(of_floats, *(tiles[n] for n in floats))
        return result, pull(result) if floats else ()

    with jax.enable_x64(False):
        closed = jax.make_jaxpr(with_derivative)(*(jax.ShapeDtypeStruct(_TILE, dtype) for dtype in dtypes))
    return frozenset(_names(closed.jaxpr))


def _names(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for part in _parts(equation):
            yield from _names(part)


def _parts(equation: Any) -> Iterator[Jaxpr]:
    from jax.extend.core import ClosedJaxpr, Jaxpr

    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr | Jaxpr):
                yield part.jaxpr if isinstance(part, ClosedJaxpr) else part


_ALIGNED = ("batch", "heads", "q_len", "kv_len")
_WANTED = "fn(logit, batch, head, q, kv, *captures) -> logit"


@dataclass(frozen=True, eq=False)
class ScoreFunction(Named, Score):
    """The function registered under `name`: fn(logit, batch, head, q, kv, *captures) -> logit, elementwise.

    captures: name -> its dims, some of ('batch', 'heads', 'q_len', 'kv_len') in this order, or (array, dims). Without an array it
    is passed in the call, by name. The function gets each element's own number of a capture. Errors: ScoreError for a name that
    isn't registered, for dims that don't exist, and for functions that branch on values, aren't elementwise or return another
    dtype or shape.
    """

    kind: ClassVar[str] = "score_function"
    captured: ClassVar[tuple[str, ...]] = ("held",)
    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()
    held: tuple[Captured, ...] = ()

    def __init__(self, name: str, captures: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "name", name)
        self._hold()
        read = [_read_capture(name, key, value) for key, value in (captures or {}).items()]
        object.__setattr__(self, "dims", tuple((name, dims) for name, dims, _ in read))
        object.__setattr__(self, "held", tuple(array for *_, array in read))
        checked_function(name, self.function, self._dtypes(), np.float32, _WANTED)

    def _dtypes(self) -> tuple[Any, ...]:
        return np.float32, *[np.int32] * 4, *[np.float32] * len(self.dims)

    def operations(self, contiguous: bool) -> frozenset[str]:
        return self.primitives(self._dtypes())

    def captures(self) -> tuple[Capture, ...]:
        return tuple(Capture(name, dims) for name, dims in self.dims)

    def arrays(self) -> tuple[Captured, ...]:
        return self.held

    def with_arrays(self, arrays: Sequence[Captured]) -> Score:
        return self._changed(held=tuple(arrays))

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        aligned = [_aligned(x, capture.dims, xp) for x, capture in zip(arrays, self.captures(), strict=True)]
        if xp is np:  # written for jax.numpy; in float64 like everything else in the reference
            with jax.enable_x64(True), jax.ensure_compile_time_eval():
                places = (np.broadcast_to(np.asarray(x), np.shape(logits)) for x in at)
                spread = (np.broadcast_to(np.asarray(x, logits.dtype), np.shape(logits)) for x in aligned)
                return np.asarray(
                    self.function(jnp.asarray(logits), *map(jnp.asarray, places), *map(jnp.asarray, spread))
                )
        return self.function(logits, *(jnp.broadcast_to(x, logits.shape) for x in (*at, *aligned)))

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Function.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        reads = [lowering.array(_aligned(x, c.dims, jnp)) for x, c in zip(arrays, self.captures(), strict=True)]
        lowering.add(Function(tuple(reads), function=self.function))

    def describe(self) -> str:
        return f"{self.name}({', '.join(name for name, _ in self.dims)})"

    def to_dict(self) -> dict[str, Any]:
        held = [name for (name, _), x in zip(self.dims, self.held, strict=True) if x is not None and x is not GIVEN]
        if held:
            raise ScoreError(
                f"score_function {self.name!r} holds {held[0]}, an array, which a file can't; leave it out there, and pass "
                f"{held[0]}= in the call"
            )
        return {
            "kind": self.kind,
            "name": self.name,
            "captures": {name: list(dims) for name, dims in self.dims},
        }

    def __repr__(self) -> str:
        return f"ScoreFunction({self.name!r})"

    def __reduce__(self) -> Any:
        captures = {name: (x, dims) for (name, dims), x in zip(self.dims, self.held, strict=True)}
        return type(self), (self.name, captures)


def _read_capture(function: str, name: Any, value: Any) -> tuple[str, tuple[str, ...], Captured]:
    what = f"capture {shown(name)} of score function {shown(function)}"
    if not isinstance(name, str) or not name.isidentifier():
        raise ScoreError(f"{what}: wanted an identifier as its name")
    pair = isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], str)
    array, dims = value if pair else (None, value)
    if isinstance(dims, str):
        dims = (dims,)
    wanted = f"dims in the order of {', '.join(_ALIGNED)}, or (array, dims)"
    several = isinstance(dims, tuple | list)
    if not several or not all(dim in _ALIGNED for dim in dims):
        close = "".join(nearest(dim, _ALIGNED) for dim in dims if isinstance(dim, str)) if several else ""
        raise ScoreError(f"{what} is {shown(value)}; wanted {wanted}.{close}")
    dims = tuple(dims)
    if list(dims) != sorted(set(dims), key=_ALIGNED.index):
        raise ScoreError(f"{what} has dims {shown(dims)}; wanted {wanted}")
    return name, dims, capture_array(array, what, (len(dims),), f"[{', '.join(dims)}]")


def _aligned(x: Any, dims: Sequence[str], xp: Any) -> Any:
    """An array as [batch, heads, q, kv], 1 where it has no such dimension."""
    sizes = dict(zip(dims, x.shape, strict=True))
    return xp.reshape(x, tuple(sizes.get(dim, 1) for dim in _ALIGNED))
