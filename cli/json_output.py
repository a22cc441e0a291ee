"""What the command writes with --json."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["print_json"]


def print_json(data: Any) -> None:
    """To stdout, and nothing else beside it."""
    print(json.dumps(data, indent=2, allow_nan=False))
