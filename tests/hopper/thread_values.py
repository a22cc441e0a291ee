"""What threads compute, in NumPy: instructions of PTX and of MLIR, those that hide what lies outside of spans, on bits.

Arrays of numbers are uint32, their last axis is the threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir

__all__ = ["ptx", "run_block"]

Array = np.ndarray[Any, Any]
_WARP = 32


def _signed(x: Array) -> Array:
    return x.view(np.int32)


def _shifted(shift: Callable[[Array, Array], Array], x: Array, by: Array) -> Array:
    """A shift by 32 bits or more leaves none."""
    return np.where(by < 32, shift(x, np.minimum(by, np.uint32(31))), np.uint32(0))


def _of_two(choice: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """One of two numbers with a sign."""
    return lambda x, y: choice(_signed(x), _signed(y)).view(np.uint32)


def _of_warp(choice: np.ufunc) -> Callable[[Array, Array], Array]:
    """One of the numbers, with a sign, or of the truths of the threads of a warp: of all of them."""

    def chosen(x: Array, threads: Array) -> Array:
        assert (threads == 2**_WARP - 1).all()
        warps = (x if x.dtype == np.bool_ else _signed(x)).reshape(*x.shape[:-1], -1, _WARP)
        made = choice.reduce(warps, axis=-1, keepdims=True)
        return np.broadcast_to(made, warps.shape).reshape(x.shape).view(x.dtype)

    return chosen


_INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "mov.b32": lambda x: x,
    "not.b32": np.invert,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "add.s32": np.add,
    "sub.s32": np.subtract,
    "max.s32": _of_two(np.maximum),
    "min.s32": _of_two(np.minimum),
    "redux.sync.max.s32": _of_warp(np.maximum),
    "redux.sync.min.s32": _of_warp(np.minimum),
    "mul.lo.s32": np.multiply,
    "mad.lo.s32": lambda x, y, z: x * y + z,
    "shr.s32": lambda x, by: (_signed(x) >> np.minimum(by, np.uint32(31)).view(np.int32)).view(np.uint32),
    "shr.u32": lambda x, by: _shifted(np.right_shift, x, by),
    "shl.b32": lambda x, by: _shifted(np.left_shift, x, by),
    "selp.b32": lambda x, y, p: np.where(p, x, y),
    "setp.eq.b32": np.equal,
    "setp.ne.b32": np.not_equal,
    "setp.gt.s32": lambda x, y: _signed(x) > _signed(y),
    "vote.sync.any.pred": _of_warp(np.logical_or),
}


def ptx(text: str, *given: Array) -> Array:
    """$0 of a block of instructions or of a single one, where given are $1, $2, ..."""
    held: dict[str, Array] = {f"${1 + number}": x for number, x in enumerate(given)}
    threads = np.broadcast_shapes(*(x.shape for x in given))
    block = re.fullmatch(r"\{ (.*) \}", text)
    *lines, last = [line.strip() for line in (text if block is None else block[1]).rstrip(";").split(";")]
    assert block is not None or not lines
    # The compiler may give $0 and $1 the same register: nothing is read after $0 is written.
    assert not any(re.search(r"\$0\b", line) for line in lines)
    assert len(re.findall(r"\$0\b", last)) == 1

    def read(name: str) -> Array:
        literal = re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", name)
        return np.broadcast_to(np.uint32(int(name, 0) % 2**32), threads) if literal else held[name]

    declared = set[str]()
    for line in (*lines, last):
        if line.startswith(".reg"):
            declared |= set(line.split(" ", 2)[2].split(", "))
            continue
        guard, opcode, names = re.fullmatch(r"(?:@!(\w+) )?([\w.]+) (.*)", line).groups()  # type: ignore[union-attr]
        target, *operands = names.split(", ")
        assert target in declared | {"$0"}
        made = np.broadcast_to(_INSTRUCTIONS[opcode](*map(read, operands)), threads)
        held[target] = made if guard is None else np.where(held[guard], held[target], made)
    return held["$0"]


_OPERATIONS: dict[str, Callable[..., Array]] = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply,
    "arith.divui": np.floor_divide, "arith.remui": np.remainder,
    "arith.maxsi": _of_two(np.maximum), "arith.minsi": _of_two(np.minimum),
    "arith.index_cast": lambda x: x, "arith.index_castui": lambda x: x,
    "gpu.block_dim": lambda: np.uint32(1),  # a block's threads are along x
}  # fmt: skip


def run_block(operations: Sequence[Any], threads: int, held: dict[Any, Array]) -> dict[Any, Array]:
    """The values that so many threads compute, and those that they are given. Of what vectors hold nothing is known."""
    numbers, held = np.arange(threads, dtype=np.uint32), dict(held)
    for operation in operations:
        op = operation.operation
        if op.name.startswith("vector.") or op.results[0] in held:
            continue
        operands = [held[x] for x in op.operands]
        with np.errstate(over="ignore"):
            if op.name == "arith.constant":
                value = op.attributes["value"]
                made = np.uint32(ir.IntegerAttr(value).value) if isinstance(value, ir.IntegerAttr) else np.uint32(0)
            elif op.name == "gpu.thread_id":
                made = numbers if re.search(r"\bx\b", str(op.attributes["dimension"])) else np.uint32(0)
            elif op.name == "llvm.inline_asm":
                made = ptx(ir.StringAttr(op.attributes["asm_string"]).value, *operands)
            else:
                made = _OPERATIONS[op.name](*operands)
        held[op.results[0]] = np.broadcast_to(made, (threads,))
    return held
