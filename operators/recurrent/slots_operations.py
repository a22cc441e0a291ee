"""The steps over slots of every recurrent operation."""

from __future__ import annotations

from typing import TypedDict, Unpack

from ...call_arguments import CallArray
from ...planning.tables.table_plan import TablePlan
from ..call.same_arguments import explained, planned
from ..paged_cache.state_batch import StateBatch
from .channel_operations import CausalConv1d, Mamba1, Mamba2
from .linear_operations import GatedDeltaRule, Gla, Kda, Lightning, Retention, SimpleGla
from .output import RecurrentOutput
from .slots_config import (
    RaggedCausalConv1dConfig,
    RaggedGatedDeltaRuleConfig,
    RaggedGatedDeltaRuleV2Config,
    RaggedGlaConfig,
    RaggedKdaConfig,
    RaggedLightningConfig,
    RaggedMamba1Config,
    RaggedMamba2Config,
    RaggedRetentionConfig,
    RaggedSimpleGlaConfig,
)
from .slots_operation import SlotsOperation

__all__ = [
    "ConvolutionStepArguments", "LinearStepArguments", "MambaStepArguments", "RaggedCausalConv1d", "RaggedGatedDeltaRule",
    "RaggedGatedDeltaRuleV2", "RaggedGla", "RaggedKda", "RaggedLightning", "RaggedMamba1", "RaggedMamba2", "RaggedRetention",
    "RaggedSimpleGla",
]  # fmt: skip


class LinearStepArguments(TypedDict, total=False):
    """The keywords of a step of linear attention. beta, A_log and dt_bias are the delta rule's."""

    state: CallArray
    batch: StateBatch
    decay: CallArray | None
    beta: CallArray | None
    A_log: CallArray | None
    dt_bias: CallArray | None
    query_conv_weight: CallArray | None
    query_conv_bias: CallArray | None
    query_conv_window: CallArray | None
    key_conv_weight: CallArray | None
    key_conv_bias: CallArray | None
    key_conv_window: CallArray | None
    value_conv_weight: CallArray | None
    value_conv_bias: CallArray | None
    value_conv_window: CallArray | None
    scale: float | None
    normalise_qk: bool | None
    conv_activation: str | None
    mode: str | None
    max_q_len: int | None
    debug: bool


class _LinearStep(SlotsOperation):
    """What the steps of linear attention have in common."""

    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[LinearStepArguments]
    ) -> RecurrentOutput:
        """Continue the state of each row with its tokens, and write it to its slots.

        Shapes: query, key [tokens, kv_heads, head_dim], value [tokens, heads, value_dim], decay [tokens, heads], and head_dim
        after it where it differs by channel; beta [tokens, heads]; state [slots, heads, head_dim, value_dim] in the config's
        state_dtype; batch: a StateBatch, which assigns tokens to rows and rows to slots. Tokens of no row have the output 0.
        max_q_len: the most tokens of a row, 1 if all decode. debug: checks traced batches on the host while the step runs.
        A convolution before the recurrence, of query, key or value, each by itself: its weight [width, heads, dim] of the array's
        heads and dim, whose last row is of the token itself; a bias [heads, dim]; a window [slots, width - 1, heads, dim] in the
        array's dtype, of which the output's `windows` has the next one; conv_activation: 'silu' or none, after them.
        Call it inside jit with the state donated, of which it writes only the batch's slots. There is no gradient.

        Errors: InputError, InputTypeError (bad arguments, known invalid batches), ConfigError, ShardingError, RefusedError
        (nothing can run it).
        """
        return self._run({"query": query, "key": key, "value": value}, call)

    plan = planned(__call__, TablePlan)
    explain = explained(plan)


class MambaStepArguments(TypedDict, total=False):
    """The keywords of a step of Mamba. The convolutions are ragged_mamba2's."""

    state: CallArray
    batch: StateBatch
    D: CallArray | None
    dt_bias: CallArray | None
    x_conv_weight: CallArray | None
    x_conv_bias: CallArray | None
    x_conv_window: CallArray | None
    B_conv_weight: CallArray | None
    B_conv_bias: CallArray | None
    B_conv_window: CallArray | None
    C_conv_weight: CallArray | None
    C_conv_bias: CallArray | None
    C_conv_window: CallArray | None
    conv_activation: str | None
    mode: str | None
    max_q_len: int | None
    debug: bool


class _MambaStep(SlotsOperation):
    """What the steps of both generations of Mamba have in common."""

    def __call__(
        self, x: CallArray, dt: CallArray, A: CallArray, B: CallArray, C: CallArray, **call: Unpack[MambaStepArguments]
    ) -> RecurrentOutput:
        """Continue the state of each row with its tokens, and write it to its slots.

        Shapes of ragged_mamba2: x [tokens, heads, value_dim], dt [tokens, heads], A [heads], B, C [tokens, groups, state], D and
        dt_bias [heads], state [slots, heads, state, value_dim]. Of ragged_mamba1: x, dt [tokens, channels], A [channels, state],
        B, C [tokens, state], D and dt_bias [channels], state [slots, channels, state]. batch, max_q_len and debug, and the
        convolutions of x, B and C that ragged_mamba2 takes: see the steps of linear attention.

        Errors: InputError, InputTypeError (bad arguments, known invalid batches), ConfigError, ShardingError, RefusedError
        (nothing can run it).
        """
        return self._run({"x": x, "dt": dt, "A": A, "B": B, "C": C}, call)

    plan = planned(__call__, TablePlan)
    explain = explained(plan)


class ConvolutionStepArguments(TypedDict, total=False):
    """The keywords of a step of the convolution."""

    state: CallArray
    batch: StateBatch
    bias: CallArray | None
    activation: str | None
    mode: str | None
    max_q_len: int | None
    debug: bool


class RaggedCausalConv1d(SlotsOperation, CausalConv1d):
    """`causal_conv1d` as a step over slots, each with the last width - 1 tokens of a sequence."""

    name = "ragged_causal_conv1d"
    config = RaggedCausalConv1dConfig

    def __call__(self, x: CallArray, weight: CallArray, **call: Unpack[ConvolutionStepArguments]) -> RecurrentOutput:  # type: ignore[override]
        """Convolve, with the tokens before those of a row from its slot, and write the last ones to its slots.

        Shapes: x [tokens, channels], weight [width, channels], whose last row is of the token itself, bias [channels], state
        [slots, width - 1, channels] in the dtype of x unless state_dtype is declared. batch, max_q_len and debug: see the steps
        of linear attention.

        Errors: InputError, InputTypeError (bad arguments, known invalid batches), ConfigError, ShardingError, RefusedError
        (nothing can run it).
        """
        return self._run({"x": x, "weight": weight}, call)

    plan = planned(__call__, TablePlan)  # type: ignore[arg-type]  # the calls differ
    explain = explained(plan)


class RaggedGatedDeltaRuleV2(_LinearStep, GatedDeltaRule):  # type: ignore[misc]  # the calls differ
    """`gated_delta_rule` as a step over slots."""

    name = "ragged_gated_delta_rule_v2"
    config = RaggedGatedDeltaRuleV2Config


class RaggedGatedDeltaRule(RaggedGatedDeltaRuleV2):
    """`ragged_gated_delta_rule_v2` by its short name."""

    name = "ragged_gated_delta_rule"
    config = RaggedGatedDeltaRuleConfig
    backend_operation = "gated_delta_rule"


class RaggedKda(_LinearStep, Kda):  # type: ignore[misc]  # the calls differ
    """`kda` as a step over slots."""

    name = "ragged_kda"
    config = RaggedKdaConfig


class RaggedGla(_LinearStep, Gla):  # type: ignore[misc]  # the calls differ
    """`gla` as a step over slots."""

    name = "ragged_gla"
    config = RaggedGlaConfig


class RaggedSimpleGla(_LinearStep, SimpleGla):  # type: ignore[misc]  # the calls differ
    """`simple_gla` as a step over slots."""

    name = "ragged_simple_gla"
    config = RaggedSimpleGlaConfig


class RaggedLightning(_LinearStep, Lightning):  # type: ignore[misc]  # the calls differ
    """`lightning` as a step over slots."""

    name = "ragged_lightning"
    config = RaggedLightningConfig


class RaggedRetention(_LinearStep, Retention):  # type: ignore[misc]  # the calls differ
    """`retention` as a step over slots."""

    name = "ragged_retention"
    config = RaggedRetentionConfig


class RaggedMamba2(_MambaStep, Mamba2):  # type: ignore[misc]  # the calls differ
    """`mamba2` as a step over slots."""

    name = "ragged_mamba2"
    config = RaggedMamba2Config


class RaggedMamba1(_MambaStep, Mamba1):  # type: ignore[misc]  # the calls differ
    """`mamba1` as a step over slots."""

    name = "ragged_mamba1"
    config = RaggedMamba1Config
