"""Run a Hopper kernel in the interpreter with a mistake planted in it: `python hopper_mutations.py KERNEL NAME [TIMES]`.

Mistakes are planted from outside, in the functions that the kernels call while they are traced. Prints 'unnoticed' for each run
whose numbers are right. A race leaves the interpreter unusable, so each mistake has a process of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops.operators.hopper.kernel import (
    backward,
    backward_keys,
    backward_query,
    block,
    forward,
    hopper_attention,
    tensor_cores,
)
from attnops.operators.kernels.operands import Operands, split_static
from attnops.operators.mosaic.kernel import block as mosaic_block
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes, MosaicTiles
from attnops.verify import reference_attention, reference_gradients

sys.path.append(str(Path(__file__).parents[1]))
from mosaic_mistakes import Planted
from part_mistakes import chains, cut_tiles, loader_apart
from span_mistakes import MASKS, span_mistakes

STAGES = 2
CLASSES = forward.HopperForward, backward_query.HopperQueryGradient, backward_keys.HopperKeyGradients


class Kernel(NamedTuple):
    """A kernel under test. start: the barrier of what each warpgroup loads for itself. loaded: the barriers of tiles, and these
    tiles. mask: one of MASKS; of others than a causal one the mistakes are of spans. sharp: a factor of the logits."""

    sizes: MosaicSizes
    start: str
    loaded: dict[str, tuple[str, ...]]
    dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (192, 224)
    heads: int = 1
    more: dict[str, Any] = {}  # noqa: RUF012 # of the kernels
    quantised: bool = False
    mask: str = "causal"
    sharp: float = 1.0


BY_KEYS = {"key": ("key_tiles",), "value": ("value_tiles",)}
BY_ROWS = {"rows": ("query_tiles", "d_output_tiles", "lse_tiles", "delta_tiles")}
KERNELS = {
    "forward": Kernel(MosaicSizes(128, 64, STAGES), "query_full", BY_KEYS),
    # The rows of four query heads, and keys in parts of three and four tiles.
    "few": Kernel(
        MosaicSizes(128, 64, STAGES), "query_full", BY_KEYS, (64, 64), (24, 448), 4, {"fold": True, "kv_splits": 2}
    ),
    # Values in keys, and 512 columns that two warpgroups share.
    "latent": Kernel(
        MosaicSizes(64, 64, STAGES),
        "query_full",
        {"key": ("key_tiles",)},
        (576, 512),
        (64, 320),
        1,
        {"value_columns": 512},
    ),
    # int8 keys and values: those that are loaded, and what a warpgroup makes of them.
    "quantised": Kernel(
        MosaicSizes(128, 64, STAGES),
        "query_full",
        {"key": (), "value": (), "key_raw": ("key_raw_tiles",), "value_raw": ("value_raw_tiles",)},
        quantised=True,
    ),
    "dq": Kernel(MosaicSizes(128, 64, STAGES), "rows_full", BY_KEYS),
    "dkv": Kernel(MosaicSizes(64, 128, STAGES), "keys_full", BY_ROWS),
    "divided": Kernel(MosaicSizes(64, 64, STAGES), "keys_full", BY_ROWS, (256, 64)),
    # Values in keys: two warpgroups have the same rows or keys, and half of the columns each.
    "latent_dq": Kernel(
        MosaicSizes(64, 32, STAGES),
        "rows_full",
        {"key": ("key_tiles",)},
        (128, 64),
        (64, 160),
        1,
        {"value_columns": 64},
    ),
    "latent_dkv": Kernel(
        MosaicSizes(32, 64, STAGES), "keys_full", BY_ROWS, (128, 64), (160, 64), 2, {"value_columns": 64}
    ),
}
FORWARD, IN_KEY = KERNELS["forward"], KERNELS["latent_dq"]
SPANS = {"forward": FORWARD, "dq": KERNELS["dq"], "dkv": KERNELS["dkv"]._replace(heads=2)}
KERNELS |= {
    f"{name}_{mask}": kernel._replace(mask=mask, lengths=lengths)
    for name, kernel in SPANS.items()
    for mask, lengths in (("window", (128, 216)), ("documents", (128, 248)))
}
# Whose tiles don't overlap.
KERNELS["apart_documents"] = KERNELS["forward_documents"]._replace(
    loaded=IN_KEY.loaded, dims=IN_KEY.dims, more=IN_KEY.more
)
# So large logits that exponentials overflow where a row's maximum isn't known.
KERNELS["forward_sharp"] = FORWARD._replace(sharp=256.0)


PLANTED = Planted(STAGES)


def _no_commit(module: Any) -> None:
    """A module's writes or reads aren't committed."""
    module.plgpu = SimpleNamespace(**vars(plgpu) | {"commit_smem": lambda: None})


def _released_early(name: str) -> None:
    """A place is said to be free once it is full, before it is read."""

    def wait(barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        if PLANTED.name(barrier) == f"{name}_full":
            plgpu.barrier_arrive(PLANTED.here(f"{name}_free", barrier))

    PLANTED.changed["barrier_wait"] = wait
    PLANTED.without("barrier_arrive", f"{name}_free")


def _released_before_sums(name: str) -> None:
    """A place is said to be free before the last product that reads it."""
    plain = tensor_cores.Interpreted.add_values

    def add_values(self: Any, *terms: Any) -> Any:
        plgpu.barrier_arrive(PLANTED.here(f"{name}_free", terms[0][1][1]))
        return plain(self, *terms)

    tensor_cores.Interpreted.add_values = add_values  # type: ignore[method-assign]
    PLANTED.without("barrier_arrive", f"{name}_free")


def _read(which: str) -> None:
    """Numbers are read from the next place."""
    plain = tensor_cores.TensorCores.numbers

    def numbers(self: Any, ref: Any, layout: Any) -> Any:
        return plain(self, PLANTED.next(ref) if PLANTED.name(ref) == which else ref, layout)

    tensor_cores.TensorCores.numbers = numbers  # type: ignore[method-assign]


def _swapped(first: str, second: str) -> None:
    """Numbers of one array for those of another."""
    plain = tensor_cores.TensorCores.numbers
    other = {first: second, second: first}

    def numbers(self: Any, ref: Any, layout: Any) -> Any:
        name = PLANTED.name(ref)
        return plain(self, PLANTED.here(other[name], ref) if name in other else ref, layout)

    tensor_cores.TensorCores.numbers = numbers  # type: ignore[method-assign]


def _tops(of: Callable[[Any, Any], Any]) -> None:
    """The maximum of tiles that overlap is another. of: of exponents and logits."""
    plain = forward._exponentials_and_top

    def made(early: Any, exponents: Any, x: Any, turn: int) -> Any:
        return plain(early, exponents, x, turn)[0], forward._top(of(exponents, x))

    forward._exponentials_and_top = made


def _weights(of: Callable[[Any, Any, Any], Any]) -> None:
    """The weights of tiles that overlap are others. of: of the weights, the first exponentials and the exponents."""
    plain = forward._exponentials_and_top

    def made(early: Any, exponents: Any, x: Any, turn: int) -> Any:
        weights, top = plain(early, exponents, x, turn)
        return of(weights, early, exponents), top

    forward._exponentials_and_top = made


def overlapped() -> dict[str, Callable[[], None]]:
    """The mistakes of exponentials that are computed beside the next tile's maximum, by name."""
    turn, beside = forward._TURN, forward._BESIDE
    return {
        "none": lambda: None,
        "a maximum without the first columns": lambda: _tops(lambda exponents, x: x[:, turn:]),
        "a maximum without the last columns": lambda: _tops(lambda exponents, x: x[:, :-turn]),
        "a maximum of the first columns": lambda: _tops(lambda exponents, x: x[:, :turn]),
        "the maximum of the tile before": lambda: _tops(lambda exponents, x: exponents),
        "the first exponentials twice": lambda: _weights(
            lambda weights, early, exponents: jnp.concatenate([early, weights[:, :-beside]], axis=1)
        ),
        "exponents for the first exponentials": lambda: _weights(
            lambda weights, early, exponents: jnp.concatenate([exponents[:, :beside], weights[:, beside:]], axis=1)
        ),
        "exponentials of turns swapped": lambda: _weights(
            lambda weights, early, exponents: jnp.concatenate(
                [early, weights[:, beside + turn :], weights[:, beside : beside + turn]], axis=1
            )
        ),
    }


def _beside_hiding() -> dict[str, Callable[[], None]]:
    """The mistakes of exponentials that are computed beside hiding, by name."""
    plain = forward._hidden

    def lost(tile: Any, seen: Any, x: Any, work: Any = lambda: ()) -> Any:
        """Those of tiles that a warp doesn't cut."""
        made = seen.where_cut(0, work, lambda: jax.tree.map(jnp.zeros_like, work()))
        return plain(tile, seen, x)[0], made

    def moved(tile: Any, seen: Any, x: Any, work: Any = lambda: ()) -> Any:
        hidden, made = plain(tile, seen, x, work)
        return hidden, jax.tree.map(lambda y: jnp.roll(y, 1, axis=1), made)

    return {
        "exponentials beside nothing to hide are lost": lambda: setattr(forward, "_hidden", lost),
        "exponentials beside hiding are one column on": lambda: setattr(forward, "_hidden", moved),
    }


def mutations(kernel: Kernel) -> dict[str, Callable[[], None]]:
    """The mistakes of a kernel, by name."""
    made: dict[str, Callable[[], None]]
    if kernel.sharp > 1:
        return overlapped()
    if kernel.mask != "causal":
        made = span_mistakes(kernel.mask, kernel.start == "keys_full", totals=kernel.start == "query_full")
        if kernel.start == "query_full":
            made |= cut_tiles(kernel.sizes.block_kv // 2)
        if kernel == KERNELS["forward_window"]:
            made |= _beside_hiding()
        if kernel == KERNELS["forward_documents"]:
            made |= chains()
            made["the loader's tiles in another order"] = lambda: loader_apart(forward.HopperForward)
        return made
    made = {
        "none": lambda: None,
        f"no wait for {kernel.start}": lambda: PLANTED.without("barrier_wait", kernel.start),
        "output not committed": lambda: PLANTED.changed.update(commit_smem=lambda: None),
        "output copied before it is there": lambda: PLANTED.without("barrier_wait", "output_full"),
        "reads of products not committed": lambda: _no_commit(tensor_cores),
        "copies that a warpgroup needs after one arrival fewer": lambda: PLANTED.arrivals(CLASSES, kernel.start, 1),
    }
    if (latent(kernel) and kernel.start != "query_full") or divided(kernel):  # two warpgroups write it
        made["output copied after one arrival"] = lambda: PLANTED.arrivals(CLASSES, "output_full", 1)
    if kernel.start == "query_full" or (latent(kernel) and kernel.start == "keys_full"):  # of one copy
        del made["copies that a warpgroup needs after one arrival fewer"]
    if kernel.quantised:  # what its products read a warpgroup wrote, not TMA
        del made["reads of products not committed"]
    for name, tiles in kernel.loaded.items():
        full, free = f"{name}_full", f"{name}_free"
        made |= {
            f"no wait for {full}": lambda full=full: PLANTED.without("barrier_wait", full),
            f"no wait for {free}": lambda free=free: PLANTED.without("barrier_wait", free),
            f"{name} released before it is read": lambda name=name: _released_early(name),
            f"{full} a phase ahead": lambda full=full: PLANTED.a_phase_ahead(full, kernel.start),
            f"{free} a phase ahead": lambda free=free: PLANTED.a_phase_ahead(free, kernel.start),
            f"{name} free after one arrival": lambda free=free: PLANTED.arrivals(CLASSES, free, 1),
            f"the next place of {full} waited for": lambda full=full: PLANTED.wait_for_next(full),
        }
        if name.endswith("_raw"):  # one warpgroup reads it
            del made[f"{name} free after one arrival"]
        elif kernel.quantised:  # may wait forever
            del made[f"the next place of {full} waited for"]
        if len(tiles) > 1:
            made[f"{full} after one copy fewer"] = functools.partial(PLANTED.arrivals, CLASSES, full, len(tiles) - 1)
        for one in tiles:
            made[f"{one} in the next place"] = lambda one=one: PLANTED.copy_to_next(one)
    last = {"query_full": "value", "rows_full": "key", "keys_full": "rows"}[kernel.start]
    if latent(kernel) and last != "rows":
        made |= {
            "the other warpgroup's query not waited for": lambda: PLANTED.without("barrier_wait", "query_free"),
            "the other warpgroup's query after one arrival": lambda: PLANTED.arrivals(CLASSES, "query_free", 1),
        }
    if latent(kernel) and last == "value":
        return made
    made[f"{last} released before its last product"] = lambda: _released_before_sums(last)
    if last == "key" and not latent(
        kernel
    ):  # a place of values is filled after that of their keys, free only after both
        del made["value released before it is read"]
    if last == "value":
        made |= {
            "keys waited for as values": lambda: PLANTED.wait_for("key_full", "value_full"),
            "values waited for as keys": lambda: PLANTED.wait_for("value_full", "key_full"),
            "free keys waited for as values": lambda: PLANTED.wait_for("key_free", "value_free"),
        }
    if last == "rows":
        made |= {
            "lse of the next place": lambda: _read("lse_tiles"),
            "delta of the next place": lambda: _read("delta_tiles"),
            "lse for delta": lambda: _swapped("lse_tiles", "delta_tiles"),
        }
    if divided(kernel) and last == "rows":
        del made["the next place of rows_full waited for"]  # waits forever
        made |= {
            "the other warpgroup's keys not waited for": lambda: PLANTED.without("barrier_wait", "keys_free"),
            "the other warpgroup's keys after one arrival": lambda: PLANTED.arrivals(CLASSES, "keys_free", 1),
        }
    return made


def divided(kernel: Kernel) -> bool:
    """Whether two warpgroups share keys."""
    return sum(kernel.dims) > 256 or latent(kernel)


def latent(kernel: Kernel) -> bool:
    """Whether values are a part of their keys."""
    return "value_columns" in kernel.more


def right(which: str, kernel: Kernel) -> bool:
    """Whether the kernel's numbers are right."""
    dim, value_dim = kernel.dims
    tiles = MosaicTiles(kernel.sizes, kernel.sizes, kernel.sizes)
    scale = kernel.sharp * dim**-0.5
    part = hopper_attention.PartialHopper("bthd", scale, None, "cuda", True, None, tiles=tiles, **kernel.more)
    rng, (q_len, kv_len), heads = np.random.default_rng(0), kernel.lengths, kernel.heads
    hidden = MASKS[kernel.mask](q_len, kv_len, kv_len - q_len - 8 * (kernel.mask != "causal"))
    shapes = (q_len, heads, dim), (kv_len, 1, dim), (kv_len, 1, value_dim), (q_len, heads, value_dim)
    q, k, v, pull = (rng.standard_normal((hidden.batch, *shape)).astype(jnp.bfloat16) for shape in shapes)
    v = k[..., :value_dim] if latent(kernel) else v
    static, dynamic = split_static(hidden.mask, None)
    value, scales = None if latent(kernel) else jnp.asarray(v), (None, None)
    if kernel.quantised:
        k, v = (np.round(40 * x.astype(np.float32)).clip(-127, 127) for x in (k, v))
        of_token = np.full((1, 1, kv_len), 1 / 32, np.float32)
        key, value, scales = jnp.asarray(k, jnp.int8), jnp.asarray(v, jnp.int8), (jnp.asarray(of_token),) * 2
        k, v = k / 32, v / 32
    else:
        key = jnp.asarray(k)
    operands = Operands(jnp.asarray(q), key, value, None, None, *scales)
    exact, known = [x.astype(np.float64) for x in (q, k, v)], {"scale": scale, "mask": hidden.seen}
    reference = reference_attention(*exact, **known)
    if kernel.start == "query_full":
        got, want = [part.attend(static, operands, dynamic)[0]], [reference.output]
    else:
        shift = jnp.asarray(reference.lse * np.log2(np.e), jnp.float32)
        delta = jnp.asarray((reference.output * pull.astype(np.float64)).sum(-1).swapaxes(1, 2), jnp.float32)
        gradients = part.gradients(static, operands, dynamic, jnp.asarray(pull), shift, delta)
        of_query = kernel.start == "rows_full"
        names = ("query",) if of_query else ("key", "value")[: 2 - latent(kernel)]
        got = [gradients.of_query()] if of_query else [x for x in gradients.of_keys() if x is not None]
        of_all = reference_gradients(*exact, pull.astype(np.float64), None, **known)
        if latent(kernel):
            of_all["key"][..., :value_dim] += of_all["value"]
        want = [of_all[name] for name in names]
    errors = [np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max() for x, y in zip(got, want, strict=True)]
    return all(error < 2e-2 for error in errors)


def main(which: str, name: str, times: str = "1") -> None:
    """Plant a mistake, run, compare."""
    kernel = KERNELS[which]
    PLANTED.into(block.HopperBlock, (mosaic_block, block, forward, backward, backward_query, backward_keys))
    mutations(kernel)[name]()
    for _ in range(int(times)):
        print("unnoticed" if right(which, kernel) else "numbers")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
