"""KVCache: a paged cache of keys and values, declared like an operand; what it takes is known before it is made."""

from __future__ import annotations

from typing import Literal

from ...sharding.mesh import AnyMesh
from .cache_fields import CacheFields, QuantisedPages
from .cache_plan import CachePlan
from .fit_cache import fit_cache
from .layer_groups import LayerGroup, layer_groups

__all__ = ["KVCache", "LayerGroup", "QuantisedPages", "layer_groups"]


class KVCache(CacheFields):
    """A KV cache in pages: frozen, hashable, exact in JSON both ways. What is given and what is left out are kept apart."""

    def plan(
        self,
        mesh: AnyMesh | None = None,
        *,
        kv_heads: Literal["replicate", "error"] = "replicate",
        device_kind: str | None = None,
    ) -> CachePlan:
        """What each device holds, how many tokens fit, where every array lives, and what is against it. Allocates nothing.

        `kv_heads`: where the mesh splits heads further than there are kv heads, 'replicate' stores each several times, 'error'
        refuses. `device_kind` is jax's name of a device, such as 'TPU v5 lite', or a platform; by default that of the mesh's
        devices, else of jax's default device. Errors: ConfigError for a cache or a policy without meaning.
        """
        return fit_cache(self.checked(), mesh, kv_heads, device_kind)
