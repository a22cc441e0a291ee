"""SplashConfig: what can be declared for splash, and which kernel supports it."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, StrictBool, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from ...errors import is_whole, shown
from ...planning import OperationConfig
from .pass_fields import DQ, INSIDE, SIZED

__all__ = ["LACKING", "LANES", "SplashConfig"]

LANES = 128
_BLOCKS = tuple(
    name
    for pass_fields in SIZED
    for name in (*pass_fields.queries, *pass_fields.keys, pass_fields.sums)
    if name is not None
)
# What a kernel doesn't support.
_ATTNOPS_ONLY = (
    "block_q_compute", "block_kv_compute_in", "transposed_tiles", "products_ahead", "heads_per_tile", "block_q_dkv_compute",
    "block_kv_dkv_sums", "block_kv_dq_compute", "products_ahead_dkv", "vmem_limit_bytes", "sum_by_product", "stationary_weights",
)  # fmt: skip
LACKING: dict[str, tuple[str, ...]] = {
    "attnops": (),
    "jax": (*_ATTNOPS_ONLY, "use_base2_exp", "fuse_reciprocal", "use_experimental_scheduler"),
    "tokamax": (*_ATTNOPS_ONLY, *DQ.blocks),
}
Layout = Literal["head_dim_minor", "seq_minor"]


class SplashConfig(OperationConfig):
    """Which splash kernel runs on a TPU, with which block sizes and layouts.

    Sizes count rows. attnops chooses unset sizes from the local shapes and the device. None means the kernels'
    own default: 128 or, for a compute block, the block that contains it.

    kernel: 'attnops', 'jax' for the kernel that ships with JAX, or 'tokamax' for tokamax's; fields that the kernel doesn't
    support are refused. block_q, block_kv: what the forward pass holds in VMEM at once. block_q_compute, block_kv_compute: the
    queries and keys of one product. block_kv_compute_in: the part of these keys that goes through the exponential and the
    product with the values at a time. transposed_tiles: hold weights as [keys, queries] in the forward pass, as the backward
    passes do; None is False. products_ahead: software pipelining, the number of products of queries and keys issued ahead of an
    earlier one's exponentials; None is 0. heads_per_tile: query heads processed together; None is 1. *_dkv: blocks of the
    gradients of k and v, *_dq of that of q; *_compute are the queries and keys processed at a time. products_ahead_dkv:
    products_ahead with the *_dkv blocks. use_fused_bwd_kernel: all three gradients in one pass, with the *_dkv blocks; None is
    False, except for tokamax, which only has the fused pass. block_kv_dkv_sums: the keys whose gradients it sums in VMEM at a
    time, with one pass after another if there are more; None is all of them. *_layout: 'seq_minor' passes the tensor transposed.
    use_base2_exp: multiply logits by log2 e. fuse_reciprocal: divide by the softmax's sum in the kernel, otherwise after it.
    sum_by_product: compute that sum in the product with the values, by a column of ones; None is False. stationary_weights:
    compute and sum the backward pass's gradients transposed, so that the weights fill the matrix unit; None is False.
    use_experimental_scheduler: the compiler's LP scheduler. vmem_limit_bytes: the VMEM that the kernels may take; None is the
    compiler's default. residual_checkpoint_name: the name of the output and its log-sum-exp for jax.checkpoint policies.
    interpret: run the kernel in Pallas' interpreter, on any platform; for tests.
    """

    feeds: ClassVar = {"blocksize_q": "block_q", "blocksize_k": "block_kv"}

    operation: Literal["splash"] = "splash"
    kernel: Literal["attnops", "jax", "tokamax"] = "attnops"
    block_q: int | None = None
    block_q_compute: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    block_kv_compute_in: int | None = None
    transposed_tiles: StrictBool | None = None
    products_ahead: NonNegativeInt | None = None
    heads_per_tile: PositiveInt | None = None
    block_q_dkv: int | None = None
    block_q_dkv_compute: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    block_kv_dkv_sums: int | None = None
    products_ahead_dkv: NonNegativeInt | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    block_kv_dq_compute: int | None = None
    use_fused_bwd_kernel: StrictBool | None = None
    q_layout: Layout = "head_dim_minor"
    k_layout: Layout = "head_dim_minor"
    v_layout: Layout = "head_dim_minor"
    use_base2_exp: StrictBool = True
    fuse_reciprocal: StrictBool = True
    sum_by_product: StrictBool | None = None
    stationary_weights: StrictBool | None = None
    use_experimental_scheduler: StrictBool = False
    vmem_limit_bytes: PositiveInt | None = None
    residual_checkpoint_name: str | None = None
    interpret: StrictBool = False

    @field_validator(*_BLOCKS, mode="before")
    @classmethod
    def _check_multiple(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        # The other kernels' forward passes have queries in sublanes; their backward passes, and all of attnops', in lanes.
        in_sublanes = info.field_name == "block_q" and info.data.get("kernel") in ("jax", "tokamax")
        multiple = 8 if in_sublanes else LANES
        if not is_whole(value, 1):
            raise ValueError(f"{info.field_name}={shown(value)} is not a positive integer (a multiple of {multiple})")
        if value % multiple:
            near = sorted({max(multiple, value // multiple * multiple), (value // multiple + 1) * multiple})
            raise ValueError(
                f"{info.field_name}={value} is not a multiple of {multiple}; nearest: {', '.join(map(str, near))}"
            )
        return value

    @model_validator(mode="after")
    def _check_inner_blocks(self) -> Self:
        for inner, outer in INSIDE:
            size, block = getattr(self, inner), getattr(self, outer)
            has_sizes = any(outer in pass_fields.blocks for pass_fields in SIZED)  # others' None isn't 128
            block = LANES if block is None and has_sizes and self.is_set(outer) else block
            if size is not None and block is not None and block % size:
                raise ValueError(f"{outer}={block} is not a multiple of {inner}={size}")
        if self.q_layout == "seq_minor" and (self.block_q or LANES) % LANES:
            raise ValueError(f"block_q={self.block_q} is not a multiple of {LANES}, which q_layout='seq_minor' wants")
        for name in LACKING[self.kernel]:
            if self.is_set(name):
                raise ValueError(
                    f"{name}={getattr(self, name)} can't be carried by kernel='{self.kernel}', which has no such field; leave it "
                    "out, or leave kernel out"
                )
        if self.use_fused_bwd_kernel or self.block_kv_dkv_sums is not None:
            for name in DQ.sizes:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect: the fused backward has no dq pass; leave it out"
                    )
        if self.use_fused_bwd_kernel is False and self.block_kv_dkv_sums is not None:
            raise ValueError(
                f"block_kv_dkv_sums={self.block_kv_dkv_sums} has no effect: only the fused backward holds the sums of many keys; "
                "leave it out"
            )
        if self.kernel == "tokamax" and self.use_fused_bwd_kernel is False:
            raise ValueError(
                "use_fused_bwd_kernel=False can't be carried by kernel='tokamax', whose backward is the fused one; leave it out, "
                "or leave kernel out"
            )
        return self
