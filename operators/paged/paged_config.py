"""PagedConfig: what can be declared for attention over pages, besides the cache itself."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, StrictBool

from ...planning import OperationConfig

__all__ = ["PagedConfig"]


class PagedConfig(OperationConfig):
    """update: when a step's own keys and values are written: 'before' the attention, 'fused' with it, 'none' for pages
    that have them already.

    kernel: the only kernel that may run beside plain XLA, 'tpu', 'hopper' or 'blackwell'; if unset or None, the device's own.
    pages_per_block, queries_per_block: what the kernel processes at once; if unset or None, it chooses.
    interpret: run the kernel in Pallas' interpreter, on any platform: the TPU's, or that of `kernel`. vmem_limit_bytes: of the
    TPU kernel; if unset or None, what it counts. kv_splits: of the GPU kernels, into how many parts all keys of a device's rows
    are divided besides one for each row, 0 for none; if unset or None, so many that they fill the device.
    """

    feeds: ClassVar = {}

    operation: Literal["paged"] = "paged"
    update: Literal["before", "fused", "none"] = "before"
    pages_per_block: PositiveInt | None = None
    queries_per_block: PositiveInt | None = None
    interpret: StrictBool = False
    kernel: Literal["tpu", "hopper", "blackwell"] | None = None
    kv_splits: NonNegativeInt | None = None
    vmem_limit_bytes: PositiveInt | None = None
