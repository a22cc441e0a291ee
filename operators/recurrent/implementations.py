"""What runs recurrent operations: plain XLA, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ...planning import Implementation, OperationConfig, Tolerance, declares
from .arithmetic import Results
from .local import RecurrentCall

__all__ = ["TOLERANCE", "RecurrentOnXla", "over_slots", "step_operands"]

TOLERANCE = {
    "float32": Tolerance(2e-5, 1e-4),
    "bfloat16": Tolerance(2e-2, 5e-2),
    "float16": Tolerance(4e-3, 2e-2),
}


class RecurrentOnXla(Implementation[OperationConfig]):
    """Plain XLA. compute: the operation's arithmetic on one device. chunk: tokens of a chunk, unless declared."""

    config: ClassVar[type[OperationConfig] | None] = OperationConfig
    chunk: ClassVar[int] = 64

    def __init__(self, compute: Callable[[RecurrentCall], Results], operands: frozenset[str]) -> None:
        self.compute = compute
        self.capability = declares(consumes=frozenset(), tolerance=TOLERANCE, operands=operands)

    def __call__(self, call: RecurrentCall) -> Results:
        """Run one device's part of a call."""
        return self.compute(call)

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config with its chunk size."""
        config: OperationConfig = problem.config
        chunks: Any = config
        if "chunk_size" in type(config).model_fields and chunks.chunk_size is None:
            config = config.with_fields({"chunk_size": self.chunk})
        return config


def over_slots(whole: RecurrentOnXla, convolved: frozenset[str]) -> RecurrentOnXla:
    """The step over slots of a whole call's implementation. convolved: the arrays of its convolutions."""
    return RecurrentOnXla(whole.compute, step_operands(whole, convolved))


def step_operands(whole: RecurrentOnXla, convolved: frozenset[str]) -> frozenset[str]:
    """The optional arrays of the step of a whole call's implementation."""
    return whole.capability.operands - {"initial_state", "segment_ids", "lengths"} | convolved
