"""Configs of recurrent operations: what a model declares about gates, and the chunks that they are computed in."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StrictBool, model_validator

from ...planning import OperationConfig

__all__ = [
    "CausalConv1dConfig", "DeltaRuleConfig", "GatedDeltaRuleConfig", "GdrConfig", "GlaConfig", "KdaConfig",
    "KernelConfig", "KernelDeltaAttentionConfig", "LightningConfig", "LinearConfig", "Mamba1Config", "Mamba2Config",
    "MambaConfig", "RecurrentConfig", "RetentionConfig", "SimpleGlaConfig", "Ssm1Config", "Ssm2Config",
]  # fmt: skip


class RecurrentConfig(OperationConfig):
    """chunk_size: tokens that are worked on together, a power of two; if unset or None, attnops chooses. state_dtype: of the
    state that a call returns; it is computed in float32. exchange: how devices that each have a part of the sequence exchange
    what their tokens do to a state: 'all_gather', or 'log_step', in rounds of which each reaches twice as far; if None, whichever
    sends less."""

    feeds: ClassVar = {}

    chunk_size: PositiveInt | None = None
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    exchange: Literal["all_gather", "log_step"] | None = None

    @model_validator(mode="after")
    def _power(self) -> Self:
        if self.chunk_size is not None and self.chunk_size & (self.chunk_size - 1):
            raise ValueError(f"chunk_size={self.chunk_size}; wanted a power of two, such as 64")
        return self


class KernelConfig(RecurrentConfig):
    """interpret: run the TPU kernel in Pallas' interpreter, on any platform; for tests."""

    interpret: StrictBool = False


class LinearConfig(KernelConfig):
    """scale: of the queries; if None, head_dim ** -0.5. normalise_qk: whether queries and keys are divided by their norms here,
    with normalise_eps under the root; a call may say it instead."""

    scale: PositiveFloat | None = None
    normalise_qk: bool = False
    normalise_eps: PositiveFloat = 1e-6


class DeltaRuleConfig(LinearConfig):
    """gate: 'log_decay', or 'raw': decay is what the model projects, and the log decay -exp(A_log) * softplus(decay + dt_bias).
    beta_form: 'value', or 'sigmoid': beta_max * sigmoid(beta)."""

    gate: Literal["log_decay", "raw"] = "log_decay"
    beta_form: Literal["value", "sigmoid"] = "value"
    beta_max: float = Field(1.0, gt=0, le=2)


class GatedDeltaRuleConfig(DeltaRuleConfig):
    """See DeltaRuleConfig."""

    operation: Literal["gated_delta_rule"] = "gated_delta_rule"


class KdaConfig(DeltaRuleConfig):
    """See DeltaRuleConfig."""

    operation: Literal["kda"] = "kda"


class GlaConfig(LinearConfig):
    """See LinearConfig."""

    operation: Literal["gla"] = "gla"


class SimpleGlaConfig(LinearConfig):
    """See LinearConfig."""

    operation: Literal["simple_gla"] = "simple_gla"


class LightningConfig(LinearConfig):
    """See LinearConfig."""

    operation: Literal["lightning"] = "lightning"


class RetentionConfig(LinearConfig):
    """See LinearConfig."""

    operation: Literal["retention"] = "retention"


class Mamba2Config(KernelConfig):
    """dt_softplus: whether dt is what the model projects, and softplus(dt + dt_bias) counts. dt_min, dt_max: it is clipped to
    them."""

    operation: Literal["mamba2"] = "mamba2"
    dt_softplus: bool = False
    dt_min: float | None = Field(None, ge=0, allow_inf_nan=False)
    dt_max: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.dt_min is not None and self.dt_max is not None and self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min:g} is above dt_max={self.dt_max:g}")
        return self


class Mamba1Config(RecurrentConfig):
    """dt_softplus: whether dt is what the model projects, and softplus(dt + dt_bias) counts."""

    operation: Literal["mamba1"] = "mamba1"
    dt_softplus: bool = False


class CausalConv1dConfig(OperationConfig):
    """activation: 'silu' or none, after the convolution. state_dtype: of the tokens that a call returns for the next."""

    feeds: ClassVar = {}
    # A convolution has no chunks, and there is one way to exchange its last tokens.
    chunk_size: ClassVar[None] = None
    exchange: ClassVar[None] = None

    operation: Literal["causal_conv1d"] = "causal_conv1d"
    activation: Literal["silu"] | None = None
    state_dtype: Literal["float32", "bfloat16"] | None = None


class GdrConfig(GatedDeltaRuleConfig):
    """See GatedDeltaRuleConfig."""

    operation: Literal["gdr"] = "gdr"  # type: ignore[assignment]


class KernelDeltaAttentionConfig(KdaConfig):
    """See KdaConfig."""

    operation: Literal["kernel_delta_attention"] = "kernel_delta_attention"  # type: ignore[assignment]


class Ssm2Config(Mamba2Config):
    """See Mamba2Config."""

    operation: Literal["ssm2"] = "ssm2"  # type: ignore[assignment]


class Ssm1Config(Mamba1Config):
    """See Mamba1Config."""

    operation: Literal["ssm1"] = "ssm1"  # type: ignore[assignment]


class MambaConfig(Mamba1Config):
    """See Mamba1Config."""

    operation: Literal["mamba"] = "mamba"  # type: ignore[assignment]
