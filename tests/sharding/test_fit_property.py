"""fit against jax itself: on random specs, shapes and meshes of the eight CPU devices."""

from __future__ import annotations

import math

import jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops.sharding import LAYOUTS, AttnShardingRules, TensorShape, fit

NAMES = ("a", "b", "c", "d")
RANKS = {"query3d": 3, "bias": 4, "mask": 4}
SIZES = [
    (8,), (4,), (1,), (2, 4), (4, 2), (2, 2), (1, 8), (3, 2), (7, 1), (2, 2, 2), (4, 1, 2), (1, 1, 5), (2, 1, 2, 2),
]  # fmt: skip


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(SIZES))
    tensor = draw(st.sampled_from(AttnShardingRules._fields))
    layout = draw(st.sampled_from(LAYOUTS))
    if tensor == "softmax_aux":
        rank = draw(st.sampled_from([1, 2]))
    elif tensor.endswith("segment_ids"):
        rank = 1 if layout == "thd" else 2
    else:
        rank = RANKS.get(tensor, len(layout))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 40]), min_size=rank, max_size=rank)))
    # One name more than the mesh can have: an axis that it doesn't know.
    names = st.sampled_from((*NAMES[: len(sizes)], "unknown"))
    entry = st.one_of(st.none(), names, st.lists(names, max_size=3).map(tuple))
    entries = draw(st.lists(entry, max_size=rank))
    return sizes, tensor, layout, shape, entries


def _wanted(entries, rank):
    """The axis names of each dimension, in order."""
    entries = [*entries, *[None] * (rank - len(entries))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _by_hand(wanted, shape, sizes):
    """Axis by axis: kept where the mesh has it, it is larger than 1, still free, and divides what is left."""
    kept, used = [], set()
    for names, left in zip(wanted, shape, strict=True):
        mine = []
        for name in names:
            if name in sizes and sizes[name] > 1 and name not in used and left % sizes[name] == 0:
                mine.append(name)
                used.add(name)
                left //= sizes[name]
        kept.append(tuple(mine))
    return kept


class _Entries(tuple):
    """Stands for a PartitionSpec that jax would refuse to build (an axis twice, say)."""


def _spec(entries):
    try:
        return P(*entries)
    except ValueError:  # newer versions of jax refuse an axis twice when the spec is made
        return _Entries(entries)


@settings(max_examples=300)
@given(cases())
def test_the_fitted_spec_is_what_jax_takes(case):
    sizes, tensor, layout, shape, entries = case
    names = NAMES[: len(sizes)]
    axis_sizes = dict(zip(names, sizes, strict=True))
    declared = _spec(entries)
    rules = AttnShardingRules(*[P()] * 10)._replace(**{tensor: declared})
    fitted = fit(rules, {tensor: TensorShape(shape, 2)}, axis_sizes, layout=layout)[tensor]

    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    assert NamedSharding(mesh, fitted.spec).shard_shape(shape) == fitted.local_shape
    assert fitted.local_bytes == 2 * math.prod(fitted.local_shape)
    assert fit(rules, {tensor: TensorShape(shape, 2)}, mesh, layout=layout)[tensor] == fitted

    kept = [fitted.axes(i) for i in range(len(shape))]
    flat = [name for names in kept for name in names]
    assert len(set(flat)) == len(flat)
    for length, local, names_here in zip(shape, fitted.local_shape, kept, strict=True):
        assert length == local * math.prod(axis_sizes[name] for name in names_here)

    wanted = _wanted(entries, len(shape))
    assert kept == _by_hand(wanted, shape, axis_sizes)
    for index, names_here in enumerate(wanted):
        dropped = [d.axis for d in fitted.dropped if d.index == index]
        assert sorted(dropped + list(kept[index])) == sorted(names_here)  # nothing is lost without a word
    for drop in fitted.dropped:
        if drop.axis not in axis_sizes:
            assert "no axis" in drop.reason
        elif axis_sizes[drop.axis] == 1:
            assert "size 1" in drop.reason
            assert drop.harmless
        elif "already" in drop.reason:
            assert flat.count(drop.axis) == 1
        else:
            assert "not divisible" in drop.reason
            assert drop.harmless == (shape[drop.index] == 1)


@settings(max_examples=150)
@given(cases())
def test_a_spec_that_jax_takes_loses_nothing(case):
    sizes, tensor, layout, shape, entries = case
    names = NAMES[: len(sizes)]
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    try:
        declared = P(*entries)
        local = NamedSharding(mesh, declared).shard_shape(shape)
    except Exception:  # jax refuses an unknown axis, one used twice, one that doesn't divide: which is not the point
        return
    rules = AttnShardingRules(*[P()] * 10)._replace(**{tensor: declared})
    fitted = fit(rules, {tensor: shape}, mesh, layout=layout, strict=True)[tensor]
    assert fitted.local_shape == local
    assert all("size 1" in drop.reason for drop in fitted.dropped)
