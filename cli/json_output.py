"""Output of the command with --json."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["print_json"]


def print_json(data: Any) -> None:
    """Print data to stdout as JSON, and nothing else."""
    print(json.dumps(data, indent=2, allow_nan=False))
