"""LayerPages and LayerStates: the arrays of one layer of a cache, and how rows of either are changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Float, Num

from ...errors import InputError, shown
from ...planning.cache.cache_plan import CachePlan
from ...planning.cache.state_plan import StatePlan
from ...pytree_export import exported, exported_tuple

__all__ = ["LayerArrays", "LayerPages", "LayerStates", "changed_rows", "planned_layer", "row_count"]


@exported_tuple
class LayerPages(NamedTuple):
    """One layer's pages, in the cache's layout; the shapes here are those of layout split. If a layout joins keys and
    values, `key` has both and `value` is None. Scales are None, [] (per tensor), [kv_heads], or [pages, page, kv_heads].
    rope: the rotary keys beside quantised latents, which aren't quantised; `key` has the latents alone then.
    """

    key: Num[Array, "pages page kv_heads head_dim"]
    value: Num[Array, "pages page kv_heads value_dim"] | None
    key_scale: Float[Array, ...] | None = None
    value_scale: Float[Array, ...] | None = None
    rope: Float[Array, "pages kv_heads page rope_dim"] | None = None


@exported()
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStates:
    """One layer's states: each declared array by its name, [slots, *shape of one sequence's]. `states["state"]` is one."""

    arrays: Mapping[str, Num[Array, "slots ..."]]

    def __getitem__(self, name: str) -> Num[Array, "slots ..."]:
        return self.arrays[name]

    def replace(self, **arrays: Any) -> LayerStates:
        """The states with other arrays of these names. Errors: InputError for a name or a shape that the layer doesn't have."""
        for name, array in arrays.items():
            if name not in self.arrays:
                raise InputError(f"states have no array {shown(name)}; wanted {', '.join(self.arrays)}.")
            if array.shape != self.arrays[name].shape or array.dtype != self.arrays[name].dtype:
                raise InputError(
                    f"{name} is {array.dtype}{list(array.shape)}; wanted {self.arrays[name].dtype}"
                    f"{list(self.arrays[name].shape)}, as the cache has it."
                )
        return LayerStates({**self.arrays, **arrays})


LayerArrays = LayerPages | LayerStates
_Layer = TypeVar("_Layer", LayerPages, LayerStates, LayerArrays)


def changed_rows(change: Callable[..., Any], layer: _Layer, *others: _Layer) -> _Layer:
    """`change(array, *arrays of the others)` of every array whose first dimension counts pages or slots. Scales that are fixed
    for the whole cache stay as they are."""
    least = 3 if isinstance(layer, LayerPages) else 1

    def one(array: Any, *more: Any) -> Any:
        return change(array, *more) if array.ndim >= least else array

    changed: _Layer = jax.tree.map(one, layer, *others)
    return changed


def row_count(layer: LayerArrays) -> int:
    """The pages or slots of a layer's arrays."""
    first = layer.key if isinstance(layer, LayerPages) else next(iter(layer.arrays.values()))
    return int(first.shape[0])


def planned_layer(plan: CachePlan | StatePlan, of: Callable[[str], Any]) -> LayerArrays:
    """`of(name)` for each array of a layer of one group."""
    return _PLANNED[plan.keeps](plan, of)


def _pages(plan: Any, of: Callable[[str], Any]) -> LayerArrays:
    return LayerPages(*map(of, (plan.pages_array.name, "value_pages", "key_scale", "value_scale", "rope_pages")))


def _states(plan: Any, of: Callable[[str], Any]) -> LayerArrays:
    return LayerStates({name: of(name) for name in plan.states})


_PLANNED = {"pages": _pages, "states": _states}
