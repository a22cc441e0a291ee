"""Mistakes planted in the Hopper kernels are noticed by the interpreter's race detection, or by the numbers."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from hopper_mutations import KERNELS, mutations
from mosaic_mistakes import check_noticed

TIMES = 2
PLANTED = [(kernel, name) for kernel, one in KERNELS.items() for name in mutations(one)]


def test_twenty_a_kernel() -> None:
    """Half as many where one array is loaded, not two. Of spans and sharp logits there are some more."""
    known = {name: kernel for name, kernel in KERNELS.items() if kernel.mask == "causal" and kernel.sharp == 1}
    least = {name: 20 if len(kernel.loaded) > 1 or "rows" in kernel.loaded else 12 for name, kernel in known.items()}
    assert all(len(mutations(kernel)) > least.get(name, 7) for name, kernel in KERNELS.items())


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), PLANTED)
def test_a_mistake_is_noticed(kernel: str, name: str) -> None:
    check_noticed(Path(__file__).with_name("hopper_mutations.py"), kernel, name, TIMES)
