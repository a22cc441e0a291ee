"""attnops: declare an attention operation once, see what will run, where and why, and run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .distribution import VERSION as _VERSION
from .lazy import lazy_names

if TYPE_CHECKING:
    from .adapters.jax_nn import dot_product_attention
    from .advising import advise
    from .errors import (
        AttnOpsError,
        ConfigError,
        FallbackWarning,
        InputError,
        MaskWarning,
        RefusedError,
        ShardingError,
        ShardingWarning,
    )
    from .masks import (
        Blocks,
        Causal,
        Chunked,
        Dense,
        Full,
        Lengths,
        Mask,
        MaskFunction,
        Positions,
        Prefix,
        SegmentIds,
        SlidingWindow,
        mask_from_dict,
        register_mask_function,
    )
    from .operators import AttentionOutput
    from .operators.api.attention import Attention
    from .operators.api.model_shardings import shardings_for
    from .operators.blocksparse import BlockSparseConfig
    from .operators.flash_attention2 import FlashAttention2Config
    from .operators.latent import LatentAttention as LatentAttention
    from .operators.paged_cache.batch import RaggedBatch
    from .operators.paged_cache.state_batch import StateBatch as StateBatch
    from .operators.sdpa.operation import SdpaConfig
    from .operators.splash import SplashConfig
    from .operators.vanilla.vanilla_config import VanillaConfig
    from .planning import Plan, Policy
    from .planning.cache.kv_cache import KVCache
    from .planning.cache.layer_groups import LayerGroup
    from .registry import OperationMetadata, OperationRegistry
    from .registry.declaration import Declaration
    from .registry.model_declaration import ModelDeclaration
    from .scores import T5 as T5
    from .scores import ALiBi, RelativeBias, ScoreFunction, SoftCap, register_score_function
    from .scores import Buckets as Buckets
    from .scores import Clip as Clip
    from .scores import Distance as Distance
    from .scores import Forgetting as Forgetting
    from .scores import PositionTemperature as PositionTemperature
    from .scores import RelativeBias2D as RelativeBias2D
    from .scores import Score as Score
    from .scores import Temperature as Temperature
    from .serving import PagePool
    from .sharding import AttnShardingRules, PartitionAxis
    from .sharding.processes import check_processes

__version__ = _VERSION

__all__ = [
    "ALiBi",
    "Attention",
    "AttentionOutput",
    "AttnOpsError",
    "AttnShardingRules",
    "BlockSparseConfig",
    "Blocks",
    "Causal",
    "Chunked",
    "ConfigError",
    "Declaration",
    "Dense",
    "FallbackWarning",
    "FlashAttention2Config",
    "Full",
    "InputError",
    "KVCache",
    "LayerGroup",
    "Lengths",
    "Mask",
    "MaskFunction",
    "MaskWarning",
    "ModelDeclaration",
    "OperationMetadata",
    "OperationRegistry",
    "PagePool",
    "PartitionAxis",
    "Plan",
    "Policy",
    "Positions",
    "Prefix",
    "RaggedBatch",
    "RefusedError",
    "RelativeBias",
    "ScoreFunction",
    "SdpaConfig",
    "SegmentIds",
    "ShardingError",
    "ShardingWarning",
    "SlidingWindow",
    "SoftCap",
    "SplashConfig",
    "VanillaConfig",
    "advise",
    "check_processes",
    "dot_product_attention",
    "mask_from_dict",
    "register_mask_function",
    "register_score_function",
    "shardings_for",
]

_ROOMS = ("authoring", "errors", "masks", "operators", "planning", "registry", "scores", "sharding", "verify")
# Where names come from: imported on first use (PEP 562), so that `attnops --help` doesn't wait for jax.
_FILES = {
    "adapters.jax_nn": ("dot_product_attention",),
    "advising": ("advise",),
    "errors": (
        "AttnOpsError",
        "ConfigError",
        "FallbackWarning",
        "InputError",
        "MaskWarning",
        "RefusedError",
        "ShardingError",
        "ShardingWarning",
    ),
    "masks": (
        "Blocks",
        "Causal",
        "Chunked",
        "Dense",
        "Full",
        "Lengths",
        "Mask",
        "MaskFunction",
        "Positions",
        "Prefix",
        "SegmentIds",
        "SlidingWindow",
        "mask_from_dict",
        "register_mask_function",
    ),
    "operators": ("AttentionOutput",),
    "operators.api.attention": ("Attention",),
    "operators.api.model_shardings": ("shardings_for",),
    "operators.blocksparse": ("BlockSparseConfig",),
    "operators.flash_attention2": ("FlashAttention2Config",),
    "operators.latent": ("LatentAttention",),  # importable here like the others, listed in the manual
    "operators.paged_cache.batch": ("RaggedBatch",),
    "operators.paged_cache.state_batch": ("StateBatch",),  # the same
    "operators.sdpa": ("SdpaConfig",),
    "operators.splash": ("SplashConfig",),
    "operators.vanilla": ("VanillaConfig",),
    "planning": ("Plan", "Policy"),
    "planning.cache.kv_cache": ("KVCache",),
    "planning.cache.layer_groups": ("LayerGroup",),
    "registry": ("OperationMetadata", "OperationRegistry"),
    "registry.declaration": ("Declaration",),
    "registry.model_declaration": ("ModelDeclaration",),
    "scores": (
        "ALiBi",
        "RelativeBias",
        "ScoreFunction",
        "SoftCap",
        "register_score_function",
        # importable here like the others, listed in attnops.scores
        "T5",
        "Buckets",
        "Clip",
        "Distance",
        "Forgetting",
        "PositionTemperature",
        "RelativeBias2D",
        "Score",
        "Temperature",
    ),
    "serving": ("PagePool",),
    "sharding": ("AttnShardingRules", "PartitionAxis"),
    "sharding.processes": ("check_processes",),
}

__getattr__ = lazy_names(__name__, {name: file for file, names in _FILES.items() for name in names}, _ROOMS)


def __dir__() -> list[str]:
    dunder = (name for name in globals() if name.startswith("__"))
    return sorted({*dunder, *__all__, *_ROOMS})
