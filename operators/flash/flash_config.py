"""FlashAttention2Config: what can be declared for the GPU kernels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, StrictBool, field_validator
from pydantic_core.core_schema import ValidationInfo

from ...errors import is_whole, shown
from ...planning import OperationConfig
from .pass_fields import FIELDS

__all__ = ["FlashAttention2Config"]

_BLOCKS = tuple(name for names in FIELDS.values() for name in names[:2])
_WARPS = tuple(names[2] for names in FIELDS.values())
_MIN = 16  # rows of a product on tensor cores


class FlashAttention2Config(OperationConfig):
    """Block sizes, warps and stages of the GPU kernels. A field that is unset or None is chosen from shapes and device.

    kernel: what attnops' kernels are written in, 'mosaic' (Hopper and Blackwell) or 'triton'; 'blackwell': those of Mosaic GPU
    for Blackwell alone, which the interpreter runs too, where 'mosaic' stands for those for Hopper; or 'tokamax', whose kernels
    run instead.
    block_q, block_kv: query rows and keys per tile of the forward pass, powers of two; they determine what a multiprocessor
    holds. num_warps: warps that share a tile, 1, 2, 4, 8 or 16. num_stages: tiles of keys being loaded from memory at once.
    *_dkv: for the gradients of key and value, *_dq: for that of the query. kv_splits: parts of the keys that the forward pass
    works on separately, so that few queries fill the device; their outputs are merged by lse. fold: the query heads that share a
    kv head are rows of the same tiles. residual_checkpoint_name: the name of the output and its
    log-sum-exp for jax.checkpoint policies. interpret: run the kernels in Pallas' interpreter, on any platform; for tests.
    """

    operation: Literal["flash_attn2"] = "flash_attn2"
    kernel: Literal["mosaic", "blackwell", "tokamax", "triton"] | None = None
    block_q: int | None = None
    block_kv: int | None = None
    num_warps: int | None = None
    num_stages: int | None = Field(default=None, ge=1, le=8)
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    num_warps_dkv: int | None = None
    num_stages_dkv: int | None = Field(default=None, ge=1, le=8)
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    num_warps_dq: int | None = None
    num_stages_dq: int | None = Field(default=None, ge=1, le=8)
    kv_splits: PositiveInt | None = None
    fold: StrictBool | None = None
    residual_checkpoint_name: str | None = None
    interpret: StrictBool = False

    @field_validator(*_BLOCKS, *_WARPS, mode="before")
    @classmethod
    def _power_of_two(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        min_value, max_value = (1, 16) if info.field_name in _WARPS else (_MIN, 1024)
        if not is_whole(value, min_value, max_value) or value & (value - 1):
            raise ValueError(f"{info.field_name}={shown(value)}; wanted a power of two from {min_value} to {max_value}")
        return value
