"""The barriers that the Hopper kernels have are those that their shared memory is counted with."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: plans choose the kernel in Triton", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops.operators.hopper.kernel.backward_keys import HopperKeyGradients
from attnops.operators.hopper.kernel.backward_query import HopperQueryGradient
from attnops.operators.hopper.kernel.forward import HopperForward
from attnops.operators.hopper.kernel.hopper_sizes import shared_bytes
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes

KERNELS = {"forward": HopperForward, "dkv": HopperKeyGradients, "dq": HopperQueryGradient}
BARRIER = 8  # bytes of one
# (kernel, sizes, dims, more of its fields)
CELLS: list[tuple[str, MosaicSizes, tuple[int, int], dict[str, Any]]] = [
    ("forward", MosaicSizes(128, 128, 2), (128, 128), {}),
    ("forward", MosaicSizes(64, 64, 8), (64, 64), {}),
    ("forward", MosaicSizes(128, 64, 2), (192, 128), {}),
    ("forward", MosaicSizes(64, 64, 2), (576, 512), {"in_key": True}),
    ("forward", MosaicSizes(128, 64, 2), (128, 128), {"stored": (("key", "int8"), ("value", "int8"))}),
    ("dkv", MosaicSizes(64, 128, 2), (128, 128), {}),
    ("dkv", MosaicSizes(64, 64, 2), (256, 256), {}),
    ("dkv", MosaicSizes(32, 64, 2), (576, 512), {"in_key": True}),
    ("dq", MosaicSizes(128, 64, 2), (128, 128), {}),
    ("dq", MosaicSizes(64, 32, 2), (576, 512), {"in_key": True}),
]


@pytest.mark.parametrize(("which", "sizes", "dims", "more"), CELLS, ids=str)
def test_barriers_are_counted(which: str, sizes: MosaicSizes, dims: tuple[int, int], more: dict[str, Any]) -> None:
    of_nothing: Any = None
    kernel = KERNELS[which](sizes, of_nothing, of_nothing, "bthd", 1, 1, 1, dims, False, **more)
    made = (one for one in kernel.scratch("bfloat16").values() if isinstance(one, plgpu.Barrier))
    found = sum(int(np.prod(one.num_barriers)) for one in made)
    stored = tuple(name for name, _ in more.get("stored", ()))
    counted = shared_bytes(which, sizes, *dims, in_key="in_key" in more, stored=stored)
    assert counted["barriers"] == BARRIER * found
