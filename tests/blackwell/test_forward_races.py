"""Mistakes planted in the forward kernel for Blackwell are noticed by the interpreter's race detection, or by the numbers."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from forward_mutations import KERNELS, mistakes
from mosaic_mistakes import check_noticed

TIMES = 2
PLANTED = [(kernel, name) for kernel in KERNELS for name in mistakes(kernel)]


def test_twenty_a_kernel() -> None:
    """Of spans there are some more."""
    assert all(len(mistakes(name)) > (20 if kernel.mask == "causal" else 9) for name, kernel in KERNELS.items())


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), PLANTED)
def test_a_mistake_is_noticed(kernel: str, name: str) -> None:
    check_noticed(Path(__file__).with_name("forward_mutations.py"), kernel, name, TIMES)
