"""Instructions that a compiled kernel has in PTX, where Mosaic GPU lowers to others or to none."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

__all__ = ["asm", "reciprocal"]


def asm(result: Any, text: str, *operands: Any, together: bool = False) -> Any:
    """What a thread computes of its numbers. together: all threads of a warp come here at once."""
    kinds = ("f" if isinstance(of, ir.F32Type) else "r" for of in (result, *(x.type for x in operands)))
    attributes = {
        "asm_string": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get("=" + ",".join(kinds)),
        **({"has_side_effects": ir.UnitAttr.get()} if together else {}),
    }
    made = ir.Operation.create("llvm.inline_asm", results=[result], operands=list(operands), attributes=attributes)
    return made.result


def reciprocal(x: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """1 / x of float32 numbers from 1 on, to the last bit but one: a quotient takes three more instructions, for small ones."""
    if interpret:
        return 1.0 / x

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def of_numbers(context: Any, x: Any) -> Any:
        del context
        return x.foreach(lambda value, _: asm(value.type, "rcp.approx.ftz.f32 $0, $1;", value), create_array=True)

    made: jax.Array = of_numbers(x)
    return made
