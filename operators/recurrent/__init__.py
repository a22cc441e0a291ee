"""Recurrent operations: linear attention, the delta rule, Mamba and the convolution before them; the past is a state."""

from .channel_operations import CausalConv1d, Mamba, Mamba1, Mamba2, Ssm1, Ssm2
from .linear_operations import GatedDeltaRule, Gdr, Gla, Kda, KernelDeltaAttention, Lightning, Retention, SimpleGla
from .operation import RecurrentOperation
from .output import RecurrentOutput

__all__ = [
    "CausalConv1d", "GatedDeltaRule", "Gdr", "Gla", "Kda", "KernelDeltaAttention", "Lightning", "Mamba", "Mamba1", "Mamba2",
    "RecurrentOperation", "RecurrentOutput", "Retention", "SimpleGla", "Ssm1", "Ssm2",
]  # fmt: skip
