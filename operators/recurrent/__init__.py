"""Recurrent operations: linear attention, the delta rule, Mamba and the convolution before them; the past is a state. Each as a
whole call, and as a step over slots."""

from .channel_operations import CausalConv1d, Mamba, Mamba1, Mamba2, Ssm1, Ssm2
from .linear_operations import GatedDeltaRule, Gdr, Gla, Kda, KernelDeltaAttention, Lightning, Retention, SimpleGla
from .operation import RecurrentOperation
from .output import RecurrentOutput
from .slots_operation import SlotsOperation
from .slots_operations import (
    RaggedCausalConv1d,
    RaggedGatedDeltaRule,
    RaggedGatedDeltaRuleV2,
    RaggedGla,
    RaggedKda,
    RaggedLightning,
    RaggedMamba1,
    RaggedMamba2,
    RaggedRetention,
    RaggedSimpleGla,
)

__all__ = [
    "CausalConv1d", "GatedDeltaRule", "Gdr", "Gla", "Kda", "KernelDeltaAttention", "Lightning", "Mamba", "Mamba1", "Mamba2",
    "RaggedCausalConv1d", "RaggedGatedDeltaRule", "RaggedGatedDeltaRuleV2", "RaggedGla", "RaggedKda", "RaggedLightning",
    "RaggedMamba1", "RaggedMamba2", "RaggedRetention", "RaggedSimpleGla", "RecurrentOperation", "RecurrentOutput", "Retention",
    "SimpleGla", "SlotsOperation", "Ssm1", "Ssm2",
]  # fmt: skip
