"""splash: block-sparse flash attention on TPUs and NVIDIA GPUs; elsewhere it runs vanilla."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ...planning import ALL_FEATURES, AttentionProblem, OperationConfig, Padding, Placement, Rule, implementation
from ...planning.operation import dequantised_copy
from ..base import Operation
from ..flash import (
    FLASH_FEATURES,
    FLASH_RULES,
    FLASH_SHIPPED,
    FlashAttention2Config,
    flash_candidates,
    flash_tuned_fields,
    resolve_flash,
    run_flash,
    steps_note,
    unknown_gpu,
)
from ..flash.flash_rules import ON_ROCM
from ..function_rules import MOSAIC, function_rules
from ..local import LocalCall, LocalOutput
from ..mask_blocks import block_remarks
from ..native_route import native_block_remarks, native_route
from ..sequence.ring_call import around_the_ring
from ..vanilla import Vanilla, VanillaConfig
from .block_choice import resolve_attnops
from .candidates import SHIPPED, tuned_fields
from .candidates import candidates as tried_sizes
from .external import EXTERNAL_RULES, external_padding, external_remarks, resolve_external, run_external
from .splash_config import LANES, SplashConfig
from .tile_way import layout_note, tile_note, writes_tokens_first
from .vmem_count import blocks_of, too_much_vmem, vmem_parts

__all__ = ["Splash", "SplashConfig"]

_FEATURES = ALL_FEATURES - {"return_weights"}

_RULES = (
    Rule(
        "splash.one_query",
        "q_len",
        lambda p, c: p.q_len > 1,
        f"q_len={{p.q_len}}: the kernel's query blocks have {LANES} rows, so {LANES - 1} of them would be padding",
        "Nothing to change: one query against a cache runs faster elsewhere.",
        routes=True,
    ),
    Rule(
        "splash.dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in ("float32", "bfloat16"),
        "runtime dtype {p.runtime_dtype}: Mosaic has no such vector loads",
        "Declare runtime_dtype bfloat16 or float32.",
    ),
    Rule(
        "splash.softmax_dtype",
        "runtime_softmax_dtype",
        lambda p, c: p.softmax_dtype == "float32",
        "softmax dtype {p.softmax_dtype}: the kernel's softmax is float32",
        "Leave runtime_softmax_dtype at float32.",
    ),
    Rule(
        "splash.sum_by_product",
        "sum_by_product",
        lambda p, c: (
            not (isinstance(c, SplashConfig) and c.sum_by_product)
            or (p.value_dim % (16 if c.transposed_tiles else LANES) == 0 and "dropout" not in p.features)
        ),
        "sum_by_product=True wants no dropout (got {p.dropout_prob}), whose weights don't count in the sum, and a value dim that "
        f"is a multiple of {LANES}, or of 16 with transposed_tiles=True (got {{p.value_dim}})",
        "Leave sum_by_product out.",
    ),
    *EXTERNAL_RULES,
    *function_rules("splash", MOSAIC),
    Rule(
        "splash.interpret.check_vma",
        "interpret",
        lambda p, c: not (p.vma and isinstance(c, SplashConfig) and c.interpret),
        "called inside a shard_map with check_vma=True, which Pallas' interpreter can't be traced under",
        "Leave interpret out, or pass check_vma=False to that shard_map.",
    ),
)


class Splash(Operation):
    """Pallas kernels behind one declaration, which handles padding, masks, offsets and sharding."""

    name = "splash"
    config: ClassVar[type[OperationConfig]] = SplashConfig
    kernels_on: ClassVar[Mapping[str, str]] = {"cuda": "flash_attn2"}

    @implementation(
        consumes=_FEATURES,
        rules=_RULES,
        # In the interpreter on CPU.
        tolerance={"float32": (1e-5, 3e-5), "bfloat16": (2e-2, 4e-2)},
    )
    def forward_tpu(self, call: LocalCall) -> LocalOutput:
        """Run the declared kernel, forward and backward."""
        config = call.config
        assert isinstance(config, SplashConfig)
        swap = call.layout == "bthd"
        call = call if config.kernel == "attnops" else call.with_hidden_keys_zero()
        tensors = [x.swapaxes(1, 2) if swap else x for x in (call.query, call.key, call.value)]
        if config.kernel == "attnops":
            output, lse = _run_attnops(call, config, *tensors)
        else:
            output, lse = run_external(call, config, *tensors), None
        return LocalOutput(output.swapaxes(1, 2) if swap else output, None, lse if call.return_lse else None)

    @implementation(
        consumes=FLASH_FEATURES,
        rules=FLASH_RULES,
        # In the interpreter on CPU.
        tolerance={"float32": (1e-5, 3e-5), "bfloat16": (2e-2, 4e-2), "float16": (3e-3, 6e-3)},
    )
    def forward_cuda(self, call: LocalCall) -> LocalOutput:
        """Run the GPU kernels, forward and backward."""
        assert isinstance(call.config, FlashAttention2Config)
        output, lse = run_flash(call, call.config)
        return LocalOutput(output, None, lse if call.return_lse else None)

    @implementation(consumes=FLASH_FEATURES, rules=(ON_ROCM,), tolerance={})
    def forward_rocm(self, call: LocalCall) -> LocalOutput:
        """Refused by its rule."""
        raise AssertionError(f"{call.problem.operation} has no kernel for ROCm.")

    forward_native = Vanilla.forward_native

    @classmethod
    def kernel_platform(cls, problem: AttentionProblem) -> str:
        """The kernels also run interpreted, if their config asks for it."""
        config = problem.config
        if isinstance(config, SplashConfig) and config.interpret:
            return "tpu"
        return "cuda" if isinstance(config, FlashAttention2Config) and config.interpret else problem.platform

    @classmethod
    def resolve_config(cls, method: str, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Fill in every field from the local shapes and the device."""
        config = problem.config
        if method == "forward_cuda" and isinstance(config, FlashAttention2Config):
            return resolve_flash(problem, placement, config)
        if method != "forward_tpu" or not isinstance(config, SplashConfig):
            return config
        return (resolve_attnops if config.kernel == "attnops" else resolve_external)(problem, placement, config)

    @classmethod
    def works_on_parts(cls, method: str, config: OperationConfig, strategy: str) -> bool:
        """True for attnops' own kernels and the native path."""
        del strategy
        return method in ("forward_native", "forward_cuda") or (
            isinstance(config, SplashConfig) and config.kernel == "attnops"
        )

    @classmethod
    def tuned_fields(cls, method: str, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset sizes and switches of attnops' kernels."""
        if method == "forward_cuda":
            return flash_tuned_fields(problem, placement)
        return tuned_fields(problem, placement) if method == "forward_tpu" else ()

    @classmethod
    def candidates(
        cls, method: str, problem: AttentionProblem, placement: Placement
    ) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Block sizes that may fit, for both passes."""
        if method == "forward_cuda":
            return flash_candidates(problem, placement)
        return tried_sizes(problem, placement) if cls.tuned_fields(method, problem, placement) else {}

    @classmethod
    def table_choice(
        cls, method: str, problem: AttentionProblem, placement: Placement
    ) -> tuple[str, Mapping[str, Any]] | None:
        """The choice in a shipped table, if nothing about blocks is declared."""
        config = problem.config
        if method == "forward_cuda" and isinstance(config, FlashAttention2Config):
            return FLASH_SHIPPED.look_up(problem, placement)
        own = isinstance(config, SplashConfig) and config.kernel == "attnops"  # the sizes are those of attnops' kernels
        return SHIPPED.look_up(problem, placement) if own and method == "forward_tpu" else None

    @classmethod
    def remarks(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> tuple[str, ...]:
        """Also reports an unknown GPU, what may exceed the device's VMEM, and the costs of another library's kernel."""
        notes = super().remarks(method, problem, placement, config)
        notes = (*notes, *_block_remarks(method, problem, placement, config))
        if method in ("forward_tpu", "forward_cuda") and problem.quantised:
            notes = (*notes, f"the gradient works on {dequantised_copy(problem, placement)}")
        if method == "forward_cuda" and isinstance(config, FlashAttention2Config):
            told_of_gpu = unknown_gpu(problem, config), steps_note(problem, config)
            return (*notes, *(note for note in told_of_gpu if note is not None))
        if method != "forward_tpu" or not isinstance(config, SplashConfig):
            return notes
        if config.kernel != "attnops":
            return (*notes, *external_remarks(problem, placement, config))
        large = None if config.interpret else too_much_vmem(problem, placement, config)
        told = tile_note(problem, config), layout_note(problem, placement, config), large
        return (*notes, *(note for note in told if note is not None))

    @classmethod
    def memory(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Mapping[str, Mapping[str, int]]:
        """VMEM of attnops' kernels, by array and block."""
        if method != "forward_tpu" or not isinstance(config, SplashConfig) or config.kernel != "attnops":
            return {}
        parts = vmem_parts(problem, placement, config)
        return {f"attnops_splash_{name}": part for name, part in parts.items()}

    @classmethod
    def check_vma(cls, method: str, config: OperationConfig) -> bool:
        """False for jax's or tokamax's kernel, and in Pallas' interpreter."""
        if method == "forward_tpu" and isinstance(config, SplashConfig):
            return config.kernel == "attnops" and not config.interpret
        if method == "forward_cuda" and isinstance(config, FlashAttention2Config):
            return not config.interpret
        return super().check_vma(method, config)

    @classmethod
    def padding(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Padding | None:
        """Rows added to reach whole blocks: in the forward pass, or in all passes if they share a length."""
        if method != "forward_tpu" or not isinstance(config, SplashConfig):
            return None
        q_len, kv_len = placement.local.q_len, placement.local.kv_len
        q_block, kv_block = (getattr(config, name) for name in ("block_q", "block_kv"))
        if config.kernel != "attnops":
            q_block, kv_block = (external_padding(config, name) for name in ("q", "kv"))
        q_padded, kv_padded = math.ceil(q_len / q_block) * q_block, math.ceil(kv_len / kv_block) * kv_block
        return Padding(q_padded - q_len, kv_padded - kv_len, 1 - q_len * kv_len / (q_padded * kv_padded))


def _block_remarks(
    method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
) -> tuple[str, ...]:
    """What a plan says of a mask of blocks; on a GPU each query head has its own tiles, on a TPU each tile of kv heads."""
    local = placement.local
    if method == "forward_cuda" and isinstance(config, FlashAttention2Config):
        sizes = local.q_len if config.fold else config.block_q or 1, config.block_kv or 1
        return block_remarks(problem, placement, *sizes, local.kv_heads if config.fold else local.q_heads)
    if method == "forward_tpu" and isinstance(config, SplashConfig):
        kv_tile = max(1, (config.heads_per_tile or 1) * local.kv_heads // local.q_heads)
        sizes = config.block_q or 1, config.block_kv or 1
        return block_remarks(problem, placement, *sizes, local.kv_heads // kv_tile)
    return native_block_remarks(problem, placement, native_route(problem, placement, VanillaConfig()))


def _run_attnops(
    call: LocalCall, config: SplashConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from ..kernels.splash import SplashPart, splash_attention  # imports Pallas, so only where the kernel runs

    if call.ring is not None:
        kernel = SplashPart(
            call.softmax_scale,
            call.logits_soft_cap,
            blocks_of(config),
            call.problem.platform,
            config.interpret,
            config.residual_checkpoint_name,
        )
        return around_the_ring(call, kernel, query, key, value)
    return splash_attention(
        query,
        key,
        value,
        scale=call.softmax_scale,
        mask=call.mask,
        bias=call.bias,
        soft_cap=call.logits_soft_cap,
        sinks=call.sinks,
        key_scale=call.key_scale,
        value_scale=call.value_scale,
        dropout=call.dropout,
        blocks=blocks_of(config),
        residual_checkpoint_name=config.residual_checkpoint_name,
        platform=call.problem.platform,
        interpret=config.interpret,
        tokens_first=writes_tokens_first(call.problem, config),
    )
