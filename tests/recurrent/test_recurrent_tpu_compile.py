"""The kernels of linear attention compiled by the real TPU compiler, and their VMEM against what is counted before.

What compiles is not thereby numerically right: the numbers are held against the reference in Pallas' interpreter.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnops import OperationMetadata, OperationRegistry, StateBatch
from attnops.operators.recurrent.kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING, STEP
from attnops.verify.compiled import kernels, program_text
from attnops.verify.topology import described_mesh

pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")

V5E, V6E, TPU7X, V4, V5P = "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1", "v4:2x2x1", "v5p:2x2x1"
NARROW, WIDE = (128, 128), (256, 256)


@pytest.mark.parametrize(
    ("topology", "kind", "dims", "dtype", "declared"),
    [
        (V5E, "gated_delta_rule", NARROW, "bfloat16", {}),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for topology in (V4, V5E, V5P, V6E, TPU7X)
            for cell in (
                (topology, "gated_delta_rule", WIDE, "float32", {}),
                (topology, "gated_delta_rule", NARROW, "bfloat16", {"chunk_size": 64}),
                (topology, "kda", NARROW, "bfloat16", {}),
                (topology, "kda", WIDE, "float32", {}),
                (topology, "gla", (64, 128), "bfloat16", {"chunk_size": 16}),
                (topology, "simple_gla", WIDE, "bfloat16", {"chunk_size": 64}),
                (topology, "lightning", (96, 80), "float16", {}),
                (topology, "mamba2", (128, 64), "bfloat16", {}),
            )
        ),
    ],
)
def test_compiles_in_the_default_vmem(
    topology: str, kind: str, dims: tuple[int, int], dtype: str, declared: dict[str, int]
) -> None:
    mesh = Mesh(described_mesh(topology).devices.reshape(1, -1)[:, :1], ("dp", "tp"))
    operation = OperationRegistry.create(
        kind, OperationMetadata(mesh=mesh, operation_configs={kind: declared}, tuning="off", fallback="error")
    )
    there = NamedSharding(mesh, PartitionSpec())
    batch, tokens, key_heads, heads = 1, 512, 4, 8
    dim, value_dim = dims
    shape = lambda *s, d=dtype: jax.ShapeDtypeStruct(s, jnp.dtype(d), sharding=there)  # noqa: E731
    keys, values = shape(batch, tokens, key_heads, dim), shape(batch, tokens, heads, value_dim)
    if kind == "mamba2":
        call = {"x": values, "dt": shape(batch, tokens, heads), "A": shape(heads, d="float32"), "B": keys, "C": keys}
    else:
        call = {"query": keys, "key": keys, "value": values}
        by_channel = (dim,) if kind in ("kda", "gla") else ()
        if kind != "lightning":
            call["decay"] = shape(batch, tokens, heads, *by_channel, d="float32")
        if kind in ("gated_delta_rule", "kda"):
            call["beta"] = shape(batch, tokens, heads, d="float32")
    call["initial_state"] = shape(batch, heads, dim, value_dim, d="float32")
    plan = operation.plan(**call)
    assert plan.method == "forward_tpu"

    def loss(call: dict[str, jax.Array]) -> jax.Array:
        output = operation(**call)
        return jnp.sum(output.attention_outputs.astype(jnp.float32)) + jnp.sum(output.state)

    parts = plan.runs.memory(plan.problem, plan.placement, plan.config)
    assert set(parts) == {FORWARD, KEEPING, BACKWARD}
    for function, wanted in ((loss, {FORWARD}), (jax.grad(loss), {KEEPING, BACKWARD})):
        found = kernels(jax.jit(function).lower(call).compile().as_text())
        assert {kernel.name for kernel in found} == wanted
        for kernel in found:
            assert kernel.vmem_limit is None  # the default is enough
            counted = sum(parts[kernel.name].values())
            # The count is of heads that are worked on at once; without a triangular inverse fewer of them are.
            least = counted / (3 if "beta" in call else 6)
            assert least <= kernel.vmem_used <= 1.25 * counted


_RAW = {"gate": "raw", "beta_form": "sigmoid", "normalise_qk": True}
_CONV = {"conv_activation": "silu"}


@pytest.mark.parametrize(
    ("topology", "kind", "dims", "declared", "longest", "columns"),
    [
        (V5E, "gated_delta_rule", NARROW, _RAW | _CONV, 1, 1),
        (V5E, "gated_delta_rule", NARROW, _RAW, None, 2),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for topology in (V4, V5E, V5P, V6E, TPU7X)
            for cell in (
                (topology, "gated_delta_rule", WIDE, {}, 1, 1),
                (topology, "gated_delta_rule", NARROW, _RAW, 1, 1),
                (topology, "kda", NARROW, {"state_dtype": "bfloat16"}, 1, 1),
                (topology, "kda", (128, 64), _RAW, 1, 1),
                (topology, "gla", (64, 128), {}, 1, 1),
                (topology, "lightning", (96, 128), {}, 1, 1),
                (topology, "mamba2", (128, 64), {"dt_softplus": True, "dt_min": 0.001}, 1, 1),
                (topology, "gated_delta_rule", WIDE, {}, 4, 4),
                (topology, "gated_delta_rule", NARROW, _RAW, None, 1),
                (topology, "kda", NARROW, {"state_dtype": "bfloat16"}, None, 3),
                (topology, "kda", (128, 64), _RAW, 8, 1),
                (topology, "gla", (64, 128), {}, 256, 2),
                (topology, "mamba2", (128, 64), {"dt_softplus": True}, None, 1),
                (topology, "gated_delta_rule", NARROW, _RAW | _CONV, 1, 1),
                (topology, "gated_delta_rule", NARROW, _RAW | _CONV, None, 2),
                (topology, "kda", WIDE, _CONV, 4, 4),
                (topology, "mamba2", NARROW, {"dt_softplus": True} | _CONV, None, 1),
            )
        ),
    ],
)
def test_a_step_over_slots_writes_them_in_place(
    topology: str, kind: str, dims: tuple[int, int], declared: dict[str, Any], longest: int | None, columns: int
) -> None:
    mesh = Mesh(described_mesh(topology).devices.reshape(1, -1)[:, :1], ("dp", "tp"))
    name = "ragged_gated_delta_rule_v2" if kind == "gated_delta_rule" else f"ragged_{kind}"
    operation = OperationRegistry.create(
        name, OperationMetadata(mesh=mesh, operation_configs={name: declared}, tuning="off", fallback="error")
    )
    there = NamedSharding(mesh, PartitionSpec())
    rows, slots, key_heads, heads = 16, 400, 8, 32
    tokens = rows if longest == 1 else 512
    dim, value_dim = dims
    shape = lambda *s, d="bfloat16": jax.ShapeDtypeStruct(s, jnp.dtype(d), sharding=there)  # noqa: E731
    keys, values = shape(tokens, key_heads, dim), shape(tokens, heads, value_dim)
    if kind == "mamba2":
        call = {"x": values, "dt": shape(tokens, heads), "A": shape(heads, d="float32"), "B": keys, "C": keys}
        call["D"] = shape(heads)
    else:
        call = {"query": keys, "key": keys, "value": values}
        if kind != "lightning":
            call["decay"] = shape(tokens, heads, *((dim,) if kind in ("kda", "gla") else ()), d="float32")
        if kind in ("gated_delta_rule", "kda"):
            call["beta"] = shape(tokens, heads, d="float32")
    if declared.get("gate") == "raw":
        call |= {"A_log": shape(heads, d="float32"), "dt_bias": shape(*call["decay"].shape[1:], d="float32")}
    written = {"state": shape(slots, heads, dim, value_dim, d=declared.get("state_dtype", "float32"))}
    if "conv_activation" in declared:
        for one in ("x", "B", "C") if kind == "mamba2" else ("query", "key", "value"):
            channels = call[one].shape[1:]
            call |= {f"{one}_conv_weight": shape(4, *channels), f"{one}_conv_bias": shape(*channels)}
            written[f"{one}_conv_window"] = shape(slots, 3, *channels)
    bounds, of_rows = shape(rows + 1, d="int32"), shape(rows, d="int32")
    batch = StateBatch(bounds, of_rows, shape(d="int32"), of_rows, shape(rows, columns, d="int32"))
    plan = operation.plan(**call, **written, batch=batch, max_q_len=longest)
    assert plan.method == "forward_tpu"
    assert not plan.notes

    def step(written: dict[str, jax.Array], call: dict[str, jax.Array], batch: StateBatch) -> Any:
        return operation(**call, **written, batch=batch, max_q_len=longest)

    compiled = jax.jit(step, donate_argnums=0).lower(written, call, batch).compile()
    parts = plan.runs.memory(plan.problem, plan.placement, plan.config)
    numbers = {name: math.prod(x.shape) * x.dtype.itemsize for name, x in written.items()}
    if text := program_text(compiled):
        found = {kernel.name: kernel for kernel in kernels(text)}
        assert set(found) == set(parts) == ({STEP} if longest is not None and longest <= 8 else {STEP, FORWARD})
        for name, kernel in found.items():
            counted = sum(parts[name].values())
            assert kernel.vmem_limit is None
            # One chunk at a time has no next one to fetch.
            assert counted / (4 if name == STEP else 6) <= kernel.vmem_used <= 1.25 * counted
        # Whole slots are copied nowhere; between chunks and last tokens XLA may hold those of small windows in VMEM.
        moved = "copy|copy-start|transpose" if longest == 1 else "copy|transpose"
        for x in written.values():
            of = f"{'bf16' if x.dtype == jnp.bfloat16 else 'f32'}[{','.join(map(str, x.shape))}]"
            assert not re.search(rf"= {re.escape(of)}\S* ({moved})\(", text)
    # The slots are the result's buffer, and no copy of them is made.
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(numbers.values())
    assert memory.temp_size_in_bytes < numbers["state"] / 4
