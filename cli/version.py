"""`attnops --version`: what is installed, for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata

__all__ = ["version_text"]


def version_text() -> str:
    """`attnops 0.2.0 (jax 0.10.2, jaxlib 0.10.2, Python 3.11.2)`; with libtpu if it is installed."""
    parts = [f"{name} {version}" for name in ("jax", "jaxlib", "libtpu") if (version := _installed(name))]
    return f"attnops {_installed('attnops') or 'from a checkout'} ({', '.join([*parts, f'Python {platform.python_version()}'])})"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
