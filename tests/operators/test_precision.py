"""Products keep all bits of their factors, on every route of an operation: as lowered for a TPU, and as traced for kernels."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from attnops import Causal, Full, OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.planning.notes import has_note

MESH = AbstractMesh(
    (2,), ("sp",), axis_types=(AxisType.Auto,), abstract_device=abstract_device("TPU v5 lite", 1, "tpu")
)


def _gradients(operation: str, dtype: str, q_len: int, kv_len: int, call: dict[str, Any], **fields: Any) -> Any:
    """(a function of q, k, v and bias giving the output and all gradients, its arguments, the plan)."""
    attend = OperationRegistry.create(
        operation, OperationMetadata(mesh=MESH, runtime_dtype=dtype, fallback="allow", **fields)
    )
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), dtype) for n in (q_len, kv_len))
    bias = () if "ring" in fields.values() else (jax.ShapeDtypeStruct((1, 2, q_len, kv_len), jnp.float32),)

    def program(*x: jax.Array) -> Any:
        def loss(*x: jax.Array) -> jax.Array:
            given = {"bias": x[3]} if len(x) > 3 else {}
            return attend(*x[:3], **given, **call).attention_outputs.astype(jnp.float32).sum()

        return jax.value_and_grad(loss, tuple(range(len(x))))(*x)

    arguments = (q, k, k, *bias)
    return program, arguments, attend.plan(q, k, k, **({"bias": bias[0]} if bias else {}), **call)


ROUTES = {
    "plain": ("vanilla", 256, 256, {"mask": Full()}, {}),
    "blockwise": ("vanilla", 1024, 1024, {"mask": Causal()}, {"operation_configs": {"vanilla": {"path": "blockwise"}}}),
    "decode": ("vanilla", 1, 4096, {}, {}),
    "ring": ("vanilla", 512, 512, {"mask": Causal()}, {"sequence_parallel": "ring"}),
    "of splash, one query": ("splash", 1, 4096, {}, {}),
    "of splash, fallback": ("splash", 256, 256, {"mask": Full(), "return_weights": True}, {}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in ROUTES), ("plain", "bfloat16"), ("blockwise", "bfloat16"), ("decode", "float16")],
)
def test_xla_routes(name: str, dtype: str) -> None:
    operation, q_len, kv_len, call, fields = ROUTES[name]
    program, arguments, plan = _gradients(operation, dtype, q_len, kv_len, call, **fields)
    assert plan.method == "forward_native"
    assert plan.problem.platform == "tpu"
    text = jax.export.export(jax.jit(program), platforms=("tpu",))(*arguments).mlir_module()
    products = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(products) >= 6  # two forward, four or five backward
    raised = [line for line in products if "precision = [HIGHEST, HIGHEST]" in line]
    assert len(raised) == (0 if dtype == "bfloat16" else len(products))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_and_the_gradient_of_a_bias(dtype: str, fused: bool) -> None:
    configs = {"operation_configs": {"splash": {"use_fused_bwd_kernel": fused}}}
    program, arguments, plan = _gradients("splash", dtype, 256, 256, {"mask": Causal()}, **configs)
    assert plan.method == "forward_tpu"
    text = str(jax.make_jaxpr(program)(*arguments))
    precisions = re.findall(r"precision=\((.*?)\)", text)
    products = text.count("dot_general[")
    assert products == len(precisions) >= 2 + (5 if fused else 7) + 3
    assert set(precisions) == {", ".join(["Precision.DEFAULT" if dtype == "bfloat16" else "Precision.HIGHEST"] * 2)}


@pytest.mark.parametrize(
    ("operation", "config", "dtype", "noted"),
    [
        ("sdpa", {}, "float32", True),
        ("sdpa", {}, "bfloat16", False),
        ("splash", {"kernel": "jax"}, "float32", True),
        ("splash", {}, "float32", False),
    ],
)
def test_products_of_others_are_noted(operation: str, config: dict[str, Any], dtype: str, noted: bool) -> None:
    configs = {"operation_configs": {operation: config}} if config else {}
    attend = OperationRegistry.create(operation, OperationMetadata(mesh=MESH, runtime_dtype=dtype, **configs))
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), dtype)
    assert has_note(attend.plan(x, x, x).notes, "dtype.precision") == noted
