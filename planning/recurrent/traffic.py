"""The least that a recurrence has to send between devices, as its plan has it; compiled programs are compared with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ...sharding import FittedSpec
from ..placed_tensors import all_axes, sent_itemsize
from ..tables.table_plan import TablePlacement
from ..tables.table_problem import TableProblem
from ..traffic import Need, Traffic
from .exchange import Maps, exchanged
from .inside import KEY_HEADS, inside_axes, repeats_keys

__all__ = ["gathered_bytes", "maps_of", "passed_bytes", "recurrence_traffic"]

_WIDE = 4  # states and maps are float32


def maps_of(operation: Any, placement: TablePlacement) -> Maps:
    """The bytes of a device's map; 0 for a convolution, which has none."""
    state = next(x for x in placement.tensors if x.tensor == "state")
    linear, constant = operation.map_numbers(dict(zip(state.dims, state.local_shape, strict=True)))
    return Maps(_WIDE * linear, _WIDE * constant)


def passed_bytes(operation: Any, problem: TableProblem, placement: TablePlacement, exchange: str) -> int:
    """What a device sends in a forward pass so that states are passed on along a split sequence."""
    return round(sum(need.sent_bytes for need in _passed(operation, problem, placement, exchange)))


def gathered_bytes(placement: TablePlacement, devices: int) -> int:
    """What each device receives if the tokens of the others are gathered."""
    total = sum(
        x.local_bytes
        for x in placement.tensors
        if "q_len" in x.dims and (placement.manual or x.axes(x.dims.index("q_len"))) and x.tensor != "attention_outputs"
    )
    return (devices - 1) * total


def recurrence_traffic(operation: Any, problem: TableProblem, placement: TablePlacement, backward: bool) -> Traffic:
    """The needs of the forward pass, or of both passes with outputs, state and all gradients where they are declared.

    A gradient is summed over the axes that split the work but not its array; what is passed on along the sequence goes back the
    same way.
    """
    count = _Count(operation, problem, placement)
    needs = [*count.forward(), *(count.backward() if backward else ())]
    return Traffic(tuple(need for need in needs if need.sent_bytes), tuple(dict.fromkeys(count.unknown)))


def _passed(operation: Any, problem: TableProblem, placement: TablePlacement, exchange: str) -> Iterator[Need]:
    """What the forward pass sends along the sequence, besides what documents need."""
    over, sizes = placement.over, {axis.name: axis.size for axis in problem.mesh}
    devices = math.prod(sizes[axis] for axis in over)
    if "history" not in problem.size:
        for one in exchanged(exchange, maps_of(operation, placement), devices):
            yield Need(one.kind, one.sent_bytes, one.what, axes=over, by=one.by)
        return
    tokens = next(x for x in placement.tensors if x.tensor == "x")
    item = sent_itemsize(problem.input_dtype, problem.platform == "cpu")
    batch, channels = (
        tokens.local_shape[tokens.dims.index(n)] if n in tokens.dims else 1 for n in ("batch", "channels")
    )
    size = float(batch * channels * problem.size["history"] * item)
    yield Need("collective-permute", size, "the neighbour's last tokens", axes=over, by=1)
    yield Need("all-reduce", 2 * size * (devices - 1) / devices, "the state after all tokens", axes=over)


class _Count:
    def __init__(self, operation: Any, problem: TableProblem, placement: TablePlacement) -> None:
        self.operation, self.problem, self.placement = operation, problem, placement
        self.inside = inside_axes(placement)
        self.sizes = {axis.name: axis.size for axis in problem.mesh if axis.splits}
        self.unknown: list[str] = []
        self.passes = placement.strategy == "state" and not placement.manual

    def forward(self) -> Iterator[Need]:
        for x in self.problem.operands:
            fitted = self._fitted(x.name)
            yield from self._gathered(fitted, self._item(x.dtype), x.name)
        if not self.passes:
            return
        yield from _passed(self.operation, self.problem, self.placement, self.placement.exchange)
        ids = next((self._fitted(x.name) for x in self.problem.operands if x.name == "segment_ids"), None)
        if ids is None:
            return
        over, rows = self.placement.over, ids.local_shape[0] if "batch" in ids.dims else 1
        history = self.problem.size.get("history", 0)
        yield Need(
            "collective-permute",
            4.0 * rows * (1 + history),
            "documents of the neighbour's last tokens",
            axes=over,
            by=1,
        )
        yield Need("all-gather", 4.0 * rows * (self._size(set(over)) - 1), "how many documents start", axes=over)

    def backward(self) -> Iterator[Need]:
        every = set(self.sizes)
        for x in self.problem.results:
            yield from self._gathered(self._fitted(x.name), self._item(x.dtype), f"gradient of {x.name}")
        for x in self.problem.operands:
            if not x.operand.gradient or not jnp.issubdtype(jnp.dtype(x.dtype), jnp.floating):
                continue
            fitted, name = self._fitted(x.name), f"gradient of {x.name}"
            inside = {axis for dim in fitted.dims for axis in self.inside.get(dim, ())}
            if x.name in KEY_HEADS and repeats_keys(self.placement):
                if self.problem.size["kv_heads"] > 1:
                    self.unknown.append("heads of keys are repeated, and XLA chooses how their gradients are summed")
                inside -= set(self.inside["kv_heads"])
            summed = every - inside
            local = math.prod(fitted.shape) * self._item(x.dtype) / self._size(inside)
            if whole := summed:
                size = self._size(whole)
                yield Need("all-reduce", 2 * local * (size - 1) / size, name, axes=self._named(whole))
        if self.passes:
            for need in _passed(self.operation, self.problem, self.placement, self.placement.exchange):
                kind = "reduce-scatter" if need.kind == "all-gather" else need.kind
                yield need._replace(kind=kind, what=f"gradient of {need.what}")

    def _gathered(self, fitted: FittedSpec, item: int, what: str) -> Iterator[Need]:
        """What is gathered of an array, or of a result's gradient, as the axes that split it don't inside."""
        declared = [fitted.axes(index) for index in range(len(fitted.dims))]
        inside = [self.inside.get(dim, ()) for dim in fitted.dims]
        gone = all_axes(tuple(declared)) - all_axes(tuple(inside))
        repeated = fitted.tensor in KEY_HEADS and repeats_keys(self.placement)
        if any(set(before) - gone - set(after) for before, after in zip(declared, inside, strict=True)) or (
            repeated and self.placement.axes(fitted.tensor, "kv_heads")
        ):
            self.unknown.append(f"{what} is split differently inside than declared, and XLA chooses how it gets there")
        if gone:
            local = math.prod(fitted.local_shape) * item
            yield Need("all-gather", float(local * (self._size(gone) - 1)), what, axes=self._named(gone))

    def _fitted(self, name: str) -> FittedSpec:
        return next(x for x in self.placement.tensors if x.tensor == name)

    def _item(self, dtype: str) -> int:
        return sent_itemsize(dtype, self.problem.platform == "cpu")

    def _named(self, axes: set[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.sizes if axis in axes)

    def _size(self, axes: set[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)
