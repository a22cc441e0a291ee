"""Run one implementation of attention over a split sequence for benchmarks/parallel.py: one JSON object per line each way.

Each runs in its own process with eight virtual CPU devices, so that it can have its own environment. Tensors are
[batch, time, heads, dim]; they are split along time over all devices, in order, and so is the output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

WINDOW = 1024  # keys that a query sees, including its own
SPLIT = PartitionSpec(None, "sp")
PACKAGES = ("jax", "jaxlib", "libtpu", "ejkernel", "tokamax")
Made = tuple[Callable[..., Any], NamedSharding]


def tensors(cell: dict[str, Any]) -> list[np.ndarray]:
    """query, key, value, cotangent of the output: normal, in the cell's dtype."""
    rng = np.random.default_rng(0)
    query = (1, cell["length"], cell["heads"], cell["dim"])
    key = (1, cell["length"], cell["kv_heads"], cell["dim"])
    drawn = (rng.standard_normal(shape, np.float32) for shape in (query, key, key, query))
    return [x.astype(jnp.dtype(cell["dtype"])) for x in drawn]


def mesh_of(devices: list[Any], sizes: dict[str, int]) -> Mesh:
    return Mesh(
        np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


# -- implementations ---------------------------------------------------------------------------------------------------


def attnops(strategy: str, order: str | None = None) -> Callable[[dict[str, Any], list[Any]], Made]:
    def make(cell: dict[str, Any], devices: list[Any]) -> Made:
        from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow

        fields: dict[str, Any] = {"sequence_parallel": strategy, "ring_order": order, "runtime_dtype": cell["dtype"]}
        if cell.get("unrolled"):  # the hops of a loop can't be distinguished
            fields["scan_ring_attention"] = False
        axes: tuple[str, ...] = ("sp",)
        mesh = mesh_of(devices, {"sp": len(devices)})
        if strategy == "ulysses_ring":
            axes, mesh = ("cp", "sp"), mesh_of(devices, {"cp": 2, "sp": len(devices) // 2})
            fields["partition_axis"] = {"query_sequence_axis": axes, "key_sequence_axis": axes}
        on_tpu = devices[0].platform == "tpu"
        operation = "splash" if on_tpu else "vanilla"
        attend = OperationRegistry.create(operation, OperationMetadata(mesh=mesh, fallback="error", **fields))
        masks = {"full": Full(), "causal": Causal(), "window": Causal() & SlidingWindow(left=WINDOW - 1)}
        mask = masks[cell["mask"]]
        return lambda q, k, v: attend(q, k, v, mask=mask).attention_outputs, NamedSharding(
            mesh, PartitionSpec(None, axes)
        )

    return make


def constrained(inside: PartitionSpec) -> Callable[[dict[str, Any], list[Any]], Made]:
    """jax.nn under plain jit: XLA partitions it according to its operands' sharding constraints."""

    def make(cell: dict[str, Any], devices: list[Any]) -> Made:
        mesh = mesh_of(devices, {"sp": len(devices)})
        window = (WINDOW - 1, 0) if cell["mask"] == "window" else None

        def pinned(x: Any, spec: PartitionSpec) -> Any:
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        def attend(*qkv: Any) -> Any:
            q, k, v = (pinned(x, inside) for x in qkv)
            causal = cell["mask"] != "full"
            output = jax.nn.dot_product_attention(
                q, k, v, is_causal=causal, local_window_size=window, implementation="xla"
            )
            return pinned(output, SPLIT)

        return attend, NamedSharding(mesh, SPLIT)

    return make


def ejkernel(as_window: bool) -> Callable[[dict[str, Any], list[Any]], Made]:
    """ejkernel's ring, on XLA or with its TPU kernels, with its own choice of blocks. XLA's doesn't take grouped queries."""

    def make(cell: dict[str, Any], devices: list[Any]) -> Made:
        on_tpu = devices[0].platform == "tpu"
        module = import_module(f"ejkernel.kernels.{'_pallas.tpu' if on_tpu else '_xla'}.ring_attention")
        mesh = mesh_of(devices, {"sp": len(devices)})
        window = {"window": (WINDOW - 1, 0), "causal": (cell["length"], 0) if as_window else None}.get(cell["mask"])

        def local(q: Any, k: Any, v: Any) -> Any:
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
            causal = cell["mask"] != "full"
            return module.ring_attention(q, k, v, causal=causal, sliding_window=window, axis_name="sp")

        attend = jax.shard_map(local, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT, check_vma=False)
        return attend, NamedSharding(mesh, SPLIT)

    return make


def tokamax(cell: dict[str, Any], devices: list[Any]) -> Made:
    """tokamax's ring of splash kernels; off TPUs they run in Pallas' interpreter. It takes no scale."""
    from tokamax._src.ops.experimental.tpu.splash_attention import ring_attention_kernel as ring
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    mesh, length = mesh_of(devices, {"sp": len(devices)}), cell["length"]
    interpret = devices[0].platform != "tpu"
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    blocks = dict.fromkeys(names, min(512, length // len(devices)))
    # base2 and the reciprocal as in tokamax's own test of its ring
    config = kernel.SplashConfig(**blocks, use_base2_exp=False, fuse_reciprocal=True, interpret=interpret)
    mask = {"causal": masks.make_causal_mask, "full": masks.FullMask}[cell["mask"]]((length, length))
    shards = {"q_seq_shards": len(devices), "kv_seq_shards": len(devices)}
    made = ring.make_ring_attention(mask, is_mqa=False, ring_axis="sp", config=config, **shards)
    spec = made.manual_sharding_spec()
    by_time = PartitionSpec(None, "sp")
    around = jax.shard_map(
        lambda kernel, q, k, v: kernel(q, k, v, None),
        mesh=mesh, in_specs=(spec, *(by_time,) * 3), out_specs=by_time, check_vma=False,
    )  # fmt: skip

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x[0].transpose(1, 0, 2) for x in (q * cell["dim"] ** -0.5, k, v))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # it queries its device
            return around(made, q, k, v).transpose(1, 0, 2)[None]

    return attend, NamedSharding(mesh, SPLIT)


IMPLEMENTATIONS: dict[str, Callable[[dict[str, Any], list[Any]], Made]] = {
    "gather": attnops("gather"),
    "ring": attnops("ring", "contiguous"),
    "zigzag": attnops("ring", "zigzag"),
    "ulysses": attnops("ulysses"),
    "ulysses_ring": attnops("ulysses_ring"),
    "jit sequence": constrained(SPLIT),
    "jit heads": constrained(PartitionSpec(None, None, "sp")),
    "ejkernel": ejkernel(False),
    "ejkernel window": ejkernel(True),
    "tokamax": tokamax,
}


# -- what is asked -----------------------------------------------------------------------------------------------------


class Program:
    """A cell's compiled program with its operands."""

    def __init__(self, name: str, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.attend, sharding = IMPLEMENTATIONS[name](cell, jax.devices()[:DEVICES])
        *self.qkv, self.cotangent = (jax.device_put(x, sharding) for x in tensors(cell))
        self.compiled = jax.jit(self.both if cell["backward"] else self.attend).lower(*self.qkv).compile()

    def both(self, *qkv: Any) -> Any:
        output, pull = jax.vjp(self.attend, *qkv)
        return output, *pull(self.cotangent)

    def run(self) -> list[Any]:
        return jax.tree.leaves(jax.block_until_ready(self.compiled(*self.qkv)))

    def errors(self, outputs: list[Any], reference: str) -> list[float]:
        """The largest difference over the largest value, for the output and each gradient, on the reference's heads."""
        found = []
        with np.load(reference) as wanted:
            for x, name in zip(outputs, ("output", "query", "key", "value"), strict=False):
                heads = slice(*wanted["kv_heads" if name in ("key", "value") else "heads"])
                got = np.asarray(x)[0, :, heads].astype(np.float64)
                found.append(float(np.abs(got - wanted[name]).max() / np.abs(wanted[name]).max()))
        return found

    def balance(self) -> dict[str, Any]:
        """What each device multiplies in the forward pass, and in the backward pass alone."""
        from parallel_products import balance, executed

        forward = jax.jit(self.attend).lower(*self.qkv).compile()
        _, pull = jax.block_until_ready(jax.jit(lambda *qkv: jax.vjp(self.attend, *qkv))(*self.qkv))
        backward = jax.jit(lambda pull, x: pull(x)).lower(pull, self.cotangent).compile()
        calls = {"forward": (forward, self.qkv), "backward": (backward, (pull, self.cotangent))}
        found = {}
        for which, (program, operands) in calls.items():
            jax.block_until_ready(program(*operands))  # only the next run is counted
            found[which] = balance(executed(lambda p=program, o=operands: p(*o), program.as_text()))
        return found


def described(name: str, cell: dict[str, Any], topology: str) -> tuple[Any, str]:
    """The program compiled for a described TPU: its memory analysis and its text."""
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    attend, sharding = IMPLEMENTATIONS[name](cell, list(devices))
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in tensors(cell)]

    def both(*args: Any) -> Any:
        output, pull = jax.vjp(attend, *args[:3])
        return output, *pull(args[3])

    with ExitStack() as stack:
        if name in ("tokamax", "ejkernel"):
            stack.enter_context(jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh))
        lowered = jax.jit(both).lower(*operands) if cell["backward"] else jax.jit(attend).lower(*operands[:3])
    compiled = lowered.compile()
    return compiled.memory_analysis(), compiled.as_text()


def answer(asked: dict[str, Any], programs: dict[str, Program]) -> dict[str, Any]:
    name = asked.get("name", "")
    if asked["do"] == "setup":
        start = time.perf_counter()
        programs.clear()
        programs[name] = Program(name, asked["cell"])
        if "text" in asked:
            Path(asked["text"]).write_text(programs[name].compiled.as_text())
        temp = programs[name].compiled.memory_analysis().temp_size_in_bytes
        return {"temp": temp, "compile seconds": time.perf_counter() - start}
    if asked["do"] == "first":
        start = time.perf_counter()
        outputs = programs[name].run()
        took = time.perf_counter() - start
        return {"seconds": took, "errors": programs[name].errors(outputs, asked["reference"])}
    if asked["do"] == "time":
        start = time.perf_counter()
        programs[name].run()
        return {"seconds": time.perf_counter() - start}
    if asked["do"] == "balance":
        return Program(name, asked["cell"] | {"unrolled": True}).balance()
    if asked["do"] == "described":
        memory, text = described(name, asked["cell"], asked["topology"])
        Path(asked["text"]).write_text(text)
        return {"temp": memory.temp_size_in_bytes}
    if asked["do"] == "versions":
        return {one: metadata.version(one) for one in PACKAGES if one in sys.modules}
    programs.clear()
    return {}


def main() -> None:
    """Answer requests until stdin ends. An error is an answer too."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # keeps libraries' prints out of the answers
    programs: dict[str, Program] = {}
    for line in sys.stdin:
        try:
            found = answer(json.loads(line), programs)
        except Exception as error:
            lines = [one.strip() for one in str(error).splitlines() if one.strip()]
            found = {"error": f"{type(error).__name__}: {' '.join(lines[:3])}"[:300]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
