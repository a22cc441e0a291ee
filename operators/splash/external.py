"""splash with another library's kernel: what jax's and tokamax's don't support, as rules, and how they are called."""

from __future__ import annotations

import math

import jax

from ...distribution import with_extras
from ...errors import ConfigError
from ...planning import ALL_FEATURES, STATIC_MASKS, AttentionProblem, OperationConfig, Placement, Rule
from ...planning.notes import note
from ..call.local import LocalCall
from ..notes.precision_notes import default_precision_notes
from .kernel.splash_blocks import ExternalBlocks
from .passes import blocks_of
from .sizes import BlockSizes, choose_block
from .splash_config import LANES, SplashConfig

__all__ = [
    "EXTERNAL_FEATURES", "EXTERNAL_RULES", "external_remarks", "resolve_external", "run_external",
]  # fmt: skip

EXTERNAL_FEATURES = STATIC_MASKS | {"segment_ids", "kv_lengths", "logits_soft_cap", "sinks", "gqa", "value_dim"}
_KERNELS = ("jax", "tokamax")
_BLOCK = 512
_LEAVE_OUT = "Leave kernel out: attnops' own has it."


def _lacks(kernel: str, feature: str) -> Rule:
    return Rule(
        f"splash.{kernel}.{feature}",
        "kernel",
        lambda p, c: c.kernel != kernel or feature not in p.features,
        f"kernel='{kernel}' has no {feature}",
        _LEAVE_OUT,
    )


def _rules(kernel: str) -> tuple[Rule, ...]:
    return (
        *(_lacks(kernel, feature) for feature in sorted(ALL_FEATURES - {"return_weights"} - EXTERNAL_FEATURES)),
        Rule(
            f"splash.{kernel}.one_of_each",
            "mask",
            lambda p, c: (
                c.kernel != kernel
                or len({leaf.name for leaf in p.leaves}) == len({leaf.name.rstrip("0123456789_") for leaf in p.leaves})
            ),
            f"kernel='{kernel}' takes segment ids and lengths once, and the mask {{p.mask}} holds them more than once",
            "Leave kernel out, or join them into one before the call.",
        ),
        Rule(
            f"splash.{kernel}.check_vma",
            "mesh",
            lambda p, c: c.kernel != kernel or not p.vma,
            f"called inside a shard_map with check_vma=True, which {kernel}'s splash kernel can't be traced under",
            "Leave kernel out, or pass check_vma=False to that shard_map.",
        ),
    )


def _installed() -> bool:
    from .kernel.tokamax_splash import installed

    return installed()


EXTERNAL_RULES = (
    *(rule for kernel in _KERNELS for rule in _rules(kernel)),
    Rule(
        "splash.tokamax.installed",
        "kernel",
        lambda p, c: c.kernel != "tokamax" or _installed(),
        "kernel='tokamax': there is no tokamax here, or one without its splash kernel",
        f"pip install '{with_extras('tokamax')}', or leave kernel out.",
    ),
)


def resolve_external(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> OperationConfig:
    """Fill in every block size for jax's or tokamax's kernel, whose passes share one padded length."""
    q_len, kv_len = placement.local.q_len, placement.local.kv_len
    cap = _BLOCK if max(problem.head_dim, problem.value_dim) <= 256 else _BLOCK // 2
    fused = config.kernel == "tokamax" or bool(config.use_fused_bwd_kernel)
    sizes = BlockSizes(config)
    sizes.fill("block_q", choose_block(q_len, cap))
    # One unit for both passes, so that their blocks can be equal.
    multiple = math.lcm(LANES, config.block_kv_compute or 1, config.block_kv_dkv_compute or 1)
    sizes.fill("block_kv", choose_block(kv_len, cap, multiple))
    # Other passes use the forward pass's blocks, so that one padded length serves all.
    backward_q = sizes["block_q"] if sizes["block_q"] % LANES == 0 else choose_block(q_len, cap)
    for suffix in ("dkv",) if fused else ("dkv", "dq"):
        sizes.fill(f"block_q_{suffix}", backward_q)
        compute = config.block_kv_dkv_compute if suffix == "dkv" else None
        fits = sizes["block_kv"] % (compute or LANES) == 0
        sizes.fill(f"block_kv_{suffix}", sizes["block_kv"] if fits else choose_block(kv_len, cap, compute or LANES))
    sizes.fill_inner("block_kv_compute", "block_kv", cap)
    sizes.fill_inner("block_kv_dkv_compute", "block_kv_dkv", cap)
    resolved = config.with_fields(sizes.values | {"use_fused_bwd_kernel": fused})
    for name, length in (("q", q_len), ("kv", kv_len)):
        blocks = {n: s for n, s in sizes.values.items() if n.startswith(f"block_{name}") and not n.endswith("compute")}
        shared = math.lcm(*blocks.values())
        padded = math.ceil(length / shared) * shared
        if padded >= 2 * max(max(blocks.values()), math.ceil(length / LANES) * LANES):
            raise ConfigError(
                f"SplashConfig: {', '.join(f'{n}={s}' for n, s in blocks.items())} share no small multiple, so {length} rows "
                f"would be padded to {padded}; wanted sizes that divide one another, or kernel='attnops', whose passes pad for "
                "themselves."
            )
    return resolved


def run_external(
    call: LocalCall, config: SplashConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Run the declared kernel on [batch, heads, length, dim]."""
    from .kernel.external_splash import ExternalCall, under_defaults

    if config.kernel == "jax":
        from .kernel.jax_splash import jax_splash_attention as attend
    else:
        from .kernel.tokamax_splash import tokamax_splash_attention as attend
    static, dynamic = call.mask.mask.split_static()
    arrays = {leaf.name: leaf.array for mask in dynamic for leaf in mask.split()[1]}
    borrowed = ExternalCall(
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
    blocks = blocks_of(config, ExternalBlocks)
    return under_defaults(
        lambda call: attend(
            call,
            blocks,
            residual_checkpoint_name=config.residual_checkpoint_name,
            interpret=config.interpret,
        ),
        borrowed,
        config.kernel,
    )


def external_remarks(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> tuple[str, ...]:
    """A plan's notes on another library's kernel."""
    if config.kernel != "tokamax":
        return default_precision_notes(problem)
    from .kernel.tokamax_splash import TRIED, untried_version

    local, version = placement.local, untried_version()
    notes = [] if version is None else [note("splash.tokamax_untried", version=version, tried=TRIED)]
    if problem.mode == "__train__" and config.block_kv_dkv is not None:
        parts = math.ceil(local.kv_len / config.block_kv_dkv)
        itemsize = 2 if parts <= 4 and problem.runtime_dtype == "bfloat16" else 4
        size = parts * local.batch * local.q_heads * local.q_len * problem.head_dim * itemsize
        notes.append(note("splash.tokamax_partial", parts=parts, size=size))
    if not config.fuse_reciprocal:
        notes.append(note("splash.tokamax_reciprocal"))
    if config.use_experimental_scheduler:
        notes.append(note("splash.tokamax_scheduler"))
    return (*notes, *default_precision_notes(problem))
