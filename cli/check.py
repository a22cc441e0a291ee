"""Compare a result with the float64 reference, in pieces to limit memory, and with given values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..operators import AttentionOutput
from ..operators.kernels.local_mask import Dropout, dropout_seed
from ..planning import AttentionProblem, Plan
from ..planning.score_operands import captured_names
from ..verify.closeness import lse_size, output_size, row_error, row_sizes
from ..verify.reference import Forward, forward
from ..verify.report import AnyPlan
from ..verify.score_reference import PlacedScore
from .materials import Materials, canonical, materials
from .progress import ReportProgress

__all__ = ["Comparison", "Worst", "check", "tolerance_of"]

_PIECE = 2**20  # logits in one piece; the reference holds about ten float64 arrays of this size


class Comparison(NamedTuple):
    """One tensor compared with another. `relative` is the largest error of a row relative to the row's size
    (verify.closeness)."""

    what: str
    against: str
    max_abs: float
    relative: float
    tolerance: float | None
    remark: str = ""

    @property
    def passed(self) -> bool:
        return self.tolerance is not None and self.relative <= self.tolerance


class Worst:
    """The largest error so far, absolute and relative to its row's size. An unexpected non-finite value counts as inf."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.error = self.relative = 0.0

    def add(self, got: np.ndarray, want: np.ndarray, sizes: np.ndarray) -> None:
        """Compare some rows. A value that isn't finite must be the same in both."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        finite = np.isfinite(want)
        same = np.array_equal(np.where(finite, 0.0, got), np.where(finite, 0.0, want))  # -inf matches only -inf
        got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
        relative = row_error(got, want, sizes, self.dtype) if same else np.inf
        self.relative = max(self.relative, relative)
        self.error = max(self.error, float(np.abs(got - want).max(initial=0.0)) if np.isfinite(relative) else np.inf)

    def compared(self, what: str, against: str, tolerance: float | None, remark: str = "") -> Comparison:
        """The comparison of all rows that were added."""
        return Comparison(what, against, self.error, self.relative, tolerance, remark)


def check(
    plan: Plan,
    output: AttentionOutput,
    arrays: Mapping[str, Any],
    expected: np.ndarray | None = None,
    source: str = "",
    progress: ReportProgress | None = None,
) -> list[Comparison]:
    """Compare the output, and lse and weights if requested, with verify.reference_attention. Also compare the output with the
    `expected` array of a source, leaving out rows of padding queries. `progress` is called for each piece. Errors: InputError for
    `expected` with a wrong shape.
    """
    problem, tensors = plan.problem, materials(plan.problem, arrays)
    packed = problem.layout == "thd"
    got, expected_values = canonical(np.asarray(output.attention_outputs), problem.layout), None
    if expected is not None:
        if expected.shape != output.attention_outputs.shape:
            expected_shape = output.attention_outputs.shape
            raise InputError(f"{source}: expected has shape {expected.shape}; wanted the output's, {expected_shape}.")
        expected_values = canonical(expected, problem.layout)
    others = {
        name: np.asarray(x)[None] if packed else np.asarray(x)
        for name, x in (("lse", output.lse), ("weights", output.attention_weights))
        if x is not None
    }
    worst = {name: Worst(x.dtype) for name, x in {"output": got, **others, "expected": got}.items()}
    real = _real_queries(problem, arrays)
    step = max(1, _PIECE // (problem.group * problem.kv_len))
    for start in range(0, problem.q_len, step):
        rows = slice(start, min(start + step, problem.q_len))
        if progress is not None:
            progress(start, problem.q_len, "queries")
        visible = tensors.visible(rows)
        for row in range(problem.batch):
            for kv_head in range(problem.kv_heads):
                heads = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
                reference = _piece(problem, tensors, visible, arrays, row, kv_head, heads, rows)
                terms, output_rows = output_size(reference.dropped, reference.value)[0], got[row, rows, heads]
                want = np.einsum("bhqk,bkhd->bqhd", reference.dropped, reference.value)[0]
                worst["output"].add(output_rows, want, row_sizes(want, terms))
                if "lse" in others:
                    worst["lse"].add(others["lse"][row, heads, rows], reference.lse[0], lse_size(reference.lse[0]))
                if "weights" in others:
                    weights = reference.weights[0]
                    worst["weights"].add(others["weights"][row, heads, rows], weights, row_sizes(weights))
                if expected_values is not None:
                    real_rows, expected_rows = real[row, rows], expected_values[row, rows, heads]
                    worst["expected"].add(
                        output_rows[real_rows], expected_rows[real_rows], row_sizes(expected_rows, terms)[real_rows]
                    )
    tolerance = tolerance_of(plan)
    remark = "" if tolerance is not None else f"no tolerance is published for {problem.runtime_dtype}"
    checks = [worst[name].compared(name, "float64 reference", tolerance, remark) for name in ("output", *others)]
    if expected_values is not None:
        remark = "" if real.all() else f"{int((~real).sum())} rows of padding queries left out"
        if not real.any():  # nothing was compared, which isn't agreement
            tolerance, remark = None, "every row is a padding query, so nothing was compared"
        checks.append(worst["expected"].compared("output", f"expected of {source}", tolerance, remark))
    return checks


def tolerance_of(plan: AnyPlan) -> float | None:
    """The published tolerance of a forward pass; None if there is none."""
    published = plan.operation.capability(plan.method or "").tolerance.get(plan.problem.runtime_dtype)
    return None if published is None else published.forward


def _real_queries(problem: AttentionProblem, arrays: Mapping[str, Any]) -> np.ndarray:
    """bool [batch, q]: False for padding queries of self-attention."""
    real = np.ones((problem.batch, problem.q_len), bool)
    if problem.q_len != problem.kv_len:
        return real
    if "kv_lengths" in arrays:
        real &= np.arange(problem.q_len) < np.asarray(arrays["kv_lengths"])[:, None]
    mask = arrays.get("mask")
    if mask is not None and mask.shape == (problem.batch, 1, 1, problem.kv_len):
        real &= np.asarray(mask)[:, 0, 0]
    return real


def _piece(
    problem: AttentionProblem, tensors: Materials, visible: np.ndarray, arrays: Mapping[str, Any], row: int, kv_head: int,
    heads: slice, rows: slice,
) -> Forward:  # fmt: skip
    batch_row, count = slice(row, row + 1), problem.group
    keep = None
    if problem.dropout_prob > 0:
        dropout = Dropout(dropout_seed(arrays["dropout_rng"]), problem.dropout_prob, row, heads.start, rows.start)
        head, at, key = np.arange(count), np.arange(rows.stop - rows.start), np.arange(problem.kv_len)
        keep = np.asarray(dropout.keep(0, head[:, None, None], at[None, :, None], key[None, None]))[None]
    return forward(
        tensors.query[batch_row, rows, heads],
        tensors.key[batch_row, :, kv_head : kv_head + 1],
        tensors.value[batch_row, :, kv_head : kv_head + 1],
        scale=problem.softmax_scale,
        mask=_cut(visible, batch_row, heads, slice(None)),
        bias=None if tensors.bias is None else _cut(tensors.bias, batch_row, heads, rows),
        soft_cap=problem.logits_soft_cap,
        sinks=None if tensors.sinks is None else tensors.sinks[heads],
        keep=keep,
        keep_probability=1.0 - problem.dropout_prob,
        score=_score(problem, tensors, arrays, row, heads, rows),
    )


def _score(
    problem: AttentionProblem, tensors: Materials, arrays: Mapping[str, Any], row: int, heads: slice, rows: slice
) -> PlacedScore | None:
    if problem.score is None:
        return None
    cuts = {"batch": slice(row, row + 1), "heads": heads, "q_len": rows}
    captures = {}
    for name in captured_names(problem.score):
        operand = problem.operand(name)
        assert operand is not None  # the call itself has it
        sizes = zip(operand.shape, operand.operand.dims, strict=True)
        captures[name] = np.asarray(arrays[name])[
            tuple(slice(None) if n == 1 else cuts.get(dim, slice(None)) for n, dim in sizes)
        ]
    offset = np.broadcast_to(np.asarray(tensors.query_offset), (problem.batch,))[row]
    q, kv = np.arange(rows.start, rows.stop)[None] + offset, np.arange(problem.kv_len)[None]
    count = heads.stop - heads.start
    return PlacedScore.of(problem.score, captures, q, kv, heads=count, first_batch=row, first_head=heads.start)


def _cut(x: np.ndarray, batch: slice, heads: slice, rows: slice) -> np.ndarray:
    """Cut [batch, heads, q, kv]; a dimension of 1 stands for all."""
    full = slice(None)
    return x[
        full if x.shape[0] == 1 else batch,
        full if x.shape[1] == 1 else heads,
        full if x.shape[2] == 1 else rows,
    ]
