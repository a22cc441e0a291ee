"""What a declaration asks a mesh to split is split, refused or warned of: never dropped in silence."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops import OperationMetadata, OperationRegistry, RefusedError, ShardingWarning
from attnops.operators.call import base
from attnops.operators.choices.bounded_cache import BoundedCache

DECLARED = (
    ("vanilla", {"sequence_parallel": "ring"}),
    ("vanilla", {"sequence_parallel": "ulysses"}),
    ("splash", {"sequence_parallel": "ring", "fallback": "allow"}),
    ("ring", {}),
    ("ulysses", {"fallback": "error"}),
)


def mesh(**sizes: int) -> jax.sharding.Mesh:
    count = int(np.prod(tuple(sizes.values())))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=jax.devices()[:count])


def create(name: str, **metadata: Any) -> Any:
    return OperationRegistry.create(name, OperationMetadata(**metadata))


def tokens(batch: int, length: int) -> jax.Array:
    return jnp.ones((batch, length, 4, 8))


@pytest.mark.parametrize(("name", "metadata"), DECLARED)
def test_a_declared_strategy_is_refused_if_the_queries_do_not_divide(name: str, metadata: dict[str, Any]) -> None:
    attend, x = create(name, mesh=mesh(sp=4), **metadata), tokens(1, 66)
    plan = attend.plan(x, x, x)
    assert plan.kind == "refused"
    codes = {reason.code for one in plan.rejected for reason in one.reasons}
    assert f"{metadata.get('sequence_parallel', name)}.q_len" in codes
    with pytest.raises(RefusedError, match=r"66 is not divisible by sp=4.*Pad the queries and keys to a multiple of 4"):
        attend(x, x, x)
    even = tokens(1, 64)
    assert attend.plan(even, even, even).placement.sequence.axes == ("sp",)


def test_a_strategy_over_two_axes_names_what_both_need() -> None:
    axes = {"query_sequence_axis": ("ring", "sp"), "key_sequence_axis": ("ring", "sp")}
    attend = create("vanilla", mesh={"ring": 2, "sp": 4}, sequence_parallel="ulysses_ring", partition_axis=axes)
    x = tokens(1, 68)
    (reason,) = [r for one in attend.plan(x, x, x).rejected for r in one.reasons if r.code == "ulysses_ring.q_len"]
    assert "over sp: 68 (each shard 34) is not divisible by sp=4" in reason.message
    assert "a multiple of 8" in reason.hint


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_one_query_and_a_mesh_without_the_axis_need_no_split(strategy: str) -> None:
    one, cache = tokens(2, 1), tokens(2, 64)
    assert create("vanilla", mesh=mesh(sp=4), sequence_parallel=strategy).plan(one, cache, cache).kind == "native"
    x = tokens(2, 66)
    assert create("vanilla", mesh=mesh(fsdp=2), sequence_parallel=strategy).plan(x, x, x).kind == "native"


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_warned_calls", BoundedCache(8))


def warned(attend: Any, *arrays: jax.Array, **call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(*arrays, **call)
        attend(*arrays, **call)
    assert all(w.category is ShardingWarning for w in caught)
    return [str(w.message) for w in caught]


def test_a_length_that_does_not_divide_warns_once() -> None:
    x = tokens(2, 66)
    (text,) = warned(create("vanilla", mesh=mesh(sp=4)), x, x, x)
    assert "mesh axis 'sp' (4) splits nothing: 4 devices do the same work" in text
    assert "q_len of query: 66 is not divisible by sp=4" in text
    assert "strict=True" in text
    other = tokens(2, 70)
    assert not warned(create("vanilla", mesh=mesh(sp=4)), other, other, other)  # once for all lengths
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ShardingWarning):
            create("splash", mesh=mesh(sp=4))(x, x, x)


@pytest.mark.parametrize(
    ("axis", "field"),
    [
        ("data", "data_parallel_axis"),
        ("model", "tensor_parallel_axis"),
        ("tensor", "tensor_parallel_axis"),
        ("cp", "sequence_parallel_axis"),
    ],
)
def test_an_axis_that_nothing_names_warns_with_a_declaration_that_works(axis: str, field: str) -> None:
    x = tokens(2, 32)
    (text,) = warned(create("vanilla", mesh=mesh(**{axis: 2})), x, x, x)
    assert f"partition_axis={{{field!r}: {axis!r}}}" in text
    attend = create("vanilla", mesh=mesh(**{axis: 2}), partition_axis={field: axis})
    assert not warned(attend, x, x, x)
    assert attend.plan(x, x, x).placement.repeated == ()


def test_what_a_declaration_leaves_whole_on_purpose_does_not_warn() -> None:
    one, cache, x = tokens(2, 1), tokens(2, 64), tokens(1, 32)
    assert not warned(create("vanilla", mesh=mesh(fsdp=2)), x, x, x)  # a batch of 1
    assert not warned(create("vanilla", mesh=mesh(ep=2)), x, x, x)  # named by the rules, for other tensors
    assert not warned(create("vanilla", mesh=mesh(sp=2), sequence_parallel="gather"), one, cache, cache)


def test_causes_are_in_the_json() -> None:
    x = tokens(1, 66)
    plan = create("vanilla", mesh={"sp": 4, "data": 2, "fsdp": 2}).plan(x, x, x)
    causes = {axis["axis"]: axis["cause"] for axis in plan.to_dict()["repeated_work"]["axes"]}
    assert causes == {"sp": "indivisible", "data": "unnamed", "fsdp": "length_1"}
