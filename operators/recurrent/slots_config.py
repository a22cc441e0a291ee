"""Configs of steps over slots: those of the whole calls; state_dtype is that of the slots."""

from __future__ import annotations

from typing import Literal

from ...planning import OperationConfig
from .config import (
    CausalConv1dConfig,
    GatedDeltaRuleConfig,
    GlaConfig,
    KdaConfig,
    LightningConfig,
    Mamba1Config,
    Mamba2Config,
    RetentionConfig,
    SimpleGlaConfig,
)

__all__ = [
    "ConvolvedConfig",
    "RaggedCausalConv1dConfig",
    "RaggedGatedDeltaRuleConfig",
    "RaggedGatedDeltaRuleV2Config",
    "RaggedGlaConfig",
    "RaggedKdaConfig",
    "RaggedLightningConfig",
    "RaggedMamba1Config",
    "RaggedMamba2Config",
    "RaggedRetentionConfig",
    "RaggedSimpleGlaConfig",
]


class ConvolvedConfig(OperationConfig):
    """conv_activation: 'silu' or none, after the convolutions that a step has before the recurrence."""

    conv_activation: Literal["silu"] | None = None


class RaggedCausalConv1dConfig(CausalConv1dConfig):
    """See CausalConv1dConfig."""

    operation: Literal["ragged_causal_conv1d"] = "ragged_causal_conv1d"  # type: ignore[assignment]


class RaggedGatedDeltaRuleV2Config(ConvolvedConfig, GatedDeltaRuleConfig):
    """See ConvolvedConfig and GatedDeltaRuleConfig."""

    operation: Literal["ragged_gated_delta_rule_v2"] = "ragged_gated_delta_rule_v2"  # type: ignore[assignment]


class RaggedGatedDeltaRuleConfig(RaggedGatedDeltaRuleV2Config):
    """See RaggedGatedDeltaRuleV2Config."""

    operation: Literal["ragged_gated_delta_rule"] = "ragged_gated_delta_rule"  # type: ignore[assignment]


class RaggedGlaConfig(ConvolvedConfig, GlaConfig):
    """See ConvolvedConfig and GlaConfig."""

    operation: Literal["ragged_gla"] = "ragged_gla"  # type: ignore[assignment]


class RaggedKdaConfig(ConvolvedConfig, KdaConfig):
    """See ConvolvedConfig and KdaConfig."""

    operation: Literal["ragged_kda"] = "ragged_kda"  # type: ignore[assignment]


class RaggedLightningConfig(ConvolvedConfig, LightningConfig):
    """See ConvolvedConfig and LightningConfig."""

    operation: Literal["ragged_lightning"] = "ragged_lightning"  # type: ignore[assignment]


class RaggedMamba1Config(Mamba1Config):
    """See Mamba1Config."""

    operation: Literal["ragged_mamba1"] = "ragged_mamba1"  # type: ignore[assignment]


class RaggedMamba2Config(ConvolvedConfig, Mamba2Config):
    """See ConvolvedConfig and Mamba2Config."""

    operation: Literal["ragged_mamba2"] = "ragged_mamba2"  # type: ignore[assignment]


class RaggedRetentionConfig(ConvolvedConfig, RetentionConfig):
    """See ConvolvedConfig and RetentionConfig."""

    operation: Literal["ragged_retention"] = "ragged_retention"  # type: ignore[assignment]


class RaggedSimpleGlaConfig(ConvolvedConfig, SimpleGlaConfig):
    """See ConvolvedConfig and SimpleGlaConfig."""

    operation: Literal["ragged_simple_gla"] = "ragged_simple_gla"  # type: ignore[assignment]
