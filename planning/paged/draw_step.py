"""draw_step: draw where a step's tokens and a cache's arrays are on a mesh, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator

from ...drawing import DevicePicture, Transfer
from ...sharding import FittedSpec, MeshAxis
from ...sharding.mesh import AnyMesh, unused_axes
from ..cache.cache_arrays import CacheArray
from ..draw_mesh import device_ids, groups_along, placed, sizes_of
from .paged_problem import PagedProblem

__all__ = ["draw_step"]

_BESIDE = ("cu_q_lens", "kv_lens", "num_seqs")  # small arrays, placed like the page table


def draw_step(problem: PagedProblem, tensors: tuple[FittedSpec, ...], mesh: AnyMesh | None) -> DevicePicture:
    """See PagedPlan.draw."""
    axes = problem.mesh
    named = [(fitted.tensor, fitted) for fitted in tensors]
    named += [(_name(array), array.fitted) for array in problem.cache.arrays if array.name not in _BESIDE]
    sent, repeated = tuple(_sent(problem, axes)), tuple(_repeated(problem, named))
    return DevicePicture(
        problem.describe(), sizes_of(axes), device_ids(axes, mesh), tuple(placed(named, axes)), sent, repeated
    )


def _name(array: CacheArray) -> str:
    return array.label if array.copies == 1 else f"{array.label} of each layer"


def _sent(problem: PagedProblem, axes: tuple[MeshAxis, ...]) -> Iterator[Transfer]:
    along = problem.sequence_axes
    if problem.merges and (groups := groups_along(axes, along)):
        for merge in problem.merges:
            yield Transfer(merge.what, merge.kind, along, groups, f"{merge.what} over parts of the pages are merged")


def _repeated(problem: PagedProblem, named: list[tuple[str, FittedSpec]]) -> Iterator[str]:
    """Lines for repeated heads, and for axes that split nothing."""
    if (times := problem.cache.kv_repeat) > 1:
        yield f"each kv head is stored {times} times, so that devices get whole heads"
    used = {axis for _, fitted in named for index in range(len(fitted.shape)) for axis in fitted.axes(index)}
    for axis in unused_axes(problem.mesh, used):
        yield f"mesh axis {axis.name!r} ({axis.size}) splits nothing: {axis.size} devices do the same work"
