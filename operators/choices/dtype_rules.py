"""Rules about dtypes that several implementations have."""

from __future__ import annotations

from ...planning import Rule

__all__ = ["float32_softmax", "plain_dtypes"]

_PLAIN = ("float32", "bfloat16", "float16")


def float32_softmax(prefix: str, what: str) -> Rule:
    """The softmax is float32. prefix: of the code. what: what has it, for the message: "the kernel's softmax is"."""
    return Rule(
        f"{prefix}.softmax_dtype",
        "runtime_softmax_dtype",
        lambda p, c: p.softmax_dtype == "float32",
        f"softmax dtype {{p.softmax_dtype}}: {what} float32",
        "Leave runtime_softmax_dtype at float32.",
    )


def plain_dtypes(prefix: str, what: str) -> Rule:
    """The runtime dtype is float32, bfloat16 or float16. what: as above: "queries over pages are"."""
    return Rule(
        f"{prefix}.dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in _PLAIN,
        f"runtime dtype {{p.runtime_dtype}}: {what} float32, bfloat16 or float16",
        "Leave runtime_dtype out, or declare one of these.",
    )
