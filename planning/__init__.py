"""What will run, where every tensor is, and why: problems, capabilities, placements, plans."""

from .call_plan import Plan
from .capability import (
    ALL_FEATURES,
    FEATURES,
    STATIC_MASKS,
    Capability,
    Reason,
    Rule,
    Tolerance,
    declares,
    implementation,
)
from .decide import plan
from .decision import Rejected
from .implementations import Implementation, Padding, PassSizes
from .operation import METHODS, PlannedOperation
from .operation_config import OperationConfig
from .placement import LocalShape, Placement
from .policy import Policy
from .problem import AttentionProblem, LeafShape
from .route import Route

__all__ = [
    "ALL_FEATURES",
    "FEATURES",
    "METHODS",
    "STATIC_MASKS",
    "AttentionProblem",
    "Capability",
    "Implementation",
    "LeafShape",
    "LocalShape",
    "OperationConfig",
    "Padding",
    "PassSizes",
    "Placement",
    "Plan",
    "PlannedOperation",
    "Policy",
    "Reason",
    "Rejected",
    "Route",
    "Rule",
    "Tolerance",
    "declares",
    "implementation",
    "plan",
]
