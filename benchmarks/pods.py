"""Split sequences on pods that aren't here: what each strategy sends and holds, from programs compiled for described TPUs.

    python benchmarks/pods.py [--only NAME ...] [--json FILE [--resume]]
    python benchmarks/pods.py --report --json FILE [--page benchmarks/pods.md]

Two kinds of cells. `attention`: the attention of Llama-3 70B (64 heads, 8 kv heads, 128 wide) on one sequence of 131072
tokens in bfloat16, causal, with all gradients, at 8, 64 and 256 chips of v5p and v5e. `layer`: the whole decoder layer with
its weights split over all 256 chips, on 16 such sequences, with all gradients. Each cell is compiled in its own
process; nothing runs. Requires libtpu.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

LENGTH, MODEL, HEADS, KV_HEADS, DIM, HIDDEN = 131072, 8192, 64, 8, 128, 28672
LAYER_BATCH = 16
TARGETS = {
    8: {"v5p": "v5p:2x2x2", "v5e": "v5e:2x4"},
    64: {"v5p": "v5p:4x4x4", "v5e": "v5e:8x8"},
    256: {"v5p": "v5p:4x8x8", "v5e": "v5e:16x16"},
}
TWO_AXES = {"query_sequence_axis": ["cp", "sp"], "key_sequence_axis": ["cp", "sp"]}
CELL_SECONDS = 1500
_BEGIN, _END = "<!-- pods -->", "<!-- end of pods -->"


class Way(NamedTuple):
    """A strategy and its mesh, by the number of chips."""

    fields: dict[str, Any]
    inner: int  # size of the last axis; 0 for none
    axis: str = "sp"


_RING = {"sequence_parallel": "ring", "scan_ring_attention": True}
WAYS = {
    "gather": Way({}, 0),
    "ring": Way(_RING, 0),
    "ulysses": Way({"sequence_parallel": "ulysses"}, 0),
    "ulysses_ring": Way(
        {"sequence_parallel": "ulysses_ring", "scan_ring_attention": True, "partition_axis": TWO_AXES}, 8, "cp"
    ),
    "gather, heads over 8": Way({}, 8),
    "ring, heads over 8": Way(_RING, 8),
}


def sizes(way: str, chips: int) -> dict[str, int]:
    """The mesh of a strategy."""
    inner, outer = WAYS[way].inner, WAYS[way].axis
    return {outer: chips // (inner or 1)} | ({("sp" if outer == "cp" else "tp"): inner} if inner else {})


CELLS = [
    *(
        f"attention/{way}/{chips}/{kind}"
        for chips in TARGETS
        for kind in TARGETS[chips]
        for way in WAYS
        if WAYS[way].inner < chips  # otherwise no chips are left to split the sequence over
    ),
    *(f"layer/{way}/256/{kind}" for kind in TARGETS[256] for way in WAYS),
]


def compile_cell(name: str) -> dict[str, Any]:
    """The compiler's figures for a cell."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from attnops import OperationMetadata, OperationRegistry, RefusedError
    from attnops.verify.topology import described_mesh

    kind, way, chips, generation = name.split("/")
    mesh = described_mesh(TARGETS[int(chips)][generation], sizes(way, int(chips)))
    metadata = OperationMetadata(mesh=mesh, tuning="off", fallback="error", **WAYS[way].fields)
    attend = OperationRegistry.create("splash", metadata)
    try:
        return (_attention if kind == "attention" else _layer)(attend, mesh)
    except RefusedError as error:
        return {"refused": str(error)}


def _attention(attend: Any, mesh: Any) -> dict[str, Any]:
    import jax

    from attnops.verify.call import verify_call

    q = jax.ShapeDtypeStruct((1, LENGTH, HEADS, DIM), "bfloat16")
    kv = jax.ShapeDtypeStruct((1, LENGTH, KV_HEADS, DIM), "bfloat16")
    report = verify_call(attend, {"query": q, "key": kv, "value": kv}, "pod")
    if report.plan.implementation is None:
        return {"refused": str(report.plan.rejected[0].reasons[0])}
    found: dict[str, Any] = {"implementation": report.plan.implementation, "passed": report.outcome.accepted}
    for one in report.passes:
        found[one.name] = {
            "failure": None if one.failure is None else one.failure.message,
            "seconds": one.seconds,
            "sent_bytes": {c.kind: 0.0 for c in one.collectives or ()},
            "overlapped": bool(one.collectives) and all(c.overlapped for c in one.collectives or ()),
            "differences": one.differences,
            "temp_bytes": one.temp_bytes,
            "peak_bytes": one.peak_bytes,
        }
        for sent in one.collectives or ():
            found[one.name]["sent_bytes"][sent.kind] += sent.sent_bytes
    return found


def _layer(attend: Any, mesh: Any) -> dict[str, Any]:
    """The gradients of a decoder layer: norms, rotated queries and keys, attention, gated feed-forward."""
    import time

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from attnops.verify.collectives import collectives
    from attnops.verify.compiled import failure

    axes = tuple(mesh.axis_names)
    tokens = tuple(a for a in axes if a != "tp")
    x = jax.ShapeDtypeStruct((LAYER_BATCH, LENGTH, MODEL), jnp.bfloat16)
    placed = NamedSharding(mesh, PartitionSpec(None, tokens, None))
    shapes = {
        "q": (MODEL, HEADS * DIM), "k": (MODEL, KV_HEADS * DIM), "v": (MODEL, KV_HEADS * DIM), "o": (HEADS * DIM, MODEL),
        "gate": (MODEL, HIDDEN), "up": (MODEL, HIDDEN), "down": (HIDDEN, MODEL),
    }  # fmt: skip
    weights = {
        n: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(axes)))
        for n, s in shapes.items()
    }

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    def rotated(x: jax.Array) -> jax.Array:
        rates = 500000.0 ** (-jnp.arange(0, DIM, 2, dtype=jnp.float32) / DIM)
        angle = jnp.outer(jnp.arange(LENGTH, dtype=jnp.float32), rates)[None, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), -1).astype(x.dtype)

    def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        w = {n: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec())) for n, a in w.items()}
        y = norm(x)
        q, k, v = ((y @ w[n]).reshape(*y.shape[:2], -1, DIM) for n in "qkv")
        out = attend(rotated(q), rotated(k), v).attention_outputs
        x = x + out.reshape(*x.shape[:2], -1) @ w["o"]
        y = norm(x)
        x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return jax.lax.with_sharding_constraint(x, placed)

    def step(w: dict[str, jax.Array], x: jax.Array, d: jax.Array) -> Any:
        return jax.vjp(layer, w, x)[1](d)

    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
    start = time.perf_counter()
    try:
        out = {n: a.sharding for n, a in weights.items()}, placed
        compiled = jax.jit(step, out_shardings=out).lower(weights, x, x).compile()
    except jax.errors.JaxRuntimeError as error:
        return {"failure": failure(error)._asdict(), "seconds": time.perf_counter() - start}
    memory = compiled.memory_analysis()
    sent: dict[str, float] = {}
    for one in collectives(compiled.as_text()):
        sent[one.kind] = sent.get(one.kind, 0.0) + one.sent_bytes
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return {
        "failure": None,
        "seconds": time.perf_counter() - start,
        "sent_bytes": sent,
        "temp_bytes": parts[2],
        "peak_bytes": sum(parts) - memory.alias_size_in_bytes,
    }


def measure(name: str) -> dict[str, Any]:
    """Compile a cell in its own process."""
    command = [sys.executable, __file__, "--cell", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CELL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled in {CELL_SECONDS} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    return json.loads(line) if line else {"error": (done.stderr.strip().splitlines() or ["no word"])[-1][:500]}


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f}" if count < 10240 * 2**20 else f"{count / 2**30:.1f}k"


def report(found: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    cells = found["cells"]
    lines = [
        f"libtpu {found['libtpu']}, jax {found['jax']}. Attention alone, in MiB per device: sent in the forward pass, sent in "
        "both passes, temporary memory of both passes.",
        "",
        "| Chips | Strategy | Mesh | v5p: sent | both | temporary | v5e: sent | both | temporary |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for chips in TARGETS:
        for way in (way for way in WAYS if WAYS[way].inner < chips):
            row = [str(chips), way, ",".join(f"{n}={s}" for n, s in sizes(way, chips).items())]
            for kind in TARGETS[chips]:
                row += _attention_columns(cells.get(f"attention/{way}/{chips}/{kind}"))
            lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        f"The decoder layer on {LAYER_BATCH} sequences of {LENGTH} tokens, with all gradients, on 256 chips: peak GiB per "
        "device.",
        "",
        "| Strategy | Mesh | v5p | v5e |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        row = [way, ",".join(f"{n}={s}" for n, s in sizes(way, 256).items())]
        row += [_layer_column(cells.get(f"layer/{way}/256/{kind}")) for kind in TARGETS[256]]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _attention_columns(cell: dict[str, Any] | None) -> list[str]:
    if cell is None:
        return ["not compiled"] * 3
    if "refused" in cell:
        return ["refused"] * 3
    if "error" in cell:
        return [cell["error"]] * 3
    forward, both = cell["forward"], cell["forward and backward"]
    failed = next((one["failure"] for one in (forward, both) if one["failure"]), None)
    if failed:
        return [failed] * 3
    return [
        _mib(sum(forward["sent_bytes"].values())),
        _mib(sum(both["sent_bytes"].values())),
        _mib(both["temp_bytes"]),
    ]


def _layer_column(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not compiled"
    if "error" in cell or "refused" in cell:
        return cell.get("error") or "refused"
    if cell["failure"]:
        needed, have = cell["failure"]["needed"], cell["failure"]["available"]
        return f"doesn't fit: {needed / 2**30:.1f} of {have / 2**30:.1f}" if needed else cell["failure"]["message"]
    return f"{cell['peak_bytes'] / 2**30:.1f}"


def main() -> None:
    """Compile the requested cells, one after another, and print the tables."""
    from compiled_cells import arguments, run_cells

    parser = arguments(__doc__)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(compile_cell(options.cell)))
        return
    run_cells(options, CELLS, measure, report, (_BEGIN, _END))


if __name__ == "__main__":
    main()
