"""attnops' GPU kernels against JAX's and tokamax's in Pallas, through the same compiler, without a GPU.

    python benchmarks/gpu_static.py --json FILE [--only TEXT]     (an environment with attnops[cuda-compile,cuda-sass,tokamax])
    python benchmarks/gpu_static.py --json FILE --report

All are compiled for described GPUs. For each kernel's loops over tiles it counts the instructions, and sums the cycles that a
warp waits by the compiler's own schedule. Both are given per logit that the mask leaves: times the warps of a tile and
the tiles that the loop goes through, so fully masked tiles count at their full cost. Where warps leave out parts of tiles that
their rows don't see, a loop counts at its mean over the parts of tiles with a mask. `visited` is how many logits these tiles have
for each one that the mask leaves. Waits for memory and for the tensor cores' results aren't in the sums, and
nothing here was timed.

`blocks` is causal attention to blocks of 128 keys that are chosen for each 128 rows; other kernels have no such mask. `packed` is
causal attention within documents of the lengths in DOCUMENTS. Their segment ids are an argument of the compiled
program, so the tiles to visit are known only when it runs; here they are counted with the same code on the same ids.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from attnops import Blocks, Causal, Full, Mask, OperationMetadata, OperationRegistry, SegmentIds, SlidingWindow
from attnops.devices import gpu_specs
from attnops.operators.flash.kernel.tile_schedule import tile_schedule
from attnops.operators.kernels.local_mask import LocalMask
from attnops.verify.gpu.gpu_kernels import GpuKernelUse, gpu_kernels
from attnops.verify.gpu.gpu_mesh import described_gpus
from attnops.verify.gpu.part_regions import EVERY_PART, PartShares
from attnops.verify.gpu_clock import loop_tiles, loop_turns, part_shares

TARGETS = ("a100", "h100", "b200")
BATCH, LENGTH, HEADS = 2, 4096, 16
# A quarter of the blocks of 128 rows and keys, and those on the diagonal, which a causal mask cuts.
CHOSEN = np.random.default_rng(0).random((LENGTH // 128,) * 2) < 0.25
MASKS = {
    "full": Full(), "causal": Causal(), "window": Causal() & SlidingWindow(1023), "packed": Causal(),
    "blocks": Causal() & Blocks(CHOSEN | np.eye(LENGTH // 128, dtype=bool), 128, 128),
}  # fmt: skip
DOCUMENTS = (1000, 531, 747, 290, 873, 117, 401, 137)
IDS = np.repeat(np.arange(len(DOCUMENTS), dtype=np.int32), DOCUMENTS)[None].repeat(BATCH, 0)
WHO = ("attnops", "jax", "tokamax")
# Kernels in Mosaic GPU, from jax 0.12 on: for Hopper attnops' and JAX's, for Blackwell attnops' and tokamax's. On Hopper one
# warpgroup of a block only loads; on Blackwell one loads and multiplies, and one corrects sums, which is counted by its own loop.
MOSAIC = {
    "h100": ("attnops mosaic", "jax mosaic"), "b200": ("attnops mosaic", "tokamax mosaic"),
}  # fmt: skip
HELPING_WARPS = {
    ("h100", "forward"): {"attnops mosaic": 4, "jax mosaic": 4},
    ("h100", "backward"): {"attnops mosaic": 4, "jax mosaic": 4},
    ("b200", "forward"): {"attnops mosaic": 8, "tokamax mosaic": 8},
    ("b200", "backward"): {"attnops mosaic": 8, "tokamax mosaic": 4},
}
WARPS_OF_GROUP = 4
BACKWARD = 64  # rows and keys of the tiles of JAX's backward pass
PASSES = ("forward", "backward")


class Tiles(NamedTuple):
    """Turns of the loops of a kernel's program for a head, logits of a tile, and what a warp sees of the parts of tiles with a
    mask."""

    turns: tuple[float, ...]
    logits: int
    shares: PartShares = EVERY_PART


def cases() -> list[dict[str, Any]]:
    """What is compiled. JAX's and tokamax's kernels support no window, and visit all tiles of a causal mask; tokamax's
    reads the mask of packed documents from an array."""
    return [
        {"target": target, "dim": dim, "mask": mask, "pass": part, "who": who}
        for target in TARGETS
        for dim in (64, 128, 256)
        for part in PASSES
        for mask in MASKS
        for who in (*WHO, *(MOSAIC.get(target, ()) if jax.__version_info__ >= (0, 12) else ()))
        if not (who == "tokamax" and (part == "backward" or mask == "packed"))  # tokamax uses XLA for the gradients
        if not (who == "tokamax mosaic" and mask in ("window", "packed"))
        if not (who == "jax mosaic" and (mask in ("window", "packed") or (part, mask) == ("backward", "causal")))
        if not (mask == "blocks" and not who.startswith("attnops"))
    ]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Compile, and read the loops."""
    mesh = described_gpus(case["target"])
    here = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.float16 if case["who"] == "jax mosaic" else jnp.bfloat16  # JAX's kernel stores float16
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, case["dim"]), dtype, sharding=here)
    ids = [jax.ShapeDtypeStruct(IDS.shape, IDS.dtype, sharding=here)] if case["mask"] == "packed" else []
    makers = {
        "attnops": _attnops, "attnops mosaic": _attnops, "jax": _jax, "tokamax": _tokamax, "jax mosaic": _jax_mosaic,
        "tokamax mosaic": _tokamax_mosaic,
    }  # fmt: skip
    run, loops_of = makers[case["who"]](case, mesh)

    def loss(*arguments: Any) -> Any:
        return run(*arguments).astype(jnp.float32).sum()

    # The kernels of JAX's gradients in Mosaic GPU have one name, so each is compiled alone.
    gradients = ((0,), (1, 2)) if case["who"] == "jax mosaic" else ((0, 1, 2),)
    functions = [run] if case["pass"] == "forward" else [jax.grad(loss, numbers) for numbers in gradients]
    kernels: list[Any] = []
    for function in functions:
        # tokamax asks the default device for its generation.
        with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
            lowered = jax.jit(function, out_shardings=here).trace(x, x, x, *ids).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile()
        kernels += gpu_kernels(compiled, compiled.as_text(), gpu_specs()[case["target"]])
    live = _live(case["mask"])
    instructions = stalls = visited = 0.0
    used = []
    for kernel in kernels:
        tiles = loops_of(kernel)
        if tiles is None:
            continue
        assert kernel.loops is not None, "nvdisasm isn't installed: pip install 'attnops[cuda-sass]'"
        mosaic = case["who"] in MOSAIC.get(case["target"], ())
        warps = (kernel.threads or 0) // 32 - (
            HELPING_WARPS[case["target"], case["pass"]][case["who"]] if mosaic else 0
        )
        # On Hopper warpgroups of attnops' kernel for keys have loops of their own; on Blackwell a block may go through its tiles
        # twice.
        parts = len(kernel.loops) // len(tiles.turns) if case["who"] == "attnops mosaic" else 1
        programs = 1 if case["target"] == "b200" else parts
        turns_of = parts * tiles.turns
        if case["who"] == "attnops" and len(kernel.loops) == len(turns_of) + 1:  # for keys that aren't finite
            turns_of = (*turns_of, 0.0)
        found = f"{kernel.name} has {len(kernel.loops)} loops; wanted {len(turns_of)}"
        assert len(kernel.loops) == len(turns_of), found
        for one, turns in zip(kernel.loops, turns_of, strict=True):
            of_turn = one.loop.mean(tiles.shares)
            instructions += of_turn[0] * warps * turns / programs / live
            stalls += of_turn[1] * warps * turns / programs / live
        for sums in kernel.sum_loops:
            instructions += sums.instructions * WARPS_OF_GROUP * sum(tiles.turns) / live
            stalls += sums.stall_cycles * WARPS_OF_GROUP * sum(tiles.turns) / live
        visited += sum(tiles.turns) * tiles.logits / live
        used.append({"kernel": kernel.name, "registers": kernel.registers, "stack": kernel.stack_bytes, "warps": warps})
    return {"instructions": instructions, "stalls": stalls, "visited": visited, "kernels": used}


def _live(name: str) -> int:
    rows = np.arange(LENGTH)[:, None]
    seen = np.broadcast_to(MASKS[name].test(rows, rows, np.arange(LENGTH)[None]), (LENGTH, LENGTH))
    return int((seen & (IDS[0][:, None] == IDS[0]) if name == "packed" else seen).sum())


def _packed_tiles(mask: LocalMask, block: tuple[int, int], slow: str) -> tuple[float, float]:
    """The tiles of a head that the kernel's lists hold for these ids: those without a mask, then those with one."""
    table = np.asarray(tile_schedule(mask, *block, slow).table)
    return float((table[..., 1] - table[..., 0]).sum()) / BATCH, float(table[..., 0].sum()) / BATCH


def _attnops(case: dict[str, Any], mesh: Any) -> Any:
    configs = {"flash_attn2": {"kernel": "mosaic" if case["who"] == "attnops mosaic" else "triton"}}
    metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", operation_configs=configs)
    attend = OperationRegistry.create("flash_attn2", metadata)
    mask = MASKS[case["mask"]]
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, case["dim"]), jnp.bfloat16)
    mode = "train" if case["pass"] == "backward" else "prefill"
    ids = jnp.asarray(IDS)
    packed: Mask = mask & SegmentIds(ids, ids) if case["mask"] == "packed" else mask
    decided = attend.plan(x, x, x, mask=packed, mode=mode)
    sizes = {size.kernel: size for size in decided.runs.passes(decided.config, case["pass"] == "backward")}
    known = LocalMask(packed, 0, LENGTH, LENGTH, 0)

    def loops_of(kernel: GpuKernelUse) -> Tiles | None:
        if kernel.name not in sizes:
            return None
        size = sizes[kernel.name]
        block = size.block_q, size.block_kv
        if packed is mask:
            tiles = loop_tiles(mask, block, size.outer, LENGTH, LENGTH, 0, asks=size.asks)
        else:
            tiles = _packed_tiles(known, block, size.outer)
        turns = loop_turns(tiles, size, packed)
        shares = part_shares(known, block, size.part, asks=size.asks) if kernel.by_parts else EVERY_PART
        return Tiles(turns, math.prod(block), shares)

    def run(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        return attend(q, k, v, mask=mask, mode=mode, q_segment_ids=ids, kv_segment_ids=ids).attention_outputs

    return run, loops_of


def _jax(case: dict[str, Any], mesh: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import attention

    del mesh
    causal, sizes = case["mask"] != "full", attention.BlockSizes.get_default()

    def tiles(rows: int, keys: int) -> int:
        """Tiles of a pass by blocks of rows, up to the last key that the block's last row sees."""
        ends = -(-rows * (np.arange(LENGTH // rows) + 1) // keys)
        return int(ends.sum()) if causal else (LENGTH // rows) * (LENGTH // keys)

    def loops_of(kernel: GpuKernelUse) -> Tiles | None:
        if kernel.name == "mha_forward" and case["pass"] == "forward":
            return Tiles((tiles(sizes.block_q, sizes.block_k),), sizes.block_q * sizes.block_k)
        if kernel.name == "mha_backward":
            firsts = np.arange(LENGTH // sizes.block_kv_dkv) * sizes.block_kv_dkv // sizes.block_q_dkv
            of_keys = int((LENGTH // sizes.block_q_dkv - firsts * causal).sum())
            logits = sizes.block_q_dkv * sizes.block_kv_dkv
            assert logits == sizes.block_q_dq * sizes.block_kv_dq
            return Tiles((of_keys, tiles(sizes.block_q_dq, sizes.block_kv_dq)), logits)
        return None

    scale = case["dim"] ** -0.5
    return (lambda q, k, v, ids=None: attention.mha(q, k, v, ids, scale, causal, block_sizes=sizes)), loops_of


def _jax_mosaic(case: dict[str, Any], mesh: Any) -> Any:
    """Its two warpgroups share tiles of 128 rows and 128 keys. It masks each tile of a causal mask. The backward pass has
    tiles of 64 rows and 64 keys, one warpgroup that computes, and no causal mask."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    del mesh
    causal, keys = case["mask"] != "full", 64 if case["dim"] == 256 else 128
    gradients = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), BACKWARD)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=keys, max_concurrent_steps=2, causal=causal, compute_wgs_bwd=1, **gradients
    )
    rows = 128
    ends = -(-rows * (np.arange(LENGTH // rows) + 1) // keys)
    tiles = int(ends.sum()) if causal else (LENGTH // rows) * (LENGTH // keys)

    def loops_of(kernel: GpuKernelUse) -> Tiles | None:
        if case["pass"] == "backward":
            tiles_of_gradients = (LENGTH // BACKWARD) ** 2
            return None if kernel.name == "entry" else Tiles((tiles_of_gradients,), BACKWARD**2)
        # Loops for tiles without a mask, if there are some: JAX divides a causal row into those and the last ones.
        loops = len(kernel.loops or ())
        full = int((rows * np.arange(LENGTH // rows) // keys).sum())
        return Tiles((full, tiles - full) if loops == 2 and causal else (tiles,), rows * keys)

    return (lambda q, k, v: attention_mgpu.attention(q, k, v, config)), loops_of


def _tokamax(case: dict[str, Any], mesh: Any) -> Any:
    from absl import flags
    from tokamax._src.ops.attention import pallas_triton

    del mesh
    flags.FLAGS.mark_as_parsed()  # tokamax reads them
    causal = case["mask"] != "full"
    block, warps, stages = 64, 4, 2  # tokamax's own choice for 16 bits
    config = pallas_triton.Config(block_q=block, block_k=block, num_stages=stages, num_warps=warps)
    attend = type("Here", (pallas_triton.PallasTritonFlashAttention,), {"supported_on": lambda *_: True})(config=config)
    count = LENGTH // block

    def loops_of(kernel: GpuKernelUse) -> Tiles:
        # The tile on the diagonal has no loop: it is counted like the others.
        return Tiles((count * (count + 1) // 2 if causal else count * count,), block * block)

    return (lambda q, k, v: attend(q, k, v, is_causal=causal)), loops_of


def _tokamax_mosaic(case: dict[str, Any], mesh: Any) -> Any:
    """Tiles of 128 rows and 128 keys. Forward, that on the diagonal has no loop, and the first of a row has nothing to correct:
    both are counted like the others."""
    import tokamax
    from absl import flags

    del mesh
    flags.FLAGS.mark_as_parsed()  # tokamax reads them
    causal, block = case["mask"] != "full", 128
    count = LENGTH // block

    def loops_of(kernel: GpuKernelUse) -> Tiles | None:
        if kernel.name.startswith("flash_attention") == (case["pass"] == "backward"):
            return None
        return Tiles((count * (count + 1) // 2 if causal else count * count,), block * block)

    def run(q: Any, k: Any, v: Any) -> Any:
        return tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation="mosaic")

    return run, loops_of


def name_of(case: dict[str, Any]) -> str:
    """`h100 64 causal forward attnops`."""
    return " ".join(str(case[key]) for key in ("target", "dim", "mask", "pass", "who"))


def report(rows: dict[str, Any]) -> None:
    """Stalls and instructions per live logit, the ratios to the other implementations, and, per visited logit, to causal."""
    print(
        f"{'':27} {'attnops':>15} {'jax':>15} {'tokamax':>15} {'/jax':>7} {'visited':>7} {'/tokamax':>8} {'/causal':>7}"
    )
    for case in cases():
        if case["who"] != "attnops":
            continue
        ours, jaxs, tokamaxs = found = [rows.get(name_of(case | {"who": who}), {}) for who in WHO]
        causal = rows.get(name_of(case | {"mask": "causal"}), {})
        cells = [f"{one['stalls']:.3f} / {one['instructions']:.3f}" if "stalls" in one else "-" for one in found]
        ratios = [_ratio(ours, jaxs), _ratio(ours, jaxs, ("visited",)), _ratio(ours, tokamaxs)]
        ratios.append(_ratio(ours, causal, ("stalls",), ("visited",)))
        print(f"{name_of(case)[:-8]:27} {cells[0]:>15} {cells[1]:>15} {cells[2]:>15} ", end="")
        print(f"{ratios[0]:>7} {ratios[1]:>7} {ratios[2]:>8} {ratios[3]:>7}")


def _ratio(
    one: dict[str, Any], other: dict[str, Any], of: tuple[str, ...] = ("stalls",), by: tuple[str, ...] = ()
) -> str:
    """The ratio of two rows' figures, or of their quotients."""
    if "stalls" not in one or "stalls" not in other:
        return "-"
    values = [math.prod(row[name] for name in of) / math.prod(row[name] for name in by) for row in (one, other)]
    return f"{values[0] / values[1]:.3f}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    data = json.loads(options.json.read_text()) if options.json.exists() else {"rows": {}}
    data["versions"] = {"jax": jax.__version__}
    if options.report:
        report(data["rows"])
        return
    for case in cases():
        name = name_of(case)
        if name in data["rows"] or options.only not in name:
            continue
        try:
            data["rows"][name] = measure(case)
        except Exception as error:  # including the compiler's own
            data["rows"][name] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        print(name, data["rows"][name], file=sys.stderr, flush=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
