"""AttentionKeywords: the keywords of an Attention of attnops' own operations over arrays, for type checkers and editors.

A test holds the names against what Attention accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ...call_arguments import CallOptions
from ...masks import Mask
from ...planning.operation_config import OperationConfig
from ...scores import Score
from ...sharding.partition_axis import AnyPartitionAxis

if TYPE_CHECKING:
    from ...registry import OperationMetadata

__all__ = ["ArrayOperation", "AttentionKeywords"]

ArrayOperation = Literal[
    "splash",
    "vanilla",
    "flash_attn2",
    "sdpa",
    "ring",
    "ulysses",
    "blocksparse",
    "autoregressive_decodeattn",
    "selected",
]


class _Metadata(TypedDict, total=False):
    """Fields of OperationMetadata that a call doesn't have."""

    metadata: OperationMetadata
    runtime_dtype: Any
    runtime_softmax_dtype: Any
    sequence_axis_name: str
    platform: str | None
    backend: str | None
    partition_axis: AnyPartitionAxis | Mapping[str, Any]
    partition_manager: Any
    base_config: Any
    operation_configs: Mapping[str, OperationConfig | Mapping[str, Any]]
    mesh: Any
    blocksize_q: int | None
    blocksize_k: int | None
    blocksize_b: int | None
    fallback: Literal["warn", "error", "allow"]
    kv_heads: Literal["replicate", "error"]
    strict: bool
    tuning: Literal["heuristic", "tune", "error", "off"]
    sequence_parallel: Literal["auto", "gather", "ring", "ulysses", "ulysses_ring", "state"]
    ring_order: Literal["contiguous", "zigzag"] | None
    scan_ring_attention: bool | None


class _Config(TypedDict, total=False):
    """Fields of the operations' configs; an operation refuses those that it doesn't have."""

    block_kv: int | None
    block_kv_compute: int | None
    block_kv_compute_in: int | None
    block_kv_dkv: int | None
    block_kv_dkv_compute: int | None
    block_kv_dkv_sums: int | None
    block_kv_dq: int | None
    block_kv_dq_compute: int | None
    block_q: int | None
    block_q_compute: int | None
    block_q_dkv: int | None
    block_q_dkv_compute: int | None
    block_q_dq: int | None
    fold: bool | None
    fuse_reciprocal: bool
    heads_per_tile: int | None
    interpret: bool
    k_layout: Literal["head_dim_minor", "seq_minor"]
    kernel: Literal["mosaic", "triton", "attnops", "jax", "tokamax"] | None
    kv_splits: int | None
    num_stages: int | None
    num_stages_dkv: int | None
    num_stages_dq: int | None
    num_warps: int | None
    num_warps_dkv: int | None
    num_warps_dq: int | None
    path: Literal["plain", "blockwise", "decode", "decode_rows", "gather", "tiles"] | None
    products_ahead: int | None
    products_ahead_dkv: int | None
    q_layout: Literal["head_dim_minor", "seq_minor"]
    residual_checkpoint_name: str | None
    stationary_weights: bool | None
    sum_by_product: bool | None
    transposed_tiles: bool | None
    use_base2_exp: bool
    use_experimental_scheduler: bool
    use_fused_bwd_kernel: bool | None
    v_layout: Literal["head_dim_minor", "seq_minor"]
    vmem_limit_bytes: int | None


class AttentionKeywords(CallOptions, _Metadata, _Config, total=False):
    """What is the same in all calls, fields of OperationMetadata, and fields of the operation's config."""

    mask: Mask | None
    score: Score | None
