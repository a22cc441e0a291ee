"""The order in which splash writes its output: outside training that of the call's layout, where values fill registers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal, OperationMetadata, OperationRegistry
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS = 2, 200, 200, 4, 2
RNG = np.random.default_rng(7)


def _outputs(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shape of the forward kernels' output in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call" and equation.params["name"] == "attnops_splash_forward":
            yield equation.outvars[0].aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _outputs(inner)


CASES: list[tuple[int, int, dict[str, Any]]] = [
    *((128, 128, {name: value}) for name, value in (("heads_per_tile", 1), ("fuse_reciprocal", False))),
    *((64, 256, {"heads_per_tile": 4}), (128, 128, {"transposed_tiles": True}), (128, 64, {})),
]


@pytest.mark.parametrize(
    ("layout", "mode", "dim", "value_dim", "fields"),
    [
        *(pytest.param("bthd", "prefill", *case) for case in CASES),
        *(
            pytest.param(*order, *case, marks=[pytest.mark.slow] if case is not CASES[2] else [])
            for order, case in itertools.product((("bthd", "train"), ("bhtd", "prefill")), CASES)
        ),
    ],
)
def test_output_and_gradients(dim: int, value_dim: int, layout: str, mode: str, fields: dict[str, Any]) -> None:
    config = {"interpret": True, "block_q": 128, "block_kv": 128, **fields}
    metadata = OperationMetadata(operation_configs={"splash": config}, fallback="error")
    attend = OperationRegistry.create("splash", metadata)
    shapes = [
        (BATCH, n, heads, size)
        for n, heads, size in ((Q_LEN, HEADS, dim), (KV_LEN, KV_HEADS, dim), (KV_LEN, KV_HEADS, value_dim))
    ]
    tensors = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    d_output = RNG.standard_normal((BATCH, Q_LEN, HEADS, value_dim)).astype(np.float32)

    def turned(x: Any) -> Any:
        return x if layout == "bthd" else x.swapaxes(1, 2)

    def call(*given: jax.Array) -> jax.Array:
        return attend(*given, mask=Causal(), softmax_scale=0.1, layout=layout, mode=mode).attention_outputs

    given = [turned(jnp.asarray(x)) for x in tensors]
    tokens_first = (
        layout == "bthd" and mode == "prefill" and value_dim % 128 == 0 and fields.get("fuse_reciprocal", True)
    )
    wanted_shape = (BATCH, 256, HEADS * value_dim) if tokens_first else (BATCH, HEADS, 256, value_dim)
    assert set(_outputs(jax.make_jaxpr(call)(*given).jaxpr)) == {wanted_shape}
    plan = attend.plan(*given, mask=Causal(), softmax_scale=0.1, layout=layout, mode=mode)
    turned_around = next((note for note in plan.notes if "transposed around" in note), "")
    assert ("value, output" in turned_around) == (layout == "bthd" and not tokens_first)

    output, pull = jax.vjp(jax.jit(call), *given)
    got = dict(zip(("output", "query", "key", "value"), (output, *pull(turned(jnp.asarray(d_output)))), strict=True))
    of: dict[str, Any] = {"scale": 0.1, "mask": np.tri(Q_LEN, KV_LEN, dtype=bool)[None, None]}
    wanted = reference_gradients(*tensors, d_output, **of)
    wanted["output"] = reference_attention(*tensors, **of).output
    terms = term_sizes(*tensors, d_output, **of)
    for name, x in got.items():
        found = np.asarray(turned(x), np.float64)
        assert row_error(found, wanted[name], row_sizes(wanted[name], terms[name])) < 3e-5, name


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"sp": 2}])
def test_over_a_mesh(sizes: dict[str, int]) -> None:
    """Shards write tokens first, each its own heads; parts of a ring don't."""
    config = {"interpret": True, "block_q": 128, "block_kv": 128}
    fields: dict[str, Any] = {"sequence_parallel": "ring"} if "sp" in sizes else {}
    metadata = OperationMetadata(
        mesh=virtual_mesh(sizes), operation_configs={"splash": config}, fallback="error", **fields
    )
    attend = OperationRegistry.create("splash", metadata)
    query, key, value = (
        RNG.standard_normal((2, 256, heads, 128)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def call(*given: jax.Array) -> jax.Array:
        return attend(*given, mask=Causal(), softmax_scale=0.1, mode="prefill").attention_outputs

    shapes = set(_outputs(jax.make_jaxpr(call)(query, key, value).jaxpr))
    assert shapes == ({(2, HEADS, 128, 128)} if fields else {(1, 256, HEADS // 2 * 128)})
    of: dict[str, Any] = {"scale": 0.1, "mask": np.tri(256, dtype=bool)[None, None]}
    wanted = reference_attention(query, key, value, **of).output
    terms = term_sizes(query, key, value, np.ones_like(wanted), **of)
    found = np.asarray(jax.jit(call)(query, key, value), np.float64)
    assert row_error(found, wanted, row_sizes(wanted, terms["output"])) < 3e-5
