"""splash's TPU kernels as an implementation: attnops' own, and those of jax and tokamax that a config may name instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from ...planning import (
    ALL_FEATURES,
    AttentionProblem,
    Implementation,
    OperationConfig,
    Padding,
    PassSizes,
    Placement,
    Rule,
    declares,
)
from ...planning.implementations import dequantised_copy
from ...planning.notes import note
from ..call.local import LocalCall, LocalOutput
from ..choices.dtype_rules import float32_softmax
from ..choices.function_rules import MOSAIC, function_rules
from ..choices.mask_blocks import block_remarks
from ..sequence.ring_call import attend_call
from .block_choice import resolve_attnops
from .candidates import SHIPPED, tuned_fields
from .candidates import candidates as tried_sizes
from .external import EXTERNAL_RULES, external_remarks, resolve_external, run_external
from .kernel.splash_blocks import ExternalBlocks, SplashBlocks
from .passes import blocks_of, splash_passes
from .pipelining import layout_note, tile_note, writes_tokens_first
from .splash_config import LANES, SplashConfig
from .vmem_count import too_much_vmem, vmem_parts

__all__ = ["SPLASH", "ExternalSplash", "SplashKernels"]

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
    float32_softmax("splash", "the kernel's softmax is"),
    Rule(
        "splash.sum_by_product",
        "sum_by_product",
        lambda p, c: (
            not c.sum_by_product
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
        lambda p, c: not (p.vma and c.interpret),
        "called inside a shard_map with check_vma=True, which Pallas' interpreter can't be traced under",
        "Leave interpret out, or pass check_vma=False to that shard_map.",
    ),
)


class _SplashConfigured(Implementation[SplashConfig]):
    """What attnops' kernels and other libraries' have in common."""

    operation = "splash"
    config = SplashConfig
    memory_field = "vmem_limit_bytes"
    capability = declares(
        consumes=_FEATURES,
        rules=_RULES,
        # In the interpreter on CPU.
        tolerance={"float32": (1e-5, 3e-5), "bfloat16": (2e-2, 4e-2)},
    )

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Run the kernel, forward and backward."""
        swap = call.layout == "bthd"
        output, lse = self.attend(call, *(x.swapaxes(1, 2) if swap else x for x in (call.query, call.key, call.value)))
        return LocalOutput(output.swapaxes(1, 2) if swap else output, None, lse if call.return_lse else None)

    def attend(
        self, call: LocalCall, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """(output, lse) of [batch, heads, length, dim]; no lse if the kernel returns none."""
        raise NotImplementedError

    def blocks(self, config: SplashConfig) -> tuple[int, int]:
        """The rows that queries and keys are padded to a multiple of."""
        raise NotImplementedError

    def passes(self, config: OperationConfig, backward: bool) -> tuple[PassSizes, ...]:
        """One kernel forward; one or two backward."""
        return splash_passes(self.read(config), backward)

    def padding(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> Padding | None:
        """Rows added to reach whole blocks: in the forward pass, or in all passes if they share a length."""
        q_len, kv_len = placement.local.q_len, placement.local.kv_len
        q_block, kv_block = self.blocks(self.read(config))
        q_padded, kv_padded = math.ceil(q_len / q_block) * q_block, math.ceil(kv_len / kv_block) * kv_block
        return Padding(q_padded - q_len, kv_padded - kv_len, 1 - q_len * kv_len / (q_padded * kv_padded))

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """The blocks of a mask of blocks, and what the gradient of quantised keys costs."""
        local, sizes = placement.local, self.read(config)
        kv_tile = max(1, (sizes.heads_per_tile or 1) * local.kv_heads // local.q_heads)
        blocks = sizes.block_q or 1, sizes.block_kv or 1
        notes = block_remarks(problem, placement, *blocks, local.kv_heads // kv_tile)
        if problem.quantised:
            notes = (*notes, note("memory.dequantised_gradient", **dequantised_copy(problem, placement)))
        return notes


class ExternalSplash(_SplashConfigured):
    """The splash kernel of jax or tokamax."""

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Run the kernel, which doesn't know of hidden keys that aren't finite."""
        return super().__call__(call.with_hidden_keys_zero())

    def attend(
        self, call: LocalCall, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        return run_external(call, self.read(call.config), query, key, value), None

    def blocks(self, config: SplashConfig) -> tuple[int, int]:
        return blocks_of(config, ExternalBlocks).common

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Sizes with which all passes share one padded length."""
        return resolve_external(problem, placement, self.read(problem.config))

    def check_vma(self, config: OperationConfig) -> bool:
        """It can't."""
        return False

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """Also what the other library's kernel costs, and leaves unread."""
        external = external_remarks(problem, placement, self.read(config))
        return (*super().notes(problem, placement, config), *external)


class SplashKernels(_SplashConfigured):
    """attnops' own kernels."""

    exact_products = True

    def variant(self, config: OperationConfig) -> Implementation[Any]:
        """Another library's kernel, if the config names one."""
        return self if not self.reads(config) or self.read(config).kernel == "attnops" else _EXTERNAL

    def attend(
        self, call: LocalCall, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        return _run_attnops(call, self.read(call.config), query, key, value)

    def blocks(self, config: SplashConfig) -> tuple[int, int]:
        return config.block_q or 1, config.block_kv or 1

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Every size, by the mask, the local lengths and the VMEM of the device."""
        return resolve_attnops(problem, placement, self.read(problem.config))

    def works_on_parts(self, config: OperationConfig, strategy: str) -> bool:
        """On one part, and around a ring."""
        return True

    def tuned_fields(self, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset sizes and switches."""
        return tuned_fields(problem, placement, self.read(problem.config))

    def candidates(self, problem: AttentionProblem, placement: Placement) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Block sizes that may fit, for both passes."""
        if not self.tuned_fields(problem, placement):
            return {}
        return tried_sizes(problem, placement, self.read(problem.config))

    def shipped_choice(self, problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
        """The choice in the shipped table, if nothing about blocks is declared."""
        return SHIPPED.look_up(problem, placement)

    def memory(
        self, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Mapping[str, Mapping[str, int]]:
        """VMEM, by array and block."""
        parts = vmem_parts(problem, placement, self.read(config))
        return {f"attnops_splash_{name}": part for name, part in parts.items()}

    def check_vma(self, config: OperationConfig) -> bool:
        """Not in Pallas' interpreter."""
        return not self.read(config).interpret

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """Also how tiles are computed, and what may exceed the device's VMEM."""
        sizes = self.read(config)
        large = None if sizes.interpret else too_much_vmem(problem, placement, sizes)
        of_tiles = tile_note(problem, self.read(problem.config), sizes), layout_note(problem, placement, sizes), large
        return (*super().notes(problem, placement, config), *(item for item in of_tiles if item is not None))


SPLASH, _EXTERNAL = SplashKernels(), ExternalSplash()


def _run_attnops(
    call: LocalCall, config: SplashConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from .kernel.splash_attention import PartialSplash  # imports Pallas, so only where the kernel runs

    blocks, columns = blocks_of(config, SplashBlocks), call.problem.value_columns
    if columns is not None:
        blocks = replace(blocks, v_layout=blocks.k_layout)
    kernel = PartialSplash(
        float(call.softmax_scale),
        call.logits_soft_cap,
        blocks,
        call.problem.platform,
        config.interpret,
        config.residual_checkpoint_name,
        tokens_first=call.ring is None and writes_tokens_first(call.problem, config),
        value_columns=columns,
    )
    return attend_call(call, kernel, query, key, value)
