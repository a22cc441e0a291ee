"""tokamax's causal_conv1d_gated_delta_rule compiled for a described TPU, with libtpu's dumps: run by a Python that has both.

    python benchmarks/recurrent_tokamax.py TOPOLOGY FOLDER HEADS

One kernel goes through a chunk of 128 tokens of a sequence in a turn of its loop, one through a token of one sequence. Heads of
128, bfloat16, states in float32. Prints the versions.
"""

from __future__ import annotations

import os
import sys

TOPOLOGY, FOLDER, HEADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ |= {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={FOLDER} --xla_jf_dump_llo_text=true",
}  # fmt: skip

import importlib.metadata  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from tokamax._src.ops.causal_conv1d_gated_delta_rule import wrapper  # noqa: E402

DIM, WIDTH, TOKENS = 128, 4, 512


def main() -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = Mesh(np.asarray(devices[:1]), ("device",))
    there = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=there)

    channels, slots = 3 * HEADS * DIM, 2
    per_head = shape(HEADS, dtype=jnp.float32)
    arrays = {
        "qkv": shape(TOKENS, channels), "b": shape(TOKENS, HEADS), "a": shape(TOKENS, HEADS),
        "conv_state": shape(slots, WIDTH - 1, channels), "conv_weight": shape(channels, 1, WIDTH),
        "conv_bias": shape(channels), "recurrent_state": shape(slots, HEADS, DIM, DIM, dtype=jnp.float32),
        "a_log": per_head, "dt_bias": per_head, "query_start_loc": shape(slots, dtype=jnp.int32),
    }  # fmt: skip
    arrays |= {name: shape(1, dtype=jnp.int32) for name in ("state_indices", "seq_lens")}
    arrays["distribution"] = shape(3, dtype=jnp.int32)
    sizes = {"n_kq": HEADS, "n_v": HEADS, "d_k": DIM, "d_v": DIM, "kernel_size": WIDTH}
    with jax.set_mesh(mesh):
        jax.jit(lambda arrays: wrapper.fused_conv1d_gdn(**arrays, **sizes)).lower(arrays).compile()
    print(*(f"{name} {importlib.metadata.version(name)}" for name in ("tokamax", "jax", "libtpu")))


if __name__ == "__main__":
    main()
