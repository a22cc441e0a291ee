"""Splash kernels by static cycles: attnops', JAX's and tokamax's through the same TPU compiler, on a machine without a TPU.

    python benchmarks/tpu_static.py [--python tokamax=/path/to/python] [--json FILE] [--report]

What FILE already has isn't compiled again.

Each kernel is compiled with several block sizes for v5e, v6e and tpu7x at head dims 64, 128 and 256 in bfloat16; attnops' and
tokamax's also with transposed keys and the compiler's other scheduler, which tokamax's tuning often finds best, and attnops'
with what it plans if nothing is declared or, where tiles are pipelined, in the widest blocks. The cycles of a tile are read from
the compiler's final schedule (attnops.verify.static_clock); a tile costs no less than the matrix units need for its products at
their published peak. attnops' kernels are compiled for a causal mask and for a window, because their code paths for a tile
depend on the mask; the others for a causal mask. All have a path for tiles without a mask then, which counts where there is
none. The cost of a pass is that of its live tiles, the starts and ends of its sums, its steps, and its work once per head
(attnops' fused backward pass clears and writes the sums of its keys); each kernel's best block sizes count. Not counted, for
any of them: waits for memory, and XLA's work around the kernels (scaling the query, the sum over output and its gradient; for
tokamax's fused backward pass the sum over the partial gradients of the query, which attnops' keeps in VMEM).

MXU: the useful operations of a tile without a mask over those that the matrix units could do in its cycles. Temp: what forward
and backward need in HBM besides arguments and results for eight heads of 32768 tokens, causal, with the first block sizes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from attnops import Causal, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.compat import abstract_device
from attnops.operators.splash.candidates import BACKWARD as BACKWARD_FIELDS
from attnops.operators.splash.candidates import FORWARD
from attnops.operators.splash.kernel.variants import WHOLE
from attnops.verify import tile_counts
from attnops.verify.generations import abstract_target, products_a_cycle
from attnops.verify.static_clock import TileCycles, kernels_in, regions, tile_cycles
from attnops.verify.tile_counts import matrix_cycles, tiles_of

HERE = Path(__file__).parent
TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
DIMS = (64, 128, 256)
LENGTHS = (4096, 8192, 32768)
MASKS: dict[str, Mask] = {"full": Full(), "causal": Causal(0), "window": Causal(0) & SlidingWindow(1023, 0, offset=0)}
BLOCKS = ((1024, 1024, 512), (1024, 1024, 1024), (512, 512, 512))
WIDE = (2048, 2048, 512)
# Plans have half of the keys, or of both, where such a tile takes long to compile.
WIDEST = '{"block_q": 2048, "block_kv": 2048, "block_q_dkv": 1024, "block_kv_dkv": 2048}'
BACKWARD = {"block_q_dkv": 1024, "block_kv_dkv": 1024, "block_kv_dkv_compute": 512}
TURNED = {  # keys transposed, and the LP scheduler
    "attnops": {"k_layout": "seq_minor", "use_experimental_scheduler": True},
    "tokamax": {"k_layout": 2, "use_experimental_scheduler": True},
}
LARGE = {"length": 32768, "heads": 8}  # the call whose HBM bytes are measured
_THEIRS = ("splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals")
NAMES = {  # of the kernels, by owner and whether the backward pass is fused
    ("attnops", True): ("attnops_splash_forward", "attnops_splash_backward"),
    ("attnops", False): ("attnops_splash_forward", "attnops_splash_dkv", "attnops_splash_dq"),
    ("jax", True): _THEIRS,
    ("jax", False): (*_THEIRS, "splash_mha_dq_no_residuals"),
    ("tokamax", True): _THEIRS,
}
COMPILED_LENGTH = 4096  # the schedule doesn't depend on it


def work_of(python: str, **case: Any) -> int | str:
    """Compile a case: the bytes needed besides arguments and results, or why it can't be compiled."""
    command = [python, str(HERE / "tpu_static_worker.py"), json.dumps(case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "not compiled in 300 s"
    return int(done.stdout) if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no word"])[-1][:300]


def cycles_of(python: str, **case: Any) -> dict[str, TileCycles] | str:
    """The cycles of each kernel of a case, by its name, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        made = work_of(python, **case, out=folder, length=COMPILED_LENGTH)
        if isinstance(made, str):
            return made
        dumped = kernels_in(Path(folder))
        found = {}
        for name in NAMES[case["kernel"], case["fused"]]:
            cycles = tile_cycles(regions(*(path.read_text() for path in dumped[name])))
            found[name] = cycles if case["kernel"] == "attnops" else cycles.cheapest_first()
        return found


def measure(pythons: dict[str, str], kernels: list[str], known: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A row for each kernel, target, head dim, block sizes and kind of backward pass; and one for the bytes in HBM."""
    rows: list[dict[str, Any]] = []
    temps: list[dict[str, Any]] = []
    made = {_key(row): row for part in ("rows", "temps") for row in known.get(part, [])}
    for target, dim, kernel in itertools.product(TARGETS, DIMS, kernels):
        same = {"kernel": kernel, "target": target, "dim": dim}
        cases: list[dict[str, Any]] = [{"blocks": blocks, "fused": kernel != "jax"} for blocks in BLOCKS]
        cases += [{"blocks": BLOCKS[0], "fused": True, "fields": TURNED[kernel]}] if kernel in TURNED else []
        # The other kind of backward pass.
        cases += [{"blocks": BLOCKS[0], "fused": kernel == "jax"}] if kernel != "tokamax" else []
        apart = {"block_q_dq": 1024, "block_kv_dq": 512} if kernel == "jax" else {}
        cases += [{"blocks": WIDE, "fused": kernel != "jax", "fields": BACKWARD | apart}]
        for mask in ("causal", "window") if kernel == "attnops" else ("causal",):
            here = [*cases, *(undeclared(target, dim, mask) if kernel == "attnops" else [])]
            rows += [same | case | {"mask": mask} for case in here]
        temps.append(same | {"blocks": BLOCKS[0], "fused": kernel != "jax"} | LARGE)

    def row(case: dict[str, Any], measured: Any, what: str) -> dict[str, Any]:
        if _key(case) in made:
            return made[_key(case)]
        done = case | {what: measured(pythons.get(case["kernel"], sys.executable), **case)}
        print(json.dumps(done), file=sys.stderr, flush=True)
        return done

    with ThreadPoolExecutor(os.cpu_count()) as pool, tempfile.TemporaryDirectory() as out:  # nothing here is timed
        large = functools.partial(work_of, out=out, hlo="none")
        return {
            "rows": list(pool.map(lambda case: row(case, cycles_of, "cycles"), rows)),
            "temps": list(pool.map(lambda case: row(case, large, "temp"), temps)),
        }


def undeclared(target: str, dim: int, compiled: str) -> list[dict[str, Any]]:
    """What attnops plans if nothing is declared, or wide blocks where tiles are pipelined, for any of the lengths and of the
    masks that this one is compiled for.
    """
    found: dict[str, dict[str, Any]] = {}
    for length, mask in itertools.product(LENGTHS, (name for name in MASKS if _compiled_for(name) == compiled)):
        case = case_of(planned(target, dim, length, mask, "{}"))
        found.setdefault(json.dumps(case), case)
        if case["fields"]["transposed_tiles"]:
            case = case_of(planned(target, dim, length, mask, WIDEST))
            found.setdefault(json.dumps(case), case)
    return list(found.values())


def case_of(config: Any) -> dict[str, Any]:
    """A case with all sizes of a resolved config."""
    fields = {name: getattr(config, name) for name in (*FORWARD, *BACKWARD_FIELDS)}
    fields = {name: value for name, value in fields.items() if value is not None}
    blocks = [fields[name] for name in ("block_q", "block_kv", "block_kv_compute")]
    return {"blocks": blocks, "fused": config.use_fused_bwd_kernel, "fields": fields}


def _compiled_for(mask: str) -> str:
    """The mask whose kernel gives attnops' cycles for a mask: a causal one has a path for tiles without a mask."""
    return "causal" if mask == "full" else mask


def _key(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in ("cycles", "temp")}, sort_keys=True)


class Kernel(NamedTuple):
    """A kernel's cycles, the least that a tile's products take, and its blocks and units.

    `slow` is the axis of the sums that it starts and ends. In kernels without units, a unit is the whole tile.
    """

    cycles: TileCycles
    least: int
    block: tuple[int, int]
    unit: tuple[int, int]
    slow: str


def passes(row: dict[str, Any]) -> dict[str, list[Kernel]]:
    """'forward' and 'backward' -> their kernels."""
    kind, dim = abstract_target(row["target"])[0], row["dim"]
    found: dict[str, list[Kernel]] = {"forward": [], "backward": []}
    for name, (tiles, *rest) in row["cycles"].items():
        which = "forward" if "forward" in name or "fwd" in name else "backward"
        products = which if which == "forward" or row["fused"] else "dq" if "dq" in name else "dkv"
        block, unit = sizes_of(row, products)
        least = matrix_cycles(kind, products, *block, dim, dim)
        by_kv = "dkv" in name  # theirs, fused or not
        found[which].append(Kernel(TileCycles(tuple(tiles), *rest), least, block, unit, "kv" if by_kv else "q"))
    return found


def sizes_of(row: dict[str, Any], products: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(blocks, units) of queries and keys of a row's kernel."""
    block_q, block_kv, compute = row["blocks"]
    fields = row.get("fields", {})
    if row["kernel"] == "attnops":
        config = planned(row["target"], row["dim"], COMPILED_LENGTH, row["mask"], json.dumps(declared(row)))
        names = {
            "forward": ("block_q", "block_kv", "block_q_compute", "block_kv_compute"),
            "dq": ("block_q_dq", "block_kv_dq", "block_q_dq", "block_kv_dq_compute"),
        }.get(products, ("block_q_dkv", "block_kv_dkv", "block_q_dkv_compute", "block_kv_dkv_compute"))
        a, b, c, d = (getattr(config, name) for name in names)
        return (a, b), (c, d)
    if products != "forward":
        block_q, block_kv = fields.get("block_q_dkv", block_q), fields.get("block_kv_dkv", block_kv)
    block = (block_q, compute) if products == "dq" else (block_q, block_kv)
    return block, block


def cost(kernels: list[Kernel], row: dict[str, Any], mask: Mask, length: int, parts: int = 1, turns: int = 0) -> int:
    """Cycles per head; `parts` of the keys, each of which goes over all queries, with so many turns of their loops."""
    total = 0
    for kernel in kernels:
        bodies, counts, blocks = tiles_of(mask, kernel.block, kernel.unit, length, length, 0, kernel.slow)
        cycles = kernel.cycles
        if row["kernel"] == "attnops":
            # The kernel is compiled for this mask, or for one whose bodies include this one's.
            of_mask = tiles_of(MASKS[row["mask"]], kernel.block, kernel.unit, COMPILED_LENGTH, COMPILED_LENGTH, 0)[0]
            cycles = cycles._replace(tiles=tuple(cycles.tiles[of_mask.index(body)] for body in bodies))
            least = [math.ceil(kernel.least * body.computed) for body in bodies]
        else:
            # Without a mask, with one; tiles of a single kind use the first path.
            counts = [
                sum(n for body, n in zip(bodies, counts, strict=True) if (body == WHOLE) == whole) for whole in (1, 0)
            ]
            least = [kernel.least] * 2
        total += cycles.at_least(least).total(counts, parts * blocks, parts, turns if kernel.slow == "q" else 0)
    return total


def declared(row: dict[str, Any]) -> dict[str, Any]:
    """The config of attnops' kernels in a row."""
    block_q, block_kv, compute = row["blocks"]
    blocks = {
        "block_q": block_q, "block_kv": block_kv, "block_kv_compute": compute, "block_q_dkv": block_q,
        "block_kv_dkv": block_kv, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": row["fused"],
    }  # fmt: skip
    apart = {} if row["fused"] else {"block_q_dq": block_q, "block_kv_dq": compute}
    return blocks | apart | row.get("fields", {})


def key_parts(row: dict[str, Any], length: int) -> tuple[int, int]:
    """How many parts attnops' fused backward pass splits the keys into, as planned; and how often its loops over them turn."""
    if row["kernel"] != "attnops" or not row["fused"]:
        return 1, 0
    config = planned(row["target"], row["dim"], length, row["mask"], json.dumps(declared(row)))
    return tile_counts.key_parts(config, length), tile_counts.key_turns(config, length)


@functools.cache
def planned(target: str, dim: int, length: int, mask: str, config: str) -> Any:
    """A declared config, resolved."""
    device = abstract_device(abstract_target(target)[0], 1, "tpu")
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=device)
    metadata = OperationMetadata(mesh=mesh, operation_configs={"splash": json.loads(config)}, tuning="off")
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    return OperationRegistry.create("splash", metadata).plan(x, x, x, mask=MASKS[mask]).config


def table(rows: list[dict[str, Any]], kernels: list[str]) -> list[dict[str, Any]]:
    """For each cell the best of each kernel, in cycles per head, and its blocks."""
    cells = []
    for target in TARGETS:
        for dim in DIMS:
            for name, mask in MASKS.items():
                for length in LENGTHS:
                    cell: dict[str, Any] = {"target": target, "dim": dim, "mask": name, "length": length}
                    undeclared_here = case_of(planned(target, dim, length, name, "{}"))
                    for kernel in kernels:
                        best: dict[str, Any] = {}
                        for row in rows:
                            same = (row["target"], row["dim"], row["kernel"]) == (target, dim, kernel)
                            of_mask = row["mask"] == (_compiled_for(name) if kernel == "attnops" else "causal")
                            if not same or not of_mask or isinstance(row["cycles"], str):
                                continue
                            for which, made in passes(row).items():
                                if made:
                                    blocks = [*row["blocks"], row["fused"], row.get("fields", {})]
                                    parts = key_parts(row, length) if which == "backward" else (1, 0)
                                    got = cost(made, row, mask, length, *parts), blocks, mxu(row, which)
                                    best[which] = min(best.get(which, got), got, key=lambda one: one[0])
                                    if kernel == "attnops" and undeclared_here.items() <= row.items():
                                        cell.setdefault("planned", {})[which] = got
                        cell[kernel] = best
                    cells.append(cell)
    return cells


def mxu(row: dict[str, Any], which: str) -> float:
    """Useful operations of a tile without a mask over the peak in its cycles: two products forward, five backward."""
    products = 2 if which == "forward" else 5
    a_weight = sum(max(kernel.cycles.tiles[0], kernel.least) / math.prod(kernel.block) for kernel in passes(row)[which])
    return products * row["dim"] / (a_weight * products_a_cycle(abstract_target(row["target"])[0]))


def show(cells: list[dict[str, Any]], kernels: list[str]) -> None:
    print(
        "Static cycles of attnops' kernels over the others', with the best block sizes of each; below 1 attnops is faster.\n"
        "MXU: attnops' tile without a mask, of the matrix units' peak; tiles at the edge of a window are never without one."
    )
    print(
        f"{'target':12}{'dim':>5} {'mask':8}{'length':>7}"
        + "".join(f"{f'{r} {w}':>18}" for r in kernels[1:] for w in _PASSES)
        + f"{'MXU fwd':>9}{'bwd':>6}"
    )
    ratios: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        if not cell["attnops"]:
            continue  # not measured
        line = f"{cell['target']:12}{cell['dim']:>5} {cell['mask']:8}{cell['length']:>7}"
        for rival in kernels[1:]:
            for which in _PASSES:
                ratio = _ratio(cell, rival, which)
                line += f"{'-' if ratio is None else f'{ratio:.2f}':>18}"
                if ratio is not None:
                    ratios.setdefault((rival, which), []).append(ratio)
        shares = [cell["attnops"][which][2] if which in cell["attnops"] else math.nan for which in _PASSES[:2]]
        print(line + ("" if cell["mask"] == "window" else f"{shares[0]:>9.0%}{shares[1]:>6.0%}"))
    for (rival, which), found in ratios.items():
        print(f"{which} of {rival}: {_spread(found)}")
    print("What attnops plans if nothing is declared:")
    for other, which in itertools.product(kernels, _PASSES):
        compared = [(cell, _ratio(cell, other, which, "planned")) for cell in cells if "planned" in cell]
        told = _spread([ratio for _, ratio in compared if ratio is not None])
        against = "its best sizes" if other == "attnops" else other
        print(f"{which} of {against}: {told}")
    for target, dim in itertools.product(TARGETS, DIMS):
        of_full = [
            c["planned"]
            for c in cells
            if (c["target"], c["dim"], c["mask"]) == (target, dim, "full") and "planned" in c
        ]
        shares = (f"{which} {min(one[which][2] for one in of_full):.1%}" for which in _PASSES[:2])
        print(f"MXU: {target:12}{dim:>5} {', '.join(shares)}" if of_full else f"MXU: {target:12}{dim:>5} -")


def _spread(ratios: list[float]) -> str:
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f} as geometric mean, {min(ratios):.2f} to {max(ratios):.2f}"


def show_temps(temps: list[dict[str, Any]], kernels: list[str]) -> None:
    print(f"\nMiB in HBM besides arguments and results: {LARGE['heads']} heads, {LARGE['length']} tokens, both passes.")
    print(f"{'target':12}{'dim':>5}" + "".join(f"{kernel:>10}" for kernel in kernels))
    for target, dim in itertools.product(TARGETS, DIMS):
        found = {row["kernel"]: row["temp"] for row in temps if (row["target"], row["dim"]) == (target, dim)}
        cells = (f"{n / 2**20:.1f}" if isinstance(n := found.get(kernel), int) else "-" for kernel in kernels)
        print(f"{target:12}{dim:>5}" + "".join(f"{cell:>10}" for cell in cells))


_PASSES = ("forward", "backward", "both")


def _ratio(cell: dict[str, Any], rival: str, which: str, own: str = "attnops") -> float | None:
    names = ("forward", "backward") if which == "both" else (which,)
    if any(name not in cell[k] for k in (own, rival) for name in names):
        return None
    ours, theirs = (sum(cell[k][name][0] for name in names) for k in (own, rival))
    return ours / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="an implementation's own environment"
    )
    parser.add_argument("--json", type=Path, help="write the measurements, or with --report read them")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in options.python)
    kernels = ["attnops", "jax", *(["tokamax"] if "tokamax" in pythons or options.report else [])]
    if options.report:
        data = json.loads(options.json.read_text())
    else:
        versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
        known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
        if known and known["versions"] != versions:
            parser.error(f"{options.json} was made with {known['versions']}, here are {versions}; use another file")
        data = {"versions": versions, **measure(pythons, kernels, known)}
        if options.json:
            options.json.write_text(json.dumps(data, indent=1))
    show(table(data["rows"], kernels), kernels)
    show_temps(data["temps"], kernels)


if __name__ == "__main__":
    main()
