"""What `jax.vmap` hides from a call: mapped rows, over which a mesh axis of the batch could be split but isn't.

A mapped call sees one row, so the mesh axes of its batch split nothing, and XLA gathers the rows at the call's shard_map. Whether
a call is mapped isn't known while it is traced (a jitted function may be mapped later), so the query goes through a primitive
that changes nothing and counts the rows when jax.vmap reaches it. It warns when the program is lowered, because by then every
jax.vmap around it has been seen.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...errors import ShardingError, ShardingWarning
from ...planning import Plan
from ...planning.notes import note
from ...planning.problem import AttentionProblem
from ...sharding import MeshAxis, axes_at
from ..choices.bounded_cache import BoundedCache

__all__ = ["Mapped", "explain_mapped_rows", "mapped_note", "unsplit_batch_axes", "watch_mapped"]

_warned: BoundedCache[bool] = BoundedCache(1024)


class Mapped(NamedTuple):
    """A jax.vmap around a call: how many rows it maps, and the mesh axes over which it splits them."""

    rows: int
    axes: tuple[str, ...]


def unsplit_batch_axes(plan: Plan) -> tuple[MeshAxis, ...]:
    problem = plan.problem
    declared = problem.rules.query
    if "b" not in problem.layout or declared is None:
        return ()
    batch = axes_at(declared, problem.layout.index("b"))
    working = set(plan.placement.axes)
    return tuple(axis for axis in problem.mesh if axis.name in batch and axis.name not in working and axis.splits)


def watch_mapped(query: Any, name: str, axes: tuple[MeshAxis, ...]) -> tuple[Any, tuple[Mapped, ...]]:
    """The same query, which warns if rows mapped by jax.vmap aren't split over `axes`; and what is already known to be mapped."""
    before: list[Mapped] | None = getattr(_listening, "mapped", None)
    mapped: list[Mapped] = []
    _listening.mapped = mapped
    try:
        watched = _watched.bind(query, name=name, axes=axes, mapped=())
    finally:
        _listening.mapped = before
    return watched, tuple(mapped)


def mapped_note(problem: AttentionProblem, axes: tuple[MeshAxis, ...], mapped: Sequence[Mapped]) -> str:
    """What a plan says of the mapped calls around it; '' if it isn't mapped."""
    if not mapped:
        return ""
    rows = " x ".join(str(axis.rows) for axis in mapped)
    unsplit = _unsplit(axes, mapped)
    consequence = f"; {_problem_of(unsplit)}. {_hint(unsplit)}" if unsplit else ""
    return note("mesh.mapped", rows=rows, batch=problem.batch, consequence=consequence)


def explain_mapped_rows(name: str, error: ValueError) -> None:
    """Raise a ShardingError if jax refused a call because of mapped rows that an Explicit mesh axis splits.

    jax.vmap takes such an axis from the mesh, and jax.shard_map can't name it then. Without it a kernel would be partitioned
    automatically, which Mosaic doesn't support. jax says only this.
    """
    if "to be a subset of mesh.axis_names" in str(error):
        raise ShardingError(
            f"{name}: jax.vmap maps rows that are split over an Explicit axis of the call's mesh; wanted rows that aren't split, "
            "or a mesh with Auto axes and spmd_axis_name. Hint: pass the rows as the call's batch, which is split as declared."
        ) from error


def _unsplit(axes: Sequence[MeshAxis], mapped: Sequence[Mapped]) -> tuple[MeshAxis, ...]:
    splitting = {name for mapped_axis in mapped for name in mapped_axis.axes}
    return tuple(axis for axis in axes if axis.name not in splitting)


def _problem_of(axes: Sequence[MeshAxis]) -> str:
    names = ", ".join(f"{axis.name!r} ({axis.size})" for axis in axes)
    devices = math.prod(axis.size for axis in axes)
    return f"mesh axis {names} doesn't split them: XLA gathers the rows, and {devices} devices do the same work"


def _hint(axes: Sequence[MeshAxis]) -> str:
    value = repr(axes[0].name) if len(axes) == 1 else repr(tuple(axis.name for axis in axes))
    return f"Declare jax.vmap(..., spmd_axis_name={value}), or pass the rows as the call's batch"


# -- the primitive ---------------------------------------------------------------------------------------------------------

_watched = Primitive("watch_mapped")
# The call that binds the primitive now; the rule of a jax.vmap directly around it runs at once.
_listening = threading.local()


def _check(name: str, axes: tuple[MeshAxis, ...], mapped: tuple[Mapped, ...]) -> None:
    unsplit = _unsplit(axes, mapped)
    if not mapped or not unsplit or _warned.find((name, unsplit)) is not None:
        return
    rows = " x ".join(str(axis.rows) for axis in mapped)
    warnings.warn(
        f"{name}: jax.vmap maps {rows} calls, and {_problem_of(unsplit)}.\n{_hint(unsplit)}.",
        ShardingWarning,
        stacklevel=2,
    )
    _warned.put((name, unsplit), True)


def _mapped(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, name: str, axes: Any, mapped: Any) -> Any:
    (query,), (dim,) = operands, dims
    if dim is None:
        return _watched.bind(query, name=name, axes=axes, mapped=mapped), None
    added = Mapped(axis_data.size, tuple(axis_data.spmd_name or ()))
    listener = getattr(_listening, "mapped", None)
    if listener is not None:
        listener.append(added)
    return _watched.bind(query, name=name, axes=axes, mapped=(*mapped, added)), dim


def _run(query: jax.Array, *, name: str, axes: tuple[MeshAxis, ...], mapped: tuple[Mapped, ...]) -> jax.Array:
    _check(name, axes, mapped)
    return query


def _lower(context: Any, query: Any, *, name: str, axes: Any, mapped: Any) -> list[Any]:
    _check(name, axes, mapped)
    return [query]


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
    return _watched.bind(*primals, **parameters), tangents[0]


_watched.def_impl(_run)
_watched.def_abstract_eval(lambda query, **_: query)
batching.fancy_primitive_batchers[_watched] = _mapped
ad.primitive_jvps[_watched] = _differentiate
mlir.register_lowering(_watched, _lower)
