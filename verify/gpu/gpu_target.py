"""gpu_target: reads 'h100:8' as a kind of GPU, a number of hosts, and GPUs per host."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...devices import gpu_specs
from ...errors import ConfigError, nearest, shown

__all__ = ["GpuTarget", "gpu_target", "is_gpu_target"]

_FORM = re.compile(r"(?P<name>[a-z0-9]+)(?::(?:(?P<hosts>[1-9]\d{0,5})x)?(?P<gpus>[1-9]\d{0,5}))?")
_MAX_GPUS = 2**16  # each GPU is an object


class GpuTarget(NamedTuple):
    """A kind of GPU, a number of hosts, and GPUs per host."""

    name: str
    hosts: int
    gpus: int


def is_gpu_target(target: str) -> bool:
    """Whether a target's name begins with that of a known GPU."""
    return target.partition(":")[0] in gpu_specs()


def gpu_target(target: str) -> GpuTarget:
    """Read `h100`, `h100:8` or `h100:2x8` (hosts x GPUs per host). Errors: ConfigError for any other form."""
    specs, match = gpu_specs(), _FORM.fullmatch(target)
    if match is None or match["name"] not in specs:
        raise ConfigError(
            f"target {shown(target)}; wanted a GPU and how many, such as h100, h100:8 or h100:2x8 (hosts x GPUs of each); GPUs: "
            f"{', '.join(specs)}.{nearest(target.partition(':')[0], specs)}"
        )
    hosts, gpus = int(match["hosts"] or 1), int(match["gpus"] or 1)
    if hosts * gpus > _MAX_GPUS:
        raise ConfigError(f"target {shown(target)} has {hosts * gpus} GPUs; at most {_MAX_GPUS} can be described.")
    return GpuTarget(match["name"], hosts, gpus)
