"""The command asks for no device that Linux doesn't show, unless somebody says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnops.cli.absent_devices import leave_absent_devices_alone


@pytest.mark.parametrize(
    ("device", "said", "wanted"),
    [
        (None, None, "cpu"),
        (None, "tpu", "tpu"),
        ("accel0", None, None),
        ("vfio/0", None, None),
        ("nvidia0", None, None),
        ("kfd", None, None),
        ("null", None, "cpu"),
    ],
)
def test_platforms(device: str | None, said: str | None, wanted: str | None, tmp_path: Path) -> None:
    if device:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    environment = {"JAX_PLATFORMS": said} if said else {}
    leave_absent_devices_alone(environment, tmp_path)
    assert environment.get("JAX_PLATFORMS") == (wanted if sys.platform == "linux" or said else None)
