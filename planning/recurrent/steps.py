"""SLOT_STEPS: how steps over slots are planned: tokens, rows and slots are split together, over the axes of the batch."""

from __future__ import annotations

from collections.abc import Callable

from ..capability import Reason
from ..notes import note
from ..planner import Request
from ..tables.fitted_plan import refuse_unfit
from ..tables.table_plan import TablePlacement, fitted_tensors
from ..tables.table_problem import TableProblem
from .inside import KEY_HEADS, repeats_keys
from .planner import Recurrences, declared_strategy, idle_axes
from .step_operands import CONV_ROWS

__all__ = ["SLOT_STEPS"]

_ROWS = (("cu_q_lens", "shards"), ("attention_outputs", "tokens"), ("state", "slots"))


class _SlotSteps(Recurrences):
    def placements(self, request: Request[TableProblem]) -> Callable[[str], TablePlacement]:
        operation, problem, policy = request
        declared_strategy(operation, policy)
        placement = TablePlacement(fitted_tensors(problem))
        if policy.strict:
            refuse_unfit(problem, placement.tensors, idle_axes(problem, placement))
        return lambda _: placement

    def reasons(self, request: Request[TableProblem], method: str, placement: TablePlacement) -> tuple[Reason, ...]:
        reasons = super().reasons(request, method, placement)
        windows = [f"{name}_{CONV_ROWS[2]}" for name in KEY_HEADS]
        keys = [name for name in windows if request.problem.operand(name) is not None]
        if keys and repeats_keys(placement):
            named = ", ".join(keys)
            text = f"the mesh splits heads further than those of queries and keys, of which {named} has windows"
            hint = "Convolve them before, by ragged_causal_conv1d, or split heads over fewer devices."
            reasons = (*reasons, Reason("recurrent.repeated_windows", keys[0], text, hint))
        axes = {dim: placement.axes(tensor, dim) for tensor, dim in _ROWS}
        if len(set(axes.values())) == 1:
            return reasons
        named = ", ".join(f"{dim} over {'+'.join(some) or 'no axis'}" for dim, some in axes.items())
        hint = "Make shards, tokens and slots multiples of the axes of the batch, or pass a batch of one shard."
        return (*reasons, Reason("recurrent.shards", "batch", f"the mesh splits {named}", hint))

    def _of_split(self, request: Request[TableProblem], placement: TablePlacement) -> list[str]:
        declared = request.policy.sequence_parallel
        return [] if declared == "auto" else [note("sequence.unsplit", strategy=declared)]


SLOT_STEPS = _SlotSteps()
