"""What exists, what it can do, and what will run."""

from .capability import ALL_FEATURES, FEATURES, STATIC_MASKS, Capability, Reason, Rule, Tolerance, implementation
from .config import OperationConfig
from .metadata import OperationMetadata
from .operation import METHODS, PlannedOperation
from .placement import LocalShape, Placement
from .plan import Padding, Plan, Policy, Rejected, plan
from .problem import AttentionProblem, LeafShape
from .registry import OperationRegistry
from .route import Route
from .unset import UNSET

__all__ = [
    "ALL_FEATURES",
    "FEATURES",
    "METHODS",
    "STATIC_MASKS",
    "UNSET",
    "AttentionProblem",
    "Capability",
    "LeafShape",
    "LocalShape",
    "OperationConfig",
    "OperationMetadata",
    "OperationRegistry",
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
