"""What variants of attnops' splash kernels cost in static cycles, on a machine without a TPU.

    python benchmarks/tpu_variants.py [--json FILE] [--report]

Of a tile: block sizes of the forward pass on v5e; plain tiles against transposed and pipelined ones on v6e and tpu7x; int8 and
fp8 keys and values; the products of the fused backward pass; units on v4. Sizes that a cell doesn't declare are those planned
without a mask. Each kernel is compiled for a causal mask, in bfloat16. What counts is the path for tiles without a mask, or that
for those on the diagonal, in cycles for 1024 x 1024 weights, and never less than what the matrix units need for its products at
their published peak.

Of a whole forward pass: units under a window, and heads of a group that share a tile.

What FILE has cycles of isn't compiled again. Requires libtpu.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tpu_static
from jax.sharding import AbstractMesh

from attnops import Causal, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.compat import abstract_device
from attnops.verify.clock_worker import ClockWorker
from attnops.verify.generations import abstract_target
from attnops.verify.local_call import LocalProblem
from attnops.verify.static_clock import kernels_in, regions, tile_cycles
from attnops.verify.tile_counts import kernel_cycles, matrix_cycles

LENGTH = 4096
WIDE_TARGETS = {"v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TARGETS = {"v5e": "v5e:2x2", **WIDE_TARGETS}
DTYPES = ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
PLAIN = {"block_q": 1024, "block_kv": 1024, "transposed_tiles": False, "products_ahead": 0}
SIZES = ("block_q", "block_kv", "block_q_compute", "block_kv_compute", "block_kv_compute_in")
V5E_BLOCKS = (
    (1024, 1024, 1024), (1024, 1024, 512), (1024, 512, 1024), (1024, 512, 512), (512, 512, 512), (2048, 512, 512),
)  # fmt: skip


class Variant(NamedTuple):
    """A cell: its table, row and column, and what is declared."""

    table: str
    row: str
    column: str
    target: str
    dim: int
    fields: dict[str, Any]
    backward: bool = False
    kv_dtype: str | None = None
    path: int = 0  # of the tile; 1: on the diagonal


class Call(NamedTuple):
    """A cell of a whole forward pass, batch 1."""

    table: str
    row: str
    column: str
    target: str
    mask: Mask
    lengths: tuple[int, int]  # queries, keys
    heads: tuple[int, int]  # of queries, of keys
    fields: dict[str, Any]


def name_of(cell: Variant | Call) -> str:
    """A cell's name in the file."""
    return f"{cell.table}; {cell.row}; {cell.column}"


def calls() -> list[Call]:
    """All cells of a whole pass, at head dimension 128. Large pipelined units have three products ahead, small ones the planned
    number.
    """
    found = []
    window = Causal() & SlidingWindow(1023)
    for chip, large in (("v5e", (512, 512)), ("v6e", (256, 512)), ("tpu7x", (256, 512))):
        ahead = 0 if chip == "v5e" else 3
        for unit in (large, (256, 256)):
            sizes: dict[str, Any] = {"block_q_compute": unit[0], "block_kv_compute": unit[1]}
            fields = sizes | ({"products_ahead": ahead} if unit == large else {})
            column = "large units" if unit == large else "256 x 256"
            found.append(Call("window of 1024", chip, column, TARGETS[chip], window, (8192, 8192), (1, 1), fields))
    for chip, target in TARGETS.items():
        for heads in (1, 4):
            fields = {"heads_per_tile": heads}
            row = Call("heads_per_tile", chip, str(heads), target, Full(), (128, 8192), (4, 1), fields)
            found.append(row)
    return found


def variants() -> list[Variant]:
    """All cells of a tile, table by table."""
    found = []
    for block, q_unit, kv_unit in V5E_BLOCKS:
        sizes = dict(zip(SIZES, (block, block, q_unit, kv_unit, kv_unit), strict=True))
        row = f"block_q {block}, block_q_compute {q_unit}, block_kv_compute {kv_unit}"
        found.append(Variant("v5e forward", row, "cycles", "v5e:2x2", 128, sizes))
    for dim in tpu_static.DIMS:
        for chip, target in WIDE_TARGETS.items():
            for column, fields in (
                ("plain", PLAIN),
                ("planned", {}),
                ("2048 keys", {"block_kv": 2048}),
                ("1024 queries", {"block_q": 1024, "block_kv": 1024}),
            ):
                found.append(Variant("transposed", f"head dim {dim}", f"{chip} {column}", target, dim, fields))
    for chip, target in TARGETS.items():
        for dtype in DTYPES:
            quantised = None if dtype == "bfloat16" else dtype
            found.append(Variant("quantised", chip, dtype, target, 128, {}, kv_dtype=quantised))
    for chip, target in TARGETS.items():
        for dim in tpu_static.DIMS:
            large = {"block_q_dkv_compute": 512, "block_kv_dkv_compute": 512, "products_ahead_dkv": 0}
            unfilled = large | {"stationary_weights": False}
            for column, fields in (
                ("plain", unfilled),
                ("stationary_weights", unfilled | {"stationary_weights": True}),
                ("planned", {}),
            ):
                found.append(Variant("fused backward", f"{chip}, head dim {dim}", column, target, dim, fields, True))
    for unit in (512, 256):
        sizes = {"block_q": 1024, "block_kv": 1024, "block_q_compute": unit, "block_kv_compute": unit}
        for path, row in enumerate(("without a mask", "on the diagonal")):
            found.append(Variant("v4 forward", row, f"{unit} x {unit}", "v4:2x2x1", 128, sizes, path=path))
    return found


def cycles_of(cell: Variant | Call) -> int | str:
    """A cell's cycles, or why there are none."""
    return cycles_of_pass(cell) if isinstance(cell, Call) else cycles_of_tile(cell)


def cycles_of_pass(call: Call) -> int | str:
    """Cycles of a whole forward pass in mode prefill."""
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(abstract_target(call.target)[0], 1, "tpu"))
    metadata = OperationMetadata(mesh=mesh, operation_configs={"splash": call.fields}, fallback="error", tuning="off")
    (q_len, kv_len), (q_heads, kv_heads) = call.lengths, call.heads
    query, key = (
        jax.ShapeDtypeStruct((1, *shape, 128), jnp.bfloat16) for shape in ((q_len, q_heads), (kv_len, kv_heads))
    )
    plan = OperationRegistry.create("splash", metadata).plan(query, key, key, mask=call.mask, mode="prefill")
    kernel = "attnops_splash_forward"
    worker = ClockWorker(kernel)
    try:
        local = LocalProblem.of(plan.problem, plan.placement)
        made = worker.ask(plan.problem.device_kind, local, "forward", call.fields)
    finally:
        worker.close()
    if made.cycles is None:
        return made.failure or "no cycles"
    return kernel_cycles(plan.problem, plan.placement, plan.config, *plan.runs.passes(plan.config, False), made.cycles)


def cycles_of_tile(variant: Variant) -> int | str:
    """Cycles for 1024 x 1024 weights, or why there are none."""
    config = tpu_static.planned(variant.target, variant.dim, LENGTH, "full", json.dumps(variant.fields))
    case = tpu_static.case_of(config)
    backward = variant.backward
    name = "attnops_splash_backward" if backward else "attnops_splash_forward"
    more: dict[str, Any] = {} if backward else {"forward_only": True}
    if variant.kv_dtype is not None:
        more["kv_dtype"] = variant.kv_dtype
    with tempfile.TemporaryDirectory() as out:
        made = tpu_static.work_of(
            sys.executable, kernel="attnops", target=variant.target, dim=variant.dim, length=LENGTH, mask="causal", out=out,
            hlo=f"{name}.1", **case, **more,
        )  # fmt: skip
        if isinstance(made, str):
            return made
        cycles = tile_cycles(regions(*(path.read_text() for path in kernels_in(Path(out))[name])))
    suffix = "_dkv" if backward else ""
    block = getattr(config, f"block_q{suffix}"), getattr(config, f"block_kv{suffix}")
    products = "backward" if backward else "forward"
    kind = abstract_target(variant.target)[0]
    least = matrix_cycles(kind, products, *block, variant.dim, variant.dim) if variant.path == 0 else 0
    return round(max(cycles.tiles[variant.path], least) * 2**20 / (block[0] * block[1]))


def show(cells: dict[str, int | str]) -> None:
    """The tables, one line for each row."""
    wanted = [*variants(), *calls()]
    for table in dict.fromkeys(one.table for one in wanted):
        rows = [one for one in wanted if one.table == table]
        columns = list(dict.fromkeys(one.column for one in rows))
        print(f"\n{table}: {', '.join(columns)}")
        for row in dict.fromkeys(one.row for one in rows):
            found = [cells.get(f"{table}; {row}; {column}", "-") for column in columns]
            print(f"  {row}: {', '.join(map(str, found))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the cycles, or with --report read them")
    parser.add_argument("--report", action="store_true", help="compile nothing")
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"versions": versions}
    cells: dict[str, int | str] = known.get("cycles", {})
    if not options.report:
        if known["versions"] != versions:
            parser.error(f"{options.json} was made with {known['versions']}, here are {versions}; use another file")
        missing = [one for one in (*variants(), *calls()) if not isinstance(cells.get(name_of(one)), int)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # nothing here is timed
            for one, cycles in zip(missing, pool.map(cycles_of, missing), strict=True):
                cells[name_of(one)] = cycles
                print(name_of(one), cycles, file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"versions": versions, "cycles": cells}, indent=1) + "\n")
    show(cells)


if __name__ == "__main__":
    main()
