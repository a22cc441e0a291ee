"""VanillaConfig: the options of attention in plain XLA."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from ...planning import OperationConfig

__all__ = ["VanillaConfig"]


class VanillaConfig(OperationConfig):
    """path: 'plain' builds the logits whole, 'blockwise' never does, 'decode' is for few queries, and
    'decode_rows' for few queries on a CPU; if unset, the plan chooses.

    block_q, block_kv: the most query rows and keys per tile; if unset or None, the plan chooses.
    """

    feeds: ClassVar = {"blocksize_q": "block_q", "blocksize_k": "block_kv"}

    operation: Literal["vanilla"] = "vanilla"
    path: Literal["plain", "blockwise", "decode", "decode_rows"] | None = None
    block_q: PositiveInt | None = None
    block_kv: PositiveInt | None = None
