"""RECURRENCES: how calls of recurrent operations are planned, with what is done about a split sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from ...errors import ConfigError
from ...sharding.mesh import unused_axes
from ..capability import Reason
from ..notes import note
from ..planner import Planner, Request
from ..policy import Policy
from ..tables.fitted_plan import refuse_unfit
from ..tables.table_plan import TablePlacement, TablePlan, fitted_tensors
from ..tables.table_problem import TableProblem
from ..tuning import versions
from .exchange import ALL_GATHER, LOG_STEP
from .inside import repeats_keys
from .traffic import gathered_bytes, passed_bytes

__all__ = ["RECURRENCES", "Recurrences", "declared_strategy", "idle_axes"]

_STRATEGIES = ("auto", "gather", "state")


def declared_strategy(operation: Any, policy: Policy) -> str:
    """What the policy says of a split sequence. Errors: ConfigError for a strategy of attention."""
    declared = policy.sequence_parallel
    if declared not in _STRATEGIES:
        raise ConfigError(
            f"operation {operation.name!r} has a state, and sequence_parallel={declared!r} is for attention; wanted one of "
            f"{', '.join(map(repr, _STRATEGIES))}."
        )
    return declared


class Recurrences(Planner[TableProblem, TablePlacement]):
    """Plans of calls that follow from a table and have a state."""

    plan: ClassVar[type[Any]] = TablePlan

    def placements(self, request: Request[TableProblem]) -> Callable[[str], TablePlacement]:
        operation, problem, policy = request
        declared = declared_strategy(operation, policy)
        placement = TablePlacement(fitted_tensors(problem))
        over = placement.axes("attention_outputs", "q_len")
        if over:
            strategy = self._choose(operation, problem, placement, over) if declared == "auto" else declared
            placement = placement._replace(strategy=strategy, over=over)
        elif (by_caller := _manual_axes(problem)) and declared == "state":
            placement = placement._replace(strategy="state", over=by_caller, manual=True)
        if placement.strategy == "state" and "history" not in problem.size:
            placement = placement._replace(exchange=_exchange(operation, problem, placement))
        if policy.strict:
            refuse_unfit(problem, placement.tensors, idle_axes(problem, placement))
        return lambda _: placement

    @staticmethod
    def _choose(operation: Any, problem: TableProblem, placement: TablePlacement, over: tuple[str, ...]) -> str:
        if _part(placement) < problem.size.get("history", 0):
            return "gather"
        placement = placement._replace(over=over)
        passed = passed_bytes(operation, problem, placement, _exchange(operation, problem, placement))
        gathered = gathered_bytes(placement, _count(problem, over))
        return "state" if passed < gathered else "gather"

    def reasons(self, request: Request[TableProblem], method: str, placement: TablePlacement) -> tuple[Reason, ...]:
        operation, problem, policy = request
        runs = operation.implementation(method, problem.config)
        capability = runs.capability
        reasons = [
            Reason(f"operand.{x.name}", x.name, f"does not take {x.name}", f"Leave {x.name} out.")
            for x in problem.operands
            if x.operand.optional and x.name not in capability.operands
        ]
        history = problem.size.get("history", 0)
        if placement.strategy == "state" and (part := _part(placement)) < history:
            text = f"parts of {part} tokens are shorter than the {history} that a device takes from its neighbour"
            reasons.append(
                Reason("recurrent.short_parts", "sequence_parallel", text, "Declare 'gather', or fewer devices.")
            )
        if placement.manual and policy.ring_order == "zigzag":
            axes = "+".join(placement.over)
            text = (
                f"ring_order='zigzag' in a shard_map of the caller over {axes}: a device then has two pieces that don't follow "
                "one another, and a state is passed from device to device"
            )
            hint = "Pass tokens in plain order and leave ring_order out; a ring of attnops permutes its own keys."
            reasons.append(Reason("recurrent.zigzag", "ring_order", text, hint))
        failing = (rule.check(problem, runs.declared(problem.config)) for rule in capability.rules)
        return (*reasons, *(reason for reason in failing if reason is not None))

    def notes(self, request: Request[TableProblem], method: str, placement: TablePlacement) -> tuple[str, ...]:
        _, problem, policy = request
        notes: list[str] = []
        if idle := idle_axes(problem, placement):
            notes.append(note("table.idle_axes", names=idle))
        notes += self._of_split(request, placement)
        if policy.ring_order is not None and not (placement.manual and policy.ring_order == "zigzag"):
            notes.append(note("recurrent.plain_order", value=policy.ring_order))
        if not placement.exchange and (named := _declared_exchange(problem.config)) is not None:
            notes.append(note("recurrent.no_exchange", value=named))
        if repeats_keys(placement):
            notes.append(note("recurrent.repeated_keys", axes=list(placement.axes("state", "heads"))))
        return tuple(notes)

    def _of_split(self, request: Request[TableProblem], placement: TablePlacement) -> list[str]:
        """Notes on what is done about a split sequence."""
        operation, problem, policy = request
        notes: list[str] = []
        if placement.over:
            exchange = placement.exchange or _exchange(operation, problem, placement)
            passed = passed_bytes(operation, problem, placement, exchange)
            gathered = gathered_bytes(placement, _count(problem, placement.over))
            axes = list(placement.over)
            of_states = note("recurrent.passed", axes=axes, size=passed, other=gathered)
            of_tokens = note("recurrent.gathered", axes=axes, size=gathered, other=passed)
            notes.append(of_states if placement.strategy == "state" else of_tokens)
            if placement.exchange:
                other = ALL_GATHER if exchange == LOG_STEP else LOG_STEP
                size = passed_bytes(operation, problem, placement, other)
                notes.append(note("recurrent.exchange", name=exchange, size=passed, other=other, other_size=size))
        elif by_caller := _manual_axes(problem):
            notes.append(note("recurrent.manual", axes=list(by_caller)))
        elif policy.sequence_parallel != "auto":
            notes.append(note("sequence.unsplit", strategy=policy.sequence_parallel))
        return notes

    def tune_key(self, method: str, problem: TableProblem, placement: TablePlacement) -> dict[str, Any]:
        shapes = {x.tensor: list(x.local_shape) for x in placement.tensors}
        return {
            "operation": problem.operation,
            "method": method,
            "device": problem.device,
            "dtype": problem.input_dtype,
            "shapes": shapes,
            "options": problem.option,
            "backward": problem.mode == "__train__",
            "config": problem.config.to_dict(),
            "versions": versions(),
        }


def idle_axes(problem: TableProblem, placement: TablePlacement) -> list[str]:
    """`tp=2` for each mesh axis along which all devices do the same work: it splits neither rows, heads, channels nor columns of
    the state, nor tokens that aren't gathered."""
    dims = "batch", "slots", "heads", "channels", "value_dim"
    used = {axis for dim in dims for axis in placement.axes("state", dim)}
    used |= set(placement.over) if placement.strategy == "state" else set()
    return [axis.label for axis in unused_axes(problem.mesh, used)]


def _exchange(operation: Any, problem: TableProblem, placement: TablePlacement) -> str:
    """How maps are exchanged: as declared, else whichever sends less."""
    ways = (ALL_GATHER, LOG_STEP)
    return _declared_exchange(problem.config) or min(
        ways, key=lambda way: passed_bytes(operation, problem, placement, way)
    )


def _declared_exchange(config: Any) -> str | None:
    named: str | None = config.exchange
    return named


def _part(placement: TablePlacement) -> int:
    """The tokens of a device."""
    outputs = next(x for x in placement.tensors if x.tensor == "attention_outputs")
    return outputs.local_shape[outputs.dims.index("q_len")]


def _manual_axes(problem: TableProblem) -> tuple[str, ...]:
    """The axes that the rules name for the sequence, if they are Manual: the caller's shard_map may have split it."""
    outputs = next(x for x in problem.results if x.name == "attention_outputs")
    spec, at = outputs.declared, outputs.operand.dims_in(problem.layout).index("q_len")
    names = () if spec is None or at >= len(spec) else spec[at]
    named = (names,) if isinstance(names, str) else tuple(names or ())
    manual = {axis.name for axis in problem.mesh if axis.kind == "manual" and axis.size > 1}
    return tuple(name for name in named if name in manual)


def _count(problem: TableProblem, axes: tuple[str, ...]) -> int:
    sizes = {axis.name: axis.size for axis in problem.mesh}
    return math.prod(sizes[name] for name in axes)


RECURRENCES = Recurrences()
