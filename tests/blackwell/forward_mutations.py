"""Run the forward kernel for Blackwell in the interpreter with a mistake planted in it: see tests/mosaic_mistakes.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ["NPROC"] = "8"  # warps and warpgroups wait in threads of XLA's, as many as there are cores by default

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops.operators.blackwell.kernel import blackwell_attention, forward, roles
from attnops.operators.blackwell.kernel.blackwell_sizes import PART
from attnops.operators.kernels.operands import Operands, split_static
from attnops.operators.mosaic.kernel import block
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes, MosaicTiles
from attnops.verify import reference_attention

sys.path.append(str(Path(__file__).parents[1]))
from mosaic_mistakes import Planted
from part_mistakes import at_edges, barely_cut_parts, cut_parts, loader_apart, many_parts, parts_as
from span_mistakes import MASKS, span_mistakes

STAGES = 2


class Kernel(NamedTuple):
    """A kernel under test. offset: of the queries' positions. more: of the kernel. widened: whether keys and values are int8.
    mask: one of MASKS; of others than a causal one the mistakes are of spans."""

    sizes: MosaicSizes
    dim: int
    q_len: int
    kv_len: int
    offset: int
    heads: int = 1
    more: dict[str, Any] = {}  # noqa: RUF012
    widened: bool = False
    mask: str = "causal"


KERNELS = {
    # Two softmaxes, with weights beside the logits and in their place; one, whose tiles take turns.
    "apart": Kernel(MosaicSizes(256, 64, STAGES), 64, 256, 256, 0),
    "in_place": Kernel(MosaicSizes(256, 128, STAGES), 128, 256, 384, 128),
    "alone": Kernel(MosaicSizes(128, 64, STAGES), 64, 128, 256, 128),
    # The rows of four query heads, and keys in parts of three and four tiles.
    "few": Kernel(MosaicSizes(128, 64, STAGES), 64, 24, 448, 424, 4, {"fold": True, "kv_splits": 2}),
    # Values in keys, and 512 columns that two blocks of threads share.
    "latent": Kernel(MosaicSizes(128, 64, STAGES), 576, 128, 320, 192, more={"value_columns": 512}),
    # int8 keys and values.
    "widened": Kernel(MosaicSizes(256, 64, STAGES), 64, 256, 256, 0, widened=True),
    # Rows don't see 12 columns of a part with 32, and in another 10.
    "window": Kernel(MosaicSizes(128, 64, STAGES), 64, 136, 216, 69, mask="window"),
    "documents": Kernel(MosaicSizes(128, 64, STAGES), 64, 136, 216, 72, mask="documents"),
    # Of the second parts of tiles the first row sees one's last column, and the last row another's first.
    "edges": Kernel(MosaicSizes(128, 64, STAGES), 64, 128, 256, 64, mask="edges"),
}
PLANTED = Planted(STAGES)


def _mma(change: Callable[[str, Any, Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Products with other options. change: of "logits" or "sums", their barrier, what they read last and their options. Places of
    tensor memory that others take too have no name of their own, but barriers do; of logits only the last product has one."""

    def mma(to: Any, a: Any, b: Any, barrier: Any = None, **options: Any) -> None:
        of = "logits" if barrier is None else PLANTED.name(barrier).removesuffix("_full")
        plgpu.tcgen05_mma(to, a, b, barrier, **change(of, barrier, b, options))

    PLANTED.changed["tcgen05_mma"] = mma


def _released_before(which: str, name: str) -> None:
    """A place of tiles is said to be free before the product is issued that reads it."""

    def early(of: str, barrier: Any, b: Any, options: dict[str, Any]) -> dict[str, Any]:
        if of == which and barrier is not None:
            last = LAST[0] == 0 or _first_index(barrier) == LAST[0]
            pl.when(last)(lambda: plgpu.tcgen05_commit_arrive(PLANTED.refs[name].at[_first_index(b)]))
        return options

    _mma(early)
    PLANTED.without("tcgen05_commit_arrive", name)


LAST = [1]  # the number of the last softmax


def _first_index(ref: Any) -> Any:
    return next(one.indices[0] for one in ref.transforms if hasattr(one, "indices"))


def _without_of(function: str, names: tuple[str, ...]) -> None:
    """Waits for any of these do nothing."""
    PLANTED.changed[function] = lambda barrier: (
        None if PLANTED.name(barrier) in names else getattr(plgpu, function)(barrier)
    )


def _weights_released_early() -> None:
    """The place of weights is said to be free when they are there."""

    def wait(barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        if PLANTED.name(barrier) == "weights_full":
            plgpu.tcgen05_commit_arrive(PLANTED.here("weights_free", barrier))

    PLANTED.changed["barrier_wait"] = wait
    PLANTED.without("tcgen05_commit_arrive", "weights_free")


def _arrive_early(name: str, at: str) -> None:
    """A role's arrival at a barrier comes with that at another, before. Another role's stays."""
    early = [False]

    def arrive(barrier: Any) -> None:
        if PLANTED.name(barrier) == at:
            plgpu.barrier_arrive(PLANTED.here(name, barrier))
            early[0] = True
        if PLANTED.name(barrier) == name and early[0]:
            early[0] = False
        else:
            plgpu.barrier_arrive(barrier)

    PLANTED.changed["barrier_arrive"] = arrive


def mutations(kernel: type[Any] = forward.BlackwellForward) -> dict[str, Callable[[], None]]:
    """The mistakes of a kernel with these roles, by name."""
    waits = [
        "query_full",
        "key_full",
        "key_free",
        "value_full",
        "value_free",
        "logits_full",
        "weights_full",
        "weights_free",
    ]
    waits += ["sums_full", "shrink_full", "totals_full"]
    made: dict[str, Callable[[], None]] = {"none": lambda: None}
    made |= {f"no wait for {name}": lambda name=name: PLANTED.without("barrier_wait", name) for name in waits}
    made |= {
        f"{name} in the next place": lambda name=name: PLANTED.copy_to_next(name)
        for name in ("key_tiles", "value_tiles")
    }
    made |= {
        "weights after one arrival": lambda: PLANTED.arrivals((kernel,), "weights_full", 1),
        "keys released before they are read": lambda: _released_before("logits", "key_free"),
        "values released before they are read": lambda: _released_before("sums", "value_free"),
        "weights released before they are read": _weights_released_early,
        "weights not committed": lambda: PLANTED.nothing("commit_tmem"),
        "output not committed": lambda: PLANTED.nothing("commit_smem"),
        "loads of tensor memory not waited for": lambda: PLANTED.nothing("wait_load_tmem"),
        "sums start anew": lambda: _mma(lambda of, at, b, o: o | {"accumulate": False}),
        "logits are added": lambda: _mma(lambda of, at, b, o: o | {"accumulate": True} if of == "logits" else o),
        "keys waited for as values": lambda: PLANTED.wait_for("key_full", "value_full"),
        "values waited for as keys": lambda: PLANTED.wait_for("value_full", "key_full"),
        "weights said to be there with what shrinks sums": lambda: _arrive_early("weights_full", "shrink_full"),
    }
    return made


def widening() -> dict[str, Callable[[], None]]:
    """The mistakes of a warpgroup that widens tiles, and of what loads them, by name."""
    waits = [f"{name}_raw_{barrier}" for name in ("key", "value") for barrier in ("full", "free")]
    made: dict[str, Callable[[], None]] = {
        f"no wait for {name}": lambda name=name: PLANTED.without("barrier_wait", name) for name in waits
    }
    return made | {
        "keys released before they are widened": lambda: _arrive_with("key_raw_free", "key_raw_full"),
        "keys said to be there before they are widened": lambda: _arrive_with("key_full", "key_raw_full"),
        "values in the next place": lambda: PLANTED.copy_to_next("value_raw_tiles"),
    }


def _arrive_with(name: str, start: str) -> None:
    """A barrier's arrival comes at the end of the wait for another."""

    def wait(barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        if PLANTED.name(barrier) == start:
            plgpu.barrier_arrive(PLANTED.here(name, barrier))

    PLANTED.changed["barrier_wait"] = wait
    PLANTED.without("barrier_arrive", name)


def mistakes(which: str) -> dict[str, Callable[[], None]]:
    """Those of one of these kernels, by name."""
    kernel, made = KERNELS[which], mutations()
    of_parts = many_parts()
    if kernel.mask == "edges":
        return at_edges() | cut_parts() | of_parts
    if kernel.mask != "causal":
        made = span_mistakes(kernel.mask, by_keys=False, totals=True) | cut_parts() | barely_cut_parts(PART // 2)
        if kernel.mask == "window":
            return made | of_parts | {"each part of a tile cut as the last": lambda: parts_as("cut", -1)}
        return made | {"the loader's tiles in another order": lambda: loader_apart(forward.BlackwellForward)}
    if kernel.widened:
        return widening() | {name: plant for name, plant in made.items() if "next place" not in name}
    if "value_columns" in kernel.more:
        # The keys of the second tile from one come when its place is free, and so after the product with its weights.
        same = {name: plant for name, plant in made.items() if "value" not in name and "weights released" not in name}
        return same | {
            "all blocks have the first columns": _first_columns,
            "keys released before they are read as values": lambda: _released_before("sums", "key_free"),
        }
    if which == "apart":
        made |= of_weights() | {"the place of weights waited for after a part is written": _waited_late}
    return made


def of_weights() -> dict[str, Callable[[], None]]:
    """The mistakes of weights that are written part by part, by name."""
    plain = roles._write
    ones = jnp.ones

    def unseen(shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
        return ones(shape, dtype), roles.by_row(0.0)

    return {
        "weights of parts in each other's place": lambda: setattr(
            roles, "_write", lambda number, *given: plain(number ^ 1, *given)
        ),
        "weights of the first part only": lambda: setattr(
            roles, "_write", lambda number, *given: plain(number, *given) if number == 0 else None
        ),
        "weights of a part that no row sees": lambda: setattr(roles, "_no_weights", unseen),
    }


def _waited_late() -> None:
    """The place of weights is waited for when the last part, which is the first that is written, has been."""
    plain, late = roles.BlackwellRoles.of_place, list[tuple[Any, Callable[[], None]]]()

    def when(condition: Any) -> Callable[[Callable[[], None]], None]:
        def run(wait: Callable[[], None]) -> None:
            if "softmax" in wait.__qualname__ and "weights_free" in wait.__code__.co_consts:
                late.append((condition, wait))
            else:
                pl.when(condition)(wait)

        return run

    def of_place(self: Any, refs: Any, name: str, *given: Any) -> Any:
        made = plain(self, refs, name, *given)
        if name == "weights" and late:
            condition, wait = late.pop()
            pl.when(condition)(wait)
        return made

    roles.pl = SimpleNamespace(**vars(pl) | {"when": when})
    roles.BlackwellRoles.of_place = of_place  # type: ignore[method-assign]


def _first_columns() -> None:
    """Each block of threads sums the first columns, and writes its own."""
    forward.BlackwellForward.part_of_columns = lambda self, run: run(0)  # type: ignore[method-assign]


def right(kernel: Kernel) -> bool:
    """Whether the kernel's numbers are right."""
    tiles = MosaicTiles(kernel.sizes, kernel.sizes, kernel.sizes)
    scale = kernel.dim**-0.5
    part = blackwell_attention.PartialBlackwell("bthd", scale, None, "cuda", True, None, tiles=tiles, **kernel.more)
    rng, hidden = np.random.default_rng(0), MASKS[kernel.mask](kernel.q_len, kernel.kv_len, kernel.offset)
    shapes = (kernel.q_len, kernel.heads), (kernel.kv_len, 1), (kernel.kv_len, 1)
    q, k, v = (rng.standard_normal((hidden.batch, *shape, kernel.dim)).astype(jnp.bfloat16) for shape in shapes)
    stored, scales = [k, v], list[jax.Array]()
    if kernel.widened:
        stored = [np.round(40 * x.astype(np.float32)).clip(-127, 127).astype(np.int8) for x in stored]
        scales = [jnp.full((1, 1, kernel.kv_len), 1 / 32, jnp.float32)] * 2
        k, v = (x.astype(np.float64) / 32 for x in stored)
    static, dynamic = split_static(hidden.mask, None)
    columns = kernel.more.get("value_columns")
    if columns is not None:
        v = k[..., :columns]
    key, value = (jnp.asarray(x) for x in stored)
    operands = Operands(jnp.asarray(q), key, value if columns is None else None, None, None, *scales)
    output, lse = part.attend(static, operands, dynamic)
    exact = [x.astype(np.float64) for x in (q, k, v)]
    want = reference_attention(*exact, scale=scale, mask=hidden.seen)
    pairs = (output, want.output), (lse, want.lse)
    return max(float(np.abs(np.asarray(x, np.float64) - y).max()) for x, y in pairs) < 2e-2


def main(which: str, name: str, times: str = "1") -> None:
    """Plant a mistake, run, compare."""
    kernel = KERNELS[which]
    LAST[0] = kernel.sizes.block_q // 128 - 1
    PLANTED.into(forward.BlackwellForward, (block, roles, forward))
    mistakes(which)[name]()
    for _ in range(int(times)):
        print("unnoticed" if right(kernel) else "numbers")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
