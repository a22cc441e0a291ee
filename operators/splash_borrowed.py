"""splash with a kernel that isn't attnops' own: what jax's and tokamax's can't do, as rules, and how they are called."""

from __future__ import annotations

import math

import jax

from ..registry import ALL_FEATURES, STATIC_MASKS, AttentionProblem, OperationConfig, Placement, Rule
from ..registry.explain import bytes_text
from .local import LocalCall
from .splash_config import SplashConfig

__all__ = ["BORROWED_FEATURES", "BORROWED_RULES", "borrowed_padding", "borrowed_remarks", "run_borrowed"]

BORROWED_FEATURES = STATIC_MASKS | {"segment_ids", "kv_lengths", "logits_soft_cap", "sinks", "gqa", "value_dim"}
_KERNELS = ("jax", "tokamax")
_LEAVE_OUT = "Leave kernel out: attnops' own has it."


def _is(kernel: str, config: OperationConfig) -> bool:
    return isinstance(config, SplashConfig) and config.kernel == kernel


def _lacks(kernel: str, feature: str) -> Rule:
    return Rule(
        f"splash.{kernel}.{feature}",
        "kernel",
        lambda p, c: not _is(kernel, c) or feature not in p.features,
        f"kernel='{kernel}' has no {feature}",
        _LEAVE_OUT,
    )


def _rules(kernel: str) -> tuple[Rule, ...]:
    return (
        *(_lacks(kernel, feature) for feature in sorted(ALL_FEATURES - {"return_weights"} - BORROWED_FEATURES)),
        Rule(
            f"splash.{kernel}.one_of_each",
            "mask",
            lambda p, c: (
                not _is(kernel, c)
                or len({leaf.name for leaf in p.leaves}) == len({leaf.name.rstrip("0123456789_") for leaf in p.leaves})
            ),
            f"kernel='{kernel}' takes segment ids and lengths once, and the mask {{p.mask}} holds them more than once",
            "Leave kernel out, or join them into one before the call.",
        ),
        Rule(
            f"splash.{kernel}.check_vma",
            "mesh",
            lambda p, c: not _is(kernel, c) or not p.vma,
            f"called inside a shard_map with check_vma=True, which {kernel}'s splash kernel can't be traced under",
            "Leave kernel out, or pass check_vma=False to that shard_map.",
        ),
    )


def _installed() -> bool:
    from .kernels.tokamax_splash import installed

    return installed()


BORROWED_RULES = (
    *(rule for kernel in _KERNELS for rule in _rules(kernel)),
    Rule(
        "splash.tokamax.installed",
        "kernel",
        lambda p, c: not _is("tokamax", c) or _installed(),
        "kernel='tokamax': there is no tokamax here, or one without its splash kernel",
        "pip install 'attnops[tokamax]', or leave kernel out.",
    ),
)


def run_borrowed(
    call: LocalCall, config: SplashConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Run the declared kernel on [batch, heads, length, dim]."""
    from .kernels.borrowed_splash import BorrowedBlocks, BorrowedCall

    if config.kernel == "jax":
        from .kernels.jax_splash import jax_splash_attention as attend
    else:
        from .kernels.tokamax_splash import tokamax_splash_attention as attend
    static, dynamic = call.mask.mask.split_static()
    arrays = {leaf.name: leaf.array for mask in dynamic for leaf in mask.split()[1]}
    borrowed = BorrowedCall(
        query,
        key,
        value,
        mask=static,
        scale=call.softmax_scale,
        soft_cap=call.logits_soft_cap,
        sinks=call.sinks,
        q_segment_ids=arrays.get("q_segment_ids"),
        kv_segment_ids=arrays.get("kv_segment_ids"),
        kv_lengths=arrays.get("kv_lengths"),
        may_have_dead_rows=call.problem.mask.may_have_dead_rows(call.problem.q_len, call.problem.kv_len),
        shard=call.q_shard,
        shards=call.q_shards,
    )
    return attend(
        borrowed,
        BorrowedBlocks(**{name: getattr(config, name) for name in BorrowedBlocks.__dataclass_fields__}),
        residual_checkpoint_name=config.residual_checkpoint_name,
        interpret=config.interpret,
    )


def borrowed_padding(config: SplashConfig, name: str) -> int:
    """The block of which a length ('q' or 'kv') is padded to a multiple: the passes share one padded length."""
    return math.lcm(*(getattr(config, f"block_{name}{suffix}") or 1 for suffix in ("", "_dkv", "_dq")))


def borrowed_remarks(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> tuple[str, ...]:
    """What a plan with tokamax's kernel notes."""
    if config.kernel != "tokamax":
        return ()
    from .kernels.tokamax_splash import untried

    local, notes = placement.local, [untried()]
    if problem.mode == "__train__" and config.block_kv_dkv is not None:
        parts = math.ceil(local.kv_len / config.block_kv_dkv)
        itemsize = 2 if parts <= 4 and problem.runtime_dtype == "bfloat16" else 4
        size = parts * local.batch * local.q_heads * local.q_len * problem.head_dim * itemsize
        notes.append(
            f"the backward of tokamax's kernel holds up to {parts} partial gradients of the query, {bytes_text(size)} a "
            "device; a larger block_kv_dkv makes fewer"
        )
    if not config.fuse_reciprocal:
        notes.append("fuse_reciprocal=False counts where tokamax's kernel is differentiated; else it divides inside")
    if config.use_experimental_scheduler:
        notes.append("use_experimental_scheduler=True reaches the forward pass of tokamax's kernel, not its backward")
    return tuple(note for note in notes if note is not None)
