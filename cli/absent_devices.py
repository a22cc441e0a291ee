"""JAX's plugins for devices that aren't there: libtpu and CUDA's complain at length when JAX looks for a device."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["leave_absent_devices_alone"]

# Where Linux shows TPUs, NVIDIA's GPUs and AMD's.
_DEVICES = ("accel*", "vfio/*", "nvidia*", "kfd")


def leave_absent_devices_alone(
    environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> None:
    """Where Linux shows no accelerator, and nobody says on what JAX is to run, let it be the CPU.

    Before JAX is imported. Compilers for devices that aren't here work as before: they don't ask for a device.
    """
    if sys.platform == "linux" and not any(any(devices.glob(name)) for name in _DEVICES):
        environment.setdefault("JAX_PLATFORMS", "cpu")
