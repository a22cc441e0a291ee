"""target_config: a kind of GPU in the form that XLA reads, a GpuTargetConfigProto in text."""

from __future__ import annotations

from ...devices import GpuSpec
from ...devices.gpus import REGISTERS, THREADS, THREADS_A_BLOCK

__all__ = ["target_config"]

_WARP = 32
_SHARED = 49152  # bytes of a block that doesn't request more
_CUDA, _CUDNN = (12, 9), (9, 10)  # versions that the compiler may rely on
_GRID = (2**31 - 1, 65535, 65535)


def target_config(spec: GpuSpec) -> str:
    """The text that `jax.experimental.topologies` takes as `target_config`. XLA treats missing fields as zero or unknown."""
    major, minor = spec.capability
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # sm_90a and sm_100a
    device: dict[str, object] = {
        "threads_per_block_limit": THREADS_A_BLOCK,
        "threads_per_warp": _WARP,
        "threads_per_core_limit": THREADS,
        "shared_memory_per_block": _SHARED,
        "shared_memory_per_block_optin": spec.shared_bytes_a_block,
        "shared_memory_per_core": spec.shared_bytes_a_core,
        "registers_per_core_limit": REGISTERS,
        "registers_per_block_limit": REGISTERS,
        "core_count": spec.cores,
        "fpus_per_core": spec.fp32_a_cycle,
        "clock_rate_ghz": spec.clock / 1e9,
        "memory_bandwidth": round(spec.bytes_per_second),
        "device_memory_size": spec.hbm_bytes,
        "l2_cache_size": spec.l2_bytes,
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} {accelerated} }}",
        **{f"block_dim_limit_{axis}": limit for axis, limit in zip("xyz", _GRID, strict=True)},
    }
    fields = [f"  {name}{'' if str(value).startswith('{') else ':'} {value}" for name, value in device.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *fields,
            "}",
            'platform_name: "CUDA"',
            f"runtime_version {{ major: {_CUDA[0]} minor: {_CUDA[1]} }}",
            f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}",
            f'device_description_str: "{spec.kind}"',
        ]
    )
