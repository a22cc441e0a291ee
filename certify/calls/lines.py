"""A case of a kind as Python source: the lines that a worker runs, and a script of the same lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..convention import Convention
from ..source import Subject
from .case import CallCase
from .kind import CallParts

__all__ = ["CallLines", "called", "cast", "lines_of", "script"]


class CallLines(NamedTuple):
    """Sections of a script, in their order but for the options, which follow the first import. process: what stands before jax
    starts, as a worker has done. names: of `got` and `want`."""

    process: tuple[str, ...]
    options: tuple[str, ...]
    imports: tuple[str, ...]
    inputs: tuple[str, ...]
    call: tuple[str, ...]
    expected: tuple[str, ...]
    names: tuple[str, ...]


def lines_of(parts: CallParts, case: CallCase, subject: Subject) -> CallLines:
    """The case as source. `got` and `want` have the results, and with a gradient one number for each array: the derivative in a
    random direction, which is expected from differences of the reference."""
    transform, smooth = case.level("transform"), parts.smooth if case.has("gradient") else ()
    call = [
        "def run(some):",
        *_indented(parts.run),
        # Arguments: of constants, XLA on CPUs folds some gathers wrongly (openxla/xla#34260).
        "floats = lambda some: {n: y for n, y in (x | some).items() if jnp.issubdtype(y.dtype, jnp.floating)}",
        *_TRANSFORMS.get(transform, ()),
        f"got = [np.asarray(y, np.float64) for y in {'run' if transform == 'eager' else 'jax.jit(run)'}(floats({{}}))]",
    ]
    expected = [
        "wide = lambda y: np.asarray(y) if jnp.issubdtype(y.dtype, jnp.integer) else np.asarray(y, np.float64)",
        "arrays = lambda some: {n: wide(y) for n, y in (x | some).items()}",
        "def reference(some):",
        *_indented(parts.expected),
        "want = reference({})",
    ]
    if smooth:
        call += [
            f"smooth = {{n: x[n] for n in {list(smooth)}}}",
            "d = [rng.standard_normal(y.shape) for y in got]",
            "u = {n: rng.standard_normal(y.shape) for n, y in smooth.items()}",
            "single = lambda y: jnp.asarray(y, jnp.float32)",
            "loss = lambda some, rest: sum((single(y) * single(z)).sum() for y, z in zip(run(rest | some), d))",
            "slopes = jax.jit(jax.grad(loss))(smooth, floats({}))",
            "slopes = {n: np.asarray(y, np.float64) for n, y in slopes.items()}",
            "got += [np.asarray((slopes[n] * u[n]).sum()) for n in smooth]",
        ]
        expected += [
            "at = lambda n, h: sum((y * z).sum() for y, z in zip(reference({n: np.asarray(x[n], np.float64) + h * u[n]}), d))",
            "want += [np.asarray((at(n, 1e-4) - at(n, -1e-4)) / 2e-4) for n in smooth]",
        ]
    options = {
        "x64": ('jax.config.update("jax_enable_x64", True)',), "debug_nans": ('jax.config.update("jax_debug_nans", True)',),
    }.get(transform, ())  # fmt: skip
    process = ('jax.config.update("jax_num_cpu_devices", 2)',) if transform == "shard_map" else ()
    imports = (
        "import jax, jax.numpy as jnp, numpy as np",
        *subject.convention.imports,
        *subject.define,
        *parts.imports,
    )
    names = (*parts.results, *(f"gradient of {name}" for name in smooth))
    return CallLines(process, options, imports, parts.inputs, tuple(call), (*expected, *parts.judged), names)


def script(parts: CallParts, case: CallCase, subject: Subject, title: str) -> str:
    """A program that runs the case and prints the largest errors."""
    lines = lines_of(parts, case, subject)
    body = [
        lines.imports[0],
        *lines.process,
        *lines.options,
        *lines.imports[1:],
        *lines.inputs,
        *lines.call,
        *lines.expected,
    ]
    body += [
        f"for name, a, b in zip({lines.names!r}, got, want):",
        "    print(name, 'is wrong by', np.abs(np.where(a == b, 0, a - b)).max())",
    ]
    return "\n".join((*(f"# {line}" for line in title.splitlines()), *body)) + "\n"


def called(case: CallCase, convention: Convention, **values: Any) -> list[str]:
    """The convention's lines before the call, and `r = ` the call, with the arguments of the case's features.

    values: of placeholders, besides the case's sizes, its levels by factor and `f`. A template that starts with @ goes into
    {options}, others into {arguments}.
    """
    known: dict[str, Any] = {"f": "f", **case.levels, **case.sizes, "dtype": case.level("dtype"), **values}
    asked = [_filled(text, known) for text in convention.always]
    for factor, level in case.levels.items():
        template = convention.arguments.get(f"{factor}.{level}", convention.arguments.get(factor))
        each = (template,) if isinstance(template, str) else template or ()
        asked += [_filled(text, known) for text in each if text]
    options = [text[1:].strip() for text in asked if text.startswith("@")]
    arguments = [text for text in asked if text[0] != "@"]
    joined = {
        name: "".join(f", {text}" for text in texts if text)
        for name, texts in (("options", options), ("arguments", arguments))
    }
    known |= joined
    return [*(_filled(line, known) for line in convention.prepare), f"r = {_filled(convention.call, known)}"]


def cast(names: Mapping[str, str], dtype: str) -> list[str]:
    """Lines that put drawn arrays into `x` in a dtype. names: of the array -> the expression."""
    return [f'x["{name}"] = jnp.asarray({drawn}, jnp.{dtype})' for name, drawn in names.items()]


def _filled(template: str, values: Mapping[str, Any]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), template)


def _indented(lines: tuple[str, ...]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


_PAIR = "one, pair = run, lambda some: jax.tree.map(lambda y: jnp.stack([y * 0, y]), floats(some))"
_TRANSFORMS = {
    "vmap": (_PAIR, "run = lambda some: [y[1] for y in jax.vmap(one)(pair(some))]"),
    "scan": (_PAIR, "run = lambda some: [y[1] for y in jax.lax.scan(lambda c, y: (c, one(y)), 0, pair(some))[1]]"),
    "remat": ("run = jax.checkpoint(run)",),
    "shard_map": (
        _PAIR,
        'mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))',
        'specs = dict(in_specs=jax.sharding.PartitionSpec("x"), out_specs=jax.sharding.PartitionSpec("x"), check_vma=False)',
        "each = lambda some: [y[None] for y in one({n: y[0] for n, y in some.items()})]",
        "run = lambda some: [y[1] for y in jax.shard_map(each, mesh=mesh, **specs)(pair(some))]",
    ),
}
