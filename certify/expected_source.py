"""The closing lines of a script: what attention is expected to give, in NumPy and float64, without attnops."""

from __future__ import annotations

from .call_source import single_arrays
from .case import Case
from .convention import Convention

__all__ = ["expected_lines"]


def expected_lines(case: Case, convention: Convention, gradients: tuple[str, ...]) -> list[str]:
    """Lines from `q`, `k`, `v`, `see` and the other arrays to `want`, whose items are those of `got`."""
    names = ["q", "k", "v", *(["d"] if case.has("gradient") else []), *(["bias"] if case.has("bias") else [])]
    names += single_arrays(case)
    to_numpy = "x.detach().double().numpy()" if convention.framework == "torch" else "np.asarray(x, np.float64)"
    lines = [f"{', '.join(names)} = ({to_numpy} for x in ({', '.join(names)}))"]
    group = case.heads // case.kv_heads
    if group > 1:
        lines.append(
            f"k, v = np.repeat(k, {group}, 2), np.repeat(v, {group}, 2)  # query head h reads key head h // {group}"
        )
    scale = _scale(case, convention)
    x = f'np.einsum("bihd,bjhd->bhij", q, k) * {scale}'
    if case.has("soft_cap"):
        lines.append(f"capped = {case.cap} * np.tanh({x} / {case.cap})")
        x = "capped"
    if case.has("alibi"):
        at = f" + {case.offset}" if case.offset else ""
        x = f"{x} - slopes[:, None, None] * abs(i{at} - j)"
    if case.has("score"):
        x = _SCORED[case.levels["score"]].format(x=x, at=f" + {case.offset}" if case.offset else "")
    if case.has("bias"):
        x = f"{x} + bias"
    lines.append(f"x = {x}" if case.sees_all else f"x = np.where(see, {x}, -np.inf)")
    plain = not case.has("sinks") and not case.has("lse") and not case.may_have_dead_rows
    if plain and not case.has("gradient"):
        weights = "w / w.sum(-1, keepdims=True)"
        return [
            *lines,
            "w = np.exp(x - x.max(-1, keepdims=True))",
            f'want = [np.einsum("bhij,bjhd->bihd", {weights}, v)]',
        ]
    lines += _softmax(case, plain)
    lines.append('want = [np.einsum("bhij,bjhd->bihd", w, v)]')
    if case.has("lse"):
        lines.append("want.append((m + np.log(total))[..., 0])")
    if not case.has("gradient"):
        return lines + _dead(case, convention)
    lines += [
        'dw = np.einsum("bihd,bjhd->bhij", d, v)',
        "inner = (w * dw).sum(-1, keepdims=True)",
        "dx = dlogit = w * (dw - inner)",
    ]
    if case.levels["score"] == "temperature":
        lines.append("dx = dx * temperature[:, None, None]")
    if case.has("soft_cap"):
        lines.append(f"dx = dx * (1 - (capped / {case.cap}) ** 2)")
    shared = f".reshape({case.batch}, {case.kv_len}, {case.kv_heads}, {group}, -1).sum(3)" if group > 1 else ""
    lines += [
        f'want.append(np.einsum("bhij,bjhd->bihd", dx, k) * {scale})',
        f'want.append((np.einsum("bhij,bihd->bjhd", dx, q) * {scale}){shared})',
        f'want.append(np.einsum("bhij,bihd->bjhd", w, d){shared})',
    ]
    if "bias" in gradients:
        lines.append(
            "want.append(dlogit.sum((0, 2), keepdims=True))"
            if case.levels["bias"] == "broadcast"
            else "want.append(dlogit)"
        )
    if "sinks" in gradients:
        lines.append("want.append((np.exp(sinks[:, None, None] - m) / total * -inner).sum((0, 2, 3)))")
    return lines + _dead(case, convention)


_SCORED = {
    "temperature": "{x} * temperature[:, None, None]",
    "relative": "{x} + np.moveaxis(table[np.clip(j - (i{at}), -3, 2) + 3], -1, 0)",
    "forgetting": "{x} + np.cumsum(log_gate, -1)[:, :, i{at}] - np.cumsum(log_gate, -1)[:, :, None]",
}


def _softmax(case: Case, plain: bool) -> list[str]:
    """From `x` to `w`; a row that sees no key has weights of 0."""
    if plain:
        return ["e = np.exp(x - x.max(-1, keepdims=True))", "w = e / e.sum(-1, keepdims=True)"]
    least = "sinks[:, None, None]" if case.has("sinks") else "-1e300"
    extra = " + np.exp(sinks[:, None, None] - m)" if case.has("sinks") else ""
    return [
        f"m = np.maximum(x.max(-1, keepdims=True), {least})",
        f"total = np.exp(x - m).sum(-1, keepdims=True){extra}",
        "w = np.exp(x - m) / np.maximum(total, 1e-300)",
    ]


def _dead(case: Case, convention: Convention) -> list[str]:
    """Where a library says nothing of rows that see no key, they are left out of the comparison."""
    if convention.dead_rows == "zero" or not case.may_have_dead_rows:
        return []
    return ["got[0] = np.where(np.isfinite(x).any(-1).swapaxes(1, 2)[..., None] | ~np.isfinite(got[0]), got[0], 0)"]


def _scale(case: Case, convention: Convention) -> str:
    if case.scale is not None:
        return repr(case.scale)
    return "1" if convention.default_scale == "one" else f"{case.dim} ** -0.5"
