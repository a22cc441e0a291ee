"""What TPUs and GPUs have and do, by jax's name of their kind: one table of each."""

from .gpus import GpuSpec, GpuVariant, gpu_specs, gpu_variant, gpu_variants, spec_of_kind
from .tpus import (
    MIN_VMEM_BYTES,
    SCALAR_BYTES,
    DescribedTpu,
    Topology,
    Tpu,
    Vmem,
    described_cores,
    described_tpus,
    tpu_of,
    vmem_of,
)

__all__ = [
    "MIN_VMEM_BYTES",
    "SCALAR_BYTES",
    "DescribedTpu",
    "GpuSpec",
    "GpuVariant",
    "Topology",
    "Tpu",
    "Vmem",
    "described_cores",
    "described_tpus",
    "gpu_specs",
    "gpu_variant",
    "gpu_variants",
    "spec_of_kind",
    "tpu_of",
    "vmem_of",
]
