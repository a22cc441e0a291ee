"""attnops: declare an attention operation once, see what will run, where and why, and run it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .distribution import VERSION as _VERSION

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
    from .operators.vanilla.operation import VanillaConfig
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
# Names that their subpackage's __init__.py doesn't export, and the file that has them. They are imported on first use.
_FILES = {
    "advise": "advising",
    "Attention": "operators.api.attention",
    "BlockSparseConfig": "operators.blocksparse",
    "Declaration": "registry.declaration",
    "FlashAttention2Config": "operators.flash_attention2",
    "KVCache": "planning.cache.kv_cache",
    "LayerGroup": "planning.cache.layer_groups",
    "ModelDeclaration": "registry.model_declaration",
    "PagePool": "serving",
    "RaggedBatch": "operators.paged_cache.batch",
    "SdpaConfig": "operators.sdpa",
    "SplashConfig": "operators.splash",
    "VanillaConfig": "operators.vanilla",
    "check_processes": "sharding.processes",
    # Importable here like those above, listed in the manual.
    "LatentAttention": "operators.latent",
    "StateBatch": "operators.paged_cache.state_batch",
    # The other scores: importable here like those above, listed in attnops.scores.
    **dict.fromkeys(
        (
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
        "scores",
    ),
    "dot_product_attention": "adapters.jax_nn",
    "shardings_for": "operators.api.model_shardings",
}


def __getattr__(name: str) -> Any:
    # On first use (PEP 562), so that `attnops --help` doesn't wait for jax.
    if name in _ROOMS:
        return importlib.import_module(f"attnops.{name}")
    if name in _FILES:
        return globals().setdefault(name, getattr(importlib.import_module(f"attnops.{_FILES[name]}"), name))
    for room in _ROOMS[1:] if name in __all__ else ():  # authoring exports nothing of its own
        module = importlib.import_module(f"attnops.{room}")
        if name in module.__all__:
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'attnops' has no attribute {name!r}")


def __dir__() -> list[str]:
    dunder = (name for name in globals() if name.startswith("__"))
    return sorted({*dunder, *__all__, *_ROOMS})
