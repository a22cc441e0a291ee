"""EasyDeL: a declared attention as an implementation in EasyDeL's registry of operations. Requires easydel.

Call `register()` once, then set `attn_mechanism="attnops"` in a model's configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError, InputError, a_type, shown
from ..operators.api.attention import Attention
from ..operators.api.attention_keywords import is_operation_name
from .extra import extra
from .front import Declared, attend, declared_attention

with extra("easydel"):
    from easydel.caching import TransformerCacheView
    from easydel.operations import AttentionOutput, OperationImpl, OperationMetadata, OperationRegistry
    from easydel.operations.requirements import CacheType, ExecutionMode, MetadataField, OperationRequirements

__all__ = ["attentions", "register"]

# What both EasyDeL's metadata and a declaration can specify; the declaration wins.
_RUNTIME_FIELDS = ("mesh", "partition_axis", "runtime_dtype", "runtime_softmax_dtype")
# What FlexibleAttentionModule passes to each implementation, for its own kernels, with the defaults.
_OF_KERNELS = {
    "prevent_cse": True, "cum_seqlens_q": None, "cum_seqlens_k": None, "normalize_output": True, "fused_backward": False,
    "compute_dtype": None, "optimized": False, "mask_value": None, "vmem_limit_bytes": None,
}  # fmt: skip
_HINTS = {
    "cum_seqlens_q": "pass segment ids in mask_info", "cum_seqlens_k": "pass segment ids in mask_info",
    "compute_dtype": "set attn_dtype in the configuration", "vmem_limit_bytes": "declare it in attnops' operation_configs",
}  # fmt: skip
_WINDOW = "sliding_window {} isn't applied again: mask_info has it, in positions of the cache"
_CACHED = "causal isn't applied in a step of one query: mask_info hides the keys that aren't in the cache yet"


def register(declared: Declared = "vanilla", *, name: str | None = None, **keywords: Any) -> str:
    """Make `attn_mechanism` of this name run the declared attention; returns the name.

    declared: an operation's name with keywords of an Attention, an Attention without a mesh, a declaration or its path. name:
    "attnops" by default, "attnops:FILE" for a path. EasyDeL's mesh, axes and dtypes apply where the declaration has none.
    Errors: ConfigError for "enabled": false, and for a name that EasyDeL uses.
    """
    attention = declared_attention(declared, keywords)
    if not attention.enabled:
        raise ConfigError('the declaration says "enabled": false; set attn_mechanism="vanilla" instead.')
    if name is None:
        of_file = isinstance(declared, Path) or (isinstance(declared, str) and not is_operation_name(declared))
        name = f"attnops:{declared}" if of_file else "attnops"
    registered = OperationRegistry._registry.get(name) if isinstance(name, str) else None
    if (
        not isinstance(name, str)
        or not name
        or (registered is not None and not issubclass(registered, _Implementation))
    ):
        raise ConfigError(f"name={shown(name)}; wanted one that EasyDeL doesn't use, such as 'attnops'.")
    OperationRegistry._registry.pop(name, None)
    kind = type("DeclaredAttention", (_Implementation,), {"registered": name, "declared": attention, "built": {}})
    OperationRegistry.register(kind)
    return name


def attentions(name: str = "attnops") -> tuple[Attention, ...]:
    """The Attentions that models run under a registered name, one for each mesh, axes and dtypes; they hold the plans."""
    return tuple(OperationRegistry.get(name).built)


class _Implementation(OperationImpl):
    """A declared attention with the call signature of EasyDeL's implementations."""

    registered = ""
    declared: Attention
    built: dict[Attention, Attention]

    def __init__(self, metadata: OperationMetadata) -> None:
        super().__init__(metadata)
        if metadata.operation_configs:
            raise ConfigError(
                "operation_configs of the configuration are for ejkernel's kernels; remove them, and declare attnops' own."
            )
        runtime_fields = {name: getattr(metadata, name) for name in _RUNTIME_FIELDS if not self.declared.states(name)}
        runtime_fields = {name: x for name, x in runtime_fields.items() if x is not None}
        attention = Attention(self.declared.declared(), **runtime_fields)
        self.attention = self.built.setdefault(
            attention, attention
        )  # layers share one attention and its compiled programs

    @classmethod
    def get_impl_name(cls) -> str:
        return cls.registered

    @classmethod
    def get_requirements(cls, mode: ExecutionMode = ExecutionMode.MIXED) -> OperationRequirements:
        """The same as EasyDeL's vanilla: its basic metadata, and its dense cache."""
        return OperationRequirements.create(
            name=cls.registered,
            required_metadata=MetadataField.basic(),
            supported_cache=CacheType.TRANSFORMER | CacheType.HYBRID,
            cache_view_class=TransformerCacheView,
        )

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask_info: Any = None,
        bias: jax.Array | None = None,
        init_bias: Any = None,
        deterministic: bool = True,
        dropout_rng: jax.Array | None = None,
        softmax_aux: jax.Array | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        dropout_prob: float = 0.0,
        causal: bool = False,
        sliding_window: int | tuple[int, int] | None = None,
        cache_view: Any = None,
        cache_metadata: Any = None,
        precision: Any = None,
        policy: Any = None,
        **others: Any,
    ) -> AttentionOutput:
        """Attend, as EasyDeL's vanilla does, to keys that already include those of the cache.

        Shapes: query [batch, q, heads, dim], key and value [batch, kv, kv_heads, dim]; bias [batch, heads, kv_heads or 1, q,
        kv]; softmax_aux [heads], [kv_heads] or [sinks], or the first two with a sinks dimension appended. Windows are inclusive
        distances. Windows and causality count from the first query and the first key. cache_metadata and policy aren't used in
        the computation.
        """
        self._check(cache_view, precision, others)
        if mask_info is None and bias is None and init_bias is not None:
            bias = init_bias()
        heads, kv_heads = query.shape[2], key.shape[2]
        if bias is not None and bias.shape[1] == kv_heads != heads:
            bias = jnp.repeat(bias, heads // kv_heads, axis=1)
        mask, remarks = None, []
        if mask_info is not None:
            mask = mask_info.get_or_compute_attention_mask()
            if mask.ndim == 4 and mask.shape[1] == kv_heads != heads:
                mask = jnp.repeat(mask, heads // kv_heads, axis=1)
            mask = mask[..., : query.shape[1], : key.shape[1]]
            if sliding_window is not None and mask_info.sliding_window_baked_in:
                remarks.append(_WINDOW.format(sliding_window))
                sliding_window = None
        if causal and query.shape[1] == 1:
            causal = False
            remarks.append(_CACHED)
        declared_offset = self.attention.declaration.call.query_offset
        result = attend(
            self.attention,
            query,
            key,
            value,
            layout="bthd",
            mask=mask,
            bias=bias,
            causal=causal,
            sliding_window=sliding_window,
            query_offset=0 if declared_offset is None and (causal or sliding_window is not None) else None,
            softmax_aux=None if softmax_aux is None else _sinks(softmax_aux, heads, kv_heads),
            softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap,
            dropout_prob=dropout_prob,
            dropout_rng=dropout_rng,
            deterministic=deterministic,
            remarks=tuple(remarks),
        )
        return AttentionOutput(attention_weights=None, attention_outputs=result.output)

    forward_native = __call__

    def _check(self, cache_view: Any, precision: Any, others: dict[str, Any]) -> None:
        if cache_view is not None and not isinstance(cache_view, TransformerCacheView):
            raise ConfigError(
                f"cache_view is a {a_type(cache_view)}; wanted a TransformerCacheView: pages require EasyDeL's paged operations."
            )
        if precision not in (None, jax.lax.Precision.DEFAULT):
            raise ConfigError(
                f"precision={precision}; wanted the default: attnops' products keep the full precision of their dtype."
            )
        for name, value in others.items():
            if value is not None and (name not in _OF_KERNELS or value != _OF_KERNELS[name]):
                hint = _HINTS.get(name, "it belongs to other implementations; remove it")
                raise ConfigError(
                    f"{name}={shown(value)} is passed to attnops' implementation, which doesn't support it: {hint}."
                )


def _sinks(sinks: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    """EasyDeL's sinks as [heads, sinks]: a vector as long as the heads or the kv heads holds one per head, any other is for
    all."""
    if sinks.ndim not in (1, 2):
        raise InputError(f"softmax_aux has shape {tuple(sinks.shape)}; wanted one or two dimensions.")
    if sinks.ndim == 1:
        sinks = sinks[:, None] if sinks.shape[0] in (heads, kv_heads) else sinks[None]
    if sinks.shape[0] not in (1, kv_heads, heads):
        raise InputError(
            f"softmax_aux has shape {tuple(sinks.shape)}; wanted 1, {kv_heads} or {heads} in its first dimension."
        )
    return jnp.repeat(sinks, heads // sinks.shape[0], axis=0)
