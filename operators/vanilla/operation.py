"""vanilla: attention in plain XLA. Every feature, every platform; the fallback of the others."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...planning import ALL_FEATURES, AttentionProblem, Implementation, OperationConfig, Placement, Rule, declares
from ...planning.notes import note
from ...planning.text import fields_text
from ...symbolic import is_symbolic
from ..call.base import Operation
from ..call.local import LocalCall, LocalOutput
from ..choices.mask_blocks import has_blocks
from ..kernels.blocking import Blocking, KeyChunks
from ..kernels.scores import WholeScores, apply_steps
from ..sequence.ring_call import attend_call
from .kernel.blockwise import PartialBlockwise
from .kernel.plain import plain_attention
from .native_route import NativeRoute, native_block_remarks, native_route
from .vanilla_config import VanillaConfig

__all__ = ["NATIVE", "NativeAttention", "Vanilla"]


_FEW_QUERIES = ("decode", "decode_rows")
_TRIED = (64, 128, 256, 512, 1024, 2048)  # block sizes that a search tries


def _path_can(problem: AttentionProblem, config: VanillaConfig) -> bool:
    if config.path in (None, "plain"):
        return True
    return "return_weights" not in problem.features and problem.softmax_dtype in ("float32", "float64")


def _length_can(problem: AttentionProblem, config: VanillaConfig) -> bool:
    if config.path in (None, "plain"):
        return True
    if config.path in _FEW_QUERIES and is_symbolic(problem.kv_len):
        return False
    return "length" not in problem.symbolic or not has_blocks(problem)


_PATH = Rule(
    "vanilla.path",
    "path",
    _path_can,
    "path={c.path!r} is declared: it never has the weights to return, and its softmax is float32 or float64",
    "Leave path out: the plan then builds the logits whole where that is needed.",
)
_LENGTH = Rule(
    "vanilla.symbolic_length",
    "path",
    _length_can,
    "path={c.path!r} is declared, but q_len is {p.q_len} and kv_len {p.kv_len}: the decode paths cut keys into a known number of "
    "pieces, and a mask of blocks has a known number of blocks on every path but the plain one",
    "Leave path out.",
)


class NativeAttention(Implementation[VanillaConfig]):
    """Softmax attention in plain XLA, by the plan's route: with whole logits, or a part at a time."""

    operation = "vanilla"
    config = VanillaConfig
    capability = declares(
        consumes=ALL_FEATURES,
        rules=(_PATH, _LENGTH),
        tolerance={
            "float64": (4e-6, 2e-5),  # with the softmax in float32, the default
            "float32": (6e-6, 2e-5),  # head dims of 576; the gradient of keys under a soft cap
            "bfloat16": (1.5e-2, 3e-2),
            "float16": (2e-3, 4e-3),
        },
        dequantises=True,
        route=native_route,
        symbolic=("batch", "length"),
    )

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Attend."""
        call = call.dequantised()
        route: Any = call.route
        if route is None:  # called from another operation's method, which has none
            route = native_route(call.problem, call.placement, VanillaConfig())
        return _whole(call) if route.whole else _in_parts(call, route)

    def works_on_parts(self, config: OperationConfig, strategy: str) -> bool:
        """On a single part with any path; on one part after another with blocks."""
        return strategy == "split_kv" or self.declared(config).path in (None, "blockwise")

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """The blocks of a mask of blocks, and sizes that the route doesn't read."""
        declared = self.declared(config)
        chosen = native_route(problem, placement, declared)
        notes, route = native_block_remarks(problem, placement, chosen), chosen.name
        sizes = {name: size for name in ("block_q", "block_kv") if (size := getattr(declared, name)) is not None}
        if route == "plain" and sizes:
            return (*notes, note("config.plain_has_no_blocks", fields=fields_text(sizes)))
        if route in _FEW_QUERIES and "block_q" in sizes:
            return (*notes, note("config.backward_only", block_q=sizes["block_q"], route=route))
        return notes

    def tuned_fields(self, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset block sizes, if the call uses blocks."""
        config = self.declared(problem.config)
        if not self.reads(problem.config) or placement.q_axes or problem.symbolic:
            return ()
        if native_route(problem, placement, config).name != "blockwise":
            return ()
        return tuple(name for name in ("block_q", "block_kv") if not config.is_set(name))

    def candidates(self, problem: AttentionProblem, placement: Placement) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Both passes use the same blocks, so in mode train they are measured together."""
        free = self.tuned_fields(problem, placement)
        if not free:
            return {}
        route = native_route(problem, placement, self.read(problem.config))
        chosen = {"block_q": route.block_q or 1, "block_kv": route.block_kv or 1}
        local = placement.local
        sizes = [
            [n for n in _TRIED if n < 2 * length] if name in free else [chosen[name]]
            for name, length in (("block_q", local.q_len), ("block_kv", local.kv_len))
        ]
        # Nearest to the heuristic's first; distance is by ratio.
        pairs = sorted(
            itertools.product(*sizes),
            key=lambda pair: sum(abs(math.log2(n / c)) for n, c in zip(pair, chosen.values(), strict=True)),
        )
        options = dict.fromkeys((tuple(chosen.values()), *pairs))
        part = "backward" if problem.mode == "__train__" else "forward"
        return {part: tuple({n: s for n, s in zip(chosen, option, strict=True) if n in free} for option in options)}


NATIVE = NativeAttention()


class Vanilla(Operation):
    """Softmax attention written out: logits, cap, bias, mask, sinks, softmax, dropout, values."""

    name = "vanilla"
    config = VanillaConfig
    forward_native = NATIVE


def _whole(call: LocalCall) -> LocalOutput:
    call, keep = call.with_hidden_keys_zero(), None
    if call.dropout is not None:
        local = call.placement.local
        keep = call.dropout.keep_all(local.batch, local.q_heads, local.q_len, slice(0, local.kv_len))
    output, weights, lse = plain_attention(
        call.query,
        call.key,
        call.value,
        layout=call.layout,
        scale=call.softmax_scale,
        mask=call.mask.array(),
        bias=call.bias,
        soft_cap=call.logits_soft_cap,
        sinks=call.sinks,
        keep=keep,
        keep_probability=1.0 - call.problem.dropout_prob,
        softmax_dtype=call.softmax_dtype,
        score=None if call.score is None else functools.partial(_scored, call),
    )
    return LocalOutput(output, weights if call.return_weights else None, lse if call.return_lse else None)


def _scored(call: LocalCall, logits: jax.Array, factor: float) -> tuple[jax.Array, float]:
    assert call.score is not None
    tile = WholeScores(call.score, call.captures, call.mask, call.softmax_dtype, slice(0, call.mask.kv_len))
    result = apply_steps(call.score, logits, factor, 1.0, tile)
    return result.x, result.factor


def _in_parts(call: LocalCall, route: NativeRoute) -> LocalOutput:
    sizes = (route.block_q, route.block_kv, route.heads_per_tile, route.block_q_backward, route.block_kv_backward)
    block_q, block_kv, heads, block_q_backward, block_kv_backward = (size or 1 for size in sizes)
    blocks = Blocking(block_q, block_kv, heads)
    kernel = PartialBlockwise(
        call.layout,
        float(call.softmax_scale),
        call.logits_soft_cap,
        np.dtype(call.softmax_dtype),
        call.problem.platform,
        forward=KeyChunks(block_kv, route.name == "decode_rows") if route.name in _FEW_QUERIES else blocks,
        backward=Blocking(block_q_backward, block_kv_backward, heads),
        value_columns=call.problem.value_columns,
    )
    output, lse = attend_call(call, kernel, call.query, call.key, call.value)
    return LocalOutput(output, None, lse if call.return_lse else None)
