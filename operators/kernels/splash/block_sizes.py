"""SplashBlocks: every size and switch of the kernels, resolved."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SplashBlocks"]


@dataclass(frozen=True)
class SplashBlocks:
    """Sizes in rows. Those with `_dq` are None with the fused backward pass.

    block_q_compute, block_kv_compute: the queries and keys of one product. block_kv_compute_in: the part of these keys that
    goes through the exponential and the product with the values at a time. transposed_tiles: the forward pass holds weights
    as [keys, queries]. products_ahead: how many units these products run ahead of their exponentials. heads_per_tile: query
    heads per tile; beyond a group, whole groups with their kv heads. block_kv_dkv_sums: the keys whose gradients the fused
    backward pass sums at a time; None if unfused.
    """

    block_q: int
    block_kv: int
    block_q_compute: int
    block_kv_compute: int
    block_kv_compute_in: int
    transposed_tiles: bool
    products_ahead: int
    heads_per_tile: int
    block_q_dkv: int
    block_q_dkv_compute: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    block_kv_dkv_sums: int | None
    products_ahead_dkv: int
    block_q_dq: int | None
    block_kv_dq: int | None
    block_kv_dq_compute: int | None
    use_fused_bwd_kernel: bool
    q_layout: str
    k_layout: str
    v_layout: str
    use_base2_exp: bool
    fuse_reciprocal: bool
    sum_by_product: bool
    use_experimental_scheduler: bool
    vmem_limit_bytes: int | None
    stationary_weights: bool
