"""KeptState: an array of fixed size that layers keep of each sequence, declared by an operation and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from ...errors import a_type, is_whole, nearest, shown
from ...sharding import Operand
from ..recurrent.operands import OPERATIONS
from ..unset_fields import UnsetFieldsModel, models_of

__all__ = ["KeptState", "checked_states", "states_problem"]

_LIMIT = 2**30
_SPLIT = ("heads", "channels")  # dims that are split as heads are

_Sizes = tuple[tuple[str, int], ...]


def _pairs(value: Any) -> Any:
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'sizes={shown(value)}; wanted the size of each dim, such as {{"heads": 32, "head_dim": 128}}')
    for name, size in value.items():
        if not isinstance(name, str) or not name.isidentifier() or not is_whole(size, 1, _LIMIT):
            raise ValueError(f"sizes has {shown(name)}: {shown(size)}; wanted names of dims and whole numbers from 1")
    return tuple(value.items())


class KeptState(UnsetFieldsModel):
    """An array that a layer keeps of each sequence, whatever its length.

    operation: the operation whose `initial_state` it is; sizes: those of its dims, in the operation's names (heads, head_dim,
    value_dim; channels, state_dim; channels, width). Without an operation, `sizes` is the shape of one sequence's array, in
    order; a dim named heads or channels is split as heads are. name: of the array; default: 'state', or 'convolution' for the
    tokens before a convolution. dtype: default float32, and the cache's for those tokens.
    """

    model_config = ConfigDict(title="cache.layers.states")

    name: Annotated[str | None, Field(description="Name of the array; null: 'state', or 'convolution'.")] = None
    operation: Annotated[
        str | None, Field(description="The operation whose initial_state it is; null: `sizes` is the array's shape.")
    ] = None
    sizes: Annotated[
        _Sizes,
        BeforeValidator(_pairs),
        PlainSerializer(dict, return_type=dict[str, int]),
        Field(
            description="The size of each dim, by the operation's names; without an operation in the order of the shape.",
            json_schema_extra={"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
        ),
    ]
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Field(description="Dtype; null: float32, or the cache's for the tokens before a convolution."),
    ] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.name is not None and not self.name.isidentifier():
            raise ValueError(f"name={shown(self.name)}; wanted a name such as 'state'")
        if self.operation is None:
            if sum(dim in _SPLIT for dim, _ in self.sizes) > 1:
                raise ValueError("sizes has heads and channels; wanted one of them, the dim that is split as heads are")
            return self
        if self.operation not in OPERATIONS:
            known = sorted(OPERATIONS)
            raise ValueError(
                f"operation={shown(self.operation)}; wanted one of {', '.join(known)}, or none and the array's dims in order"
                + nearest(self.operation, known)
            )
        wanted, given = self._wanted(), dict(self.sizes)
        if set(wanted) != set(given):
            raise ValueError(f"sizes has {', '.join(given)}; wanted {', '.join(wanted)} for {self.operation!r}")
        if given.get("width") == 1:
            raise ValueError(
                "sizes has width 1, a convolution that keeps nothing; leave it out, or declare a width from 2"
            )
        return self

    def _row(self) -> Operand:
        assert self.operation is not None
        return OPERATIONS[self.operation]["initial_state"]

    def _wanted(self) -> tuple[str, ...]:
        """The dims that an operation's sizes name."""
        return tuple("width" if dim == "history" else dim for dim in self._row().dims[1:])

    @property
    def label(self) -> str:
        """The array's name."""
        return self.name or ("convolution" if self.of_tokens else "state")

    @property
    def of_tokens(self) -> bool:
        """Whether it holds a convolution's last tokens, in their dtype."""
        return self.operation is not None and "history" in self._row().dims

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the array's dims."""
        return tuple(dim for dim, _ in self.sizes) if self.operation is None else self._row().dims[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sequence's array."""
        if self.operation is None:
            return tuple(size for _, size in self.sizes)
        sizes = dict(self.sizes)
        return tuple(sizes["width"] - 1 if dim == "history" else sizes[dim] for dim in self.dims)

    @property
    def heads_at(self) -> int | None:
        """Which dim of `shape` is split as heads are; None for none."""
        if self.operation is None:
            split: tuple[str, ...] = tuple("heads" if dim in _SPLIT else "" for dim in self.dims)
        else:
            split = self._row().split_dims("bthd")[1:]
        return split.index("heads") if "heads" in split else None

    def dtype_in(self, dtype: str) -> str:
        """Its dtype in a cache of this dtype."""
        default = dtype if self.of_tokens else "float32"
        return default if self.dtype is None else self.dtype


def checked_states(value: Any) -> Any:
    """Check `states`: a list of arrays, which become KeptStates. Errors: ValueError that names the array."""
    if not isinstance(value, list | tuple):
        raise ValueError(
            f'states is {a_type(value)}; wanted a list such as [{{"operation": "mamba2", "sizes": {{"heads": 64, "head_dim": '
            '128, "value_dim": 64}}]'
        )
    return models_of(
        value, KeptState, "states", '{"operation": "causal_conv1d", "sizes": {"channels": 64, "width": 4}}'
    )


def states_problem(states: tuple[KeptState, ...]) -> str:
    """What is wrong with the arrays of a group; '' for nothing."""
    if not states:
        return "states is an empty list; wanted at least one array"
    names = [one.label for one in states]
    twice = next((name for name in names if names.count(name) > 1), None)
    return "" if twice is None else f"states has two arrays named {twice!r}; give each a name of its own"
