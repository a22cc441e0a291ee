"""What fields of a KV cache contradict each other. Each check takes a CacheFields and returns the problem in words, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import shown
from ...page_layouts import LAYOUTS
from .layer_groups import groups_problem, reads_problem

__all__ = ["CHECKS", "axis_names"]


_OF_PAGES = ("kind", "kv_heads", "head_dim", "value_dim", "quantised", "pages", "max_tokens", "layout")


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of a declared axis field."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _kind(cache: Any) -> str | None:
    if (cache.kind == "latent") != LAYOUTS[cache.layout].values_in_keys:
        return (
            f"kind={shown(cache.kind)} with layout={shown(cache.layout)}; wanted kind 'latent' without a layout, or 'kv' with "
            "another layout"
        )
    one_key = cache.kv_heads == 1 and cache.value_dim is not None and cache.value_dim <= cache.head_dim
    if cache.kind == "latent" and not one_key:
        return (
            f"kind='latent' with kv_heads={cache.kv_heads}, head_dim={cache.head_dim}, value_dim={cache.value_dim}; wanted one "
            "kv head, head_dim of latent and rotary key together, and value_dim, that of the latent alone"
        )
    return None


def _rope(cache: Any) -> str | None:
    if cache.rope_dtype is None:
        return None
    latent = cache.kind == "latent" or any(group.kind == "latent" for group in cache.groups)
    if cache.quantised is None or not latent:
        return (
            f"rope_dtype={shown(cache.rope_dtype)} with kind={shown(cache.kind)} and "
            f"quantised={shown(cache.quantised)}; wanted kind 'latent' and quantised, beside whose latents rotary keys are stored"
        )
    return None


def _groups(cache: Any) -> str | None:
    return groups_problem(cache.groups, cache.stateless_layers or ())


def _heads(cache: Any) -> str | None:
    if not cache.has_pages:
        given = [name for name in _OF_PAGES if cache.is_set(name) and getattr(cache, name) is not None]
        return "; ".join(
            f"{name}={shown(getattr(cache, name))}, but no layer has pages; leave it out" for name in given
        )
    sizes = {name: getattr(cache, name) for name in ("kv_heads", "head_dim")}
    problems = [
        f"{name}=0: Input should be greater than or equal to 1" if cache.is_set(name) else f"{name} is missing"
        for name in sizes
        if not sizes[name] and any(_needs(name, group, cache.kind) for group in cache.groups)
    ]
    return "; ".join(problems) or None


def _needs(name: str, group: Any, kind: str) -> bool:
    """Whether a group's size is the cache's: it has pages, none of its own, and no kind that implies it."""
    implied = name == "kv_heads" and (group.kind or kind) == "latent"
    return not group.of_states and getattr(group, name) is None and not implied


def _reads(cache: Any) -> str | None:
    return None if cache.reads_layer is None else reads_problem(cache.reads_layer, cache.groups)


def _size(cache: Any) -> str | None:
    if not cache.has_pages:
        return None
    with_pages = [number for number, group in enumerate(cache.groups) if not group.of_states]
    sized = [number for number, group in enumerate(cache.groups) if group.pages is not None]
    if sized and (cache.pages is not None or cache.bytes_per_device is not None):
        other = "bytes_per_device" if cache.pages is None else "pages"
        return f"layers[{sized[0]}].pages and {other} are given; wanted one of them, which sets the size of the cache"
    if sized and len(sized) < len(with_pages):
        without = next(number for number in with_pages if number not in sized)
        return f"layers[{without}] has no pages, but layers[{sized[0]}] has; wanted pages in each, or in none"
    if cache.pages is not None and len(with_pages) > 1:
        return f"pages={cache.pages} for {len(with_pages)} groups of layers; wanted pages in each of them"
    if not sized and (cache.pages is None) == (cache.bytes_per_device is None):
        got = "neither" if cache.pages is None else "both"
        return f"{got} of pages and bytes_per_device is given; wanted one of them, which sets the size of the cache"
    return None


def _dims(cache: Any) -> str | None:
    if not LAYOUTS[cache.layout].same_dim or cache.value_size == cache.head_dim:
        return None
    return (
        f"layout={shown(cache.layout)} with value_dim={cache.value_size} and head_dim={cache.head_dim}; wanted the same "
        "dim, as keys and values alternate, or layout 'split', 'heads' or 'joined'"
    )


def _axes(cache: Any) -> str | None:
    seen: dict[str, str] = {}
    for field in ("pages_axis", "kv_head_axis", "page_sequence_axis"):
        for name in axis_names(getattr(cache, field)):
            if name in seen:
                return f"{field} and {seen[name]} both name {shown(name)}; use each mesh axis once"
            seen[name] = field
    return None


CHECKS: tuple[Callable[[Any], str | None], ...] = (_groups, _heads, _kind, _rope, _reads, _size, _dims, _axes)
