"""Other libraries' names for attention over pages: `paged` with the page layout and update that each name stands for."""

from __future__ import annotations

from typing import ClassVar, Literal

from .operation import Paged
from .paged_config import PagedConfig

__all__ = [
    "MultiLatentRaggedPageAttentionV1",
    "MultiLatentRaggedPageAttentionV1Config",
    "MultiLatentRaggedPageAttentionV2",
    "MultiLatentRaggedPageAttentionV2Config",
    "PagedFlashAttention",
    "PagedFlashAttentionConfig",
    "RaggedPageAttentionV2",
    "RaggedPageAttentionV2Config",
    "RaggedPageAttentionV3",
    "RaggedPageAttentionV3Config",
    "UnifiedAttention",
    "UnifiedAttentionConfig",
]


class RaggedPageAttentionV2Config(PagedConfig):
    """See PagedConfig; what is declared for 'paged' applies too."""

    operation: Literal["ragged_page_attention_v2"] = "ragged_page_attention_v2"  # type: ignore[assignment]


class RaggedPageAttentionV3Config(PagedConfig):
    """See PagedConfig; what is declared for 'paged' applies too. The update is 'fused'."""

    operation: Literal["ragged_page_attention_v3"] = "ragged_page_attention_v3"  # type: ignore[assignment]
    update: Literal["before", "fused", "none"] = "fused"


class MultiLatentRaggedPageAttentionV1Config(PagedConfig):
    """See PagedConfig; what is declared for 'paged' applies too. The update is 'fused'."""

    operation: Literal["multi_latent_ragged_page_attention_v1"] = "multi_latent_ragged_page_attention_v1"  # type: ignore[assignment]
    update: Literal["before", "fused", "none"] = "fused"


class MultiLatentRaggedPageAttentionV2Config(PagedConfig):
    """See PagedConfig; what is declared for 'paged' applies too. The update is 'fused'."""

    operation: Literal["multi_latent_ragged_page_attention_v2"] = "multi_latent_ragged_page_attention_v2"  # type: ignore[assignment]
    update: Literal["before", "fused", "none"] = "fused"


class UnifiedAttentionConfig(PagedConfig):
    """See PagedConfig; what is declared for 'paged' applies too."""

    operation: Literal["unified_attention"] = "unified_attention"  # type: ignore[assignment]


class PagedFlashAttentionConfig(PagedConfig):
    """See PagedConfig; what is declared for 'paged' applies too."""

    operation: Literal["paged_flash_attention"] = "paged_flash_attention"  # type: ignore[assignment]


class PagedPreset(Paged):
    """`paged` by another name, over pages of one layout; what is declared for 'paged' applies to it too."""

    backend_operation: ClassVar[str | None] = Paged.name


class RaggedPageAttentionV2(PagedPreset):
    """`paged` over pages of layout interleaved: each head's keys and values alternate in one array."""

    name = "ragged_page_attention_v2"
    config = RaggedPageAttentionV2Config
    cache_layout = "interleaved"


class RaggedPageAttentionV3(PagedPreset):
    """`paged` over pages of layout packed: as interleaved, in 32-bit words and whole lanes. The update is 'fused'."""

    name = "ragged_page_attention_v3"
    config = RaggedPageAttentionV3Config
    cache_layout = "packed"


class MultiLatentRaggedPageAttentionV1(PagedPreset):
    """`paged` over pages of latents, each followed by its rotary key. The update is 'fused'."""

    name = "multi_latent_ragged_page_attention_v1"
    config = MultiLatentRaggedPageAttentionV1Config
    cache_layout = "latent"


class MultiLatentRaggedPageAttentionV2(PagedPreset):
    """The same as multi_latent_ragged_page_attention_v1: elsewhere they differ in their kernels."""

    name = "multi_latent_ragged_page_attention_v2"
    config = MultiLatentRaggedPageAttentionV2Config
    cache_layout = "latent"


class UnifiedAttention(PagedPreset):
    """`paged` over pages of layout split."""

    name = "unified_attention"
    config = UnifiedAttentionConfig
    cache_layout = "split"


class PagedFlashAttention(PagedPreset):
    """`paged` over pages of layout split, as in flash-attention's block tables."""

    name = "paged_flash_attention"
    config = PagedFlashAttentionConfig
    cache_layout = "split"
