"""Mistakes planted in the kernels over pages in Mosaic GPU are noticed by the interpreter's race detection, or by the numbers."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

import blackwell_pages_mutations
import hopper_pages_mutations
from mosaic_mistakes import check_noticed

PLANTED = [
    (program.__name__, case, name)
    for program in (hopper_pages_mutations, blackwell_pages_mutations)
    for case in program.CASES
    for name in program.mutations(case)
]


def test_ten_a_kernel() -> None:
    for program in (hopper_pages_mutations, blackwell_pages_mutations):
        assert sum(len(program.mutations(case)) for case in program.CASES) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("program", "case", "name"), PLANTED)
def test_a_mistake_is_noticed(program: str, case: str, name: str) -> None:
    check_noticed(Path(__file__).with_name(f"{program}.py"), case, name, 2)
