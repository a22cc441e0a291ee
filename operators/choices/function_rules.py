"""What kernels can't do with registered mask and score functions, as rules: they compile a function together with themselves."""

from __future__ import annotations

from ...errors import shown
from ...masks import MaskFunction
from ...planning import AttentionProblem, Rule

__all__ = ["MOSAIC", "MOSAIC_GPU", "TRITON", "function_rules", "score_function_rule"]

_HINT = (
    "Compute it from position and key by arithmetic and comparisons (a small table entry by entry, as Python numbers), pass "
    "the mask as an array, or use 'vanilla'."
)
# Names of jax's primitives that are elementwise, and that both Mosaic and Pallas' Triton compile in a kernel.
_OPERATIONS = frozenset((
    "abs", "add", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "clz",
    "convert_element_type", "cos", "custom_jvp_call", "div", "eq", "exp", "exp2", "floor", "ge", "gt", "integer_pow",
    "iota", "is_finite", "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "or", "pjit", "population_count", "pow", "rem", "rsqrt", "scan", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "while", "xor",
))  # fmt: skip
# What jax adds to a derivative.
_ADDED = frozenset({"add_any", "copy", "one_minus_square", "reshape", "transpose", "mul"})
MOSAIC = _OPERATIONS | {"cond", "erf", "reduce_or", "round"}
# Those of Mosaic GPU on a tile of a warpgroup.
MOSAIC_GPU = frozenset((
    "abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "custom_jvp_call", "div", "eq", "exp", "exp2",
    "ge", "gt", "integer_pow", "jit", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "or", "pjit", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sqrt", "square",
    "stop_gradient", "sub", "tanh", "xor",
))  # fmt: skip
TRITON = _OPERATIONS | {"cbrt", "expm1"}


def function_rules(kernel: str, operations: frozenset[str]) -> tuple[Rule, ...]:
    """The rules of a kernel, whose name begins their codes; operations: those that its compiler takes."""
    return (
        Rule(
            f"{kernel}.mask_function_array",
            "mask",
            lambda p, c: not any(f.code.arrays for f in _functions(p)),
            lambda p, c: "; ".join(
                f"mask function {shown(f.name)} holds {', '.join(f.code.arrays)}: a kernel can't take a function's arrays"
                for f in _functions(p)
                if f.code.arrays
            ),
            _HINT,
        ),
        Rule(
            f"{kernel}.mask_function_operation",
            "mask",
            lambda p, c: not any(_beyond(f, operations) for f in _functions(p)),
            lambda p, c: "; ".join(
                f"mask function {shown(f.name)} {_beyond(f, operations)}"
                for f in _functions(p)
                if _beyond(f, operations)
            ),
            _HINT,
        ),
        score_function_rule(kernel, operations),
    )


def score_function_rule(kernel: str, operations: frozenset[str]) -> Rule:
    """The rule about a score's functions."""
    return Rule(
        f"{kernel}.score_function_operation",
        "score",
        lambda p, c: not _of_score(p, operations),
        lambda p, c: (
            f"the score {p.score} or its derivative uses {', '.join(_of_score(p, operations))}, which kernels can't compile"
        ),
        "Write the function with other operations, or use 'vanilla'.",
    )


def _of_score(problem: AttentionProblem, operations: frozenset[str]) -> list[str]:
    """What a kernel's compiler can't take of the score's functions."""
    if problem.score is None:
        return []
    return sorted(problem.score.operations(problem.contiguous_positions) - operations - _ADDED)


def _functions(problem: AttentionProblem) -> list[MaskFunction]:
    return [atom for atom in problem.mask.leaves() if isinstance(atom, MaskFunction)]


def _beyond(function: MaskFunction, operations: frozenset[str]) -> str:
    """What a kernel's compiler can't take; '' if nothing."""
    code = function.code
    if code.error:
        return f"can't be traced ({code.error})"
    beyond = sorted(code.operations - operations)
    return f"uses {', '.join(beyond)}, which kernels can't compile" if beyond and not code.arrays else ""
