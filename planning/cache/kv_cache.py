"""KVCache: a declared paged cache of keys and values, whose memory is known before it is created."""

from __future__ import annotations

from typing import Literal

from ...sharding.mesh import AnyMesh
from .cache_fields import CacheFields, QuantisedPages
from .cache_plan import CachePlan
from .layer_groups import LayerGroup, layer_groups

__all__ = ["KVCache", "LayerGroup", "QuantisedPages", "layer_groups"]


class KVCache(CacheFields):
    """A paged KV cache: frozen, hashable, with exact JSON round trips. It distinguishes fields that were given from omitted
    ones."""

    def plan(
        self,
        mesh: AnyMesh | None = None,
        *,
        kv_heads: Literal["replicate", "error"] = "replicate",
        device_kind: str | None = None,
    ) -> CachePlan:
        """Plan what each device holds, how many tokens fit, where every array is, and reasons against it. Allocates nothing.

        kv_heads: if the mesh splits heads further than there are kv heads, 'replicate' stores each several times, and 'error'
        refuses. device_kind: jax's name for a device, such as 'TPU v5 lite', or a platform; default: that of the mesh's devices,
        else of jax's default device. Errors: ConfigError for an invalid cache or policy.
        """
        from .fit_cache import fit_cache

        return fit_cache(self.checked(), mesh, kv_heads, device_kind)
