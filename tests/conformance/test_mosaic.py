"""The kernels in Mosaic GPU: each case agrees with the reference in Pallas' interpreter, which looks for races, or is refused."""

from __future__ import annotations

import jax
import pytest

from attnops import RefusedError
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

from . import cases, harness

SIZES = cases.Sizes(batch=1, heads=2, kv_heads=1, length=80)
LAYOUTS, DTYPES = ("bthd", "bhtd", "thd"), ("bfloat16", "float16")
RUNS = jax.__version_info__ >= JAX_NEEDED
# The interpreter takes seconds for each: `make test` runs a causal window.
OFTEN = {("causal_window", "bthd", "bfloat16")}
CELLS = [
    pytest.param(name, layout, dtype, marks=() if (name, layout, dtype) in OFTEN else pytest.mark.slow)
    for number, name in enumerate(cases.names())
    for layout, dtype in {(LAYOUTS[number % 3], DTYPES[number % 2]), *((cell[1:]) for cell in OFTEN if cell[0] == name)}
]


@pytest.mark.skipif(not RUNS, reason=f"jax {jax.__version__}: the interpreter of {JAX_NEEDED} looks for races")
@pytest.mark.parametrize(("name", "layout", "dtype"), CELLS)
@pytest.mark.parametrize("generation", harness.MOSAIC)
def test_agrees_or_refuses(generation: str, name: str, layout: str, dtype: str) -> None:
    case, kernel = cases.build(name, layout, SIZES), harness.MOSAIC[generation]
    attend, tensors = kernel.make(dtype), harness.draw(case, dtype)
    qkv = harness.handed_over(case, tensors, dtype, layout)
    plan = attend.plan(*qkv, layout=layout, **case.call)
    refusal = {f"feature.{feature}" for feature in case.features - kernel.capability.consumes}
    codes = {
        r.code
        for rejected in plan.rejected
        for r in rejected.reasons
        if rejected.implementation.endswith(f"_{generation}")
    }
    assert codes == refusal
    if refusal:
        assert plan.implementation is None
        with pytest.raises(RefusedError):
            attend(*qkv, layout=layout, **case.call)
        return
    assert plan.method == f"forward_{generation}"
    published = kernel.capability.tolerance[dtype]
    want = harness.expect(case, tensors)
    harness.agree(harness.run(attend, case, tensors, dtype, layout), want, published.forward, published.backward)
