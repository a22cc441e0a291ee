"""What attention adds to lowering and compiling a model: text, functions, seconds, host memory; compared with jax.nn's.

    python benchmarks/lowering.py [--layers 32] [--compiled 8] [--rounds 5] [--length 1024] [--masks] [--json FILE]

Layers with projections, forward and backward, are lowered with jax.nn.dot_product_attention, with one operation for all,
with an operation made in each layer, and with an Attention made in each layer; a smaller number of them is compiled. They run
in turns, with all of jax's caches cleared before each; medians. --masks lowers long masks, each in its own process, and
reports the memory that this added to the process. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from attnops import Attention, Causal, Chunked, Mask, OperationMetadata, OperationRegistry, Prefix, SlidingWindow

BATCH, HEADS, KV_HEADS, DIM = 2, 8, 4, 64
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(left=127),
    "chunked": Causal() & Chunked(100),
    "prefix_or_causal": Prefix(64) | Causal(),
}
ROUTES = ("jax.nn", "sdpa", "vanilla", "vanilla/plain", "vanilla/blockwise", "vanilla/decode")
LENGTHS = (4096, 16384)


def attends(dtype: str) -> dict[str, Callable[[], Attend]]:
    """What makes each layer's attention: called once per layer."""
    metadata = {"runtime_dtype": dtype}
    shared = OperationRegistry.create("vanilla", OperationMetadata(**metadata))

    def of(attend: Any) -> Attend:
        return lambda q, k, v: attend(q, k, v, mask=Causal()).attention_outputs

    return {
        "jax.nn": lambda: lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        "shared operation": lambda: of(shared),
        "operation a layer": lambda: of(OperationRegistry.create("vanilla", OperationMetadata(**metadata))),
        "Attention a layer": lambda: of(Attention({"operation": "vanilla", "metadata": metadata})),
    }


def model(make: Callable[[], Attend], layers: int, length: int, dtype: str) -> tuple[Any, tuple[Any, Any]]:
    """(a jitted gradient of a model of this many layers, the shapes of its arguments)."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for layer in weights:
            q, k, v = (jnp.einsum("btd,dhe->bthe", x, layer[name]) for name in "qkv")
            x = x + jnp.einsum("bthe,hed->btd", make()(q, k, v), layer["o"])
        return x.astype(jnp.float32).sum()

    width = HEADS * DIM
    shapes = {
        "q": (width, HEADS, DIM),
        "k": (width, KV_HEADS, DIM),
        "v": (width, KV_HEADS, DIM),
        "o": (HEADS, DIM, width),
    }
    layer = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return jax.jit(jax.grad(loss)), ([layer] * layers, jax.ShapeDtypeStruct((BATCH, length, width), dtype))


def models(layers: int, length: int, dtype: str, rounds: int, *, compiled: bool) -> dict[str, dict[str, float]]:
    """Text, functions and seconds of each, and their ratios to jax.nn's."""
    seconds: dict[str, list[float]] = {}
    found: dict[str, dict[str, float]] = {}
    for round_ in range(rounds + 1):
        for name, make in attends(dtype).items():
            jax.clear_caches()
            program, arguments = model(make, layers, length, dtype)
            start = time.perf_counter()
            lowered = program.lower(*arguments)
            if compiled:
                start = time.perf_counter()
                lowered.compile()
            taken = time.perf_counter() - start
            if round_ == 0:  # the first of each also imports, and warms caches that clear_caches leaves
                text = lowered.as_text()
                found[name] = {"text_bytes": len(text), "functions": text.count("func.func")}
            else:
                seconds.setdefault(name, []).append(taken)
    for name, figures in found.items():
        figures["seconds"] = statistics.median(seconds[name])
    base = found["jax.nn"]
    for figures in found.values():
        figures |= {f"{key}_ratio": figures[key] / base[key] for key in ("text_bytes", "seconds")}
    return found


def of_mask(route: str, mask: str, length: int, gradient: bool) -> dict[str, float]:
    """Text and MiB of memory that lowering one call adds to this process."""
    operation, _, path = route.partition("/")
    if operation == "jax.nn":
        attend: Attend = attends("float32")["jax.nn"]()
    else:
        configs = {operation: {"path": path}} if path else {}
        made = OperationRegistry.create(operation, OperationMetadata(operation_configs=configs))
        attend = lambda q, k, v: made(q, k, v, mask=MASKS[mask]).attention_outputs  # noqa: E731
    program = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)) if gradient else attend
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
    small = jax.ShapeDtypeStruct((1, 16, 1, 64), jnp.float32)
    jax.jit(program).lower(small, small, small)  # keeps imports out of the measurement
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lowered = jax.jit(program).lower(x, x, x)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"text_bytes": len(lowered.as_text()), "host_mib": (after - before) / 1024}


def masks() -> dict[str, dict[str, float]]:
    """`of_mask` for every route, mask and length, each in its own process. jax.nn's only mask without an array is causal."""
    found = {}
    for route in ROUTES:
        for mask in MASKS if route != "jax.nn" else ["causal"]:
            for length in LENGTHS:
                for gradient in (False, True):
                    key = f"{route} {mask} {length} {'gradient' if gradient else 'forward'}"
                    command = [sys.executable, __file__, "--one", route, mask, str(length), str(int(gradient))]
                    out = subprocess.run(command, capture_output=True, text=True, check=True)
                    found[key] = json.loads(out.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="how many layers to lower")
    parser.add_argument("--compiled", type=int, default=8, help="how many layers to compile; 0 for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--masks", action="store_true", help="also lower long masks, each in its own process")
    parser.add_argument("--one", nargs=4, metavar=("ROUTE", "MASK", "LENGTH", "GRADIENT"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.one:
        route, mask, length, gradient = arguments.one
        print(json.dumps(of_mask(route, mask, int(length), gradient == "1")))
        return
    shape = arguments.length, arguments.dtype, arguments.rounds
    figures: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "call": f"bthd [{BATCH}, {arguments.length}, {HEADS} / {KV_HEADS}, {DIM}] {arguments.dtype}, causal, gradient",
        f"lowering {arguments.layers} layers": models(arguments.layers, *shape, compiled=False),
    }
    if arguments.compiled:
        figures[f"compiling {arguments.compiled} layers"] = models(arguments.compiled, *shape, compiled=True)
    if arguments.masks:
        figures["masks"] = masks()
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
