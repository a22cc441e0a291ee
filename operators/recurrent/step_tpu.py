"""What runs the steps of linear attention over slots on TPUs: one token of each row in place, several in chunks."""

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
from ...planning.text import bytes_text
from ...planning.tiles import least_tiled, tiled
from .arithmetic import Results
from .implementations import TOLERANCE
from .kernel.tpu_sizes import FORWARD, LEAST_CHUNK, STEP, Sizes, step_heads, step_vmem, turns, vmem_parts
from .local import RecurrentCall
from .tpu import RecurrentOnTpu

__all__ = ["StepOnTpu"]


class StepOnTpu(RecurrentOnTpu):
    """The step over slots of a whole call's kernels. Rows of one token: a kernel that reads and writes each state once, in
    place. Others: the chunks of the whole call, and their last tokens on XLA."""

    def __init__(self, whole: RecurrentOnTpu) -> None:
        operands = whole.capability.operands - {"initial_state", "segment_ids", "lengths"}
        super().__init__(whole.compute, operands, by_channel=whole.by_channel)
        room = Rule(
            "recurrent.step_vmem",
            "head_dim",
            lambda p, c: not _decodes(p) or self._taken(p) <= vmem_of(p.device_kind).default,
            lambda p, c: (
                f"states of one head take {bytes_text(self._taken(p))} of VMEM, but a kernel may take "
                f"{bytes_text(vmem_of(p.device_kind).default)}"
            ),
            "Leave max_q_len out, which updates states by plain XLA.",
        )
        of_chunks = tuple(_in_chunks(rule) for rule in self.capability.rules)
        self.capability = declares((), rules=(*of_chunks, room), tolerance=TOLERANCE, operands=operands)

    def __call__(self, call: RecurrentCall) -> Results:
        """Run one device's part of a step."""
        from .kernel.tpu import chunked_tpu  # imports Pallas, so only where the kernel runs
        from .kernel.tpu_step import step_tpu

        interpret = bool(getattr(call.config, "interpret", False))
        chunks = functools.partial(chunked_tpu, interpret=interpret)
        return self.compute(replace(call, chunked=chunks, token=functools.partial(step_tpu, interpret=interpret)))

    def memory(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, Mapping[str, int]]:
        """VMEM of each kernel, by what it holds."""
        local: dict[str, int] = {}
        for x in placement.tensors:
            local = dict(zip(x.dims, x.local_shape, strict=True)) | local
        if not _decodes(problem):
            return {FORWARD: vmem_parts(self._sizes(problem, self._size(problem, config), local), FORWARD)}
        sizes = local["head_dim"], local["value_dim"], _itemsize(problem), self._delta
        return {STEP: step_vmem(step_heads(local["heads"], _group(local), *sizes), *sizes)}

    def tuned_fields(self, problem: Any, placement: Any) -> tuple[str, ...]:
        """None: the chunks of a step are those of the whole call."""
        del problem, placement
        return ()

    def grid_steps(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, int]:
        """Of rows of one token; how many chunks others have is known only to the batch."""
        del config
        if not _decodes(problem):
            return {}
        local: dict[str, int] = {}
        for x in placement.tensors:
            local = dict(zip(x.dims, x.local_shape, strict=True)) | local
        sizes = local["head_dim"], local["value_dim"], _itemsize(problem), self._delta
        heads = step_heads(local["heads"], _group(local), *sizes)
        return {STEP: local.get("shards", 1) * local["rows"] * (local["heads"] // heads)}

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """Which tokens the kernels leave to XLA, and slots that the kernel takes in another layout than programs do."""
        del config
        if not _decodes(problem):
            return (note("recurrent.step_on_xla", columns=problem.size["columns"]),)
        tensor = next(x for x in placement.tensors if x.tensor == "state")
        shape = tensor.local_shape
        row, lane = (3, 2) if turns(*shape[2:]) else (2, 3)
        if problem.platform != "tpu" or least_tiled(shape) == tiled(shape, row, lane):
            return ()
        size = tiled(shape, row, lane) * _itemsize(problem)
        return (note("recurrent.slots_copied", shape=shape, size=size),)

    @property
    def _delta(self) -> bool:
        return "beta" in self.capability.operands

    def _taken(self, problem: Any) -> int:
        """The least bytes of VMEM of a step: one head at a time."""
        sizes = problem.size["head_dim"], problem.size["value_dim"], _itemsize(problem), self._delta
        return math.ceil(sum(step_vmem(1, *sizes).values()))

    def _sizes(self, problem: Any, chunk: int, size: Mapping[str, int]) -> Sizes:
        longest = problem.option["max_q_len"] or size["tokens"]
        return super()._sizes(problem, chunk, {**size, "q_len": max(longest, LEAST_CHUNK)})._replace(initial=True)


def _decodes(problem: Any) -> bool:
    return bool(problem.option["max_q_len"] == 1)


def _group(size: Mapping[str, int]) -> int:
    """Heads that share a key head."""
    return max(size["heads"] // size["kv_heads"], 1)


def _itemsize(problem: Any) -> int:
    return jnp.dtype(problem.operand("state").dtype).itemsize


def _in_chunks(rule: Rule) -> Rule:
    """A rule of chunks, which rows of one token don't have."""
    return replace(rule, test=lambda p, c: _decodes(p) or rule.test(p, c))
