"""A call of a recurrent operation as Python source: its arrays, its call, and what the float64 reference says."""

from __future__ import annotations

from typing import Any, NamedTuple

from .source import Subject

__all__ = ["RecurrenceLines", "recurrence_lines"]

_DRAWS = {
    "decay": "-np.exp(2 * {normal} - 2)",
    "beta": "1 / (1 + np.exp(-{normal}))",
    "dt": "np.exp({normal} - 1)",
    "A": "-np.exp({normal})",
    "dt_bias": "np.exp({normal} - 2)",
    "key": "{normal} / np.sqrt({shape}[-1])",
}
_WIDE = ("decay", "dt", "A", "D", "dt_bias", "initial_state")  # float32 in every call


class RecurrenceLines(NamedTuple):
    """Sections of a script, in their order but for the options, which follow the first import."""

    options: tuple[str, ...]
    imports: tuple[str, ...]
    inputs: tuple[str, ...]
    call: tuple[str, ...]
    expected: tuple[str, ...]


def recurrence_lines(case: Any, subject: Subject, operation: Any) -> RecurrenceLines:
    """The case as source. `got` and `want` have the outputs, the state, and with a gradient one number for each array: the
    derivative in a random direction, which is expected from differences of the reference."""
    table, layout = operation.operands, case.level("layout")
    names = [row.name for row in table if not row.optional or case.levels.get(row.name) == "yes"]
    size = {
        "batch": case.batch, "q_len": case.tokens, "kv_heads": case.kv_heads, "heads": case.heads, "head_dim": case.dim,
        "value_dim": case.value_dim, "channels": case.heads * case.value_dim, "state_dim": case.dim, "width": 4, "history": 3,
    }  # fmt: skip
    inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}"]
    for name in names:
        shape = tuple(size[dim] for dim in table[name].dims_in(layout))
        if name == "segment_ids":
            inputs.append(
                f'x["{name}"] = np.broadcast_to(np.arange({case.tokens}) * 3 // {case.tokens + 1}, {shape}).astype(np.int32)'
            )
        elif name == "lengths":
            inputs.append(f'x["{name}"] = np.maximum({case.tokens} - 1 - np.arange({case.batch}), 0).astype(np.int32)')
        else:
            normal = f"rng.standard_normal({shape})"
            drawn = _DRAWS.get(name, "{normal}").format(normal=normal, shape=shape)
            dtype = "float32" if name in _WIDE else case.level("dtype")
            inputs.append(f'x["{name}"] = jnp.asarray({drawn}, jnp.{dtype})')
    gradient = case.levels.get("gradient") == "yes"
    call = [
        f'def run(some):\n    r = f(**(x | some), layout="{layout}")\n    return r.attention_outputs, r.state',
        *_TRANSFORMS.get(case.level("transform"), ()),
        "got = [np.asarray(y, np.float64) for y in {}(run)({{}})]".format(
            "(lambda g: g)" if case.level("transform") == "eager" else "jax.jit"
        ),
    ]
    expected = [
        f'plan = f.plan(**x, layout="{layout}")',
        "wide = lambda y: np.asarray(y) if y.dtype == np.int32 else np.asarray(y, np.float64)",
        "arrays = lambda some: {n: wide(y) for n, y in (x | some).items()}",
        "reference = lambda some: list(recurrent_reference(plan.problem, arrays(some), type(f), plan.config).values())",
        "want = reference({})",
    ]
    if gradient:
        smooth = [name for name in names if table[name].gradient]
        call += [
            f"smooth = {{n: x[n] for n in {smooth}}}",
            "d = [rng.standard_normal(y.shape) for y in got]",
            "u = {n: rng.standard_normal(y.shape) for n, y in smooth.items()}",
            "loss = lambda some: sum((y.astype(jnp.float32) * jnp.asarray(z, jnp.float32)).sum() for y, z in zip(run(some), d))",
            "slopes = jax.jit(jax.grad(loss))(smooth)",
            "slopes = {n: np.asarray(y, np.float64) for n, y in slopes.items()}",
            "got += [np.asarray((slopes[n] * u[n]).sum()) for n in smooth]",
        ]
        expected += [
            "at = lambda n, h: sum((y * z).sum() for y, z in zip(reference({n: np.asarray(x[n], np.float64) + h * u[n]}), d))",
            "want += [np.asarray((at(n, 1e-4) - at(n, -1e-4)) / 2e-4) for n in smooth]",
        ]
    else:
        smooth = []
    parts = ("outputs", "state", *(f"gradient of {name}" for name in smooth))
    expected.append(
        f"for name, a, b in zip({parts!r}, got, want):\n    print(name, 'is wrong by', np.abs(a - b).max())"
    )
    options = {
        "x64": ('jax.config.update("jax_enable_x64", True)',), "debug_nans": ('jax.config.update("jax_debug_nans", True)',),
    }.get(case.level("transform"), ())  # fmt: skip
    imports = (
        "import jax, jax.numpy as jnp, numpy as np", *subject.define,
        "from attnops.verify.recurrent_of_call import recurrent_reference",
    )  # fmt: skip
    return RecurrenceLines(options, imports, tuple(inputs), tuple(call), tuple(expected))


_PAIR = (
    "floats = lambda some: {n: y for n, y in (x | some).items() if y.dtype != np.int32}",
    "one, pair = run, lambda some: jax.tree.map(lambda y: jnp.stack([y * 0, y]), floats(some))",
)
_TRANSFORMS = {
    "vmap": (*_PAIR, "run = lambda some: [y[1] for y in jax.vmap(one)(pair(some))]"),
    "scan": (*_PAIR, "run = lambda some: [y[1] for y in jax.lax.scan(lambda c, y: (c, one(y)), 0, pair(some))[1]]"),
    "remat": ("run = jax.checkpoint(run)",),
}
