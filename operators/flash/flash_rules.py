"""What the GPU kernels support, as data."""

from __future__ import annotations

from ...planning import ALL_FEATURES, Rule
from ..choices.dtype_rules import float32_softmax
from ..choices.function_rules import TRITON, function_rules

__all__ = ["FLASH_FEATURES", "FLASH_RULES", "ON_ROCM"]

FLASH_FEATURES = ALL_FEATURES - {"return_weights"}
_MAX_DIM, _MAX_IN_KEY = 256, 640
# Prefixes of the device kinds of GPUs with a compute capability below 8.0, from NVIDIA's table.
_BEFORE_AMPERE = (
    "Tesla", "NVIDIA T4", "NVIDIA P", "NVIDIA TITAN", "NVIDIA GeForce RTX 20", "NVIDIA GeForce GTX", "Quadro", "NVIDIA Quadro",
    "NVIDIA Tesla",
)  # fmt: skip

FLASH_RULES = (
    Rule(
        "flash.dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in ("bfloat16", "float16", "float32"),
        "runtime dtype {p.runtime_dtype}: the kernels' products are summed in float32",
        "Declare runtime_dtype bfloat16, float16 or float32.",
    ),
    float32_softmax("flash", "the kernels' softmax is"),
    Rule(
        "flash.head_dim",
        "head_dim",
        lambda p, c: max(p.head_dim, p.value_dim) <= (_MAX_DIM if p.value_columns is None else _MAX_IN_KEY),
        f"head_dim={{p.head_dim}}, value dim {{p.value_dim}}: a tile's sums are held in registers, up to a dim of {_MAX_DIM}, or "
        f"of {_MAX_IN_KEY} where values are the first numbers of their keys",
        "Use 'vanilla'.",
    ),
    Rule(
        "flash.generation",
        "platform",
        lambda p, c: not p.device_kind.startswith(_BEFORE_AMPERE),
        "device {p.device}: Triton compiles for Ampere (compute capability 8.0) and later",
        "Use 'vanilla', which is plain XLA.",
    ),
    Rule(
        "flash.kernel",
        "kernel",
        lambda p, c: c.kernel in (None, "triton"),
        "kernel='{c.kernel}' is declared, and these kernels are written in Triton",
        "Leave kernel out, or declare 'triton'.",
    ),
    *function_rules("flash", TRITON),
    Rule(
        "flash.interpret.check_vma",
        "interpret",
        lambda p, c: not (p.vma and c.interpret),
        "called inside a shard_map with check_vma=True, which Pallas' interpreter can't be traced under",
        "Leave interpret out, or pass check_vma=False to that shard_map.",
    ),
)

ON_ROCM = Rule(
    "flash.rocm",
    "platform",
    lambda p, c: False,
    "platform rocm: the kernels have been compiled for NVIDIA's GPUs only",
    "Use 'vanilla', which is plain XLA.",
)
