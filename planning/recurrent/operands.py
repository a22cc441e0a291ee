"""The arrays of recurrent operations, and what they return.

`kv_heads` are the heads of queries and keys, or the groups of B and C; `heads` are those of values and of the state. In layout
thd the tokens of a packed batch are one row.
"""

from __future__ import annotations

from ...sharding import Operand, OperandTable

__all__ = [
    "CHANNEL_DECAY", "CONVOLUTION", "DELTA_CHANNEL", "DELTA_HEAD", "HEAD_DECAY", "MAMBA1", "MAMBA2", "OPERATIONS",
    "RESULTS_OF_CHANNELS", "RESULTS_OF_CONVOLUTION", "RESULTS_OF_HEADS",
]  # fmt: skip

_KEY_DIMS = ("batch", "q_len", "kv_heads", "head_dim")
_VALUE_DIMS = ("batch", "q_len", "heads", "value_dim")
_CHANNELS = ("batch", "q_len", "channels")
_CHANNELS_SPLIT = ("batch", "q_len", "heads")  # channels are split as heads are

_STATE = Operand("initial_state", ("batch", "heads", "head_dim", "value_dim"))
_SEGMENTS = Operand("segment_ids", ("batch", "q_len"), "bt", dtype="integers", gradient=False)
_LENGTHS = Operand("lengths", ("batch",), dtype="integers", gradient=False)


def _needed(name: str, dims: tuple[str, ...], order: str = "bthd", split_as: tuple[str, ...] | None = None) -> Operand:
    return Operand(name, dims, order, optional=False, split_as=split_as)


def _linear(*own: Operand) -> OperandTable:
    arrays = _needed("query", _KEY_DIMS), _needed("key", _KEY_DIMS), _needed("value", _VALUE_DIMS)
    return OperandTable(*arrays, *own, _STATE, _SEGMENTS, _LENGTHS)


_HEAD_DECAY = Operand("decay", ("batch", "q_len", "heads"), "bth", also=(("heads",),))
_CHANNEL_DECAY = Operand("decay", ("batch", "q_len", "heads", "head_dim"), "bthd")
_BETA = Operand("beta", ("batch", "q_len", "heads"), "bth")
_RATE = Operand("A_log", ("heads",))

HEAD_DECAY = _linear(_HEAD_DECAY)
"""Of linear attention with one log decay for a head and token, or one for a head."""

CHANNEL_DECAY = _linear(_CHANNEL_DECAY)
"""Of linear attention with a log decay for each key channel."""

DELTA_HEAD = _linear(_HEAD_DECAY, _BETA, _RATE, Operand("dt_bias", ("heads",)))
"""Of the gated delta rule. A_log and dt_bias are of a raw gate."""

DELTA_CHANNEL = _linear(_CHANNEL_DECAY, _BETA, _RATE, Operand("dt_bias", ("heads", "head_dim")))
"""Of the delta rule with a log decay for each key channel."""

MAMBA2 = OperandTable(
    _needed("x", _VALUE_DIMS),
    _needed("dt", ("batch", "q_len", "heads"), "bth"),
    _needed("A", ("heads",), ""),
    _needed("B", _KEY_DIMS),
    _needed("C", _KEY_DIMS),
    Operand("D", ("heads",)),
    Operand("dt_bias", ("heads",)),
    _STATE,
    _SEGMENTS,
    _LENGTHS,
)
"""Of Mamba-2. A is negative; head_dim is the size of the state for each channel of a head."""

MAMBA1 = OperandTable(
    _needed("x", _CHANNELS, "btd", _CHANNELS_SPLIT),
    _needed("dt", _CHANNELS, "btd", _CHANNELS_SPLIT),
    _needed("A", ("channels", "state_dim"), "", ("heads", "")),
    _needed("B", ("batch", "q_len", "state_dim"), "btd"),
    _needed("C", ("batch", "q_len", "state_dim"), "btd"),
    Operand("D", ("channels",), split_as=("heads",)),
    Operand("dt_bias", ("channels",), split_as=("heads",)),
    Operand("initial_state", ("batch", "channels", "state_dim"), split_as=("batch", "heads", "")),
    _SEGMENTS,
    _LENGTHS,
)
"""Of Mamba-1, whose decay differs for each channel and each number of its state."""

CONVOLUTION = OperandTable(
    _needed("x", _CHANNELS, "btd", _CHANNELS_SPLIT),
    _needed("weight", ("width", "channels"), "", ("", "heads")),
    Operand("bias", ("channels",), split_as=("heads",)),
    Operand("initial_state", ("batch", "history", "channels"), split_as=("batch", "", "heads")),
    _SEGMENTS,
    _LENGTHS,
)
"""Of a causal convolution along the tokens. history is width - 1: the tokens before the first."""

RESULTS_OF_HEADS = (
    Operand("attention_outputs", _VALUE_DIMS, "bthd"),
    Operand("state", ("batch", "heads", "head_dim", "value_dim")),
)
RESULTS_OF_CHANNELS = (
    Operand("attention_outputs", _CHANNELS, "btd", split_as=_CHANNELS_SPLIT),
    Operand("state", ("batch", "channels", "state_dim"), split_as=("batch", "heads", "")),
)
RESULTS_OF_CONVOLUTION = (
    Operand("attention_outputs", _CHANNELS, "btd", split_as=_CHANNELS_SPLIT),
    Operand("state", ("batch", "history", "channels"), split_as=("batch", "", "heads")),
)

OPERATIONS: dict[str, OperandTable] = {
    "causal_conv1d": CONVOLUTION,
    "gated_delta_rule": DELTA_HEAD,
    "gdr": DELTA_HEAD,
    "gla": CHANNEL_DECAY,
    "kda": DELTA_CHANNEL,
    "kernel_delta_attention": DELTA_CHANNEL,
    "lightning": HEAD_DECAY,
    "mamba": MAMBA1,
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "retention": HEAD_DECAY,
    "simple_gla": HEAD_DECAY,
    "ssm1": MAMBA1,
    "ssm2": MAMBA2,
}
"""The table of each operation that ships, by name: a cache's states are declared by an operation and its sizes."""
