"""Mistakes planted in the kernels of Blackwell's gradients are noticed by the interpreter's race detection, or by the numbers."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from backward_mutations import KERNELS, mutations
from mosaic_mistakes import check_noticed

TIMES = 2
PLANTED = [(kernel, name) for kernel, one in KERNELS.items() for name in mutations(one)]


def test_twenty_a_kernel() -> None:
    """Of spans there are some more."""
    assert all(len(mutations(kernel)) > (20 if kernel.mask == "causal" else 9) for kernel in KERNELS.values())


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), PLANTED)
def test_a_mistake_is_noticed(kernel: str, name: str) -> None:
    check_noticed(Path(__file__).with_name("backward_mutations.py"), kernel, name, TIMES)
