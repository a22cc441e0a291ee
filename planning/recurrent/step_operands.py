"""The arrays of steps over slots: those of the whole call by token, without a batch, the slots of its states, and the
convolutions of its arrays with heads."""

from __future__ import annotations

from dataclasses import replace

from ...sharding import Operand, OperandTable

__all__ = ["CONV_ROWS", "STATE_BATCH", "conv_rows", "of_step"]

CONV_ROWS = ("conv_weight", "conv_bias", "conv_window")
"""What the names of a convolution's arrays add to that of what is convolved, such as query_conv_weight."""

_WHOLE_CALLS = ("segment_ids", "lengths")
_OF_STEPS = {"batch": "slots", "q_len": "tokens"}


def _rows(name: str, *dims: str) -> Operand:
    split = ("batch", *[""] * len(dims))
    row = Operand(name, ("shards", *dims), also=(dims,), split_as=split, dtype="integers")
    return replace(row, optional=False, gradient=False)


STATE_BATCH = OperandTable(
    _rows("cu_q_lens", "bounds"),
    _rows("kv_lens", "rows"),
    _rows("num_seqs"),
    _rows("read_slots", "rows"),
    _rows("write_slots", "rows", "columns"),
)
"""The arrays of a StateBatch, which may be of several shards."""


def of_step(table: OperandTable, results: tuple[Operand, ...]) -> tuple[OperandTable, tuple[Operand, ...]]:
    """(arrays, results) of the step of a whole call. Tokens have no batch dim, and a mesh splits them as it splits slots: by the
    axes of the batch. The state is the array of slots, which a step returns too, as it does windows of convolutions."""
    rows = [_of_step(row) for row in table if row.name not in _WHOLE_CALLS]
    state = next(row for row in rows if row.name == "state")
    tokens = [row for row in rows if row.name != "state"]
    convolved = [row for one in tokens if not one.optional and len(one.dims) == 3 for row in conv_rows(one)]
    windows = [row for row in convolved if row.name.endswith(CONV_ROWS[2])]
    return OperandTable(*tokens, *convolved, state), (*map(_of_step, results), *windows)


def conv_rows(row: Operand) -> tuple[Operand, Operand, Operand]:
    """The arrays of a causal convolution of an array [tokens, heads, dim], each channel by itself: its weight, whose last row is
    of the token itself, its bias, and slots of the tokens before those of a row."""
    _, *dims = row.dims
    _, *split = row.dims if row.split_as is None else row.split_as
    own = {
        "conv_weight": (("width", *dims), ("", *split)),
        "conv_bias": (tuple(dims), tuple(split)),
        "conv_window": (("slots", "history", *dims), ("batch", "", *split)),
    }
    weight, bias, window = (
        Operand(f"{row.name}_{name}", of, split_as=by, gradient=False) for name, (of, by) in own.items()
    )
    return weight, bias, window


def _of_step(row: Operand) -> Operand:
    split = row.dims if row.split_as is None else row.split_as
    if row.name in ("initial_state", "state"):
        return replace(row, name="state", dims=("slots", *row.dims[1:]), split_as=split, optional=False, gradient=False)
    if "q_len" not in row.dims:
        return replace(row, gradient=False)
    # The first two are batch and tokens.
    return replace(row, dims=("tokens", *row.dims[2:]), split_as=("batch", *split[2:]), order="", gradient=False)
