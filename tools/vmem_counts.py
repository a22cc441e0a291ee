"""How much VMEM kernels are counted to take before they are compiled, against what the TPU compiler allocates.

    python tools/vmem_counts.py --compile [--only TEXT]   compiles what benchmarks/results/vmem_counts.json lacks
    python tools/vmem_counts.py                           prints the distribution of counted / allocated

Cases of splash, in mode train on one device of each TPU generation, with the blocks that a plan takes:

- the shapes of real models (tests/data/model_shapes.json), whose blocks are those of operators/splash/shipped.json or the
  heuristic's;
- the features, head dims and dtypes of tools/tpu_support.py.

Batches are so large that no tensor fits in VMEM: XLA keeps a small one there whole, and a kernel then needs no blocks of it. So
a call of small tensors takes less than is counted. Cases of the paged kernels are those of benchmarks/results/paged_static.json.
Nothing is run. Compiling requires libtpu.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tpu_support import CALLS, DIMS, HEADS, LENGTH, TARGETS

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.operators.kernels.pages.tpu import Geometry, Options, chosen_sizes, vmem_parts
from attnops.planning import Plan
from attnops.planning.tune_cache import ENVIRONMENT as TUNE_CACHE
from attnops.verify.call_program import call_program
from attnops.verify.compiled import failure, kernels, program_text
from attnops.verify.targets import target_of
from attnops.verify.topology import described_mesh

ROOT = Path(__file__).resolve().parent.parent
SHAPES = json.loads((ROOT / "tests" / "data" / "model_shapes.json").read_text())["shapes"]
DATA = ROOT / "benchmarks" / "results" / "vmem_counts.json"
PAGED = ROOT / "benchmarks" / "results" / "paged_static.json"
_LARGE = 256 << 20  # bytes of each tensor; no generation has more than half of it as VMEM
_MIB = 1 << 20
_WITHIN = 1.25
_LANES = 128
_LONGER = 64  # queries than keys: with more, tensors of which the smaller is large exceed the HBM
_OF_KERNEL = (
    "seq_q", "seq_kv", "head_dim", "head_dim_v", "causal", "window", "chunk", "logits_soft_cap", "sinks", "bias",
)  # fmt: skip
# Features whose kernels differ in what they hold; the others differ in a few numbers per row.
_FEATURES = (
    "segment_ids", "kv_lengths", "positions", "dense_mask", "chosen_blocks", "logits_soft_cap", "sinks", "dropout",
    "quantized_kv",
)  # fmt: skip


class Case(NamedTuple):
    """A call on a target: its arguments for a batch size, and bytes of a row of a tensor."""

    name: str
    target: str
    arguments: Callable[[int], dict[str, Any]]
    row: int


class Kernel(NamedTuple):
    """A kernel of a case: bytes that are counted, and bytes that the compiler allocates."""

    case: str
    name: str
    generation: str
    counted: int
    allocated: int

    @property
    def ratio(self) -> float:
        return self.counted / self.allocated


def cases() -> Iterator[Case]:
    """All cases; of shapes that differ in nothing that a kernel depends on, the first."""
    shapes = {}
    for shape in SHAPES:
        if 1 < shape["seq_q"] <= _LONGER * shape["seq_kv"]:
            shapes.setdefault(json.dumps([shape[name] for name in _OF_KERNEL]), shape)
    for target in TARGETS:
        generation = target.partition(":")[0]
        for shape in shapes.values():
            yield Case(f"{shape['name']}, {generation}", target, *_of_model(shape))
        for dtype in ("bfloat16", "float32"):
            for dim, value_dim in DIMS:
                told = f"causal {dtype} {dim} {value_dim}, {generation}"
                yield Case(told, target, *_of_feature("causal", dtype, dim, value_dim))
        for feature in _FEATURES:
            yield Case(f"{feature}, {generation}", target, *_of_feature(feature, "bfloat16", 128, 128))


def _of_model(shape: dict[str, Any]) -> tuple[Callable[[int], dict[str, Any]], int]:
    mask: Mask = Causal() if shape["causal"] else Full()
    if shape["window"]:
        mask = mask & SlidingWindow(*shape["window"])
    if shape["chunk"]:
        mask = mask & Chunked(shape["chunk"])

    def arguments(batch: int) -> dict[str, Any]:
        # One head: their number changes nothing in a kernel for several queries.
        made: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((batch, length, 1, dim), jnp.bfloat16)
            for name, length, dim in (
                ("query", shape["seq_q"], shape["head_dim"]),
                ("key", shape["seq_kv"], shape["head_dim"]),
                ("value", shape["seq_kv"], shape["head_dim_v"]),
            )
        }
        made |= {"mask": mask} | {name: shape[name] for name in ("softmax_scale", "logits_soft_cap")}
        if shape["sinks"]:
            made["softmax_aux"] = jax.ShapeDtypeStruct((1,), jnp.float32)
        if shape["bias"]:
            made["bias"] = jax.ShapeDtypeStruct((1, 1, *shape["bias"][2:]), jnp.bfloat16)
        return made

    return arguments, 2 * _LANES * min(shape["seq_q"], shape["seq_kv"])


def _of_feature(feature: str, dtype: str, dim: int, value_dim: int) -> tuple[Callable[[int], dict[str, Any]], int]:
    def arguments(batch: int) -> dict[str, Any]:
        def of_batch(x: Any) -> Any:
            return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) if getattr(x, "shape", ())[:1] == (2,) else x

        call = {name: jax.tree.map(of_batch, x) for name, x in CALLS[feature].items() if name != "dropout_rng"}
        if "dropout_prob" in call:
            call["dropout_rng"] = CALLS[feature]["dropout_rng"]
        stored = call.pop("kv_dtype", dtype)
        sizes = {"query": (dim, dtype), "key": (dim, stored), "value": (value_dim, stored)}
        arrays = {
            name: jax.ShapeDtypeStruct((batch, LENGTH, HEADS, n), jnp.dtype(of)) for name, (n, of) in sizes.items()
        }
        return {"mask": Causal()} | arrays | {name: x for name, x in call.items() if name != "causal"}

    return arguments, jnp.dtype(dtype).itemsize * _LANES * LENGTH * HEADS


def planned(case: Case, compiles: bool) -> tuple[Any, dict[str, Any], Plan]:
    """(operation, arguments, plan) for one device of the target, which is described if the plan is to be compiled."""
    arguments = case.arguments(math.ceil(_LARGE / case.row))
    if compiles:
        mesh: Any = Mesh(np.asarray(described_mesh(case.target).devices.reshape(-1)[:1]), ("device",))
    else:
        mesh = replace(target_of(case.target), count=1).abstract({"device": 1})
    operation = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, fallback="allow"))
    return operation, arguments, operation.plan(**arguments).require()


def compiled(case: Case) -> dict[str, Any]:
    """The bytes of VMEM of each kernel of the call and its gradient, or why there are none."""
    operation, arguments, plan = planned(case, compiles=True)
    program, arrays = call_program(operation, arguments, plan, True)
    try:
        text = program_text(program.lower(arrays).compile())
    except Exception as error:  # the compiler's, of whatever class
        return {"failure": failure(error).message}
    if text is None:
        return {"failure": "compiles, but its program can't be read"}
    found = {kernel.name: kernel.vmem_used for kernel in kernels(text)}
    return {"kernels": found, "config": sizes_of(plan)}


def sizes_of(plan: Plan) -> dict[str, Any]:
    """The sizes and switches of a plan, except the limit: with the same ones the kernels are the same."""
    whole = plan.config.every_field()
    return {name: value for name, value in whole.items() if isinstance(value, int) and name != "vmem_limit_bytes"}


def splash_kernels(data: dict[str, Any]) -> Iterator[Kernel]:
    """What was compiled and would still be planned with the same sizes."""
    for case in cases():
        made = data["cases"].get(case.name, {})
        if "kernels" not in made:
            continue
        plan = planned(case, compiles=False)[2]
        if sizes_of(plan) != made["config"]:
            print(f"{case.name}: other sizes are planned now; compile it again", file=sys.stderr)
            continue
        counted = plan.runs.memory(plan.problem, plan.placement, plan.config)
        for name, parts in counted.items():
            # A pass over a part of the keys has a number after its name.
            of_name = [used for kernel, used in made["kernels"].items() if re.fullmatch(rf"{name}(_\d+)?", kernel)]
            told, generation = name.removeprefix("attnops_splash_"), case.name.rpartition(", ")[2]
            if allocated := max((used or 0 for used in of_name), default=0):
                yield Kernel(case.name, told, generation, sum(parts.values()), allocated)


def paged_kernels() -> Iterator[Kernel]:
    """The paged kernels that benchmarks/paged_static.py has compiled."""
    sys.path.append(str(ROOT / "benchmarks"))
    from paged_static import SELECTED, SEQUENCES, sizes

    for row in json.loads(PAGED.read_text(encoding="utf-8"))["rows"]:
        case = row["case"]
        if case["layout"] == "jax" or "vmem" not in row:
            continue
        (heads, kv_heads, dim, value_dim, wide), page = sizes(case), case["page"]
        width, decodes = case["keys"] // page, case["kind"] != "prefill"
        bf16 = np.dtype(jnp.bfloat16)
        geometry = Geometry(
            layout=case["layout"], tokens=SEQUENCES if decodes else 512, heads=heads, kv_heads=kv_heads,
            dim=dim, value_dim=value_dim, key_row=wide, value_row=wide, pages=SEQUENCES * width, page=page,
            sequences=SEQUENCES, width=width,
            dtype=bf16, key_dtype=bf16, value_dtype=bf16, key_scale=None, value_scale=None,
            selected=SELECTED if case["kind"] == "selected" else 0,
        )  # fmt: skip
        options = Options(
            scale=1.0, causal=True, left=None, right=None, soft_cap=None, sinks=False, max_q_len=1 if decodes else None,
            pages_per_block=0, queries_per_block=0, buffers=0, vmem_limit_bytes=None, interpret=False, writes=False,
        )  # fmt: skip
        for name, parts in vmem_parts(geometry, chosen_sizes(geometry, options)).items():
            told = " ".join(map(str, case.values()))
            generation = case["target"].partition(":")[0]
            if name in row["vmem"]:
                yield Kernel(told, name.removeprefix("attnops_"), generation, sum(parts.values()), row["vmem"][name])


def report(found: list[Kernel]) -> None:
    """Print the distribution for each kernel and generation, and the cases that are too far off."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in found:
        for key in ((one.name, one.generation), (one.name, "all")):
            groups[key].append(one.ratio)
    head = ("kernel", "generation", "cases", "least", "10 %", "median", "90 %", "most", "within 25 %")
    print("counted / allocated")
    print("{:14} {:10} {:>5} {:>6} {:>6} {:>6} {:>6} {:>6} {:>12}".format(*head))
    for (name, generation), ratios in sorted(groups.items()):
        at = [float(np.quantile(ratios, share)) for share in (0, 0.1, 0.5, 0.9, 1)]
        within = sum(1 / _WITHIN <= ratio <= _WITHIN for ratio in ratios)
        numbers = " ".join(f"{ratio:6.2f}" for ratio in at)
        print(f"{name:14} {generation:10} {len(ratios):5} {numbers} {within:6} of {len(ratios)}")
    for one in sorted(found, key=lambda one: one.ratio):
        if not 1 / _WITHIN <= one.ratio <= _WITHIN:
            sizes = f"{one.counted / _MIB:.2f} MiB counted, {one.allocated / _MIB:.2f} allocated"
            print(f"{one.ratio:5.2f}  {one.name}, {one.case}: {sizes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="compile cases with this in their name")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so long")
    options = parser.parse_args()
    data: dict[str, Any] = {"versions": {name: version(name) for name in ("jax", "libtpu")}, "cases": {}}
    if DATA.exists():
        data = json.loads(DATA.read_text(encoding="utf-8"))
    start = time.perf_counter()
    for case in cases() if options.compile else ():
        if time.perf_counter() - start > options.seconds:
            break
        if options.only in case.name and case.name not in data["cases"]:
            data["cases"][case.name] = compiled(case)
            print(case.name, json.dumps(data["cases"][case.name]), file=sys.stderr, flush=True)
            DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    report([*splash_kernels(data), *paged_kernels()])


if __name__ == "__main__":
    with TemporaryDirectory() as nothing:
        os.environ[TUNE_CACHE] = nothing  # this machine's own choices must not enter the results
        main()
