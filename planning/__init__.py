"""What will run, where every tensor is, and why: problems, capabilities, placements, plans."""

from .capability import ALL_FEATURES, FEATURES, STATIC_MASKS, Capability, Reason, Rule, Tolerance, implementation
from .decide import plan
from .operation import METHODS, Padding, PlannedOperation
from .operation_config import OperationConfig
from .placement import LocalShape, Placement
from .plan import Plan
from .plan_fields import Rejected
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
    "LeafShape",
    "LocalShape",
    "OperationConfig",
    "Padding",
    "Placement",
    "Plan",
    "PlannedOperation",
    "Policy",
    "Reason",
    "Rejected",
    "Route",
    "Rule",
    "Tolerance",
    "implementation",
    "plan",
]
