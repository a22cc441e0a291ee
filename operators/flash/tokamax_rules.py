"""What tokamax's kernels for GPUs support, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...devices import gpu_variant
from ...distribution import with_extras
from ...masks.causal_window import square_flags
from ...planning import STATIC_MASKS, AttentionProblem, Placement, Rule
from ...planning.notes import note
from .flash_config import FlashAttention2Config
from .pass_fields import FIELDS

__all__ = ["KEYS_WANTED", "TOKAMAX_FEATURES", "TOKAMAX_RULES", "keys_to_pad", "local_flags", "tokamax_notes"]

TOKAMAX_FEATURES = STATIC_MASKS | {
    "blocks", "chosen_blocks", "segment_ids", "kv_lengths", "positions", "dense_mask", "dynamic_or", "dynamic_query_offset",
    "bias", "logits_soft_cap", "gqa", "value_dim",
}  # fmt: skip
_MAX_DIM, _KEYS = 256, 64
_MAX_TRAINED, _ALSO_TRAINED = 128, (192, 128)  # whose tiles fit the shared memory of a Blackwell GPU
# Before, its function parsed the command line of the program that calls it, and its gradient didn't fit a Blackwell GPU.
_FIRST_VERSION = (0, 0, 17)
_SIZES = (*(name for names in FIELDS.values() for name in names), "kv_splits", "fold", "residual_checkpoint_name")
KEYS_WANTED = f"on Hopper tokamax's gradient takes the array of a mask for a multiple of {_KEYS} keys"
_LEAVE_OUT = "Leave kernel out: attnops' own has it."


def _architecture(problem: AttentionProblem) -> str | None:
    gpu = gpu_variant(problem.device_kind)
    return None if gpu is None else gpu.architecture


def tokamax_flags(problem: AttentionProblem) -> tuple[bool, tuple[int, int] | None] | None:
    """(is_causal, local_window_size) where these say all of the mask, else None: it goes as an array.

    On Blackwell windows do, as tokamax may divide the keys there, which its window can't be divided with.
    """
    flags = square_flags(problem.mask, problem.q_len, problem.kv_len)
    return None if flags is not None and flags[1] is not None and _architecture(problem) == "blackwell" else flags


def local_flags(problem: AttentionProblem, placement: Placement) -> tuple[bool, tuple[int, int] | None] | None:
    """These of a device's part: where it has some of the queries, its rows of the mask go as an array."""
    return tokamax_flags(problem) if placement.local.q_len == problem.q_len else None


def keys_to_pad(problem: AttentionProblem, flags: object) -> bool:
    """Whether there is a gradient on Hopper that takes the array of a mask, for a number of keys that it can't."""
    array = flags is None or _as_bias(problem)
    return _trains_on(problem, "hopper") and array and problem.kv_len % _KEYS != 0


def _declared(config: Any) -> list[str]:
    return [f"{name}={getattr(config, name)!r}" for name in _SIZES if getattr(config, name) is not None]


def _as_bias(problem: AttentionProblem) -> bool:
    return "bias" in problem.features


def _trains_on(problem: AttentionProblem, architecture: str) -> bool:
    return problem.mode == "__train__" and _architecture(problem) == architecture


def _fits(problem: AttentionProblem) -> bool:
    dims = problem.head_dim, problem.value_dim
    if not _trains_on(problem, "blackwell"):
        return max(dims) <= _MAX_DIM
    return max(dims) <= _MAX_TRAINED or dims == _ALSO_TRAINED


def _rule(
    name: str, field: str, holds: Callable[[AttentionProblem, Any], bool], message: Any, hint: str = _LEAVE_OUT
) -> Rule:
    return Rule(f"flash.tokamax.{name}", field, holds, message, hint)


def _version() -> tuple[int, ...] | None:
    from .kernel.tokamax_attention import installed_version

    return installed_version()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _what_is_here() -> str:
    version = _version()
    return "there is no tokamax here" if version is None else f"tokamax {_dotted(version)} is installed"


TOKAMAX_RULES = (
    _rule(
        "version", "kernel", lambda p, c: (_version() or ()) >= _FIRST_VERSION,
        lambda p, c: f"kernel='tokamax': {_what_is_here()}; its kernels for GPUs are called from {_dotted(_FIRST_VERSION)} on",
        f"pip install '{with_extras('tokamax')}' with Python 3.12 or later, or leave kernel out.",
    ),
    _rule(
        "device", "platform", lambda p, c: c.interpret or _architecture(p) in ("hopper", "blackwell"),
        "device {p.device}: tokamax's kernels and their gradients are written for Hopper and Blackwell",
    ),
    _rule(
        "dtype", "runtime_dtype", lambda p, c: c.interpret or p.runtime_dtype in ("bfloat16", "float16"),
        "runtime dtype {p.runtime_dtype}: tokamax's kernels multiply 16-bit numbers",
        "Declare runtime_dtype bfloat16 or float16, or leave kernel out.",
    ),
    _rule(
        "head_dim", "head_dim", lambda p, c: _fits(p),
        f"head_dim={{p.head_dim}}, value dim {{p.value_dim}}: tokamax's kernels take up to {_MAX_DIM}, their gradient "
        f"on Blackwell up to {_MAX_TRAINED}, or {_ALSO_TRAINED[0]} with {_ALSO_TRAINED[1]}",
    ),
    _rule(
        "values_in_key", "value", lambda p, c: p.value_columns is None,
        "values are the first {p.value_columns} numbers of their keys, which kernel='tokamax' would load twice",
    ),
    _rule(
        "cap_and_bias", "bias", lambda p, c: not (_as_bias(p) and "logits_soft_cap" in p.features),
        "kernel='tokamax' adds a bias before the soft cap, and here it is added after it",
    ),
    _rule(
        "mask_gradient", "kv_len",
        lambda p, c: not keys_to_pad(p, tokamax_flags(p)),
        f"kv_len={{p.kv_len}}: {KEYS_WANTED}", f"Pad the keys to a multiple of {_KEYS}, or leave kernel out.",
    ),
    _rule(
        "bias_gradient", "bias", lambda p, c: not (_trains_on(p, "blackwell") and _as_bias(p)),
        "on Blackwell tokamax's gradient of a bias in float32 takes more shared memory than there is",
    ),
    _rule(
        "sizes", "kernel", lambda p, c: not _declared(c),
        lambda p, c: f"{', '.join(_declared(c))} and kernel='tokamax': its public function takes no sizes and names no residuals",
        "Leave these out, or leave kernel out.",
    ),
    _rule(
        "check_vma", "mesh", lambda p, c: not p.vma,
        "called inside a shard_map with check_vma=True, which tokamax's kernels can't be traced under",
        "Leave kernel out, or pass check_vma=False to that shard_map.",
    ),
)  # fmt: skip


def tokamax_notes(problem: AttentionProblem, placement: Placement, config: FlashAttention2Config) -> tuple[str, ...]:
    """A version that wasn't tried, what the array of a mask takes, and that nothing is interpreted."""
    from .kernel.tokamax_attention import TRIED

    version = _dotted(_version() or ())
    notes = [] if version in TRIED else [note("flash.tokamax_untried", version=version, tried=TRIED)]
    if config.interpret:
        notes.append(note("flash.tokamax_interpret"))
    if local_flags(problem, placement) is None:
        local = placement.local
        size = jnp.dtype(bool).itemsize * local.q_len * local.kv_len
        notes.append(note("flash.tokamax_mask", size=size, q_len=local.q_len, kv_len=local.kv_len))
    return tuple(notes)
