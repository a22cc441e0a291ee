"""Run a kernel of Blackwell's gradients in the interpreter with a mistake planted in it: see tests/mosaic_mistakes.py."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["NPROC"] = "8"  # warpgroups wait in threads of XLA's, as many as there are cores by default

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops.operators.blackwell.kernel import backward, backward_keys, backward_query, blackwell_attention
from attnops.operators.blackwell.kernel.backward_sizes import gradient_turns
from attnops.operators.kernels.operands import Operands, split_static
from attnops.operators.mosaic.kernel import block, tile
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes, MosaicTiles
from attnops.operators.mosaic.kernel.seen_parts import SeenParts
from attnops.verify import reference_attention, reference_gradients

sys.path.append(str(Path(__file__).parents[1]))
from mosaic_mistakes import Planted
from span_mistakes import MASKS, FirstPlace, span_mistakes

STAGES = 2


class Kernel(NamedTuple):
    """A kernel under test. start: barriers of what a block loads once. loaded: the barriers of tiles, and these tiles. factors:
    of sums. dims: of keys and values; in_key: these are the first columns of keys. mask: one of MASKS; of others than a causal
    one the mistakes are of spans. lengths: of rows and keys, and the offset of rows."""

    sizes: MosaicSizes
    start: tuple[str, ...]
    loaded: dict[str, tuple[str, ...]]
    factors: tuple[str, ...]
    dims: tuple[int, int] = (128, 128)
    in_key: bool = False
    mask: str = "causal"
    lengths: tuple[int, int, int] = (264, 296, 32)

    @property
    def turns(self) -> int:
        """How often a block goes through its tiles."""
        which = "dkv" if len(self.factors) > 1 else "dq"
        return len(gradient_turns(which, *self.dims, in_key=self.in_key))


PRODUCTS = "logits", "d_weights"
BY_ROWS = {"rows": ("query_tiles", "d_output_tiles", "lse_tiles", "delta_tiles")}
OF_KEYS = "weights", "d_logits"
LATENTS = 480, 128  # in two turns; of the first one's columns some have values
KERNELS = {
    "dq": Kernel(
        MosaicSizes(128, 64, STAGES), ("rows_full",), {"key": ("key_tiles",), "value": ("value_tiles",)}, ("d_logits",)
    ),
    "dkv": Kernel(MosaicSizes(64, 128, STAGES), ("key_full", "value_full"), BY_ROWS, OF_KEYS),
    "divided": Kernel(MosaicSizes(64, 128, STAGES), ("key_full", "value_full"), BY_ROWS, OF_KEYS, (224, 224)),
    "latent dq": Kernel(
        MosaicSizes(128, 64, STAGES), ("rows_full", "d_output_full", "d_output_held"), {"key": ("key_tiles",)},
        ("d_logits",), LATENTS, in_key=True,
    ),
    "latent dkv": Kernel(MosaicSizes(64, 128, STAGES), ("key_full",), BY_ROWS, OF_KEYS, LATENTS, in_key=True),
}  # fmt: skip
KERNELS |= {
    f"{name} {mask}": KERNELS[name]._replace(mask=mask, dims=(64, 64), lengths=(136, 216, 72))
    for name in ("dq", "dkv")
    for mask in ("window", "documents")
}


PLANTED = Planted(STAGES)
CLASSES = backward_query.BlackwellQueryGradient, backward_keys.BlackwellKeyGradients


def _indices(ref: Any) -> Any:
    """The first that a reference was cut with."""
    return next(one.indices for one in ref.transforms if hasattr(one, "indices"))


def _released_before(factors: tuple[str, ...], name: str, in_key: bool) -> None:
    """A place is said to be free before the product is issued that reads it last. in_key: which has parts."""

    def multiply(to: Any, a: Any, b: Any, barrier: Any = None, **options: Any) -> None:
        if PLANTED.name(a) in factors and not (in_key and _indices(to)[1].start):
            freed = PLANTED.refs[name]
            plgpu.tcgen05_commit_arrive(freed.at[_indices(b)[0]] if name.endswith("_free") else freed)
        plgpu.tcgen05_mma(to, a, b, barrier, **options)

    PLANTED.changed["tcgen05_mma"] = multiply
    PLANTED.without("tcgen05_commit_arrive", name)


def _products(change: Callable[[str, Any, Any, dict[str, Any]], tuple[Any, Any, dict[str, Any]]]) -> None:
    """Products of other factors. change: of the name of the first, the factors and the options."""

    def multiply(to: Any, a: Any, b: Any, barrier: Any = None, **options: Any) -> None:
        a, b, options = change(PLANTED.name(a), a, b, options)
        plgpu.tcgen05_mma(to, a, b, barrier, **options)

    PLANTED.changed["tcgen05_mma"] = multiply


def _accumulate(factor: str, accumulate: bool) -> None:
    """A sum begins anew with each product, or with what was in its place."""
    _products(lambda name, a, b, options: (a, b, options | ({"accumulate": accumulate} if name == factor else {})))


def _values_of_next(factor: str) -> None:
    """A sum's values are those of the next place."""
    _products(lambda name, a, b, options: (a, PLANTED.next(b) if name == factor else b, options))


def _a_phase_ahead(name: str) -> None:
    """The warpgroup that multiplies arrives once too often at a barrier, before its first wait."""
    begun: list[int] = []

    def wait(barrier: Any) -> None:
        if not begun and PLANTED.name(barrier) in ("rows_full", "key_full"):
            begun.append(1)
            ref = PLANTED.refs[name]
            for one in [ref.at[slot] for slot in range(STAGES)] if name.endswith("_free") else [ref]:
                plgpu.tcgen05_commit_arrive(one)
        plgpu.barrier_wait(barrier)

    PLANTED.changed["barrier_wait"] = wait


def _arrivals(name: str, count: int) -> None:
    """A barrier of so many arrivals."""
    PLANTED.arrivals(CLASSES, name, count)


def _numbers(change: dict[str, str]) -> None:
    """Numbers of rows are those of another array, or of the next place."""

    def load(ref: Any, **options: Any) -> Any:
        name = PLANTED.name(ref)
        if name in change:
            ref = PLANTED.next(ref) if change[name] == name else PLANTED.here(change[name], ref)
        return plgpu.load(ref, **options)

    PLANTED.changed["load"] = load


def _same_columns() -> None:
    """Both warpgroups write the first half of what is multiplied."""
    plain = backward.BlackwellGradients.give

    def give(self: Any, refs: Any, name: str, x: Any, columns: Any) -> None:
        plain(self, refs, name, x, type(columns)(0, columns.size))

    backward.BlackwellGradients.give = give  # type: ignore[method-assign]


def _early(factor: str) -> None:
    """A factor is said to be there before it is written."""
    plain = backward.BlackwellGradients.give

    def give(self: Any, refs: Any, name: str, x: Any, columns: Any) -> None:
        if name != factor:
            plain(self, refs, name, x, columns)
            return
        plgpu.barrier_arrive(refs[f"{name}_full"])
        plgpu.async_store_tmem(refs[name].at[:, columns], x)
        plgpu.commit_tmem()

    backward.BlackwellGradients.give = give  # type: ignore[method-assign]


def _loaded_early() -> None:
    """The values are said to have their place before their gradient is written from there."""

    def arrive(barrier: Any) -> None:
        if PLANTED.name(barrier) == "stored":
            plgpu.barrier_arrive(PLANTED.refs["value_free"])
        if PLANTED.name(barrier) != "value_free":
            plgpu.barrier_arrive(barrier)

    PLANTED.changed["barrier_arrive"] = arrive
    _arrivals("value_free", 2)


def _pieces_in_one_place() -> None:
    """Both warpgroups store through the first one's place."""
    plain = backward.BlackwellGradients.store_pieces

    def store(self: Any, refs: Any, *given: Any) -> None:
        plain(self, refs | {"pieces": FirstPlace(refs["pieces"])}, *given)

    backward.BlackwellGradients.store_pieces = store  # type: ignore[method-assign]


def _of_warps(by_keys: bool) -> dict[str, Callable[[], None]]:
    """Those in what a warp passes over."""
    made: dict[str, Callable[[], None]] = {
        "a tile that is seen passed over": lambda: _warps(lambda seen, cut: (seen & False, cut)),
        "a tile that isn't seen whole passed over": lambda: _warps(lambda seen, cut: (~cut, cut)),
    }
    if by_keys:
        made["a cut tile taken for a whole one"] = lambda: _warps(lambda seen, cut: (seen, cut & False))
    return made


def _warps(change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """What a warp's rows see of a tile, changed."""
    plain = tile.seen_parts

    def seen_parts(*given: Any, **more: Any) -> SeenParts:
        made: SeenParts = plain(*given, **more)
        assert made.seen
        assert made.cut
        changed = change(made.seen[0], made.cut[0])
        return made._replace(seen=(changed[0],), cut=(changed[1],))

    tile.seen_parts = seen_parts


def mutations(kernel: Kernel) -> dict[str, Callable[[], None]]:
    """The mistakes of a kernel, by name."""
    if kernel.mask != "causal":
        return span_mistakes(kernel.mask, len(kernel.factors) > 1) | _of_warps(len(kernel.factors) > 1)
    made: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        **{f"no wait for {name}": functools.partial(PLANTED.without, "barrier_wait", name) for name in kernel.start},
        "writes to shared memory not committed": lambda: PLANTED.nothing("commit_smem"),
        "writes to tensor memory not committed": lambda: PLANTED.nothing("commit_tmem"),
        "reads of tensor memory not waited for": lambda: PLANTED.nothing("wait_load_tmem"),
        "no wait for stored": lambda: PLANTED.without("barrier_wait", "stored"),
        "stored after one half": lambda: _arrivals("stored", 1),
        "both halves in one place": _same_columns,
    }
    for name in PRODUCTS:
        made |= {
            f"no wait for {name}_full": lambda name=name: PLANTED.without("barrier_wait", f"{name}_full"),
            f"no wait for {name}_read": lambda name=name: PLANTED.without("barrier_wait", f"{name}_read"),
            f"{name} read by one": lambda name=name: _arrivals(f"{name}_read", 1),
        }
    for factor in kernel.factors:
        made |= {
            f"no wait for {factor}_full": lambda factor=factor: PLANTED.without("barrier_wait", f"{factor}_full"),
            f"no wait for {factor}_read": lambda factor=factor: PLANTED.without("barrier_wait", f"{factor}_read"),
            f"{factor} of one half": lambda factor=factor: _arrivals(f"{factor}_full", 1),
            f"{factor} said to be there early": lambda factor=factor: _early(factor),
            f"{factor} free before the product": lambda f=factor: _released_before((f,), f"{f}_read", kernel.in_key),
            f"{factor}_read a phase ahead": lambda factor=factor: _a_phase_ahead(f"{factor}_read"),
            f"sums of {factor} anew": lambda factor=factor: _accumulate(factor, False),
            f"sums of {factor} added to what was there": lambda factor=factor: _accumulate(factor, True),
            f"sums of {factor} of the next values": lambda factor=factor: _values_of_next(factor),
        }
    for name, tiles in kernel.loaded.items():
        full, free = f"{name}_full", f"{name}_free"
        made |= {
            f"no wait for {full}": lambda full=full: PLANTED.without("barrier_wait", full),
            f"no wait for {free}": lambda free=free: PLANTED.without("barrier_wait", free),
            f"{free} a phase ahead": lambda free=free: _a_phase_ahead(free),
            f"the next place of {full} waited for": lambda full=full: PLANTED.wait_for_next(full),
        }
        if len(tiles) > 1:
            made[f"{full} after one copy fewer"] = functools.partial(_arrivals, full, len(tiles) - 1)
        for one in tiles:
            made[f"{one} in the next place"] = functools.partial(PLANTED.copy_to_next, one)
    made.pop("the next place of value_full waited for", None)  # waits forever
    of_keys = len(kernel.factors) > 1
    # Where a turn has one factor, each is the last.
    factors = kernel.factors if kernel.turns > 1 and not kernel.in_key else kernel.factors[-1:]
    last = factors, "rows_free" if of_keys else "key_free", kernel.in_key
    made[f"{last[1]} before the last product"] = functools.partial(_released_before, *last)
    if kernel.in_key:
        made["no wait for sums_full"] = lambda: PLANTED.without("barrier_wait", "sums_full")
        made["pieces not waited for"] = lambda: PLANTED.nothing("wait_smem_to_gmem")
        made["pieces in one place"] = _pieces_in_one_place
    if "d_output_held" in kernel.start:
        made["d_output_held after one half"] = lambda: _arrivals("d_output_held", 1)
    elif not of_keys:
        made["rows_full after one copy"] = lambda: _arrivals("rows_full", 1)
    if of_keys:
        made |= {
            "no wait for sums_full": lambda: PLANTED.without("barrier_wait", "sums_full"),
            "lse of the next place": lambda: _numbers({"lse_tiles": "lse_tiles"}),
            "delta of the next place": lambda: _numbers({"delta_tiles": "delta_tiles"}),
            "lse for delta": lambda: _numbers({"lse_tiles": "delta_tiles", "delta_tiles": "lse_tiles"}),
        }
    if kernel.turns > 1 and not kernel.in_key:
        made |= {
            "no wait for value_free": lambda: PLANTED.without("barrier_wait", "value_free"),
            "value_free before it is written": _loaded_early,
        }
    return made


def right(kernel: Kernel) -> bool:
    """Whether the kernel's numbers are right."""
    tiles = MosaicTiles(kernel.sizes, kernel.sizes, kernel.sizes)
    dim, value_dim = kernel.dims
    columns = value_dim if kernel.in_key else None
    part = blackwell_attention.PartialBlackwell(
        "bthd", dim**-0.5, None, "cuda", True, None, tiles=tiles, value_columns=columns
    )
    rng, hidden, (q_len, kv_len, _) = np.random.default_rng(0), MASKS[kernel.mask](*kernel.lengths), kernel.lengths
    shapes = [
        (hidden.batch, n, 1, d) for n, d in ((q_len, dim), (kv_len, dim), (kv_len, value_dim), (q_len, value_dim))
    ]
    q, k, v, pull = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)
    v = k[..., :value_dim] if kernel.in_key else v
    static, dynamic = split_static(hidden.mask, None)
    operands = Operands(jnp.asarray(q), jnp.asarray(k), None if kernel.in_key else jnp.asarray(v), None, None)
    exact, known = [x.astype(np.float64) for x in (q, k, v)], {"scale": dim**-0.5, "mask": hidden.seen}
    reference = reference_attention(*exact, **known)
    shift = jnp.asarray(reference.lse * np.log2(np.e), jnp.float32)
    delta = jnp.asarray((reference.output * pull.astype(np.float64)).sum(-1).swapaxes(1, 2), jnp.float32)
    gradients = part.gradients(static, operands, dynamic, jnp.asarray(pull), shift, delta)
    of_query = len(kernel.factors) == 1
    names = ("query",) if of_query else ("key", "value")[: 2 - kernel.in_key]
    got = [gradients.of_query()] if of_query else [x for x in gradients.of_keys() if x is not None]
    of_all = reference_gradients(*exact, pull.astype(np.float64), None, **known)
    if kernel.in_key:
        of_all["key"][..., :value_dim] += of_all["value"]
    want = [of_all[name] for name in names]
    errors = [np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max() for x, y in zip(got, want, strict=True)]
    return all(error < 2e-2 for error in errors)  # NaN is wrong too


def main(which: str, name: str, times: str = "1") -> None:
    """Plant a mistake, run, compare."""
    kernel = KERNELS[which]
    PLANTED.into(backward.BlackwellGradients, (block, backward, backward_keys, backward_query))
    mutations(kernel)[name]()
    for _ in range(int(times)):
        print("unnoticed" if right(kernel) else "numbers")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
