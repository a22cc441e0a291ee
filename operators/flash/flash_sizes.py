"""How a FlashAttention2Config is filled in: blocks, warps and stages from the local shapes, the dtype and the device."""

from __future__ import annotations

import math

from ...devices import gpu_variant, gpu_variants
from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ...planning.notes import note
from ...scores.steps import Diagonal, Lookup, Product
from ..choices.mask_blocks import fitted_block
from .flash_config import FlashAttention2Config
from .kernel.flash_sizes import TileSizes, TileSteps
from .pass_fields import FIELDS

__all__ = ["min_shared_bytes", "resolve_flash", "sizes_of", "splits_of", "steps_note", "steps_of", "unknown_gpu"]


_DIMS = (64, 128, 256)
# (forward, gradients of key and value, gradient of the query) by the power of two that holds the head dim. Hopper's were timed
# on an H200. The others were chosen from compiled programs: few or no spills, then the fewest stalls in the inner loop, which
# tell nothing of stages, as loads aren't in them (benchmarks/gpu.md).
_HOPPER = {
    64: (TileSizes(128, 128, 4, 3), TileSizes(128, 128, 8, 2), TileSizes(128, 64, 4, 3)),
    128: (TileSizes(128, 128, 8, 3), TileSizes(64, 128, 8, 2), TileSizes(128, 64, 8, 2)),
    256: (TileSizes(128, 64, 8, 2), TileSizes(64, 64, 8, 2), TileSizes(64, 32, 4, 1)),
}
# With a bias, a score or a mask array, whose tiles are loaded too, or quantised keys, which take registers. Not timed.
_HOPPER_WITH_MORE = {
    64: (TileSizes(128, 64, 4, 3), TileSizes(64, 128, 8, 2), TileSizes(128, 64, 4, 3)),
    128: (TileSizes(128, 128, 8, 2), TileSizes(64, 128, 8, 2), TileSizes(128, 64, 8, 1)),
    256: (TileSizes(128, 64, 8, 1), TileSizes(32, 64, 8, 2), TileSizes(64, 32, 4, 1)),
}
_BLACKWELL = {
    64: (TileSizes(128, 64, 4, 3), TileSizes(64, 128, 4, 1), TileSizes(128, 64, 4, 3)),
    128: (TileSizes(128, 128, 8, 2), TileSizes(64, 128, 8, 1), TileSizes(128, 64, 4, 2)),
    256: (TileSizes(128, 64, 8, 1), TileSizes(32, 64, 8, 2), TileSizes(64, 32, 4, 1)),
}
_AMPERE = {
    64: (TileSizes(128, 64, 4, 3), TileSizes(64, 64, 4, 2), TileSizes(128, 32, 4, 2)),
    128: (TileSizes(128, 128, 8, 3), TileSizes(32, 64, 4, 2), TileSizes(64, 32, 4, 2)),
    256: (TileSizes(64, 32, 4, 2), TileSizes(32, 32, 4, 1), TileSizes(64, 32, 8, 1)),
}
# The forward pass at 128 has a multiprocessor to itself, so the next tile is loaded meanwhile: three stages. With two, each turn
# of the loop waits for its loads, which the stalls don't show.
_AMPERE_BIASED = TileSizes(128, 128, 8, 2)  # the bias of two tiles exceeds shared memory
_AMPERE_QUANTISED = TileSizes(128, 64, 8, 2)  # converting keys takes registers
# For GPUs with less shared memory, and for unknown ones: all GPUs from sm_86 on have 99 KiB per block.
_SMALL = {
    64: (TileSizes(64, 64, 4, 2), TileSizes(64, 64, 4, 1), TileSizes(64, 64, 4, 1)),
    128: (TileSizes(64, 64, 4, 1), TileSizes(32, 64, 4, 1), TileSizes(64, 32, 4, 1)),
    256: (TileSizes(64, 32, 4, 1), TileSizes(16, 32, 4, 1), TileSizes(32, 32, 4, 1)),
}
# For float32, whose products don't run on tensor cores.
_WIDE = {
    64: (TileSizes(64, 32, 4, 2), TileSizes(32, 32, 4, 1), TileSizes(32, 32, 4, 1)),
    128: (TileSizes(32, 32, 4, 1), TileSizes(32, 32, 4, 1), TileSizes(32, 32, 4, 1)),
    256: (TileSizes(16, 32, 4, 1), TileSizes(16, 16, 4, 1), TileSizes(16, 16, 4, 1)),
}
# Of latents, which are keys and values at once: head dims above 256, up to 512 and up to 1024. Chosen from compiled programs,
# for few spills and for tiles that fit into shared memory.
_LATENT_SMALL = TileSizes(16, 32, 4, 1), TileSizes(16, 16, 4, 1), TileSizes(16, 16, 4, 1)
_LATENT_AMPERE = TileSizes(32, 32, 4, 1), TileSizes(32, 16, 4, 1), TileSizes(16, 32, 4, 1)
_LATENTS = {
    "hopper": {
        512: (TileSizes(64, 32, 8, 2), TileSizes(32, 64, 8, 1), TileSizes(64, 32, 8, 1)),
        1024: (TileSizes(64, 32, 8, 2), TileSizes(32, 32, 8, 1), TileSizes(32, 32, 8, 1)),
    },
    "blackwell": {
        512: (TileSizes(64, 64, 8, 1), TileSizes(32, 32, 4, 1), TileSizes(32, 32, 4, 1)),
        1024: (TileSizes(64, 32, 8, 1), TileSizes(32, 16, 4, 1), TileSizes(16, 32, 4, 1)),
    },
    "ampere": {512: _LATENT_AMPERE, 1024: _LATENT_AMPERE},
    None: {512: _LATENT_SMALL, 1024: (TileSizes(16, 16, 4, 1), *_LATENT_SMALL[1:])},
}
_LATENT_WIDE = (TileSizes(16, 16, 4, 1),) * 3  # of float32
# Steps of a tile of the forward pass, by the same power of two; chosen likewise. On Hopper tensor cores run by themselves, so a
# product starts as soon as its share of the weights is known, and the exponentials of the next share run beside it. On Blackwell
# each product would take tensor memory, and at 256 registers.
_HOPPER_STEPS = dict.fromkeys(_DIMS, TileSteps(1, 4, 8))
_STEPS = {64: TileSteps(2, 1, 8), 128: TileSteps(2, 1, 1), 256: TileSteps()}
_MIN_SOFTMAX, _MIN_PRODUCT = 32, 16  # keys
_ROWS_OF_WARP = 16
_FOLDED_ROWS = 64  # the most queries, over all heads that share a kv head, that become the rows of one tile
_FOLDED_TOKENS = (
    8  # of latents, whose key is that of all heads: the most queries of a head that share tiles with other heads'
)
_MIN_TILE = 32
_PLACES = 2**31
_SPLIT_KEYS = 256  # the fewest keys per part
_MAX_SPLITS = 64
_SOME_CORES = 108


def resolve_flash(
    problem: AttentionProblem, placement: Placement, config: FlashAttention2Config
) -> FlashAttention2Config:
    """Fill in every size. Errors: ConfigError if declared sizes can't work together."""
    local = placement.local
    q_len, kv_len = local.q_len, local.kv_len
    group = local.q_heads // local.kv_heads
    _check_places(problem, placement)
    sizes: dict[str, object] = {}
    fold = config.fold
    if fold is None:
        few = group * q_len <= min(config.block_q or _table(problem)[0].block_q, _FOLDED_ROWS)
        fold = few or (problem.values_in_key and group > 1 and q_len <= _FOLDED_TOKENS)
    rows = group * q_len if fold else q_len
    for pass_, default in _defaults(problem, rows if fold else None, q_len, kv_len).items():
        for name, size in zip(FIELDS[pass_], default, strict=True):
            declared = getattr(config, name)
            sizes[name] = size if declared is None else declared
    block_q = sizes["block_q"]
    assert isinstance(block_q, int)
    programs = local.batch * (local.kv_heads if fold else local.q_heads) * math.ceil(rows / block_q)
    sizes["fold"] = fold
    sizes["kv_splits"] = config.kv_splits or splits_of(problem, placement, programs)
    chosen = config.with_fields(sizes)
    _check_shared(problem, chosen)
    return chosen


def unknown_gpu(problem: AttentionProblem, config: FlashAttention2Config) -> str | None:
    """A note if sizes were chosen for an unknown GPU."""
    if config.interpret or gpu_variant(problem.device_kind) is not None:
        return None
    return note("flash.unknown_gpu", device=problem.device, known=gpu_variants())


def splits_of(problem: AttentionProblem, placement: Placement, programs: int) -> int:
    """Parts of the keys that make as many programs as the device has multiprocessors, if the queries alone don't."""
    gpu = gpu_variant(problem.device_kind)
    cores = _SOME_CORES if gpu is None else gpu.cores
    if 2 * programs > cores:
        return 1
    max_splits = min(_MAX_SPLITS, placement.local.kv_len // _SPLIT_KEYS)
    return max(1, min(max_splits, cores // programs))


def _check_places(problem: AttentionProblem, placement: Placement) -> None:
    """Triton uses 32-bit offsets for arrays of up to 2**32 bytes. Errors: ConfigError for larger counts of one-byte numbers."""
    local, dims = placement.local, {"key": problem.head_dim, "value": problem.token_dim - problem.head_dim}
    sizes = {name: local.batch * local.kv_heads * local.kv_len * dims[name] for name in problem.quantised}
    for leaf in problem.leaves:
        if "kv" in leaf.dims[2:]:
            sizes[leaf.name] = math.prod(leaf.shape) // problem.devices
    for name, size in sizes.items():
        if size > _PLACES:
            raise ConfigError(
                f"{name} has {size} numbers of one byte on a device; wanted at most {_PLACES}, which 32 bits can count."
            )


def min_shared_bytes(problem: AttentionProblem, config: FlashAttention2Config) -> dict[str, int]:
    """The least shared memory, in bytes, that each pass of a filled config takes: the tiles being loaded at once.

    These are the tiles that the loop runs over: keys and values, or queries and their gradients. On Ampere it is one tile fewer
    than stages, because the last one is consumed from registers. Compiled kernels take this or more (docs/gpu.md).
    """
    row = problem.token_dim
    size = {"float32": 4}.get(problem.runtime_dtype, 2)
    fewer = _architecture(problem) == "ampere"
    sizes = sizes_of(config)
    rows = {"forward": sizes["forward"].block_kv, "dkv": sizes["dkv"].block_q, "dq": sizes["dq"].block_kv}
    return {pass_: max(1, sizes[pass_].num_stages - fewer) * n * row * size for pass_, n in rows.items()}


def _check_shared(problem: AttentionProblem, config: FlashAttention2Config) -> None:
    """Errors: ConfigError for tiles that can't fit, as far as that is known: products of two-byte numbers, known GPUs."""
    gpu = gpu_variant(problem.device_kind)
    max_bytes = 0 if gpu is None else gpu.shared_bytes_a_block
    if gpu is None or config.interpret or problem.runtime_dtype == "float32" or problem.quantised:
        return
    for pass_, min_bytes in min_shared_bytes(problem, config).items():
        if min_bytes > max_bytes:
            block_q, block_kv, _, stages = FIELDS[pass_]
            block = block_q if pass_ == "dkv" else block_kv
            raise ConfigError(
                f"FlashAttention2Config: {block}={getattr(config, block)} and {stages}={getattr(config, stages)} take at least "
                f"{min_bytes} bytes of shared memory; {problem.device} has {max_bytes} for a block of threads. "
                "Hint: fewer stages or a smaller block."
            )


def _architecture(problem: AttentionProblem) -> str | None:
    """The architecture of the device; None for an unknown one."""
    gpu = gpu_variant(problem.device_kind)
    return None if gpu is None else gpu.architecture


def _table(problem: AttentionProblem) -> tuple[TileSizes, TileSizes, TileSizes]:
    dim = max(_DIMS[0], _power(max(problem.head_dim, problem.value_dim)))
    if dim > _DIMS[-1]:
        return _LATENT_WIDE if problem.runtime_dtype == "float32" else _LATENTS[_architecture(problem)][dim]
    if problem.runtime_dtype == "float32":
        return _WIDE[dim]
    architecture = _architecture(problem)
    if architecture is None:
        return _SMALL[dim]
    biased = problem.operand("bias") is not None or _score_loads_tiles(problem)
    tiles_of_arrays = biased or any({"q", "kv"} <= set(leaf.dims) for leaf in problem.leaves)
    if architecture == "blackwell":
        return _BLACKWELL[dim]
    if architecture == "hopper":
        return (_HOPPER_WITH_MORE if tiles_of_arrays or problem.quantised else _HOPPER)[dim]
    forward, of_keys, of_query = _AMPERE[dim]
    if dim == 128 and (problem.quantised or biased):
        forward = _AMPERE_QUANTISED if problem.quantised else _AMPERE_BIASED
    return forward, of_keys, of_query


def _score_loads_tiles(problem: AttentionProblem) -> bool:
    """Whether a score reads a number for each pair: by distance, from a table, or of an array by query and key. As those of a
    bias, they are loaded ahead into shared memory."""
    if problem.score is None:
        return False
    captures = (x.operand.dims for x in problem.operands if x.operand.feature == "score")
    gathered = problem.score.step_names(problem.contiguous_positions) & {Diagonal.name, Lookup.name, Product.name}
    return bool(gathered) or any({"q_len", "kv_len"} <= set(dims) for dims in captures)


def _defaults(problem: AttentionProblem, folded: int | None, q_len: int, kv_len: int) -> dict[str, TileSizes]:
    """The sizes of each pass. folded: the rows of the forward pass's one tile, if heads are folded into it."""
    defaults = {}
    for pass_, size in zip(FIELDS, _table(problem), strict=True):
        one_tile = folded if pass_ == "forward" else None
        rows = _power(one_tile or q_len)
        size = size._replace(block_q=min(size.block_q, rows), block_kv=min(size.block_kv, _power(kv_len)))
        defaults[pass_] = _of_mask(problem, size, folded=one_tile is not None)
    return defaults


def _of_mask(problem: AttentionProblem, size: TileSizes, *, folded: bool) -> TileSizes:
    """Tiles that lie in one block of the mask, unless its blocks are smaller than a tile can be."""
    blocks = {}
    for axis, max_size, length in (("q", size.block_q, problem.q_len), ("kv", size.block_kv, problem.kv_len)):
        fitted = fitted_block(problem.mask, axis, max_size, length, _MIN_TILE)
        blocks[f"block_{axis}"] = max_size if folded and axis == "q" else 1 << (fitted.bit_length() - 1)
    return size._replace(**blocks)


def steps_of(problem: AttentionProblem, config: FlashAttention2Config) -> TileSteps:
    """How the forward pass of a filled config goes through a tile."""
    size, dim = sizes_of(config)["forward"], max(_DIMS[0], _power(max(problem.head_dim, problem.value_dim)))
    hopper = _architecture(problem) == "hopper"
    # With fewer rows, Triton distributes a tile's columns among the warps, and a part of the columns isn't where it is needed.
    rows = max(_ROWS_OF_WARP * size.num_warps, 0 if hopper else dim)
    # Converting quantised keys and values takes the registers of further parts.
    if dim > _DIMS[-1] or size.block_q < rows or problem.quantised or _architecture(problem) == "blackwell":
        return TileSteps()
    softmaxes, products, lanes = (_HOPPER_STEPS if hopper else _STEPS)[dim]
    softmaxes = max(1, min(softmaxes, size.block_kv // _MIN_SOFTMAX))
    if problem.value_columns is not None:  # a part of the keys that were loaded for the logits
        products = 1
    return TileSteps(softmaxes, min(products, size.block_kv // softmaxes // _MIN_PRODUCT), lanes)


def steps_note(problem: AttentionProblem, config: FlashAttention2Config) -> str | None:
    """A plan's note on how the forward pass goes through a tile; None if it takes the tile at once."""
    steps, keys = steps_of(problem, config), sizes_of(config)["forward"].block_kv
    if steps == TileSteps():
        return None
    parts = []
    if steps.softmaxes > 1:
        of_keys = keys // steps.softmaxes
        parts.append(
            f"in {steps.softmaxes} parts of {of_keys} keys, each with its own softmax, so that products of one part run beside "
            f"the softmax of another"
        )
    if steps.products > 1:
        parts.append(
            f"with {steps.products} products with the values in each softmax, so that one runs beside the next exponentials"
        )
    if steps.lanes > 1:
        parts.append(f"with a row's weights added up in {steps.lanes} sums, which are put together after the last tile")
    return note("flash.steps", keys=keys, how="; ".join(parts))


def _power(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


def sizes_of(config: FlashAttention2Config) -> dict[str, TileSizes]:
    """The sizes of a filled config, by pass."""
    return {pass_: TileSizes(*(getattr(config, name) for name in names)) for pass_, names in FIELDS.items()}
