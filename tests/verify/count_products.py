"""Counts what each of eight virtual devices multiplies in a ring, and prints it as JSON: count_products.py MASK ORDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import parallel_products as counting

from attnops import Causal, Full, OperationMetadata, OperationRegistry

if __name__ == "__main__":
    mask, order = {"Full": Full(), "Causal": Causal()}[sys.argv[1]], sys.argv[2]
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    # Unrolled: the hops of a loop can't be told apart.
    fields = {"sequence_parallel": "ring", "ring_order": order, "scan_ring_attention": False}
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, runtime_dtype="float32", **fields))
    x = jax.device_put(jnp.ones((1, 8192, 1, 16)), jax.NamedSharding(mesh, jax.P(None, "sp")))
    program = jax.jit(lambda x: attend(x, x, x, mask=mask).attention_outputs).lower(x).compile()
    program(x).block_until_ready()
    print(json.dumps(counting.balance(counting.executed(lambda: program(x), program.as_text()))))
