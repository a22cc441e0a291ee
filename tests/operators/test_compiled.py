"""Under jit a planned call is the program that an expert writes by hand, operation for operation."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnops import Causal, OperationMetadata, OperationRegistry
from attnops.operators.vanilla.kernel.plain import plain_attention

B, T, H, K, D = 4, 64, 8, 4, 16


def _operations(text: str) -> Counter[str]:
    """Opcodes of an optimised HLO module, with the collectives' groups."""
    found = Counter()
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(", line)
        if match:
            groups = re.search(r"replica_groups=\S+", line)
            found[match[1] + (f" {groups[0]}" if groups else "")] += 1
    return found


def _by_hand(mesh: jax.sharding.Mesh, sequence: str | None):
    query = PartitionSpec("fsdp", sequence, "tp", None)
    key = PartitionSpec("fsdp", sequence, "tp", None)

    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if sequence is not None:
            k, v = (jax.lax.all_gather(x, sequence, axis=1, tiled=True) for x in (k, v))
        length = q.shape[1]
        rows, cols = jax.lax.broadcasted_iota(jnp.int32, (length, 1), 0), jax.lax.broadcasted_iota(jnp.int32, (1, T), 1)
        if sequence is not None:
            rows = rows + jax.lax.axis_index(sequence) * length
        mask = cols <= rows
        return plain_attention(
            q, k, v, layout="bthd", scale=D**-0.5, mask=mask[None, None], bias=None, soft_cap=None, sinks=None, keep=None,
            keep_probability=1.0, softmax_dtype=jnp.dtype("float32"),
        )[0]  # fmt: skip

    return jax.shard_map(body, mesh=mesh, in_specs=(query, key, key), out_specs=query)


@pytest.mark.parametrize("sequence", [None, "sp"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_same_operations_as_by_hand(sequence: str | None, gradient: bool) -> None:
    shape = (2, 2, 2) if sequence else (2, 4, 1)
    mesh = jax.make_mesh(shape, ("fsdp", "tp", "sp"), axis_types=(AxisType.Auto,) * 3)
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh))
    by_hand = _by_hand(mesh, sequence)
    planned = lambda q, k, v: attend(q, k, v, mask=Causal()).attention_outputs  # noqa: E731
    where = NamedSharding(mesh, PartitionSpec("fsdp", sequence, "tp", None))
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=where) for s in ((B, T, H, D), (B, T, K, D), (B, T, K, D))
    ]

    def compiled(call) -> Counter[str]:
        function = jax.grad(lambda *x: (call(*x) ** 2).sum(), (0, 1, 2)) if gradient else call
        return _operations(jax.jit(function).lower(*arguments).compile().as_text())

    ours, theirs = compiled(planned), compiled(by_hand)
    assert ours == theirs
    assert sum(theirs.values()) > 10
    if sequence is None:
        collectives = [op for op in ours if op.startswith(("all-", "collective", "reduce-scatter"))]
        assert not collectives  # head- and batch-sharded attention talks to nobody


def test_no_shard_map_on_one_device() -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata())
    x = jnp.ones((1, 8, 2, 4))
    assert "shard_map" not in str(jax.make_jaxpr(lambda q: attend(q, q, q).attention_outputs)(x))


def test_one_trace_serves_equal_calls() -> None:
    traces = []

    class Counting(OperationRegistry.get("vanilla")):  # type: ignore[misc]
        name = "counting"

        def forward_native(self, call):
            traces.append(call.problem)
            return super().forward_native(call)

        forward_native.capability = OperationRegistry.get("vanilla").capability("forward_native")

    attend = Counting(OperationMetadata())
    x = jnp.ones((1, 8, 2, 4))
    for _ in range(3):
        attend(x, x, x, mask=Causal(), softmax_scale=0.5)
    assert len(traces) == 1
    attend(x, x, x, mask=Causal(), softmax_scale=0.25)
    assert len(traces) == 2
