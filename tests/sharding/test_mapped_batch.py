"""jax.vmap around a call on a mesh: what is hidden from the plan is told, and spmd_axis_name ends the gathering."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnops import Attention, ShardingError, ShardingWarning
from attnops.operators.call import mapped_batch
from attnops.sharding import MeshAxis
from attnops.verify.reference import reference_attention

X = np.random.default_rng(0).normal(size=(8, 16, 4, 8)).astype(np.float32)
WANT = reference_attention(X, X, X, scale=8**-0.5, mask=np.tri(16, dtype=bool)).output
ROUTES: list[Any] = [("vanilla", {}), ("splash", {"interpret": True})]
NESTED: dict[str, Callable[[Any], Any]] = {"direct": lambda f: f, "jitted": jax.jit, "remat": jax.checkpoint}


@pytest.fixture(autouse=True)
def _each_test_warns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_batch, "_warned", type(mapped_batch._warned)(16))


def _mesh(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    axes = axes or {"fsdp": 4, "tp": 2}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def _gathers(function: Any, mesh: Mesh) -> int:
    """How many all-gathers the compiled program has for rows that come split over fsdp."""
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("fsdp")))
    return len(re.findall(r" all-gather(?:-start)?\(", jax.jit(function).lower(x).compile().as_text()))


def _row(attend: Attention, plans: list[Any] | None = None) -> Callable[[Any], Any]:
    def row(x: Any) -> Any:
        found = attend(x[None], x[None], x[None])
        if plans is not None:
            plans.extend((found.plan, attend.plan(x[None], x[None], x[None])))
        return found.attention_outputs[0]

    return row


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize(("operation", "config"), ROUTES)
def test_only_spmd_axis_name_keeps_mapped_rows_where_they_are(
    operation: str, config: dict[str, Any], nested: str, gradient: bool
) -> None:
    mesh = _mesh()
    row = NESTED[nested](_row(Attention(operation, causal=True, mesh=mesh, **config)))

    def mapped(axis: str | None) -> Any:
        called = jax.vmap(row, spmd_axis_name=axis)
        return jax.grad(lambda x: (called(x) ** 2).sum()) if gradient else called

    with pytest.warns(ShardingWarning, match=r"spmd_axis_name='fsdp'"):
        assert _gathers(mapped(None), mesh) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _gathers(mapped("fsdp"), mesh) == 0
    if not gradient:
        want = WANT
        np.testing.assert_allclose(jax.jit(mapped("fsdp"))(X), want, atol=2e-6)


def test_a_plan_says_what_is_mapped_and_which_axis_would_split_it() -> None:
    plans: list[Any] = []
    row = _row(Attention("vanilla", causal=True, mesh=_mesh()), plans)
    with pytest.warns(ShardingWarning):
        jax.vmap(row)(X)
    jax.vmap(row, spmd_axis_name="fsdp")(X)
    notes = [[note for note in plan.notes if note.startswith("jax.vmap")] for plan in plans]
    assert all(len(found) == 1 and "8 calls" in found[0] for found in notes)
    assert ["spmd_axis_name='fsdp'" in found[0] for found in notes] == [True, True, False, False]


def test_nested_maps_count_together() -> None:
    """On the watch alone: jax 0.12 can't lower a shard_map with check_vma in two jax.vmaps of which one has an spmd_axis_name."""

    def row(x: Any) -> Any:
        return mapped_batch.watch_mapped(x, "vanilla", (MeshAxis("fsdp", 4),))[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jax.vmap(jax.vmap(row), spmd_axis_name="fsdp"))(X)
        jax.jit(jax.vmap(jax.vmap(row, spmd_axis_name="fsdp")))(X)
    with pytest.warns(ShardingWarning, match="maps 16 x 8 calls"):
        jax.jit(jax.vmap(jax.vmap(row)))(X)


def test_the_warning_comes_once_for_an_operation_and_its_axes() -> None:
    row = _row(Attention("vanilla", causal=True, mesh=_mesh()))
    with pytest.warns(ShardingWarning):
        jax.jit(jax.vmap(row))(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jax.vmap(row))(X[:4])


@pytest.mark.parametrize("batch", [4, 8])
def test_a_call_whose_own_batch_is_split_is_silent(batch: int) -> None:
    attend = Attention("vanilla", causal=True, mesh=_mesh())
    x = jnp.ones((3, batch, 16, 4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plans: list[Any] = []
        jax.vmap(lambda x: plans.append((found := attend(x, x, x)).plan) or found.attention_outputs)(x)
        attend(x[0, :1], x[0, :1], x[0, :1])  # one row, which nothing maps
    assert not [note for note in plans[0].notes if note.startswith("jax.vmap")]


def test_without_a_mesh_or_with_one_row_axis_nothing_is_watched() -> None:
    for attend in (Attention("vanilla", causal=True), Attention("vanilla", causal=True, mesh=_mesh(tp=2))):
        text = jax.make_jaxpr(jax.vmap(_row(attend)))(X).pretty_print()
        assert "watch_mapped" not in text
    assert "watch_mapped" in jax.make_jaxpr(_row(Attention("vanilla", causal=True, mesh=_mesh())))(X[0]).pretty_print()


@pytest.mark.parametrize("nested", ["direct", "jitted"])
@pytest.mark.parametrize(("operation", "config"), ROUTES)
def test_rows_split_over_an_explicit_axis_are_refused(operation: str, config: dict[str, Any], nested: str) -> None:
    mesh = _mesh(AxisType.Explicit)
    row = NESTED[nested](_row(Attention(operation, causal=True, mesh=mesh, **config)))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("fsdp")))
    with jax.set_mesh(mesh), pytest.raises(ShardingError, match=r"Explicit axis.*the call's batch"):
        jax.jit(jax.vmap(row))(x)
    with jax.set_mesh(mesh), pytest.warns(ShardingWarning):
        whole = jax.jit(jax.vmap(row))(jax.device_put(X, NamedSharding(mesh, PartitionSpec())))
    np.testing.assert_allclose(whole, WANT, atol=2e-6)
