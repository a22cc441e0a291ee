"""Compile one splash kernel for a described TPU: python tpu_static_worker.py '{"kernel": ..., ...}'.

libtpu's dumps of the final schedule go to `out`; it prints the bytes that the compiled program needs besides its arguments and
results. Each case has its own process, because libtpu reads its options when it starts.

Keys: kernel (attnops, jax or tokamax), target, length, dim, out, and either blocks [q, kv, compute] with fused, or for tokamax
config, the fields of its SplashConfig. Optional: fields (more of a config), heads, value_dim, mask (causal, full, or window with
attnops' kernel), forward_only; kv_dtype, with attnops' kernel and forward_only: that of quantised keys and values, with scales;
hlo, the one kernel to dump, by its name in the compiled program; score, with attnops' kernel: alibi or t5, differentiated
as well unless `constant` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

CASE = json.loads(sys.argv[1])
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "LIBTPU_INIT_ARGS": (
        f"--xla_jf_dump_to={CASE['out']} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
        + (f" --xla_jf_dump_only_matching_hlo={CASE['hlo']}" if "hlo" in CASE else "")
    ),
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

HEADS = CASE.get("heads", 2)


def of_attnops(mesh: Mesh, length: int, dim: int) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """attnops' kernel or JAX's, through the same declaration."""
    from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow

    kernel, (block_q, block_kv, compute) = CASE["kernel"], CASE["blocks"]
    config: dict[str, Any] = {
        "kernel": kernel, "block_q": block_q, "block_kv": block_kv, "block_kv_compute": compute, "block_q_dkv": block_q,
        "block_kv_dkv": block_kv, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": CASE["fused"],
    }  # fmt: skip
    if not CASE["fused"]:
        config |= {"block_q_dq": block_q, "block_kv_dq": compute}
    config |= CASE.get("fields", {})
    metadata = OperationMetadata(mesh=mesh, operation_configs={"splash": config}, fallback="error")
    attend = OperationRegistry.create("splash", metadata)
    window = Causal() & SlidingWindow(1023, 0)
    mask = {"causal": Causal(), "full": Full(), "window": window}[CASE.get("mask", "causal")]

    def of_quantised(q: Any, k: Any, v: Any) -> Any:
        scale = jnp.ones((1, length, HEADS, 1), jnp.float32)
        return attend(q, k, v, mask=mask, key_scale=scale, value_scale=scale).attention_outputs

    if "score" in CASE:
        return lambda q, k, v, x: attend(q, k, v, mask=mask, score=scored(x)).attention_outputs, (1, length, HEADS, dim)
    run = of_quantised if "kv_dtype" in CASE else lambda q, k, v: attend(q, k, v, mask=mask).attention_outputs
    return run, (1, length, HEADS, dim)


def scored(array: Any) -> Any:
    """The score of the case, of its array."""
    from attnops import ALiBi, RelativeBias

    return ALiBi(array) if CASE["score"] == "alibi" else RelativeBias(array)


def of_tokamax(length: int, dim: int) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """tokamax's splash; it takes no scale, so the query isn't scaled."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    if "config" in CASE:
        fields = dict(CASE["config"])
    else:
        block_q, block_kv, compute = CASE["blocks"]
        fields = {
            "block_q": block_q, "block_kv": block_kv, "block_kv_compute": compute, "block_q_dkv": block_q,
            "block_kv_dkv": block_kv, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": True,
            **CASE.get("fields", {}),
        }  # fmt: skip
    fields |= {name: kernel.QKVLayout(value) for name, value in fields.items() if name.endswith("layout")}
    mask = {"causal": masks.CausalMask, "full": masks.FullMask}[CASE.get("mask", "causal")]((length, length))
    attend = kernel.make_splash_mha_single_device(mask, config=kernel.SplashConfig(**fields))
    return lambda q, k, v: attend(q, k, v), (HEADS, length, dim)


def main() -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CASE["target"]).devices
    mesh = Mesh(np.array(devices[:1]), ("fsdp",))
    sizes = CASE["length"], CASE["dim"]
    attend, shape = of_tokamax(*sizes) if CASE["kernel"] == "tokamax" else of_attnops(mesh, *sizes)
    sharding = NamedSharding(mesh, PartitionSpec())
    x, value = (
        jax.ShapeDtypeStruct((*shape[:-1], dim), jnp.bfloat16, sharding=sharding)
        for dim in (CASE["dim"], CASE.get("value_dim", CASE["dim"]))
    )

    captured = {"alibi": (HEADS,), "t5": (32, HEADS)}[CASE["score"]] if "score" in CASE else None
    arrays = [] if captured is None else [jax.ShapeDtypeStruct(captured, jnp.float32, sharding=sharding)]

    def loss(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays).astype(jnp.float32).sum()

    wanted = range(3 + (len(arrays) and not CASE.get("constant")))

    with contextlib.ExitStack() as stack:
        if CASE["kernel"] == "tokamax":  # it queries its device; attnops sets it itself
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        key = x.update(dtype=CASE.get("kv_dtype", x.dtype))
        value = value.update(dtype=CASE.get("kv_dtype", x.dtype))
        lowered = jax.jit(attend if CASE.get("forward_only") else jax.grad(loss, tuple(wanted))).lower(
            x, key, value, *arrays
        )
    print(lowered.compile().memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main()
