"""A mesh axis that a declaration names and the mesh lacks is reported, whatever its name; those of the defaults aren't."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from eformer.escale import PartitionAxis

from attnops import OperationMetadata, OperationRegistry, ShardingError
from attnops.sharding import declared_axes

X = jax.ShapeDtypeStruct((8, 64, 8, 16), "float32")
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "defaults": ({}, set()),
    "the default, written out": ({"batch_axis": ("fsdp", "dp"), "tensor_parallel_axis": "tp"}, set()),
    "batch over fsdp and data": ({"batch_axis": ("data", "fsdp")}, {"data", "fsdp"}),
    "another data axis": ({"data_parallel_axis": "replica"}, {"replica"}),
    "heads over fsdp": ({"head_axis": "fsdp"}, {"fsdp"}),
    "heads over fsdp when decoding": ({"decode_head_axis": "fsdp"}, {"fsdp"}),
    "standard names exchanged": (
        {"tensor_parallel_axis": "fsdp", "fully_sharded_data_parallel_axis": "tp"},
        {"fsdp", "tp"},
    ),
    "a dimension left whole": ({"head_axis": None}, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_partition_axis_declares(name: str) -> None:
    fields, wanted = CASES[name]
    assert declared_axes(PartitionAxis(**fields)) == wanted


@pytest.mark.parametrize(
    ("fields", "reported"),
    [({}, False), ({"data_parallel_axis": "data"}, False), ({"batch_axis": ("data", "fsdp")}, True)],
)
def test_a_declared_fsdp_that_the_mesh_lacks_is_reported_and_refused_by_strict(
    fields: dict[str, Any], reported: bool
) -> None:
    metadata = OperationMetadata(mesh={"data": 4, "tp": 2}, partition_axis=fields)
    plan = OperationRegistry.create("vanilla", metadata).plan(X, X, X)
    drops = [d for d in plan.placement.fitted.dropped if d.axis == "fsdp" and d.tensor == "query"]
    assert [d.harmless for d in drops] == [not reported]
    assert ("axis 'fsdp' of batch" in plan.explain()) == reported
    if reported:
        with pytest.raises(ShardingError, match="'fsdp'"):
            OperationRegistry.create("vanilla", metadata.replace(strict=True)).plan(X, X, X)
