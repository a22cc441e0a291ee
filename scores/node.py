"""Score, the base of what is done to logits between the product of query and key and the softmax; and Chain."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias, cast

import jax
import numpy as np

from ..errors import ScoreError, a_type, shown
from .places import Places
from .steps import Lowering

if TYPE_CHECKING:
    from ..drawing import HeatPicture

__all__ = ["GIVEN", "Capture", "Chain", "Score", "capture_array", "finite"]


class _Given:
    """The place of an array in a score without its arrays."""

    def __repr__(self) -> str:
        return "GIVEN"

    def __reduce__(self) -> str:
        return "GIVEN"


GIVEN = _Given()
Captured: TypeAlias = Any  # an array, numbers, None, or GIVEN


class Capture(NamedTuple):
    """An array that a score reads: its name in the call, the names of its dimensions, and those that it may have instead.

    A size of 1 counts for all of a dimension, if `broadcasts`. sizes: those of dims that no tensor of a call has.
    """

    name: str
    dims: tuple[str, ...]
    also: tuple[tuple[str, ...], ...] = ()
    broadcasts: bool = True
    sizes: tuple[tuple[str, int], ...] = ()


class Score:
    """Elementwise functions of a logit and its place. `a >> b` applies b to what a returns.

    Equal if kind, numbers, functions and the very arrays are. Arrays may be given in the call instead, by name. Subclasses are
    frozen dataclasses with eq=False; `captured` names the fields that hold arrays.
    """

    kind: ClassVar[str]
    # How pydantic reads and writes a score: set by pydantic_field.py.
    __get_pydantic_core_schema__: ClassVar[Any]
    __pydantic_serializer__: ClassVar[Any]
    captured: ClassVar[tuple[str, ...]] = ()
    # Whether the score depends on where a query and a key are, so that their alignment matters.
    needs_positions: ClassVar[bool] = True
    # Whether of these it is only the query's.
    by_query_alone: ClassVar[bool] = False

    def _key(self) -> tuple[Any, ...]:
        held = (x if x is None or x is GIVEN or isinstance(x, tuple) else id(x) for x in self.arrays())
        return type(self), vars(self).get("function"), *sorted(self._static().items()), *held

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Score) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __rshift__(self, other: Score) -> Score:
        if not isinstance(other, Score):
            return NotImplemented
        return Chain((*self.parts(), *other.parts()))

    def parts(self) -> tuple[Score, ...]:
        """The scores that are applied one after the other."""
        return (self,)

    # -- arrays ------------------------------------------------------------------------------------------------------

    def captures(self) -> tuple[Capture, ...]:
        """The arrays that it needs, in the order of their names; equal names are numbered by `Chain`."""
        return ()

    def arrays(self) -> tuple[Captured, ...]:
        """What its fields hold of them: an array or numbers, None for 'in the call', or GIVEN."""
        return tuple(getattr(self, name) for name in self.captured)

    def with_arrays(self, arrays: Sequence[Captured]) -> Score:
        """The same score with other arrays; neither validates nor normalises them."""
        return self._changed(**dict(zip(self.captured, arrays, strict=True)))

    def structure(self) -> Score:
        """The score without arrays; hashable."""
        return self.with_arrays([GIVEN] * len(self.arrays()))

    def without_values(self) -> Score:
        """The score without arrays that only a call has: those that are numbers stay, so that it can be drawn."""
        return self.with_arrays([x if isinstance(x, tuple) else GIVEN for x in self.arrays()])

    def with_heads(self, heads: int) -> Score:
        """The score for this many query heads; a score whose numbers follow from that has them as an array then."""
        return self

    def _changed(self, **fields: Any) -> Self:
        new = object.__new__(type(self))
        for name, value in {**vars(self), **fields}.items():
            object.__setattr__(new, name, value)
        return new

    # -- what it computes --------------------------------------------------------------------------------------------

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        """The definition: new logits [batch, heads, q, kv] in the library `xp` (numpy or jax.numpy), in any float dtype.

        arrays: those of `captures`, in the shapes of a call.
        """
        raise NotImplementedError

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        """Add the steps that do the same to a tile, and the arrays that they read, to `lowering`."""
        raise NotImplementedError

    def step_names(self, contiguous: bool) -> frozenset[str]:
        """The names of the steps that `lower` adds; contiguous: see Lowering."""
        raise NotImplementedError

    def operations(self, contiguous: bool) -> frozenset[str]:
        """The names of jax's primitives that a kernel has to compile for registered functions, with their derivatives."""
        return frozenset()

    # -- text --------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Short, deterministic text, such as `alibi >> soft_cap(50.0)`."""
        text = ", ".join(f"{name}={_text(value)}" for name, value in self._static().items())
        return f"{self.kind}({text})" if text else self.kind

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Errors: ScoreError if it holds arrays. Inverse: `score_from_dict`."""
        data: dict[str, Any] = {"kind": self.kind}
        for name, value in self._static().items():
            value = list(value) if isinstance(value, tuple) else value
            data[name] = value.to_dict() if hasattr(value, "to_dict") else value
        for name in self.captured:
            value = getattr(self, name)
            if isinstance(value, tuple):
                data[name] = list(value)
            elif value is not None and value is not GIVEN:
                raise ScoreError(
                    f"{self.kind}.{name} holds an array, which a file can't; leave it out there, and pass {name}= in the call"
                )
        return data

    def _static(self) -> dict[str, Any]:
        """The fields that hold no arrays, without those that are unset."""
        fields = dataclasses.fields(cast(Any, self))
        values = {f.name: getattr(self, f.name) for f in fields if f.init and f.name not in self.captured}
        return {name: value for name, value in values.items() if value is not None}

    def draw(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        query_offset: int = 0,
        head: int = 0,
        heads: int | None = None,
        batch: int = 0,
    ) -> HeatPicture:
        """Draw what it adds to a logit of 0 (of 1, if it multiplies) at the middle of each tile. Print the picture or show it in
        a notebook; it has `svg()` and `save(path)`.

        Lengths and heads default to those of its arrays, or else to 256 and 8. Errors: ScoreError for an array that is missing,
        and for other sizes than the arrays'.
        """
        from .draw import draw_score

        return draw_score(self, q_len, kv_len, query_offset, head, heads, batch)

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True, eq=False)
class Chain(Score):
    """Scores applied one after the other."""

    kind: ClassVar[str] = "chain"
    scores: tuple[Score, ...]

    @property
    def needs_positions(self) -> bool:  # type: ignore[override]
        return any(score.needs_positions for score in self.scores)

    def parts(self) -> tuple[Score, ...]:
        return self.scores

    def captures(self) -> tuple[Capture, ...]:
        seen: dict[str, int] = {}
        numbered = []
        for capture in itertools.chain.from_iterable(score.captures() for score in self.scores):
            count = seen[capture.name] = seen.get(capture.name, 0) + 1
            numbered.append(capture if count == 1 else capture._replace(name=f"{capture.name}_{count}"))
        return tuple(numbered)

    def arrays(self) -> tuple[Captured, ...]:
        return tuple(itertools.chain.from_iterable(score.arrays() for score in self.scores))

    def with_arrays(self, arrays: Sequence[Captured]) -> Score:
        rest = iter(arrays)
        return Chain(tuple(s.with_arrays([next(rest) for _ in s.arrays()]) for s in self.scores))

    def structure(self) -> Score:
        return Chain(tuple(score.structure() for score in self.scores))

    def without_values(self) -> Score:
        return Chain(tuple(score.without_values() for score in self.scores))

    def with_heads(self, heads: int) -> Score:
        return Chain(tuple(score.with_heads(heads) for score in self.scores))

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        rest = iter(arrays)
        for score in self.scores:
            logits = score.apply(logits, at, [next(rest) for _ in score.arrays()], xp)
        return logits

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        rest = iter(arrays)
        for score in self.scores:
            score.lower([next(rest) for _ in score.arrays()], lowering)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset().union(*(score.step_names(contiguous) for score in self.scores))

    def operations(self, contiguous: bool) -> frozenset[str]:
        return frozenset().union(*(score.operations(contiguous) for score in self.scores))

    def describe(self) -> str:
        return " >> ".join(score.describe() for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "scores": [score.to_dict() for score in self.scores]}


def _text(value: Any) -> str:
    return value.describe() if hasattr(value, "describe") else repr(value)


def finite(value: Any, what: str, *, positive: bool = False) -> float:
    """A finite number. Errors: ScoreError with the value."""
    wanted = "a positive number" if positive else "a finite number"
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ScoreError(f"{what}={shown(value)} is {a_type(value)}; wanted {wanted}: it is compiled in") from None
    if isinstance(value, bool) or not math.isfinite(number) or (positive and number <= 0):
        raise ScoreError(f"{what}={shown(value)}; wanted {wanted}")
    return number


def capture_array(value: Any, what: str, ranks: Sequence[int], dims: str) -> Captured:
    """An array, a tuple of numbers, None or GIVEN. Errors: ScoreError for another type, dtype or rank, and for constants that
    aren't finite. ranks: those that it may have; dims: what the message says of them."""
    if value is None or value is GIVEN:
        return value
    if isinstance(value, Mapping | str | Score):
        raise ScoreError(f"{what} is {a_type(value)}; wanted an array {dims}")
    if isinstance(value, list | tuple):
        value = tuple(finite(x, what) for x in value)
        shape, floats = (len(value),), True
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, floats = value.shape, jax.numpy.issubdtype(value.dtype, np.floating)
        if isinstance(value, np.ndarray) and floats and not np.isfinite(value.astype(np.float64)).all():
            raise ScoreError(f"{what} has numbers that aren't finite; wanted finite numbers")
    else:
        raise ScoreError(f"{what} is {a_type(value)}; wanted an array {dims}")
    if not floats:
        raise ScoreError(f"{what} has dtype {value.dtype}; wanted floats: cast it")
    if len(shape) not in ranks:
        raise ScoreError(f"{what} has shape {tuple(shape)}; wanted {dims}")
    return value
