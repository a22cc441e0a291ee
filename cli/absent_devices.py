"""Keep JAX from starting plugins for devices that aren't there: those for TPUs and CUDA print long complaints."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["leave_absent_devices_alone"]

# Device files of TPUs, NVIDIA GPUs and AMD GPUs on Linux.
_DEVICES = ("accel*", "vfio/*", "nvidia*", "kfd")


def leave_absent_devices_alone(
    environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> None:
    """Make JAX run on the CPU if Linux shows no accelerator and the environment doesn't choose a platform.

    Call this before JAX is imported. Compiling for devices that aren't here still works: that needs no device.
    """
    if sys.platform == "linux" and not any(any(devices.glob(name)) for name in _DEVICES):
        environment.setdefault("JAX_PLATFORMS", "cpu")
