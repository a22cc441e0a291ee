"""What the kernels in Mosaic GPU support, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from ...devices import gpu_variant
from ...planning import STATIC_MASKS, AttentionProblem, Rule
from ..choices.dtype_rules import float32_softmax
from ..choices.function_rules import MOSAIC_GPU, function_rules
from ..flash.flash_config import FlashAttention2Config
from .kernel.mosaic_sizes import MOST_COLUMNS, padded_dim
from .mosaic_sizes import WARPS, columns

__all__ = ["JAX_NEEDED", "MOSAIC_FEATURES", "Generation", "is_architecture", "is_asked", "mosaic_rules"]

# What a kernel of Mosaic GPU needs is public from here on: a kernel's output types, layouts in the interpreter, checked races.
JAX_NEEDED = (0, 12)
MOSAIC_FEATURES = STATIC_MASKS | {
    "blocks", "chosen_blocks", "segment_ids", "kv_lengths", "positions", "dense_mask", "dynamic_or", "dynamic_query_offset",
    "bias", "logits_soft_cap", "score", "sinks", "dropout", "return_lse", "gqa", "value_dim", "quantized_kv",
}  # fmt: skip
_MAX_DIM = 256
_MAX_LATENT = 576, 512  # dims of key and value where values are the first numbers of their keys
_PADDED = 4 / 3  # columns computed for each of a head's


@dataclass(frozen=True)
class Generation:
    """The kernels of a generation. name: in codes. fields: the sizes that can be declared, by field. sums: where a tile's sums
    are held. warps: fields of warps that aren't read. vma: whether they are traced in a shard_map with check_vma=True."""

    name: str
    fields: Mapping[str, tuple[int, ...]]
    sums: str
    warps: tuple[str, ...] = WARPS
    vma: bool = True


def is_architecture(problem: AttentionProblem, architecture: str) -> bool:
    """Whether the device is a GPU of that architecture."""
    gpu = gpu_variant(problem.device_kind)
    return gpu is not None and gpu.architecture == architecture


def is_asked(config: FlashAttention2Config) -> bool:
    """Whether such a kernel is declared, so that only what it can't do is a reason against it."""
    return config.kernel not in (None, "triton", "tokamax")


def _widened(problem: AttentionProblem) -> float:
    dims = problem.head_dim, problem.value_dim
    return sum(map(padded_dim, dims)) / sum(dims)


def _size_rule(of: Generation, name: str) -> Rule:
    sizes = of.fields[name]
    return Rule(
        f"{of.name}.{name}",
        name,
        lambda p, c: getattr(c, name) in (None, *sizes),
        f"{name}={{c.{name}}}: the kernel's tiles have {' or '.join(map(str, sizes))} of them",
        f"Declare {name}={' or '.join(map(str, sizes))}, or leave it out.",
    )


def _warps_rule(of: Generation, name: str) -> Rule:
    return Rule(
        f"{of.name}.{name}",
        name,
        lambda p, c: getattr(c, name) is None,
        f"{name}={{c.{name}}} is declared: here the warps follow from the blocks",
        f"Leave {name} out.",
    )


def _vma_rule(of: Generation) -> Rule:
    inside = "called inside a shard_map with check_vma=True, which"
    if not of.vma:
        return Rule(
            f"{of.name}.check_vma",
            "mesh",
            lambda p, c: not p.vma,
            f"{inside} JAX can't trace the warps of a kernel under",
            "Pass check_vma=False to that shard_map; until then the kernel in Triton runs.",
        )
    return Rule(
        f"{of.name}.interpret.check_vma",
        "interpret",
        lambda p, c: not (p.vma and c.interpret),
        f"{inside} Pallas' interpreter can't be traced under",
        "Leave interpret out, or pass check_vma=False to that shard_map.",
    )


def mosaic_rules(of: Generation) -> tuple[Rule, ...]:
    """What every generation's kernels ask of a call."""
    return (
        Rule(
            f"{of.name}.jax",
            "kernel",
            lambda p, c: jax.__version_info__ >= JAX_NEEDED,
            f"jax {jax.__version__}: what a kernel of Mosaic GPU needs is public from {'.'.join(map(str, JAX_NEEDED))} on",
            "Upgrade jax; until then the kernel in Triton runs.",
        ),
        Rule(
            f"{of.name}.kernel",
            "kernel",
            lambda p, c: c.kernel in (None, "mosaic", of.name),
            "kernel='{c.kernel}' is declared",
            "Leave kernel out.",
        ),
        Rule(
            f"{of.name}.dtype",
            "runtime_dtype",
            lambda p, c: p.runtime_dtype in ("bfloat16", "float16"),
            "runtime dtype {p.runtime_dtype}: the kernel's products are of 16-bit numbers",
            "Declare runtime_dtype bfloat16 or float16.",
        ),
        float32_softmax(of.name, "the kernel's softmax is"),
        Rule(
            f"{of.name}.head_dim",
            "head_dim",
            lambda p, c: p.value_columns is not None or max(p.head_dim, p.value_dim) <= _MAX_DIM,
            f"head_dim={{p.head_dim}}, value dim {{p.value_dim}}: a tile's sums are held in {of.sums}, up to a dim of {_MAX_DIM}",
            "Use 'vanilla'.",
        ),
        _latent_rule(of),
        Rule(
            f"{of.name}.padding",
            "head_dim",
            lambda p, c: is_asked(c) or _widened(p) <= _PADDED,
            lambda p, c: (
                f"head_dim={p.head_dim}, value dim {p.value_dim}: the kernel would copy the arrays and compute "
                f"{padded_dim(p.head_dim)} and {padded_dim(p.value_dim)} columns"
            ),
            "Nothing to change: the kernel in Triton computes fewer columns. kernel='mosaic' runs this one.",
        ),
        *(_size_rule(of, name) for name in of.fields),
        *(_warps_rule(of, name) for name in of.warps),
        *function_rules(of.name, MOSAIC_GPU),
        _vma_rule(of),
    )


def _latent_rule(of: Generation) -> Rule:
    """Where values are the first numbers of their keys."""
    dim, value_dim = _MAX_LATENT
    return Rule(
        f"{of.name}.latent_dim",
        "head_dim",
        lambda p, c: p.value_columns is None or (p.head_dim <= dim and columns(p)[1] <= min(value_dim, columns(p)[0])),
        f"head_dim={{p.head_dim}}, whose first {{p.value_dim}} are the value: shared memory and {of.sums} hold up to {dim} "
        f"and {value_dim}, and values of more than {MOST_COLUMNS} in steps of 128",
        "Nothing to change: the kernel in Triton runs.",
    )
