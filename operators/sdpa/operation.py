"""sdpa: jax.nn.dot_product_attention; cuDNN on CUDA where its constraints hold, XLA elsewhere."""

from __future__ import annotations

from typing import Literal

from ...masks import Causal
from ...masks.causal_window import square_flags
from ...planning import STATIC_MASKS, AttentionProblem, Implementation, OperationConfig, Placement, Rule, declares
from ..call.base import Operation
from ..call.local import LocalCall, LocalOutput
from ..choices.dtype_rules import float32_softmax
from ..kernels.library_attention import library_mask
from ..notes.precision_notes import default_precision_notes
from .kernel.jax_sdpa import jax_sdpa
from .score_bias import ONLY_ADDS, bias_note, with_score_as_bias

__all__ = ["ScaledDotProduct", "SdpaConfig"]

_HOPPER_OR_LATER = ("H100", "H200", "H20", "H800", "GH200", "B100", "B200", "B300", "GB200", "GB300")
_FEATURES = STATIC_MASKS | {
    "blocks", "chosen_blocks", "segment_ids", "kv_lengths", "positions", "dense_mask", "dynamic_or", "dynamic_query_offset",
    "bias", "gqa", "score",
    "quantized_kv",
}  # fmt: skip


class SdpaConfig(OperationConfig):
    """sdpa has no options."""

    operation: Literal["sdpa"] = "sdpa"


def _max_head_dim(p: AttentionProblem) -> int:
    return 256 if any(name in p.device_kind for name in _HOPPER_OR_LATER) else 128


_SOFTMAX = float32_softmax("sdpa", "jax.nn.dot_product_attention has")
_CUDNN = (
    _SOFTMAX,
    ONLY_ADDS,
    Rule(
        "sdpa.cudnn_dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in ("bfloat16", "float16"),
        "runtime dtype {p.runtime_dtype}: cuDNN's flash attention takes bfloat16 and float16",
        "Declare runtime_dtype bfloat16.",
    ),
    Rule(
        "sdpa.cudnn_head_dim",
        "head_dim",
        lambda p, c: p.head_dim % 8 == 0 and p.head_dim <= _max_head_dim(p),
        "head_dim={p.head_dim} on {p.device}: cuDNN requires a multiple of 8 up to 128 (256 on Hopper and later)",
        "Pad the head dim in the projections, or use 'vanilla'.",
    ),
    Rule(
        "sdpa.cudnn_even_lengths",
        "q_len",
        # jax.nn passes a bias to cuDNN, an empty one if there is none, and cuDNN's gradient requires even lengths with a bias.
        lambda p, c: p.mode != "__train__" or (p.q_len % 2 == 0 and p.kv_len % 2 == 0),
        "q_len={p.q_len}, kv_len={p.kv_len} in mode train: jax.nn requires even lengths for cuDNN's gradient",
        "Pad the sequence to an even length.",
    ),
)


class _JaxAttention(Implementation[SdpaConfig]):
    operation = "sdpa"
    config = SdpaConfig
    bias_itemsize = 4

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """The precision of jax's products, and what a score's bias takes."""
        return (*default_precision_notes(problem), *bias_note(problem, placement, self.bias_itemsize))


class CudnnAttention(_JaxAttention):
    """cuDNN's flash attention; causal masks and causal windows as flags, other masks as an array."""

    bias_itemsize = 2
    capability = declares(
        consumes=_FEATURES,
        rules=_CUDNN,
        tolerance={"bfloat16": (2e-2, 4e-2), "float16": (4e-3, 8e-3)},
        dequantises=True,
    )

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Attend."""
        local = call.placement.local
        flags = square_flags(call.mask.mask, local.q_len, local.kv_len) if call.q_shards == 1 else None
        return _run(call, "cudnn", flags)


class XlaSdpa(_JaxAttention):
    """jax.nn's XLA implementation; a causal mask as a flag, other masks as an array."""

    capability = declares(
        consumes=_FEATURES,
        rules=(_SOFTMAX, ONLY_ADDS),
        # bfloat16: jax 0.12 on CPU rounds more than jax 0.10 if heads come before time (a row off by 5.8e-2 of its size).
        tolerance={"float32": (4e-6, 1e-5), "bfloat16": (7e-2, 7e-2), "float16": (2e-3, 4e-3)},
        dequantises=True,
        symbolic=("batch", "length"),
    )

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Attend."""
        # Not local_window_size: jax.nn makes two arrays of indices for it, constants of 64 KB of text at 4096.
        causal = call.mask.mask == Causal(0) and call.q_shards == 1
        return _run(call, "xla", (True, None) if causal else None)


class ScaledDotProduct(Operation):
    """jax's own attention behind the declaration; what it can't express is refused."""

    name = "sdpa"
    config = SdpaConfig
    forward_cuda = CudnnAttention()
    forward_native = XlaSdpa()


def _run(
    call: LocalCall, implementation: Literal["xla", "cudnn"], flags: tuple[bool, tuple[int, int] | None] | None
) -> LocalOutput:
    call = with_score_as_bias(call.dequantised().with_hidden_keys_zero())
    swap = call.layout == "bhtd"
    query, key, value = (x.swapaxes(1, 2) if swap else x for x in (call.query, call.key, call.value))
    is_causal, window = flags or (False, None)
    output = jax_sdpa(
        query,
        key,
        value,
        library_mask(call.mask, call.bias, flags is not None),
        scale=call.softmax_scale,
        is_causal=is_causal,
        window=window,
        implementation=implementation,
    )
    return LocalOutput(output.swapaxes(1, 2) if swap else output)
