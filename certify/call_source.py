"""The call of a case as Python source: arrays in the call's dtype, `call`, its transformation, and `got`."""

from __future__ import annotations

import re
from typing import Any

from .case import Case
from .convention import Convention

# May have a place of their own in `call`, None if they're absent.
_PLACED = ("segments", "bias", "sinks", "mask", "kv_lengths")
_OF_SCORES = {"temperature": "temperature", "relative": "table", "forgetting": "log_gate"}

__all__ = ["call_lines", "cast", "differentiated", "drawn_as_called", "prepared_lines", "single_arrays"]


def differentiated(case: Case) -> tuple[str, ...]:
    """The arrays that have a gradient in this case."""
    more = case.levels["transform"] in ("jit", "remat", "eager", "x64", "debug_nans")
    bias = ("bias",) if more and case.levels["bias"] in ("yes", "broadcast") else ()
    return ("q", "k", "v", *bias, *(("sinks",) if more and case.has("sinks") else ()))


def _arrays(case: Case) -> tuple[list[str], list[str]]:
    """Names of the arrays in the call's dtype, and of those that keep theirs."""
    floats = ["q", "k", "v", *(["d"] if case.has("gradient") else []), *(["bias"] if case.has("bias") else [])]
    return floats, single_arrays(case)


def drawn_as_called(case: Case) -> bool:
    """Whether the arrays can be drawn in the call's dtype: none is changed, or stays in another dtype, before the call."""
    changed = case.has("values") or case.levels["bias"] in ("infinite", "dead") or case.has("sinks")
    return not changed and not (case.has("gradient") and case.may_have_dead_rows)


def cast(drawn: str, case: Case, convention: Convention) -> str:
    """An array in the call's dtype."""
    if convention.framework == "torch":
        return f"torch.tensor({drawn}, dtype=torch.{case.dtype})"
    return f"jnp.asarray({drawn}, jnp.{case.dtype})"


def single_arrays(case: Case) -> list[str]:
    """Names of the arrays that are float32 in every call."""
    named = {"sinks": "sinks", "alibi": "slopes", "score": _OF_SCORES.get(case.levels["score"], "")}
    return [name for factor, name in named.items() if case.has(factor)]


def call_lines(case: Case, convention: Convention) -> list[str]:
    """From the arrays in NumPy to `got`."""
    floats, single = _arrays(case)
    others = [
        *(["q_segments", "kv_segments"] if case.has("segments") else []), *(["kv_lengths"] if case.has("lengths") else []),
        *(["mask"] if case.has("mask") else []),
    ]  # fmt: skip
    torch = convention.framework == "torch"

    def each(names: list[str], one: str) -> list[str]:
        listed = f"{names[0]}," if len(names) == 1 else ", ".join(names)
        return [f"{listed} = ({one} for x in ({listed}))"] if names else []

    lines = [] if drawn_as_called(case) else each(floats, cast("x", case, convention))
    lines += each(single, "torch.tensor(x, dtype=torch.float32)" if torch else "jnp.asarray(x, jnp.float32)")
    lines += each(others, "torch.tensor(x)" if torch else "jnp.asarray(x)")
    inputs = ", ".join(differentiated(case)) if case.has("gradient") else "q, k, v"
    function = f"lambda {inputs}: {_call_text(case, convention)}"
    return [*lines, *(_torch_run(case, function) if torch else _jax_run(case, inputs, function))]


def _jax_run(case: Case, inputs: str, function: str) -> list[str]:
    transform = case.levels["transform"]
    if transform in ("jit", "eager", "x64", "debug_nans") and not case.has("gradient") and not case.has("lse"):
        jitted = f"({function})" if transform == "eager" else f"jax.jit({function})"
        return [f"got = [np.asarray({jitted}({inputs}), np.float64)]"]
    lines = [f"call = {function}"]
    pair = "one, pair = call, lambda x: [jnp.stack([a, -a]) for a in x]  # of -q, -k, -v the output is minus that of q, k, v"
    if transform == "vmap":
        lines += [pair, "call = lambda *x: -jax.vmap(one)(*pair(x))[1]"]
    elif transform == "scan":
        lines += [pair, "call = lambda *x: -jax.lax.scan(lambda c, y: (c, one(*y)), 0, pair(x))[1][1]"]
    elif transform == "shard_map":
        lines += [
            pair,
            'mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))',
            'specs = dict(in_specs=jax.sharding.PartitionSpec("x"), out_specs=jax.sharding.PartitionSpec("x"), check_vma=False)',
            "each = lambda *y: one(*(a[0] for a in y))[None]",
            "call = lambda *x: -jax.shard_map(each, mesh=mesh, **specs)(*pair(x))[1]",
        ]
    elif transform == "remat":
        lines.append("call = jax.checkpoint(call)")
    jit = ("{}" if transform == "eager" else "jax.jit({})").format
    if case.has("gradient"):
        lines += [
            "def run(*x):",
            "    out, back = jax.vjp(call, *x)",
            "    return out, *back(d.astype(out.dtype))",
            f"got = [np.asarray(x, np.float64) for x in {jit('run')}({inputs})]",
        ]
        return lines
    got = f"{jit('call')}({inputs})"
    every = f"np.asarray(x, np.float64) for x in {got}" if case.has("lse") else f"np.asarray({got}, np.float64)"
    return [*lines, f"got = [{every}]"]


def _torch_run(case: Case, function: str) -> list[str]:
    if not case.has("gradient"):
        return [f"got = [({function})(q, k, v).double().numpy()]"]
    names = ", ".join(differentiated(case))
    return [
        f"call = {function}",
        f"x = [a.requires_grad_() for a in ({names})]",
        "out = call(*x)",
        "got = [a.detach().double().numpy() for a in (out, *torch.autograd.grad(out, x, d.to(out.dtype)))]",
    ]


def filled(template: str, case: Case, convention: Convention, **more: Any) -> str:
    """A template with its placeholders filled in; braces around anything else stay."""
    unlimited = convention.unlimited
    values: dict[str, Any] = {
        "left": unlimited if case.left is None else case.left,
        "right": unlimited if case.right is None else case.right,
        "tokens": None if case.left is None else case.left + 1,
        "offset": case.offset, "scale": case.scale, "cap": case.cap, "mask": _MASKS[convention.mask_means],
        "batch": case.batch, "q_len": case.q_len, "kv_len": case.kv_len, "heads": case.heads, "kv_heads": case.kv_heads,
        "dim": case.dim, "value_dim": case.value_dim, "group": case.heads // case.kv_heads,
        "grouped": case.heads != case.kv_heads, "causal": case.has("causal"), "windowed": case.has("window"), "dtype": case.dtype,
        **{name: f"{name}[0]" if case.levels["layout"] == "thd" else name for name in ("q_segments", "kv_segments")}, **more,
    }  # fmt: skip
    return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), template)


_MASKS = {
    "visible": "mask",
    "hidden": "~mask",
    "additive": "jnp.where(mask, 0, -jnp.inf).astype(q.dtype)",
}


def _placeholders(case: Case, c: Convention) -> dict[str, str]:
    """What the templates of a case make together: {arguments}, {options}, {terms}, and what has its own place in the call."""
    asked = {name: filled(text, case, c) for name, text in _templates(case, c).items() if text}
    placed = {name: asked.get(name, "None") for name in _PLACED if f"{{{name}}}" in c.call}
    given = [text for name, text in asked.items() if name not in placed]
    terms = [text[1:].strip() for text in given if text.startswith("&")]
    options = [text[1:].strip() for text in given if text.startswith("@")]
    arguments = [*(filled(text, case, c) for text in c.always), *(text for text in given if text[0] not in "&@")]
    made = c.term_join.join(terms) or c.no_terms
    joined = filled(c.terms.replace("{terms}", made), case, c)
    if made and "{terms}" not in c.call:
        arguments.append(joined)
    listed = {"arguments": arguments, "options": options}
    return (
        {name: "".join(f", {one}" for one in texts if one) for name, texts in listed.items()}
        | {"terms": joined}
        | placed
    )


def prepared_lines(case: Case, convention: Convention) -> tuple[str, ...]:
    """The convention's lines before a call."""
    more = _placeholders(case, convention)
    return tuple(filled(line, case, convention, **more) for line in convention.prepare)


def _call_text(case: Case, convention: Convention) -> str:
    """The expression of the call, from q, k and v in bthd to an output in bthd."""
    c = convention
    layout = case.levels["layout"] if case.levels["layout"] in c.layouts else next(iter(c.layouts))
    names = {name: _in_layout(name, layout) for name in ("q", "k", "v")}
    if c.shared_heads == "repeat" and case.heads != case.kv_heads:
        repeat = "repeat_interleave" if c.framework == "torch" else None
        group = case.heads // case.kv_heads
        for name in ("k", "v"):
            whole = f"{name}.{repeat}({group}, 2)" if repeat else f"jnp.repeat({name}, {group}, 2)"
            names[name] = _in_layout(whole, layout)
    text = filled(c.call, case, c, f="f", **names, **_placeholders(case, c))
    if not case.has("lse"):
        return _out_of_layout(text + c.output, layout)
    lse = c.lse_at if c.lse_layout == "bht" else f"{c.lse_at}.swapaxes(1, 2)"
    output, lse = _out_of_layout(f"r{c.output or '[0]'}", layout), f"r{lse}"
    return f"(lambda r: ({output}, {lse}))({text})"


def _templates(case: Case, c: Convention) -> dict[str, str | None]:
    """What the convention writes for what the case has."""
    return {
        "causal": c.causal if case.has("causal") else c.not_causal,
        "causal_offset": c.causal_offset if case.levels["causal"] in ("start", "end", "offset") else None,
        "window": c.window if case.has("window") else None,
        "segments": c.segments if case.has("segments") else None,
        "kv_lengths": c.kv_lengths if case.has("lengths") else None,
        "mask": c.mask if case.has("mask") else None,
        "bias": c.bias if case.has("bias") else None,
        "scale": c.scale if case.has("scale") else None,
        "soft_cap": c.soft_cap if case.has("soft_cap") else None,
        "sinks": c.sinks if case.has("sinks") else None,
        "alibi": c.alibi if case.has("alibi") else None,
        "score": getattr(c, case.levels["score"]) if case.has("score") else None,
        "lse": c.lse if case.has("lse") else None,
        "layout": c.layouts.get(case.levels["layout"]),
    }


def _in_layout(name: str, layout: str) -> str:
    return f"{name}.swapaxes(1, 2)" if layout == "bhtd" else f"{name}[0]" if layout == "thd" else name


def _out_of_layout(text: str, layout: str) -> str:
    return f"{text}.swapaxes(1, 2)" if layout == "bhtd" else f"{text}[None]" if layout == "thd" else text
