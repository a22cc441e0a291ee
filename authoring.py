"""The API for authors of operations: implementations, what they can do, operands, and the parts of a call that they see."""

from .operators import LocalCall, LocalOutput, Operation
from .planning import (
    ALL_FEATURES,
    FEATURES,
    STATIC_MASKS,
    AttentionProblem,
    Capability,
    Implementation,
    OperationConfig,
    Padding,
    PassSizes,
    Placement,
    Reason,
    Rule,
    Tolerance,
    declares,
    implementation,
    plan,
)
from .sharding import ATTENTION, Operand, OperandTable

__all__ = [
    "ALL_FEATURES",
    "ATTENTION",
    "FEATURES",
    "STATIC_MASKS",
    "AttentionProblem",
    "Capability",
    "Implementation",
    "LocalCall",
    "LocalOutput",
    "Operand",
    "OperandTable",
    "Operation",
    "OperationConfig",
    "Padding",
    "PassSizes",
    "Placement",
    "Reason",
    "Rule",
    "Tolerance",
    "declares",
    "implementation",
    "plan",
]
