"""selected: attention of each query to the keys that were selected for it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import PositiveInt

from ...masks import SegmentIds
from ...planning import STATIC_MASKS, AttentionProblem, Implementation, OperationConfig, Rule, declares
from ...sharding import ATTENTION, Operand
from ..call.base import Operation
from ..call.local import LocalCall, LocalOutput
from ..choices.dtype_rules import float32_softmax, plain_dtypes
from ..kernels.local_mask import LocalMask
from ..kernels.primitives import numbers, shifted
from .kernel.selected import selected_attention

__all__ = ["SELECTED_ON_XLA", "SelectedAttention", "SelectedConfig"]

_FEATURES = (STATIC_MASKS - {"mask_function"}) | {
    "segment_ids", "kv_lengths", "dynamic_query_offset", "logits_soft_cap", "sinks", "return_lse", "gqa", "value_dim",
    "quantized_kv", "selected",
}  # fmt: skip


class SelectedConfig(OperationConfig):
    """path: 'gather' copies the keys of each query, 'tiles' masks the tiles of keys from which a block of queries selected any;
    if unset or None, what is less work. block_q, block_kv: queries and keys that are worked on together; if unset or None, by
    their sizes."""

    feeds: ClassVar = {}

    operation: Literal["selected"] = "selected"
    path: Literal["gather", "tiles"] | None = None
    block_q: PositiveInt | None = None
    block_kv: PositiveInt | None = None


def _given(problem: AttentionProblem, config: OperationConfig) -> bool:
    return problem.operand("selected") is not None


_SELECTED = Rule(
    "selected.positions",
    "selected",
    _given,
    "the call has no selected keys",
    "Pass selected, the positions that an indexer returns; attend to all keys with 'vanilla'.",
)
_SOFTMAX = float32_softmax("selected", "over selected keys it is")
_DTYPE = plain_dtypes("selected", "over selected keys it is")


class SelectedOnXla(Implementation[SelectedConfig]):
    """Plain XLA: keys gathered for each query, or tiles of keys masked, in blocks of queries."""

    operation = "selected"
    config = SelectedConfig
    capability = declares(
        consumes=_FEATURES,
        rules=(_SELECTED, _SOFTMAX, _DTYPE),
        tolerance={"float32": (6e-6, 2e-5), "bfloat16": (1.5e-2, 3e-2), "float16": (2e-3, 4e-3)},
        dequantises=True,
        operands=("selected",),
    )

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Attend."""
        call = call.dequantised()
        config, bthd = self.read(call.config), call.layout == "bthd"
        query, key, value = (x if bthd else x.swapaxes(1, 2) for x in (call.query, call.key, call.value))
        columns = call.problem.value_columns
        output, lse = selected_attention(
            query,
            key,
            None if columns is not None else value,
            _visible(call.mask, call.further["selected"]),
            softmax_scale=call.softmax_scale,
            soft_cap=call.logits_soft_cap,
            sinks=call.sinks,
            value_dim=columns,
            path=config.path,
            block_q=config.block_q,
            block_kv=config.block_kv,
        )
        return LocalOutput(output if bthd else output.swapaxes(1, 2), lse=lse if call.return_lse else None)


def _visible(mask: LocalMask, selected: jax.Array) -> jax.Array:
    """The selected positions [batch, q, n] that the mask shows; -1 in place of the others."""
    there = (selected >= 0) & (selected < mask.kv_len)
    keys = jnp.where(there, selected, 0)
    rows = shifted(numbers((1, 1, keys.shape[1], 1), 2), mask.q_start)
    offset = 0 if mask.query_offset is None else mask.query_offset
    at = shifted(rows, offset if isinstance(offset, int) else offset[:, None, None, None])
    for part in mask.mask.conjuncts():
        if isinstance(part, SegmentIds):
            ids = jnp.take_along_axis(part.kv, keys.reshape(len(keys), -1), axis=1).reshape(keys.shape)
            there &= ids == part.query[..., None]
        else:  # by the position of a key, whichever it is
            there &= part.test(rows, at, keys[:, None])[:, 0]
    return jnp.where(there, selected, np.int32(-1))


SELECTED_ON_XLA = SelectedOnXla()


class SelectedAttention(Operation):
    """Softmax attention to the keys at `selected`, integers [batch, q, n], among those that the mask shows.

    Positions are distinct in each row; -1, and any other number that isn't a key's position, is unused. The selection has no
    gradient.
    """

    name = "selected"
    convention = "attnops:selected"
    config = SelectedConfig
    operands = ATTENTION.extended(
        Operand("selected", ("batch", "q_len", "selected"), "btd", dtype="integers", gradient=False, indexes="kv_len")
    )
    forward_native: Any = SELECTED_ON_XLA
