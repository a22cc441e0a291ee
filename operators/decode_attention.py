"""autoregressive_decodeattn: the last tokens of sequences against a dense cache, with a start and an end for each row."""

from __future__ import annotations

from typing import ClassVar, Literal

from .call.base import Operation
from .vanilla.operation import NATIVE
from .vanilla.vanilla_config import VanillaConfig

__all__ = ["AutoregressiveDecodeAttention", "AutoregressiveDecodeConfig"]


class AutoregressiveDecodeConfig(VanillaConfig):
    """See VanillaConfig; what is declared for 'vanilla' applies too."""

    operation: Literal["autoregressive_decodeattn"] = "autoregressive_decodeattn"  # type: ignore[assignment]


class AutoregressiveDecodeAttention(Operation):
    """`vanilla` over a dense cache: `kv_starts` and `kv_lengths` specify which keys of each row exist."""

    name = "autoregressive_decodeattn"
    config = AutoregressiveDecodeConfig
    backend_operation: ClassVar[str | None] = "vanilla"
    forward_native = NATIVE
