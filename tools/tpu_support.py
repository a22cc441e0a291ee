"""Compile splash for described TPUs, feature by feature, and write the results to benchmarks/tpu-support.md.

    python tools/tpu_support.py --write [--again]   compiles what benchmarks/results/tpu_support.json lacks, then writes the page
    python tools/tpu_support.py --page              only writes the page

A cell is a kernel, a call and a target, compiled forward and with its gradient by attnops.verify. Nothing runs. Existing results
are kept, so that --write resumes where it was stopped; --again compiles everything anew, as after a change of versions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attnops import (
    Blocks,
    Causal,
    Chunked,
    MaskFunction,
    OperationMetadata,
    OperationRegistry,
    Positions,
    Prefix,
    SegmentIds,
    register_mask_function,
)
from attnops.planning import ALL_FEATURES
from attnops.planning.tune_cache import ENVIRONMENT as TUNE_CACHE
from attnops.verify.call import verify_call
from attnops.verify.topology import described_mesh

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "tpu-support.md"
DATA = ROOT / "benchmarks" / "results" / "tpu_support.json"
TARGETS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
KERNELS = ("attnops", "jax", "tokamax")
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
DTYPES = ("bfloat16", "float32", "float16")
LENGTH, HEADS = 512, 4
_MIB = 1 << 20


@register_mask_function("tpu_support_near", override=True)
def _near(position: Any, key: Any) -> Any:
    return abs(position - key) < 90


def _of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _calls() -> dict[str, dict[str, Any]]:
    """A call for each feature, by its name, and after a comma a variant of it; `causal` is the plain one.

    Sizes: batch 2, 512 tokens, 4 heads, dim 128.
    """
    ids, numbers = _of(2, LENGTH), _of(2)
    open_call: dict[str, Any] = {"causal": False}
    return {
        "causal": {},
        "sliding_window": open_call | {"sliding_window": (100, 20)},
        "chunked": {"mask": Chunked(100)},
        "prefix": {"mask": Causal() | Prefix(70)},
        "mask_function": {"mask": MaskFunction("tpu_support_near")},
        "blocks": {"mask": Causal() | Blocks(np.eye(8, dtype=bool), 64, 64)},
        "segment_ids": open_call | {"q_segment_ids": ids, "kv_segment_ids": ids},
        "kv_lengths": open_call | {"kv_lengths": numbers},
        "positions": {"mask": Positions(ids, ids, left=30)},
        "dense_mask": open_call | {"mask": _of(2, HEADS, LENGTH, LENGTH, dtype=jnp.bool_)},
        "chosen_blocks": {"mask": Causal() & Blocks(_of(2, HEADS, 8, 3), 64, 64)},
        "dynamic_or": {"mask": Causal() | SegmentIds(ids, ids)},
        "dynamic_query_offset": {"query_offset": numbers},
        "bias": open_call | {"bias": _of(1, HEADS, LENGTH, LENGTH, dtype=jnp.bfloat16)},
        "logits_soft_cap": open_call | {"logits_soft_cap": 30.0},
        "sinks": open_call | {"softmax_aux": _of(HEADS, dtype=jnp.float32)},
        "dropout": open_call | {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": _key()},
        "return_weights": open_call | {"return_weights": True},
        "return_lse": open_call | {"return_lse": True},
        "gqa": open_call | {"kv_heads": 2},
        "value_dim": open_call | {"value_dim": 64},
        "quantized_kv": _quantised("int8"),
        "quantized_kv, float8_e4m3fn": _quantised("float8_e4m3fn"),
        "quantized_kv, float8_e5m2": _quantised("float8_e5m2"),
    }


def _quantised(dtype: str) -> dict[str, Any]:
    """Keys and values of a dtype, with a scale for every token and head."""
    scale = _of(2, LENGTH, HEADS, 1, dtype=jnp.float32)
    return {"kv_dtype": dtype, "key_scale": scale, "value_scale": scale}


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


CALLS = _calls()
assert {name.partition(",")[0] for name in CALLS} == ALL_FEATURES - {"score"}, (
    "a feature has no call in tools/tpu_support.py"
)


class Cell(NamedTuple):
    """What is compiled: a kernel, a feature's call, sizes, and a target."""

    kernel: str
    feature: str
    dtype: str
    dim: int
    value_dim: int
    target: str

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.feature} {self.dtype} {self.dim} {self.value_dim} {self.target}"


def cells() -> Iterator[Cell]:
    """All cells; the plain causal call is in both tables of attnops' kernel, and is yielded once."""
    found = [Cell(kernel, f, "bfloat16", 128, 128, t) for kernel, f, t in itertools.product(KERNELS, CALLS, TARGETS)]
    sizes = itertools.product(DIMS, DTYPES, TARGETS)
    found[len(CALLS) * len(TARGETS) : 0] = [Cell("attnops", "causal", d, *dims, t) for dims, d, t in sizes]
    return iter(dict.fromkeys(found))


def compiled(cell: Cell) -> dict[str, Any]:
    """The outcome of a cell: 'refused' (why), or for each pass 'failed' (why) or the VMEM of its largest kernel in bytes."""
    device = described_mesh(cell.target).devices.flat[0]
    mesh = Mesh(np.array([device]), ("fsdp",))
    metadata = OperationMetadata(
        mesh=mesh, operation_configs={"splash": {"kernel": cell.kernel}}, fallback="error", causal=True
    )
    call = dict(CALLS[cell.feature])
    kv_heads, value_dim = call.pop("kv_heads", HEADS), call.pop("value_dim", cell.value_dim)
    shapes = {"query": (HEADS, cell.dim), "key": (kv_heads, cell.dim), "value": (kv_heads, value_dim)}
    kv_dtype = call.pop("kv_dtype", cell.dtype)
    dtypes = {"query": cell.dtype, "key": kv_dtype, "value": kv_dtype}
    arrays = {name: _of(2, LENGTH, *shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    report = verify_call(OperationRegistry.create("splash", metadata), arrays | call, cell.target)
    if report.plan.implementation is None:
        (own,) = [r for r in report.plan.rejected if r.implementation == "splash.forward_tpu"]
        return {"refused": [f"{reason.message} [{reason.code}]" for reason in own.reasons]}
    assert report.plan.implementation == "splash.forward_tpu"
    outcome: dict[str, Any] = {}
    for made in report.passes:
        used = [kernel.vmem_used for kernel in made.kernels]
        if made.failure is not None:
            outcome[made.name] = {"failed": made.failure.message[:300]}
        else:
            outcome[made.name] = {"vmem": max((n for n in used if n is not None), default=None)}
    return outcome


def versions() -> dict[str, str]:
    """The versions that determine the outcome."""
    found = {}
    for name in ("jax", "libtpu", "tokamax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def compile_all(again: bool) -> dict[str, Any]:
    """Compile what the data lacks, and save it after every cell."""
    data = {"versions": versions(), "cells": {}}
    if DATA.exists() and not again:
        kept = json.loads(DATA.read_text(encoding="utf-8"))
        data = kept if kept["versions"] == data["versions"] else data
    with TemporaryDirectory() as nothing:
        os.environ[TUNE_CACHE] = nothing  # this machine's own block choices must not enter the table
        for cell in cells():
            if cell.name in data["cells"]:
                continue
            data["cells"][cell.name] = compiled(cell)
            print(cell.name, json.dumps(data["cells"][cell.name]), file=sys.stderr, flush=True)
            DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


class _Notes:
    """Footnotes: each reason once, numbered in order of appearance."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def of(self, reason: str) -> str:
        number = self.found.setdefault(reason, len(self.found) + 1)
        return f"[{number}](#reasons)"

    def listed(self) -> str:
        return "\n".join(f"{n}. {text}" for text, n in self.found.items())


def _shown(outcome: dict[str, Any] | None, notes: _Notes) -> str:
    if outcome is None:
        return "not compiled"
    if "refused" in outcome:
        return "refused " + ", ".join(notes.of(reason) for reason in outcome["refused"])
    parts = []
    for made in outcome.values():
        if "failed" in made:
            parts.append("fails " + notes.of(made["failed"]))
        else:
            parts.append("yes" if made["vmem"] is None else f"{made['vmem'] / _MIB:.2f}")
    return " / ".join(parts)


def page(data: dict[str, Any]) -> str:
    """The page's text."""
    notes, found = _Notes(), data["cells"]
    head = ("", *(target.partition(":")[0] for target in TARGETS))

    def row(title: str, *sizes: Any) -> tuple[str, ...]:
        return (title, *(_shown(found.get(Cell(*sizes, target).name), notes) for target in TARGETS))

    plain = ("bfloat16", 128, 128)
    parts = [_INTRO.format(**data["versions"]), "## attnops' kernel: features"]
    parts.append(_table(head, [row(_code(feature), "attnops", feature, *plain) for feature in CALLS]))
    parts.append("## attnops' kernel: head dimensions and dtypes")
    parts.append(
        "The calls are causal. In a pair, the first dimension is that of query and key, the second that of the value."
    )
    for dtype in DTYPES:
        rows = [row(_dims(*dims), "attnops", "causal", dtype, *dims) for dims in DIMS]
        parts.append(_table((dtype, *head[1:]), rows))
    for kernel, owner in (("jax", "JAX's"), ("tokamax", "tokamax's")):
        parts.append(f'## {owner} kernel (`kernel="{kernel}"`): features')
        parts.append(_table(head, [row(_code(feature), kernel, feature, *plain) for feature in CALLS]))
    parts += ["## Reasons", notes.listed()]
    return "\n\n".join(parts) + "\n"


_INTRO = """# TPU support

Which `splash` calls compile for which TPU generation, and how much VMEM they use. `tools/tpu_support.py` wrote this page with jax
{jax}, libtpu {libtpu} and tokamax {tokamax}. Nothing ran on a TPU.

- Each cell was compiled for one described device, forward and with the gradient: batch 2, 512 tokens, 4 heads. Longer calls take
  larger blocks and more VMEM; check a call of your own with [`attnops verify`](../docs/command-line.md#attnops-verify).
- A cell has the MiB of VMEM of the largest kernel: in the forward pass / in forward and backward together.
- *refused*: the plan refuses the call. *fails*: the compiler refuses it.
- Features are tested one at a time, in bfloat16 with head dimension 128. [Support](../docs/support.md#features) explains them."""


def _code(feature: str) -> str:
    name, _, variant = feature.partition(", ")
    return f"`{name}`" + (f", {variant}" if variant else ", int8" if name == "quantized_kv" else "")


def _dims(dim: int, value_dim: int) -> str:
    return str(dim) if dim == value_dim else f"{dim}, {value_dim}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def main() -> None:
    """Compile, or only write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="compile what is missing, then write the page")
    what.add_argument("--page", action="store_true", help="write the page from existing results")
    parser.add_argument("--again", action="store_true", help="with --write: compile everything anew")
    options = parser.parse_args()
    data = compile_all(options.again) if options.write else json.loads(DATA.read_text(encoding="utf-8"))
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
