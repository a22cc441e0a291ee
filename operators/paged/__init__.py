"""The operation `paged`, and the names under which other libraries know it."""

from .operation import Paged, PagedOperation
from .paged_config import PagedConfig
from .presets import (
    MultiLatentRaggedPageAttentionV1,
    MultiLatentRaggedPageAttentionV2,
    PagedFlashAttention,
    RaggedPageAttentionV2,
    RaggedPageAttentionV3,
    UnifiedAttention,
)

__all__ = [
    "MultiLatentRaggedPageAttentionV1",
    "MultiLatentRaggedPageAttentionV2",
    "Paged",
    "PagedConfig",
    "PagedFlashAttention",
    "PagedOperation",
    "RaggedPageAttentionV2",
    "RaggedPageAttentionV3",
    "UnifiedAttention",
]
