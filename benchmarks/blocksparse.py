"""Block masks: time against visited tiles, and against dense attention; what the kernels visit; how long planning takes.

    python benchmarks/blocksparse.py [--lengths 8192 16384 32768] [--rounds 5] [--json FILE]

Layouts are random, with a block on each row's diagonal, in blocks of 128; 4 heads of 64, batch 1, float32, on this machine's
CPU. One array is query, key and value, so a gradient includes the sum of three. In a row of the table the implementations run
in turns and the median counts. `a tile` is the time of a visited tile divided by that of one with a layout of nearly all
blocks, in the same tiles: 1 if time follows the number of tiles. jax.nn gets the mask as an array, and is measured up to 8192
tokens. Visited tiles of the TPU's and the GPU's kernels are counted from the lists that they read, relative to the live tiles
of the layout. A gradient of more than 16384 tokens has two rounds. ejkernel's block-sparse attention, which EasyDeL's calls, is
measured if it is installed: on XLA it reads no layout, so it gets the mask as an array too. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from attnops import Blocks, Causal, Mask, OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.operators.flash.kernel.tile_schedule import tile_schedule as flash_schedule
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.splash.kernel.schedule import tile_schedule

BLOCK, HEADS, DIM = 128, 4, 64
DENSITIES = (0.05, 0.1, 0.25, 0.5)
RIVALS = ("jax.nn with the array", "ejkernel with the array")
LONG = 16384  # tokens; a round of a gradient of more takes minutes
MOST_WHOLE = 8192  # the most tokens for implementations that hold whole logits


def layout_of(length: int, density: float) -> np.ndarray:
    """Random blocks with this density, including the diagonal."""
    count = length // BLOCK
    seen = np.random.default_rng(0).random((count, count)) < density - 1 / count
    return seen | np.eye(count, dtype=bool)


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, repeat: bool = False) -> dict[str, float]:
    """Median seconds of each, run in turns, after one run of each that doesn't count.

    repeat: each turn is two runs, of which the second counts. Implementations that hold gigabytes make the next run slow.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            if repeat and number:
                jax.block_until_ready(call())
            start = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def on_this_machine(length: int, rounds: int, backward: bool) -> list[dict[str, Any]]:
    """A row for each density."""
    attend = OperationRegistry.create("blocksparse", OperationMetadata(causal=False, tuning="off"))
    x = jax.random.normal(jax.random.key(0), (1, length, HEADS, DIM))

    def run(attention: Callable[[Any], Any]) -> Callable[[], Any]:
        loss = lambda q: (attention(q) ** 2).sum()  # noqa: E731
        made = jax.jit(jax.grad(loss) if backward else attention)
        return lambda: made(x)

    def masked(mask: Mask, q: jax.Array) -> jax.Array:
        return attend(q, q, q, mask=mask).attention_outputs

    layouts = {density: layout_of(length, density) for density in (*DENSITIES, 1.0)}
    ways = {
        f"{density}": run(functools.partial(masked, Blocks(layout, BLOCK, BLOCK)))
        for density, layout in layouts.items()
    }
    ways["dense"] = run(lambda q: attend(q, q, q).attention_outputs)
    times = interleaved(ways, rounds)
    others: dict[str, float] = {}
    if length <= MOST_WHOLE:
        array = jnp.asarray(layouts[0.1].repeat(BLOCK, 0).repeat(BLOCK, 1))[None, None]
        whole_logits = {"0.1": ways["0.1"]}
        for name, attention in rivals(array).items():
            check(attention, functools.partial(masked, Blocks(layouts[0.1], BLOCK, BLOCK)), x)
            whole_logits[name] = run(attention)
        others = interleaved(whole_logits, rounds, repeat=True)
    whole = times["1.0"] / int(layouts[1.0].sum())
    rows = []
    for density in DENSITIES:
        taken, tiles = times[f"{density}"], int(layouts[density].sum())
        row = {
            "length": length,
            "pass": "gradient" if backward else "forward",
            "density": tiles / layouts[density].size,
        }
        row |= {"seconds": taken, "a tile": taken / tiles / whole, "of dense": taken / times["dense"]}
        if density == 0.1:
            row |= {f"of {name}": others["0.1"] / others[name] for name in RIVALS if name in others}
        rows.append(row)
    return rows


def rivals(array: jax.Array) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Implementations that take this layout, as an array."""
    found = {RIVALS[0]: lambda q: jax.nn.dot_product_attention(q, q, q, mask=array)}
    if importlib.util.find_spec("ejkernel"):
        from ejkernel.modules.operations import blocksparse_attention

        def ejkernel(q: jax.Array) -> jax.Array:
            by_head = q.swapaxes(1, 2)
            made = blocksparse_attention(by_head, by_head, by_head, attention_mask=array, causal=False, platform="xla")
            return made.swapaxes(1, 2)

        found[RIVALS[1]] = ejkernel
    return found


def check(attention: Callable[[jax.Array], jax.Array], ours: Callable[[jax.Array], jax.Array], x: jax.Array) -> None:
    """Stop if a rival computes something else."""
    error = float(jnp.abs(jax.jit(attention)(x) - jax.jit(ours)(x)).max())
    if not error < 1e-4:
        raise SystemExit(f"a rival is off by {error:.1e}: the layout isn't what it reads")


def visited(length: int, density: float) -> dict[str, Any]:
    """Visits in the kernels' lists per live tile, for tiles that are blocks of the mask."""
    layout = layout_of(length, density)
    local = LocalMask(Blocks(layout, BLOCK, BLOCK), 0, length, length, None)
    live, found = int(layout.sum()), {}
    for slow in ("q", "kv"):
        table = np.asarray(flash_schedule(local, BLOCK, BLOCK, slow).table)
        found[f"gpu by {slow}"] = float(table[..., 1].sum() / live)
        found[f"tpu by {slow}"] = tile_schedule(local, BLOCK, BLOCK, slow).length / live
    return {"length": length, "density": live / layout.size, **found}


def planning() -> dict[str, float]:
    """Milliseconds of a new plan for 131072 tokens, causal and a layout of density 0.1, in blocks of 128 and 512, by platform."""
    kinds = {"tpu": "TPU v5 lite", "gpu": "NVIDIA H100 80GB HBM3"}
    meshes: dict[str, Any] = {"cpu": None} | {
        name: AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, name))
        for name, kind in kinds.items()
    }
    x = jax.ShapeDtypeStruct((1, 131072, 8, 128), jnp.bfloat16)
    found = {}
    for name, mesh in meshes.items():
        for block in (128, 512):
            count = 131072 // block
            mask = Causal() & Blocks(np.random.default_rng(1).random((count, count)) < 0.1, block, block)
            times = []
            for number in range(6):
                metadata = OperationMetadata(mesh=mesh, softmax_scale=1 + number / 1e3, tuning="off")
                start = time.perf_counter()
                OperationRegistry.create("blocksparse", metadata).plan(x, x, x, mask=mask)
                times.append(1e3 * (time.perf_counter() - start))
            found[f"{name}, blocks of {block}"] = statistics.median(times[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "jax": jax.__version__,
        "left out": [] if importlib.util.find_spec("ejkernel") else ["ejkernel: not installed"],
        "plan_ms": planning(),
        "visits a live tile": [visited(n, d) for n in arguments.lengths for d in (0.05, 0.5)],
        "cpu": [],
    }
    print(json.dumps(figures, indent=1))
    for length in arguments.lengths:
        for backward in (False, True):
            rounds = min(2, arguments.rounds) if backward and length > LONG else arguments.rounds
            for row in on_this_machine(length, rounds, backward):
                figures["cpu"].append(row)
                print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
