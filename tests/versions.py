"""What a JAX as old as the oldest supported one lacks; tests that need it skip, and say so."""

from __future__ import annotations

import jax
import pytest

__all__ = ["JAX_0_9", "needs_jax_0_10"]

JAX_0_9 = jax.__version_info__ < (0, 10)


def needs_jax_0_10(why: str) -> pytest.MarkDecorator:
    """Skip on jax 0.9, which lacks something."""
    return pytest.mark.skipif(JAX_0_9, reason=f"jax 0.9: {why}")
