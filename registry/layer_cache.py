"""What a layer keeps of one sequence: keys and values, latents and keys of an indexer, a state, the end of a convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..masks.page_mask import page_mask
from ..planning.cache.kept_states import KeptState
from ..planning.recurrent.operands import OPERATIONS
from .declaration import Declaration
from .layer_calls import without_spans

__all__ = ["bytes_of", "kept_keys", "kept_state", "state_fields", "window_tokens"]

Shapes = dict[str, jax.ShapeDtypeStruct]


def window_tokens(declaration: Declaration) -> int | None:
    """How many keys a query of this attention sees at most, its own included, by a window or a chunk; None: all of them."""
    mask = declaration.call.mask
    over_pages = None if mask is None else page_mask(without_spans(mask))
    left = None if over_pages is None else over_pages.most_left
    return None if left is None else left + 1


def kept_keys(
    declaration: Declaration,
    latent: Declaration | None,
    indexer: Mapping[str, int],
    tokens: int,
    *,
    whole: bool = False,
) -> Shapes:
    """The arrays that attention keeps of a sequence of so many tokens; none if it isn't causal. whole: as if each query saw all
    keys, without an indexer."""
    if declaration.metadata.get("causal") is False:
        return {}
    window, dtype = window_tokens(declaration), _dtype(declaration)
    kept = tokens if window is None or whole else min(tokens, window)

    def of(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((kept, *sizes), dtype)

    if latent is not None and latent.latent is not None:
        shapes = {"latent": of(latent.latent.latent_dim), "rotary_key": of(latent.latent.rope_dim)}
    else:
        call = declaration.call
        heads, dim = call.kv_heads or call.q_heads or 0, call.head_dim or 0
        shapes = {"key": of(heads, dim), "value": of(heads, call.value_dim or dim)}
    return shapes | ({"index_key": of(indexer["head_dim"])} if indexer and not whole else {})


def kept_state(recurrence: Declaration | None, convolution: Declaration | None) -> Shapes:
    """The state and the last tokens before the convolution that a layer keeps of a sequence, whatever its length."""
    shapes = {}
    for name, declaration in (("state", recurrence), ("convolution", convolution)):
        if declaration is not None:
            call: dict[str, Any] = declaration.call.model_dump(mode="json", by_alias=True)
            call |= {"batch": 1, "q_len": 1, "operands": {"initial_state": True}}
            one = Declaration.from_dict({**declaration.to_dict(), "call": call}).shapes()["initial_state"]
            configs = declaration.metadata.get("operation_configs") or {}
            dtype = configs.get(declaration.operation, {}).get("state_dtype")
            default = jnp.dtype(jnp.float32) if name == "state" else _dtype(declaration)
            shapes[name] = jax.ShapeDtypeStruct(one.shape[1:], default if dtype is None else jnp.dtype(dtype))
    return shapes


def state_fields(recurrence: Declaration | None, convolution: Declaration | None) -> tuple[KeptState, ...]:
    """The same arrays as a group of layers in a KVCache declares them: by operation and sizes."""
    states = []
    for name, shape in kept_state(recurrence, convolution).items():
        declaration = recurrence if name == "state" else convolution
        assert declaration is not None
        dims = OPERATIONS[declaration.operation]["initial_state"].dims[1:]
        pairs = zip(dims, shape.shape, strict=True)
        sizes = {"width" if dim == "history" else dim: size + (dim == "history") for dim, size in pairs}
        own = {"dtype": shape.dtype.name} if name == "state" and shape.dtype != jnp.float32 else {}
        states.append(KeptState.model_validate({"operation": declaration.operation, "sizes": sizes} | own))
    return tuple(states)


def bytes_of(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """The bytes of these arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes.values())


def _dtype(declaration: Declaration) -> Any:
    return jnp.dtype(declaration.call.dtype or declaration.metadata.get("runtime_dtype") or "float32")
