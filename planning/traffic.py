"""The least that a placed call has to send between devices, given the strategy that its plan declares; compiled programs are
compared with it.

In the forward pass, each operand goes from its declared split to the one inside the operation: axes that disappear have to be
gathered. A ring sends its part of K and V at each step, and zigzag order costs two permutes of half an array each way; an
exchange of heads sends each tensor once; keys that stay split send what merges the outputs. In the backward pass, a gradient
goes the way back, and is summed over the axes that split the work but not its array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from .moves import MASK_ROWS, strategy_moves
from .placed_tensors import PlacedTensor, all_axes, axes_by_dim, placed_tensors, sent_itemsize
from .plan_fields import PlanFields
from .problem import LeafShape
from .text import bytes_text

__all__ = ["Need", "Traffic", "min_traffic", "sends", "sends_line"]


# Of a move that isn't a collective by name: the collective, and what it is called for a tensor; which of a ring's permutes it is.
_COLLECTIVES = {
    "ring": ("collective-permute", "{} around the ring"),
    "permute": ("collective-permute", "{} in zigzag order"),
}
_STEPS = {"ring": "ring", "permute": "zigzag"}
_BACK = "back into order"


class Need(NamedTuple):
    """What a device has to send in one kind of collective, for what, and along which mesh axes.

    optional: a compiler may do without it. step: of a ring's permutes, 'ring' for those around it, 'zigzag' for those that change
    the order. by: of another permute, how many places on its bytes go.
    """

    kind: str
    sent_bytes: float
    what: str
    optional: bool = False
    axes: tuple[str, ...] = ()
    step: str = ""
    by: int = 0


class Traffic(NamedTuple):
    """The needs of a program, and why some are unknown, if so: then the program isn't compared with them."""

    needs: tuple[Need, ...]
    unknown: tuple[str, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """What a device has to send in all, without what a compiler may do without."""
        return sum(need.sent_bytes for need in self.needs if not need.optional)


def sends(plan: PlanFields) -> dict[str, Traffic]:
    """The traffic of each pass of a call that is split over devices: 'forward' and, in mode train, 'backward' alone. {} if
    nothing can run it, or if the caller's own shard_map does the splitting."""
    problem = plan.problem
    if plan.implementation is None or problem.devices == 1 or any(a.kind == "manual" for a in problem.mesh):
        return {}
    if problem.symbolic:
        unknown = Traffic((), (f"the {' and the '.join(sorted(problem.symbolic))} of the call is symbolic",))
        return {"forward": unknown} | ({"backward": unknown} if problem.mode == "__train__" else {})
    forward = min_traffic(plan, False)
    if problem.mode != "__train__":
        return {"forward": forward}
    both = min_traffic(plan, True)
    return {"forward": forward, "backward": Traffic(both.needs[len(forward.needs) :], both.unknown)}


def sends_line(plan: PlanFields) -> str:
    """The bytes that a device has to send in each pass; '' if nothing is split over devices."""
    passes = sends(plan)
    if not passes:
        return ""
    texts = [_pass_text(name, traffic) for name, traffic in passes.items()]
    if not any(traffic.needs or traffic.unknown for traffic in passes.values()):
        return "nothing"
    wide = sent_itemsize(plan.problem.runtime_dtype, plan.problem.platform == "cpu")
    widened = wide > jnp.dtype(plan.problem.runtime_dtype).itemsize
    return ", ".join(texts) + (f"; XLA:CPU sends {plan.problem.runtime_dtype} as float32" if widened else "")


def _pass_text(name: str, traffic: Traffic) -> str:
    if traffic.unknown:
        return f"{name} unknown: {traffic.unknown[0]}"
    kinds = dict.fromkeys(need.kind for need in traffic.needs if not need.optional)
    return (
        f"{name} {bytes_text(round(traffic.sent_bytes))} per device ({', '.join(kinds)})"
        if kinds
        else f"{name} nothing"
    )


def min_traffic(plan: PlanFields, backward: bool) -> Traffic:
    """The needs of the forward pass, or of both passes with the outputs and all gradients returned as declared."""
    count = _Count(plan)
    needs = [*count.forward(), *(count.backward() if backward else ())]
    return Traffic(tuple(need for need in needs if need.sent_bytes), tuple(dict.fromkeys(count.unknown)))


class _Count:
    def __init__(self, plan: PlanFields) -> None:
        self.problem, self.placement = plan.problem, plan.placement
        self.split = plan.placement.sequence
        self.sizes = {axis.name: axis.size for axis in plan.problem.mesh}
        self.unknown: list[str] = []
        self.cpu = plan.problem.platform == "cpu"
        self.item = sent_itemsize(plan.problem.runtime_dtype, self.cpu)
        self.wide = max(self.item, 4)
        self.tensors = tuple(placed_tensors(plan.problem, plan.placement))

    def forward(self) -> Iterator[Need]:
        for tensor in self.tensors:
            yield from self._moved(tensor, tensor.declared, tensor.inside, tensor.name)
        yield from self._of_strategy()

    def backward(self) -> Iterator[Need]:
        work = set(self.placement.axes)
        for tensor in self.tensors:
            if not tensor.gradient:
                continue
            name = f"gradient of {tensor.name}"
            inside, declared = all_axes(tensor.inside), all_axes(tensor.declared)
            summed = work - inside
            local = self._bytes(tensor, inside)
            if scattered := summed & declared:  # it was gathered
                size = self._size(scattered)
                yield Need("reduce-scatter", local * (size - 1) / size, name, axes=self._named(scattered))
                local /= size
            if whole := summed - declared:
                size = self._size(whole)
                yield Need("all-reduce", 2 * local * (size - 1) / size, name, axes=self._named(whole))
            if tensor.name in ("key", "value") and self.placement.kv_repeat > 1:
                yield from self._copies(tensor, local)
                continue
            back = tuple(tuple(a for a in dim if a not in scattered) for dim in tensor.declared)
            yield from self._moved(tensor, tensor.inside, back, name)
        yield from self._of_strategy_backward()

    def _copies(self, tensor: PlacedTensor, local: float) -> Iterator[Need]:
        """The gradients of a repeated head's copies are added up and returned to the owner of the head."""
        kv_heads, repeat = self.problem.kv_heads, self.placement.kv_repeat
        if kv_heads > 1:
            self.unknown.append(f"{kv_heads} kv heads are copied, and XLA chooses how their gradients are summed")
        heads = self.placement.head_axes
        yield Need("all-reduce", 2 * local * (repeat - 1) / repeat, f"gradient of {tensor.name}", axes=heads)

    # -- what the strategy sends -----------------------------------------------------------------------------------

    def _of_strategy(self) -> Iterator[Need]:
        for move in strategy_moves(self.problem, self.placement, self.tensors):
            kind, what = _COLLECTIVES.get(move.kind, (move.kind, "{}"))
            if move.reason == _BACK:
                what = "{} in order again"
            if move.kind == "all-reduce":
                yield Need(kind, self._merged() * self._share(move.kind), "merging outputs by lse", axes=move.axes)
                continue
            for name in move.tensors:
                sent = self._sent(name, move.kind) * self._share(move.kind)
                yield Need(kind, sent, what.format(name), axes=move.axes, step=_STEPS.get(move.kind, ""))

    def _share(self, kind: str) -> float:
        """The part of a device's array that it sends in one move, which a gather and a ring do several times."""
        split = self.split
        return {
            "all-gather": split.shards - 1,
            "all-to-all": (split.head_size - 1) / split.head_size,
            "all-reduce": 2 * (split.shards - 1) / split.shards,
            "ring": len(split.steps) - 1,
            "permute": self._swapped,
        }[kind]

    def _sent(self, name: str, kind: str) -> float:
        """The bytes on a device of what moves under a name."""
        if name == "output":
            of_sinks = kind == "permute" and any(tensor.name == "softmax_aux" for tensor in self.tensors)
            return self._output() + (self._lse() if of_sinks or "return_lse" in self.problem.features else 0)
        if name == MASK_ROWS:
            masks = zip(self.problem.leaves, self.tensors[len(self.tensors) - len(self.problem.leaves) :], strict=True)
            return sum(self._bytes(tensor, all_axes(tensor.inside)) for leaf, tensor in masks if _has_rows(leaf))
        tensor = next(tensor for tensor in self.tensors if tensor.name == name)
        return self._bytes(tensor, all_axes(tensor.inside))

    def _merged(self) -> float:
        """An output in float32 at least, and two numbers a row."""
        return self._output() * self.wide / self.item + 2 * self._lse()

    def _of_strategy_backward(self) -> Iterator[Need]:
        split, named = self.split, {t.name: t for t in self.tensors}
        over, heads, ring = split.axes, split.head_axes, split.ring_axes
        keys = [t for n, t in named.items() if n in ("key", "value")]
        local = {t.name: self._bytes(t, all_axes(t.inside)) for t in self.tensors}
        smooth = [t for t in (named["query"], *keys) if t.gradient]
        output, lse = self._output(), self._lse()
        returned = lse if "return_lse" in self.problem.features or ("softmax_aux" in named and split.zigzag) else 0
        if split.gathers:
            scales = [t for n, t in named.items() if n.endswith("_scale")]
            for tensor in (*keys, *scales):
                if tensor.gradient:
                    sent = local[tensor.name] * (split.shards - 1)
                    yield Need("reduce-scatter", sent, f"gradient of {tensor.name}", axes=over)
        if split.head_axes:
            share = (split.head_size - 1) / split.head_size
            yield Need("all-to-all", (output + returned) * share, "gradient of the output", axes=heads)
            for tensor in smooth:
                yield Need("all-to-all", local[tensor.name] * share, f"gradient of {tensor.name}", axes=heads)
        if split.ring_axes:
            steps = len(split.steps) - 1
            for tensor in keys:
                # One step goes the same way in both passes, so XLA:CPU of jax 0.10 reuses the first result: it drops the barrier.
                sent = local[tensor.name] * steps
                again = Need("collective-permute", sent, f"{tensor.name} around the ring again", axes=ring, step="ring")
                yield again._replace(optional=self.cpu and steps == 1)
                if steps:  # sums in float32, but for the way home
                    sums = local[tensor.name] * (steps * self.wide / self.item + 1)
                    # On the first hop the sum is only what a GPU's kernel wrote in the dtype, and XLA may widen it afterwards.
                    first = local[tensor.name] * (self.wide / self.item - 1) if self.problem.platform == "cuda" else 0.0
                    around = f"gradient of {tensor.name} around the ring"
                    yield Need("collective-permute", sums - first, around, axes=ring, step="ring")
                    wide = f"gradient of {tensor.name}, its first hop wide"
                    yield Need("collective-permute", first, wide, True, ring, "ring")
        if split.strategy == "split_kv":
            self.unknown.append("the gradient of outputs that are merged over devices: what XLA sends isn't worked out")
        if split.zigzag:
            sent = (output + returned) * self._swapped
            yield Need("collective-permute", sent, "gradient of the output", axes=ring, step="zigzag")
            for tensor in smooth:
                sent = local[tensor.name] * self._swapped
                yield Need("collective-permute", sent, f"gradient of {tensor.name}", axes=ring, step="zigzag")

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def _swapped(self) -> float:
        """The fraction of an array that moves into zigzag order: two devices keep their first halves."""
        return 0.5 if self.split.ring_size == 2 else 1.0

    def _moved(
        self,
        tensor: PlacedTensor,
        before: tuple[tuple[str, ...], ...],
        after: tuple[tuple[str, ...], ...],
        what: str,
    ) -> Iterator[Need]:
        """The needs from one split to another: axes that disappear are gathered, axes that change dimension are exchanged."""
        gone = all_axes(before) - all_axes(after)
        remaining = [(a, i) for i, dim in enumerate(before) for a in dim if a not in gone]
        other = {a for a, i in remaining if a not in after[i]}
        local = self._bytes(tensor, all_axes(before))
        if other:
            self.unknown.append(
                f"{tensor.name} is split differently inside than declared, and XLA chooses how it gets there"
            )
        if gone:
            yield Need("all-gather", local * (self._size(gone) - 1), what, axes=self._named(gone))

    def _bytes(self, tensor: PlacedTensor, axes: set[str]) -> float:
        return math.prod(tensor.shape) * tensor.itemsize / self._size(axes)

    def _named(self, axes: set[str]) -> tuple[str, ...]:
        """The axes in the mesh's order."""
        return tuple(axis for axis in self.sizes if axis in axes)

    def _size(self, axes: set[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def _output(self) -> float:
        shape = self.problem.shape_of("output")
        return math.prod(shape) * self.item / self._size(all_axes(axes_by_dim(self.placement.spec("output"), 4)))

    def _lse(self) -> float:
        problem = self.problem
        whole = problem.batch * problem.q_heads * problem.q_len * jnp.dtype(problem.softmax_dtype).itemsize
        return whole / self._size(all_axes(axes_by_dim(self.placement.spec("lse"), 3)))


def _has_rows(leaf: LeafShape) -> bool:
    return any(dim == "q" and n > 1 for dim, n in zip(leaf.dims, leaf.shape, strict=True))
