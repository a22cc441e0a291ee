"""Judge what a case gave: against the float64 reference, row by row, within what rounding to the call's dtype explains."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..scores import ALiBi, Clip, Forgetting, RelativeBias, Temperature
from ..verify.closeness import lse_size, row_error, row_sizes, term_sizes
from ..verify.reference import reference_attention, reference_gradients
from .call_source import differentiated
from .case import Case
from .convention import Convention
from .source import part_names

__all__ = ["DENORMAL", "TOLERANCES", "USUAL_LOGIT", "Judgement", "judged"]

# Largest error of a row of outputs and of gradients, relative to the row's size. A function may compute its softmax in the call's
# dtype: bfloat16 then rounds logits of 4 by 0.008. Larger logits are rounded by more, and the tolerance grows with them.
TOLERANCES = {"float32": (1e-4, 3e-4), "bfloat16": (0.05, 0.1), "float16": (0.01, 0.02)}
USUAL_LOGIT = 8.0  # the tolerances hold for logits up to this
# Weights below the dtype's smallest number are 0, and whatever is multiplied to them: rows smaller than this, in terms of the
# largest one, count as if they were so large.
_SMALL = {"float32": 1e-30, "bfloat16": 1e-30, "float16": 1e-5}
DENORMAL = 1e-30  # where values are denormal, what is made of them may be flushed to 0; NaN and infinity are found
_SCORES = {
    "alibi": ALiBi(),
    "temperature": Temperature(),
    "relative": RelativeBias(buckets=Clip(3, 2)),
    "forgetting": Forgetting(),
}
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "bias", "sinks": "softmax_aux"}


class Judgement(NamedTuple):
    """verdict: 'right', 'wrong' or 'refused'. what: the part that is wrong, and how. error: in a row's size; -1 if not finite."""

    verdict: str
    what: str = ""
    error: float = 0.0


def judged(case: Case, convention: Convention, arrays: dict[str, Any]) -> Judgement:
    """arrays: what the lines of the case left behind, by name."""
    got = dict(zip(part_names(case), arrays["got"], strict=True))
    numbers = {name: _float64(arrays[name]) for name in ("q", "k", "v", "d", "bias", "sinks") if name in arrays}
    see = arrays.get("see", np.ones((case.batch, case.heads, case.q_len, case.kv_len), bool))
    bias = numbers.get("bias") if case.has("bias") else None
    scale = case.scale
    if scale is None:
        scale = 1.0 if convention.default_scale == "one" else case.dim**-0.5
    arguments: dict[str, Any] = {
        "scale": scale, "mask": see, "bias": bias, "soft_cap": case.cap, "sinks": numbers["sinks"] if case.has("sinks") else None,
    }  # fmt: skip
    score = "alibi" if case.has("alibi") else case.levels["score"]
    if score in _SCORES:
        captured = {
            name: _float64(arrays[name]) for name in ("slopes", "temperature", "table", "log_gate") if name in arrays
        }
        arguments |= {"score": _SCORES[score], "captures": captured, "query_offset": case.offset}
    q, k, v = (numbers[name] for name in ("q", "k", "v"))
    want = reference_attention(q, k, v, **arguments)
    d = numbers.get("d", np.zeros_like(want.output))
    sizes = term_sizes(q, k, v, d, **arguments)
    largest = float(np.abs(np.einsum("bihd,bjhd->bhij", q, np.repeat(k, case.heads // case.kv_heads, 2)) * scale).max())
    grown = max(1.0, largest / USUAL_LOGIT)
    forward, backward = (tolerance * grown for tolerance in TOLERANCES[case.dtype])

    output = got["output"]
    if output.shape != want.output.shape:
        return Judgement("wrong", f"output has shape {output.shape}; expected {want.output.shape}", -1.0)
    if convention.dead_rows == "unspecified":
        dead = ~(see & np.isfinite(0.0 if bias is None else bias)).any(-1).swapaxes(1, 2)[..., None]
        output = np.where(dead & np.isfinite(output), want.output, output)
    found = [_part("output", output, want.output, row_sizes(want.output, sizes["output"]), forward, case)]
    if "lse" in got:
        alive = np.isfinite(want.lse) | (convention.dead_rows == "zero")
        lse, expected = (np.where(alive, x, 0) for x in (got["lse"], want.lse))
        same = np.isneginf(lse) & np.isneginf(expected)
        lse, expected = np.where(same, 0, lse), np.where(same, 0, expected)
        found.append(_part("log-sum-exp", lse, expected, lse_size(expected), forward, case))
    if case.has("gradient"):
        gradients = reference_gradients(q, k, v, d, **arguments)
        for name in differentiated(case):
            of = _NAMES[name]
            a, b, size = (
                x[..., None] if name == "sinks" else x for x in (got[f"gradient of {name}"], gradients[of], sizes[of])
            )
            found.append(_part(f"gradient of {name}", a, b, row_sizes(b, size), backward, case))
    wrong = [one for one in found if one.verdict == "wrong"]
    return wrong[0] if wrong else max(found, key=lambda one: one.error)


def _part(what: str, got: np.ndarray, want: np.ndarray, sizes: np.ndarray, tolerance: float, case: Case) -> Judgement:
    if got.shape != want.shape:
        return Judgement("wrong", f"{what} has shape {got.shape}; expected {want.shape}", -1.0)
    if not np.isfinite(got).all():
        return Judgement("wrong", f"{what} has NaN or infinity", -1.0)
    least = DENORMAL if case.levels["values"] == "denormal" else _SMALL[case.dtype] * float(sizes.max(initial=0.0))
    error = row_error(got, want, np.maximum(sizes, least), case.dtype)
    if error <= tolerance:
        return Judgement("right", what, error)
    return Judgement(
        "wrong", f"{what} is wrong by {error:.2g} of a row's size; rounding explains {tolerance:.2g}", error
    )


def _float64(x: Any) -> np.ndarray:
    return x.detach().double().numpy() if hasattr(x, "detach") else np.asarray(x, np.float64)
