"""What the Hopper kernel supports, as data."""

from __future__ import annotations

import math
from typing import Any

import jax

from ...devices import gpu_variant
from ...planning import STATIC_MASKS, AttentionProblem, OperationConfig, Rule
from ...scores.steps import Diagonal, Lookup, Product
from ..choices.dtype_rules import float32_softmax
from ..choices.function_rules import MOSAIC_GPU, function_rules
from ..flash.flash_config import FlashAttention2Config
from .hopper_sizes import WARPS
from .kernel.hopper_sizes import KEYS, ROWS, padded_dim

__all__ = ["HOPPER_FEATURES", "HOPPER_RULES", "JAX_NEEDED", "is_hopper"]

# What a kernel of Mosaic GPU needs is public from here on: a kernel's output types, layouts in the interpreter, checked races.
JAX_NEEDED = (0, 12)
HOPPER_FEATURES = STATIC_MASKS | {
    "blocks", "chosen_blocks", "segment_ids", "kv_lengths", "positions", "dense_mask", "dynamic_or", "dynamic_query_offset",
    "bias", "logits_soft_cap", "score", "sinks", "dropout", "return_lse", "gqa", "value_dim",
}  # fmt: skip
_MAX_DIM = 256
_BLOCKS = (ROWS, 2 * ROWS)
_FOLDED_ROWS = 64  # queries of a kv head that the kernel in Triton makes one tile of
_SPLIT_KEYS = 512  # the fewest keys that it divides
_PADDED = 4 / 3  # columns computed for each of a head's


def is_hopper(problem: AttentionProblem) -> bool:
    """Whether the device is of compute capability 9.0."""
    gpu = gpu_variant(problem.device_kind)
    return gpu is not None and gpu.architecture == "hopper"


def _field(config: OperationConfig, name: str) -> Any:
    return getattr(config, name) if isinstance(config, FlashAttention2Config) else None


def _asked(config: OperationConfig) -> bool:
    """Whether this kernel is declared, so that only what it can't do is a reason against it."""
    return _field(config, "kernel") == "mosaic"


def _programs(problem: AttentionProblem) -> int:
    """Blocks of threads of a device."""
    rows = math.ceil(problem.q_len / (2 * ROWS))
    return math.ceil(problem.batch * problem.q_heads * rows / problem.devices)


def _fills(problem: AttentionProblem) -> bool:
    """Whether the queries alone fill the device, or there are too few keys to divide."""
    gpu = gpu_variant(problem.device_kind)
    return gpu is None or 2 * _programs(problem) > gpu.cores or problem.kv_len < _SPLIT_KEYS


def _widened(problem: AttentionProblem) -> float:
    dims = problem.head_dim, problem.value_dim
    return sum(map(padded_dim, dims)) / sum(dims)


def _gathered(problem: AttentionProblem) -> list[str]:
    """The score's steps that read a number for each pair from a place that follows from both."""
    names = frozenset() if problem.score is None else problem.score.step_names(problem.contiguous_positions)
    return sorted(names & {Diagonal.name, Lookup.name, Product.name})


def _rows_rule(name: str) -> Rule:
    return Rule(
        f"hopper.{name}",
        name,
        lambda p, c: _field(c, name) in (None, *_BLOCKS),
        f"{name}={{c.{name}}}: a warpgroup has {ROWS} rows, and one or two of them compute",
        f"Declare {name}={_BLOCKS[0]} or {_BLOCKS[1]}, or leave it out.",
    )


def _keys_rule(name: str) -> Rule:
    return Rule(
        f"hopper.{name}",
        name,
        lambda p, c: _field(c, name) in (None, *KEYS),
        f"{name}={{c.{name}}}: a product with keys goes through 64 of them at once, and one for logits has at most 256 columns",
        f"Declare {name}={', '.join(map(str, KEYS))}, or leave it out.",
    )


def _warps_rule(name: str) -> Rule:
    return Rule(
        f"hopper.{name}",
        name,
        lambda p, c: _field(c, name) is None,
        f"{name}={{c.{name}}} is declared: here the warps follow from the blocks",
        f"Leave {name} out.",
    )


HOPPER_RULES = (
    Rule(
        "hopper.jax",
        "kernel",
        lambda p, c: jax.__version_info__ >= JAX_NEEDED,
        f"jax {jax.__version__}: what a kernel of Mosaic GPU needs is public from {'.'.join(map(str, JAX_NEEDED))} on",
        "Upgrade jax; until then the kernel in Triton runs.",
    ),
    Rule(
        "hopper.kernel",
        "kernel",
        lambda p, c: _field(c, "kernel") != "triton",
        "kernel='triton' is declared",
        "Leave kernel out.",
    ),
    Rule(
        "hopper.dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in ("bfloat16", "float16"),
        "runtime dtype {p.runtime_dtype}: the kernel's products are of 16-bit numbers",
        "Declare runtime_dtype bfloat16 or float16.",
    ),
    float32_softmax("hopper", "the kernel's softmax is"),
    Rule(
        "hopper.head_dim",
        "head_dim",
        lambda p, c: max(p.head_dim, p.value_dim) <= _MAX_DIM,
        f"head_dim={{p.head_dim}}, value dim {{p.value_dim}}: a tile's sums are held in registers, up to a dim of {_MAX_DIM}",
        "Use 'vanilla'.",
    ),
    Rule(
        "hopper.values_in_key",
        "value",
        lambda p, c: p.value_columns is None,
        "values are the first {p.value_columns} numbers of their keys: the kernel would load them twice",
        "Nothing to change: the kernel in Triton loads them once.",
    ),
    Rule(
        "hopper.padding",
        "head_dim",
        lambda p, c: _asked(c) or _widened(p) <= _PADDED,
        lambda p, c: (
            f"head_dim={p.head_dim}, value dim {p.value_dim}: the kernel would copy the arrays and compute "
            f"{padded_dim(p.head_dim)} and {padded_dim(p.value_dim)} columns"
        ),
        "Nothing to change: the kernel in Triton computes fewer columns. kernel='mosaic' runs this one.",
    ),
    Rule(
        "hopper.few_queries",
        "q_len",
        lambda p, c: _asked(c) or p.q_len * (p.q_heads // p.kv_heads) > _FOLDED_ROWS,
        lambda p, c: (
            f"q_len={p.q_len}, {p.q_heads // p.kv_heads} query heads a kv head: the kernel in Triton makes them one tile, this "
            f"one pads each head's to {ROWS} rows"
        ),
        "Nothing to change. kernel='mosaic' runs this one.",
    ),
    Rule(
        "hopper.few_blocks",
        "q_len",
        lambda p, c: _asked(c) or _fills(p),
        lambda p, c: (
            f"{_programs(p)} blocks of {2 * ROWS} queries on a device with {gpu_variant(p.device_kind).cores} multiprocessors: "  # type: ignore[union-attr]
            "the kernel in Triton divides the keys too"
        ),
        "Nothing to change. kernel='mosaic' runs this one.",
    ),
    *(_rows_rule(name) for name in ("block_q", "block_q_dkv", "block_q_dq", "block_kv_dkv")),
    *(_keys_rule(name) for name in ("block_kv", "block_kv_dq")),
    *(_warps_rule(name) for name in WARPS),
    Rule(
        "hopper.fold",
        "fold",
        lambda p, c: not _field(c, "fold"),
        "fold=True is declared: the kernel's tiles have the rows of one query head",
        "Leave fold out.",
    ),
    Rule(
        "hopper.kv_splits",
        "kv_splits",
        lambda p, c: _field(c, "kv_splits") in (None, 1),
        "kv_splits={c.kv_splits} is declared: the kernel doesn't divide the keys",
        "Leave kv_splits out.",
    ),
    Rule(
        "hopper.score_gathered",
        "score",
        lambda p, c: not _gathered(p),
        lambda p, c: (
            f"the score {p.score} adds numbers by {', '.join(_gathered(p))}: Mosaic GPU loads tiles, not a number for each "
            "pair of a query and a key"
        ),
        "Nothing to change: the kernel in Triton gathers them.",
    ),
    *function_rules("hopper", MOSAIC_GPU),
    Rule(
        "hopper.interpret.check_vma",
        "interpret",
        lambda p, c: not (p.vma and _field(c, "interpret")),
        "called inside a shard_map with check_vma=True, which Pallas' interpreter can't be traced under",
        "Leave interpret out, or pass check_vma=False to that shard_map.",
    ),
)
