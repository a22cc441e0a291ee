"""attnops' TPU kernels of paged attention against JAX's ragged_paged_attention, through the same compiler, without a TPU.

    python benchmarks/paged_static.py --json FILE [--only TEXT]     (an environment with libtpu; resumes where it was stopped)
    python benchmarks/paged_static.py --json FILE --report

Both are compiled for described TPUs. For the decoding kernel's step (a block of pages against a row of every head) the cycles
are read from the compiler's final schedule, and compared with the time that the step's bytes take at the published bandwidth.
A block of the kernel for selected keys is one of pieces of pages.
The cycles don't include waits: a step that needs fewer cycles than its bytes take is bound by memory if enough bytes are being
fetched meanwhile, which is what the ring of buffers is for. Bytes are counted from what the kernels fetch: whole pages, with rows
padded to 128 numbers if the array's layout pads them.

A step of JAX's kernel is a block of pages against a block of queries, which in decoding belong to several sequences: each of
them takes its own step, with all the rows of the block.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnops.compat import abstract_device

TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
MODELS = {"llama-3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
KERNELS = ("heads", "split", "joined", "jax")  # our layouts, and JAX's kernel
# Layouts of other servers' pages, in which keys and values alternate, beside the one that differs in nothing else.
ALTERNATING = ("interleaved", "packed")
SERVED_LAYOUTS = ("split", *ALTERNATING)
# Latents of 512 with rotary keys of 64: all heads of a device over one key head.
ALL_TARGETS = (*TARGETS, "v5p:2x2x1", "v4:2x2x1")
LATENT_MODELS = {"deepseek-v3": (128, 1, 576, 512), "deepseek-v3-tp8": (16, 1, 576, 512)}
SEQUENCES = 64
SELECTED, SELECTED_FROM = 2048, 32768  # keys that a token names, and those of its sequence
JAX_KEYS = 512  # keys per block of JAX's kernel


def cases() -> list[dict[str, Any]]:
    """What is compiled."""
    found = []
    for target in TARGETS:
        for model in MODELS:
            for page in (16, 64, 128):
                for layout in KERNELS:
                    case = {"target": target, "model": model, "page": page, "layout": layout, "keys": 2048}
                    found.append(case | {"kind": "decode"})
                    if page == 64:
                        found.append(case | {"kind": "prefill"})
    for target in ALL_TARGETS:
        for page in (16, 64, 128):
            for layout in SERVED_LAYOUTS:
                case = {"target": target, "model": "llama-3-8b", "page": page, "layout": layout, "keys": 2048}
                found += [x for x in (case | {"kind": "decode"},) if x not in found]
                if page == 64:
                    found += [x for x in (case | {"kind": "prefill"},) if x not in found]
        found.append(
            {"target": target, "model": "smollm2-135m", "page": 64, "layout": "packed", "keys": 2048, "kind": "decode"}
        )
    for target in ALL_TARGETS:
        for model in LATENT_MODELS:
            for page in (64, 128):
                found.append(
                    {"target": target, "model": model, "page": page, "layout": "latent", "keys": 4096, "kind": "decode"}
                )
        of_selected = {"target": target, "page": 64, "keys": SELECTED_FROM, "kind": "selected"}
        for model, layout in (*((x, "latent") for x in LATENT_MODELS), ("llama-3-8b", "split")):
            found.append(of_selected | {"model": model, "layout": layout})
    return found


def sizes(case: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """(heads, kv heads, head dim, value dim, numbers per row of the array that holds keys)."""
    if case["layout"] == "latent":
        heads, kv_heads, dim, value_dim = LATENT_MODELS[case["model"]]
        return heads, kv_heads, dim, value_dim, math.ceil(dim / 128) * 128
    heads, kv_heads, dim = MODELS[case["model"]]
    row = {"joined": 2 * dim, "packed": math.ceil(dim / 128) * 128}.get(case["layout"], dim)
    return heads, kv_heads, dim, dim, row


def compile_case(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Compile in a new process, and read the kernel's schedule."""
    name = kernel_name(case)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
            + (f" --xla_jf_dump_only_matching_hlo={name}.1" if name else "")
        ),
    }
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from attnops.verify.compiled import failure, kernels, program_text
    from attnops.verify.static_clock import kernels_in, regions
    from attnops.verify.topology import described_mesh

    heads, kv_heads, dim, value_dim, key_row = sizes(case)
    page, width = case["page"], case["keys"] // case["page"]
    tokens = 512 if case["kind"] == "prefill" else SEQUENCES
    mesh = Mesh(described_mesh(case["target"]).devices.reshape(-1)[:1], ("device",))
    shape = lambda s, d: jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, PartitionSpec()))  # noqa: E731
    pages, bf16, int32 = SEQUENCES * width, jnp.bfloat16, jnp.int32
    numbers = {
        "kv_lens": shape((SEQUENCES,), int32), "page_table": shape((SEQUENCES, width), int32),
        "cu_q_lens": shape((SEQUENCES + 1,), int32), "num_seqs": shape((1,), int32),
    }  # fmt: skip
    query = shape((tokens, heads, dim), bf16)
    try:
        if case["layout"] == "jax":
            from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

            kv = shape((pages, page, 2 * kv_heads, dim), bf16)
            # Its own choice queries the device that runs the process. 32 queries are its default.
            blocks = {"num_kv_pages_per_block": min(width, JAX_KEYS // page), "num_queries_per_block": 32}
            call = jax.jit(lambda *x: ragged_paged_attention(*x, sm_scale=dim**-0.5, **blocks))
            # It queries its device while it is traced.
            device = abstract_device(mesh.devices[0].device_kind, 1, "tpu")
            auto = (jax.sharding.AxisType.Auto,)
            asked = jax.sharding.AbstractMesh((1,), ("device",), axis_types=auto, abstract_device=device)
            with jax.sharding.use_abstract_mesh(asked):
                traced = call.trace(query, kv, *numbers.values())
            lowered = traced.lower(lowering_platforms=("tpu",))
        else:
            from attnops.operators.kernels.pages.tpu import paged_attention_tpu

            forms = {"split": (page, kv_heads), "interleaved": (page, 2 * kv_heads), "packed": (page, kv_heads, 2)}
            row = lambda n: (pages, *forms.get(case["layout"], (kv_heads, page)), n)  # noqa: E731
            one_array = case["layout"] not in ("split", "heads")
            arrays = numbers | {"query": query, "key_pages": shape(row(key_row), bf16)}
            arrays["value_pages"] = None if one_array else shape(row(value_dim), bf16)
            static = {"softmax_scale": dim**-0.5, "layout": case["layout"], "value_dim": value_dim}
            static["max_q_len"] = None if case["kind"] == "prefill" else 1
            if case["kind"] == "selected":
                arrays["selected"] = shape((tokens, SELECTED), int32)
            lowered = jax.jit(lambda a: paged_attention_tpu(**a, **static)).lower(arrays)
        compiled = lowered.compile()
    except Exception as error:
        message = " ".join(str(error).split())
        told = failure(error).message
        return {"failure": (told if "VMEM" in told else f"{type(error).__name__}: {message}")[:300]}
    text = program_text(compiled) or ""
    made: dict[str, Any] = {
        "vmem": {k.name: k.vmem_used for k in kernels(text)},
        "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
    }
    dumps = kernels_in(Path(folder))
    for name, files in dumps.items():
        if name not in made["vmem"]:
            continue
        root = regions(*(path.read_text() for path in files))
        selects = case["kind"] == "selected"
        made.setdefault("steps", {})[name] = selected_cycles(name, root) if selects else step_cycles(root)
    return made


def kernel_name(case: dict[str, Any]) -> str:
    """The kernel whose schedule is read; JAX's has its sizes in its name, so everything is dumped."""
    if case["layout"] == "jax":
        return ""
    return f"attnops_paged_{'chunks' if case['kind'] == 'prefill' else case['kind']}"


def step_cycles(root: Any) -> int:
    """Cycles of the innermost loop with all products, without its alternative branches.

    Inner loops without products handle partial blocks, page by page.
    """
    body = root
    while True:
        inner = [r for r in body.inside if r.products]
        loops = [r for r in body.all() if r is not body and r.is_loop and r.products]
        if not loops:
            break
        body = max(loops, key=lambda r: (r.products, r.cycles)) if len(inner) else body
    apart = sum(r.cycles for r in body.all() if r is not body and r.is_loop and not r.products)
    return int(body.cycles - apart)


def selected_cycles(name: str, root: Any) -> int:
    """The same of the kernel for selected keys, without the product that is made again where a value isn't finite."""
    from attnops.verify.paged_clock import LocalStep

    return int(LocalStep.read(None, name, root).masked)  # type: ignore[arg-type]


def sizes_of(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step, and of a decode batch against the least that it needs."""
    import jax.numpy as jnp
    import numpy as np

    from attnops.operators.kernels.pages.tpu import Geometry, Options, by_pieces, chosen_sizes

    heads, kv_heads, dim, value_dim, row = sizes(case)
    page, layout = case["page"], case["layout"]
    if layout == "jax":
        keys = min(case["keys"], JAX_KEYS // page * page)
        return {"step_bytes": keys * 2 * kv_heads * math.ceil(dim / 128) * 128 * 2, "pages_per_block": keys // page}
    one_array = layout not in ("split", "heads")
    bf16 = np.dtype(jnp.bfloat16)
    geometry = Geometry(
        layout=layout, tokens=SEQUENCES, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, key_row=row,
        value_row=row if one_array else value_dim, pages=1 << 20, page=page, sequences=SEQUENCES,
        width=case["keys"] // page, dtype=bf16, key_dtype=bf16, value_dtype=bf16, key_scale=None, value_scale=None,
    )  # fmt: skip
    options = Options(
        scale=1.0, causal=True, left=None, right=None, soft_cap=None, sinks=False, max_q_len=1, pages_per_block=0,
        queries_per_block=0, buffers=0, vmem_limit_bytes=None, interpret=False,
    )  # fmt: skip
    if case["kind"] == "selected":
        geometry = replace(geometry, selected=SELECTED)
    options = chosen_sizes(geometry, options)
    streams = 2 if not one_array or layout in ALTERNATING else 1
    held_heads = 1 << (kv_heads - 1).bit_length() if layout in ("split", "interleaved") else kv_heads
    page_bytes = streams * page * held_heads * math.ceil(row / 128) * 128 * 2
    if case["kind"] == "selected":
        pieces, sized = by_pieces(geometry, options)
        size, held = pieces.page, SELECTED_FROM // pieces.page
        # Pieces that hold a key, of keys drawn at random.
        scattered = held * (1 - math.prod(1 - SELECTED / (SELECTED_FROM - i) for i in range(size)))
        return {
            "step_bytes": sized.pages_per_block * page_bytes * size // page,
            "pieces_per_block": sized.pages_per_block,
            "blocks": {
                "in a row": SELECTED / size / sized.pages_per_block,
                "scattered": scattered / sized.pages_per_block,
            },
        }
    fetched = {}
    for keys in (1024, 1500, 4096, 8192):
        held = dim if layout == "latent" else dim + value_dim
        least = keys * kv_heads * held * 2 + heads * (dim + value_dim) * 2
        read = math.ceil(keys / page) * page_bytes + 2 * heads * math.ceil(dim / 128) * 128 * 2
        fetched[str(keys)] = read / least
    return {
        "step_bytes": options.pages_per_block * page_bytes,
        "pages_per_block": options.pages_per_block,
        "read": fetched,
    }


def measure(path: Path, only: str) -> None:
    """Compile what has no figures yet."""
    data = json.loads(path.read_text()) if path.exists() else {"rows": []}
    known = {json.dumps(row["case"], sort_keys=True) for row in data["rows"]}
    for case in cases():
        key = json.dumps(case, sort_keys=True)
        if key in known or only not in key:
            continue
        folder = tempfile.mkdtemp()
        try:
            command = [sys.executable, __file__, "--worker", json.dumps(case | {"folder": folder})]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stdout.strip().splitlines()
            made = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failure": done.stderr[-300:]}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if "failure" not in made and case["kind"] != "prefill":
            made |= sizes_of(case)
        data["rows"].append({"case": case, **made})
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(key, json.dumps(made), flush=True)


def report(path: Path) -> None:
    """Print a table."""
    from attnops.verify.generations import abstract_target, clock_rate, device_of

    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        case = row["case"]
        label = " ".join(str(case[n]) for n in ("target", "model", "kind", "page", "layout"))
        if "failure" in row:
            print(f"{label}: refused: {row['failure'][:110]}")
            continue
        line = f"{label}: steps {row.get('steps')}, temporary {row['temporary_bytes'] >> 20} MiB"
        if "step_bytes" in row:
            kind, _ = abstract_target(case["target"])
            device = device_of(kind)
            assert device is not None
            cycles = row["step_bytes"] / (device.bytes_per_second / device.cores) * clock_rate(kind)
            (step,) = row["steps"].values()
            line += f", bytes take {cycles:.0f} cycles: {step / cycles:.2f}"
            if "blocks" in row:
                (dense,) = (x for x in rows if x["case"] == dense_case(case))
                blocks = SELECTED_FROM / (dense["pages_per_block"] * case["page"])
                whole = blocks * max(*dense["steps"].values(), dense["step_bytes"] / row["step_bytes"] * cycles)
                ratios = (f"{n} {many * max(step, cycles) / whole:.2f}" for n, many in row["blocks"].items())
                line += f"; of decode over all keys: {', '.join(ratios)}"
            if "read" in row:
                line += f"; read {max(row['read'].values()):.3f} of the least"
        print(line)


def dense_case(case: dict[str, Any]) -> dict[str, Any]:
    """The decoding step over all keys to hold one over selected keys against."""
    return case | {"kind": "decode", "keys": 4096 if case["layout"] == "latent" else 2048}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help='a part of a case, as JSON, such as \'"kind": "decode"\'')
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        case = json.loads(given.worker)
        folder = case.pop("folder")
        print(json.dumps(compile_case(case, folder)))
    elif given.report:
        report(given.json)
    else:
        measure(given.json, given.only)


if __name__ == "__main__":
    main()
