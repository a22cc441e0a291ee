"""What runs the steps of linear attention over slots on TPUs: the last tokens of rows in place, those before them in chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ...devices import vmem_of
from ...planning import OperationConfig, Rule, declares
from ...planning.notes import note
from ...planning.recurrent.step_operands import CONV_ROWS
from ...planning.text import bytes_text
from ...planning.tiles import least_tiled, tiled
from .arithmetic import Results
from .implementations import TOLERANCE, step_operands
from .kernel.over_rows import last_tokens_alone
from .kernel.tpu_sizes import (
    FORWARD,
    LEAST_CHUNK,
    STEP,
    Sizes,
    StepSizes,
    Window,
    step_heads,
    step_vmem,
    turns,
    vmem_parts,
)
from .local import RecurrentCall
from .tpu import RecurrentOnTpu, local_sizes

__all__ = ["StepOnTpu"]


class StepOnTpu(RecurrentOnTpu):
    """The step over slots of a whole call's kernels. Rows of few tokens, and the last tokens whose states are kept: a kernel that
    reads each state once and writes it in place. Others: the chunks of the whole call. convolved: the arrays of convolutions."""

    def __init__(self, whole: RecurrentOnTpu, convolved: frozenset[str]) -> None:
        operands = step_operands(whole, convolved)
        super().__init__(whole.compute, operands, by_channel=whole.by_channel)
        room = Rule(
            "recurrent.step_vmem",
            "head_dim",
            lambda p, c: self._taken(p) <= vmem_of(p.device_kind).default,
            lambda p, c: (
                f"states of one head take {bytes_text(self._taken(p))} of VMEM, but a kernel may take "
                f"{bytes_text(vmem_of(p.device_kind).default)}"
            ),
            "Declare state_dtype='bfloat16', or let plain XLA run it.",
        )
        windows = Rule(
            "recurrent.window_dtype",
            "state",
            lambda p, c: all(x.dtype != "float16" for x in _windows(p)),
            "windows of a convolution are float16, which the TPU kernel doesn't take",
            "Pass tokens and windows in bfloat16 or float32, or let plain XLA run it.",
        )
        of_chunks = tuple(_of_chunks(rule) for rule in self.capability.rules)
        self.capability = declares((), rules=(*of_chunks, room, windows), tolerance=TOLERANCE, operands=operands)

    def __call__(self, call: RecurrentCall) -> Results:
        """Run one device's part of a step."""
        from .kernel.tpu import chunked_tpu  # imports Pallas, so only where the kernel runs
        from .kernel.tpu_step import step_tpu

        interpret = bool(getattr(call.config, "interpret", False))
        chunks = functools.partial(chunked_tpu, interpret=interpret)
        return self.compute(replace(call, chunked=chunks, token=functools.partial(step_tpu, interpret=interpret)))

    def memory(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, Mapping[str, int]]:
        """VMEM of each kernel, by what it holds."""
        local = local_sizes(placement)
        sizes = self._of_step(problem, local)
        found = {STEP: step_vmem(step_heads(local["heads"], _group(local), sizes), sizes)}
        if _in_chunks(problem):
            found[FORWARD] = vmem_parts(self._sizes(problem, self._size(problem, config), local), FORWARD)
        return found

    def tuned_fields(self, problem: Any, placement: Any) -> tuple[str, ...]:
        """None: the chunks of a step are those of the whole call."""
        del problem, placement
        return ()

    def grid_steps(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, int]:
        """Of the last tokens of rows; how many chunks there are is known only to the batch."""
        del config
        local = local_sizes(placement)
        sizes = self._of_step(problem, local)
        heads = step_heads(local["heads"], _group(local), sizes)
        return {STEP: local.get("shards", 1) * local["rows"] * (local["heads"] // heads) * _alone(problem)}

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """Slots that the kernel takes in another layout than programs do."""
        del config
        if problem.platform != "tpu":
            return ()
        slots, notes = {"state", *(x.name for x in _windows(problem))}, []
        for x in placement.tensors:
            if x.tensor in slots:
                shape, turned = x.local_shape, x.tensor == "state" and turns(*x.local_shape[2:])
                taken = tiled(shape, *((3, 2) if turned else (2, 3)))
                if least_tiled(shape) != taken:
                    size = taken * jnp.dtype(problem.operand(x.tensor).dtype).itemsize
                    notes.append(note("recurrent.slots_copied", name=x.tensor, shape=shape, size=size))
        return tuple(notes)

    @property
    def _delta(self) -> bool:
        return "beta" in self.capability.operands

    def _taken(self, problem: Any) -> int:
        """The least bytes of VMEM of the last tokens: one head at a time."""
        return math.ceil(sum(step_vmem(1, self._of_step(problem, problem.size)).values()))

    def _of_step(self, problem: Any, size: Mapping[str, int]) -> StepSizes:
        """What the VMEM of the last tokens depends on besides heads."""
        of_windows = (
            ([size[dim] for dim in x.operand.dims[1:]], jnp.dtype(x.dtype).itemsize) for x in _windows(problem)
        )
        windows = tuple(Window(history, heads, dim, item) for (history, heads, dim), item in of_windows)
        return StepSizes(size["head_dim"], size["value_dim"], _itemsize(problem), self._delta, _alone(problem), windows)

    def _sizes(self, problem: Any, chunk: int, size: Mapping[str, int]) -> Sizes:
        longest = problem.option["max_q_len"] or size["tokens"]
        return super()._sizes(problem, chunk, {**size, "q_len": max(longest, LEAST_CHUNK)})._replace(initial=True)


def _windows(problem: Any) -> list[Any]:
    """The windows of the step's convolutions."""
    return [x for x in problem.operands if x.name.endswith(CONV_ROWS[2])]


def _alone(problem: Any) -> int:
    """How many last tokens of a row are worked on a token at a time."""
    return last_tokens_alone(problem.option["max_q_len"], problem.size["columns"])


def _in_chunks(problem: Any) -> bool:
    """Whether rows may have more tokens."""
    longest = problem.option["max_q_len"]
    return longest is None or longest > _alone(problem)


def _group(size: Mapping[str, int]) -> int:
    """Heads that share a key head."""
    return max(size["heads"] // size["kv_heads"], 1)


def _itemsize(problem: Any) -> int:
    return jnp.dtype(problem.operand("state").dtype).itemsize


def _of_chunks(rule: Rule) -> Rule:
    """A rule of chunks, which rows of few tokens don't have."""
    return replace(rule, test=lambda p, c: not _in_chunks(p) or rule.test(p, c))
