"""A case as Python source: the lines that a worker runs, and a script that anyone can paste, which are the same lines."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from .call_source import call_lines, cast, differentiated, drawn_as_called, prepared_lines
from .case import Case
from .convention import Convention
from .expected_source import expected_lines

__all__ = ["Lines", "Subject", "lines_of", "part_names", "script"]


class Subject(NamedTuple):
    """What is certified: a name, its convention, and the lines that define `f`."""

    name: str
    convention: Convention
    define: tuple[str, ...]


class Lines(NamedTuple):
    """Sections of a script. process: what stands before jax starts, as a worker has done; imports: the same for every case."""

    process: tuple[str, ...]
    options: tuple[str, ...]
    imports: tuple[str, ...]
    prepare: tuple[str, ...]
    inputs: tuple[str, ...]
    call: tuple[str, ...]


def part_names(case: Case) -> tuple[str, ...]:
    """What `got` holds, in its order."""
    if case.has("lse"):
        return "output", "lse"
    return (
        ("output", *(f"gradient of {name}" for name in differentiated(case))) if case.has("gradient") else ("output",)
    )


def lines_of(case: Case, subject: Subject) -> Lines:
    """The case as source."""
    convention = subject.convention
    torch = convention.framework == "torch"
    transform = case.levels["transform"]
    options = {
        "x64": ('jax.config.update("jax_enable_x64", True)',), "debug_nans": ('jax.config.update("jax_debug_nans", True)',),
    }.get(transform, ())  # fmt: skip
    process = ('jax.config.update("jax_num_cpu_devices", 2)',) if transform == "shard_map" else ()
    imports = ("import numpy as np", "import torch") if torch else ("import jax, jax.numpy as jnp, numpy as np",)
    return Lines(
        process, options, (*imports, *convention.imports, *subject.define), prepared_lines(case, convention),
        tuple(_inputs(case, convention)), tuple(call_lines(case, convention)),
    )  # fmt: skip


def script(case: Case, subject: Subject, title: str) -> str:
    """A program that runs the case, computes what is expected in NumPy, and prints the largest errors."""
    process, options, imports, prepare, inputs, call = lines_of(case, subject)
    head = [f"# {line}" for line in title.splitlines()]
    first, *others = imports
    body = [
        first,
        *process,
        *options,
        *others,
        *prepare,
        *inputs,
        *call,
        *expected_lines(case, subject.convention, differentiated(case)),
    ]
    names = part_names(case)
    if len(names) == 1:
        body.append('print("output is wrong by", np.abs(got[0] - want[0]).max())')
    else:
        body += [
            f"for name, a, b in zip({names!r}, got, want):".replace("'", '"'),
            '    print(name, "is wrong by", np.abs(a - b).max())',
        ]
    return "\n".join((*head, *body)) + "\n"


_SCORE_ARRAYS = {
    "temperature": "temperature = rng.uniform(0.5, 1.5, {h})",
    "relative": "table = rng.standard_normal((6, {h}))",
    "forgetting": "log_gate = -rng.uniform(0, 0.5, ({b}, {h}, {s}))",
}


def _literal(array: np.ndarray) -> str:
    """A small array of integers or booleans."""
    text = re.sub(r"\s", "", np.array2string(array.astype(int), separator=",", threshold=10**9, max_line_width=10**9))
    return f"np.array({text.replace(',', ', ')}, {'bool' if array.dtype == bool else 'np.int32'})"


def _inputs(case: Case, convention: Convention) -> list[str]:
    """The arrays in NumPy, and `see`: which query may attend to which key."""
    b, t, s, h, k = case.batch, case.q_len, case.kv_len, case.heads, case.kv_heads
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("q", (b, t, h, case.dim)),
        ("k", (b, s, k, case.dim)),
        ("v", (b, s, k, case.value_dim)),
    ]
    if case.has("gradient"):
        shapes.append(("d", (b, t, h, case.value_dim)))
    if case.has("bias"):
        shapes.append(("bias", (1, h, 1, s) if case.levels["bias"] == "broadcast" else (b, h, t, s)))
    if case.has("sinks"):
        shapes.append(("sinks", (h,)))
    drawn = "rng.integers(-2, 3, s)" if case.integers else "rng.standard_normal(s)"
    if drawn_as_called(case):
        drawn = cast(drawn, case, convention)
    elif case.integers:
        drawn += ".astype(float)"
    names = ", ".join(name for name, _ in shapes)
    lines = [
        f"rng = np.random.default_rng({case.seed})",
        f"{names} = ({drawn} for s in ({', '.join(str(shape) for _, shape in shapes)}))",
    ]
    if case.levels["values"] == "large":
        lines.append("q, k = q * 30, k * 30")
    if case.levels["values"] == "denormal":
        lines.append("v = v * 1e-39")
    if case.levels["bias"] == "infinite":
        lines.append(f"bias[..., {max(s // 2, 1)}:] = -np.inf")
    if case.levels["bias"] == "dead":
        lines.append(f"bias[:, :, {t // 2}] = -np.inf")
    if case.has("score"):
        lines.append(_SCORE_ARRAYS[case.levels["score"]].format(b=b, h=h, s=s))
    if case.has("alibi"):
        lines.append(f"slopes = np.array({[2.0 ** -(1 + n) for n in range(h)]})")
    return lines + _visible(case, convention.dead_rows)


def _visible(case: Case, dead_rows: str) -> list[str]:
    lines: list[str] = []
    terms: list[str] = []
    at = f" + {case.offset}" if case.offset else ""
    if case.has("causal"):
        terms.append(f"(j <= i{at})")
    if case.left is not None:
        terms.append(f"(j >= i{at} - {case.left})")
    if case.right is not None:
        terms.append(f"(j <= i{at} + {case.right})")
    if case.has("segments"):
        lines.append(f"q_segments = kv_segments = {_literal(case.segment_ids())}")
        terms.append("(q_segments[:, None, :, None] == kv_segments[:, None, None, :])")
    if case.has("lengths"):
        lines.append(f"kv_lengths = {_literal(case.kv_lengths())}")
        terms.append("(j < kv_lengths[:, None, None, None])")
    if case.has("mask"):
        lines.append(f"mask = {_literal(case.mask())}")
        terms.append("mask")
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    if any(case.has(factor) for factor in ("causal", "window", "lengths", "alibi", "score")):
        lines.append(f"i, j = np.arange({case.q_len})[:, None], np.arange({case.kv_len})")
    if terms:
        lines.append(f"see = np.broadcast_to({' & '.join(terms)}, {shape})")
    if case.has("gradient") and dead_rows == "unspecified" and case.may_have_dead_rows:
        alive = "np.isfinite(bias)" if case.sees_all else "(see & np.isfinite(bias))" if case.has("bias") else "see"
        lines.append(
            f"d = np.where({alive}.any(-1).swapaxes(1, 2)[..., None], d, 0)  # rows that see no key don't count"
        )
    return lines
