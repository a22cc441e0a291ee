"""attnops: declare an attention operation once, see what will run, where and why, and run it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .distribution import VERSION as _VERSION

if TYPE_CHECKING:
    from .adapters.jax_nn import dot_product_attention
    from .advising import Advice, advise
    from .errors import (
        AttnOpsError,
        ConfigError,
        ConfigWarning,
        FallbackWarning,
        InputError,
        InputTypeError,
        MaskError,
        MaskWarning,
        ProcessError,
        RefusedError,
        ShardingError,
        ShardingWarning,
        UnknownNameError,
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
        window_tokens,
    )
    from .operators import AttentionOutput, LocalCall, LocalOutput, Operation
    from .operators.attention import Attention
    from .operators.blocksparse import BlockSparseConfig
    from .operators.flash_attention2 import FlashAttention2Config
    from .operators.model_shardings import ModelShardings, shardings_for
    from .operators.sdpa import SdpaConfig
    from .operators.splash import SplashConfig
    from .operators.vanilla import VanillaConfig
    from .planning import AttentionProblem, OperationConfig, Plan, Policy, Reason, Rule, implementation, plan
    from .planning.cache.kv_cache import KVCache
    from .planning.cache.layer_groups import LayerGroup
    from .registry import OperationMetadata, OperationRegistry
    from .registry.declaration import Declaration
    from .registry.model_declaration import LayerDeclaration, ModelDeclaration
    from .sharding import AttnShardingRules, PartitionAxis, fit
    from .sharding.processes import check_processes

__version__ = _VERSION

__all__ = [
    "Advice",
    "Attention",
    "AttentionOutput",
    "AttentionProblem",
    "AttnOpsError",
    "AttnShardingRules",
    "BlockSparseConfig",
    "Blocks",
    "Causal",
    "Chunked",
    "ConfigError",
    "ConfigWarning",
    "Declaration",
    "Dense",
    "FallbackWarning",
    "FlashAttention2Config",
    "Full",
    "InputError",
    "InputTypeError",
    "KVCache",
    "LayerDeclaration",
    "LayerGroup",
    "Lengths",
    "LocalCall",
    "LocalOutput",
    "Mask",
    "MaskError",
    "MaskFunction",
    "MaskWarning",
    "ModelDeclaration",
    "ModelShardings",
    "Operation",
    "OperationConfig",
    "OperationMetadata",
    "OperationRegistry",
    "PartitionAxis",
    "Plan",
    "Policy",
    "Positions",
    "Prefix",
    "ProcessError",
    "Reason",
    "RefusedError",
    "Rule",
    "SdpaConfig",
    "SegmentIds",
    "ShardingError",
    "ShardingWarning",
    "SlidingWindow",
    "SplashConfig",
    "UnknownNameError",
    "VanillaConfig",
    "advise",
    "check_processes",
    "dot_product_attention",
    "fit",
    "implementation",
    "mask_from_dict",
    "plan",
    "register_mask_function",
    "shardings_for",
    "window_tokens",
]

_ROOMS = ("errors", "masks", "operators", "planning", "registry", "sharding", "verify")
# Names that their subpackage's __init__.py doesn't export, and the file that has them. They are imported on first use.
_FILES = {
    "Advice": "advising",
    "advise": "advising",
    "Attention": "operators.attention",
    "BlockSparseConfig": "operators.blocksparse",
    "Declaration": "registry.declaration",
    "FlashAttention2Config": "operators.flash_attention2",
    "KVCache": "planning.cache.kv_cache",
    "LayerDeclaration": "registry.model_declaration",
    "LayerGroup": "planning.cache.layer_groups",
    "ModelDeclaration": "registry.model_declaration",
    "ModelShardings": "operators.model_shardings",
    "SdpaConfig": "operators.sdpa",
    "SplashConfig": "operators.splash",
    "VanillaConfig": "operators.vanilla",
    "check_processes": "sharding.processes",
    "dot_product_attention": "adapters.jax_nn",
    "shardings_for": "operators.model_shardings",
}


def __getattr__(name: str) -> Any:
    # On first use (PEP 562), so that `attnops --help` doesn't wait for jax.
    if name in _ROOMS:
        return importlib.import_module(f"attnops.{name}")
    if name in _FILES:
        return globals().setdefault(name, getattr(importlib.import_module(f"attnops.{_FILES[name]}"), name))
    for room in _ROOMS if name in __all__ else ():
        module = importlib.import_module(f"attnops.{room}")
        if name in module.__all__:
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'attnops' has no attribute {name!r}")


def __dir__() -> list[str]:
    dunder = (name for name in globals() if name.startswith("__"))
    return sorted({*dunder, *__all__, *_ROOMS})
