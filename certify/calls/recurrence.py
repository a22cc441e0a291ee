"""The kind of attnops' recurrent operations. Each optional array is a feature; the table of operands has the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..features import Feature
from ..source import Subject
from .case import CallCase
from .kind import DTYPES, TRANSFORMS, VALUES, CallParts, Kind, sized
from .lines import called

__all__ = ["ARRAYS", "NARROW", "STATE_VALUES", "absent_from", "drawn_arrays", "recurrences"]

ARRAYS = {"decay": "decay", "beta": "beta", "D": "D", "dt_bias": "bias of dt", "bias": "bias"}
STATE_VALUES = VALUES | {"large": "large values"}
NARROW = (("values.large", "dtype.float16"), ("values.denormal", "dtype"))  # which the dtype can't hold
_VALUES = ("value", "x")  # of which every result is a sum
_OF_CALLS = {"initial_state": "initial state", "segment_ids": "segment ids", "lengths": "lengths by row"}
_DRAWS = {
    "decay": "-np.exp(2 * {normal} - 2)",
    "beta": "1 / (1 + np.exp(-{normal}))",
    "dt": "np.exp({normal} - 1)",
    "A": "-np.exp({normal})",
    "dt_bias": "np.exp({normal} - 2)",
    # A delta rule whose keys are longer than sqrt(2) makes every rounding error greater with each token.
    "key": "{normal} / np.sqrt({shape}[-1])",
    "key_conv_weight": "{normal} / 4",
    "key_conv_bias": "{normal} / np.sqrt(16 * {shape}[-1])",
    "key_conv_window": "{normal} / np.sqrt({shape}[-1])",
}
_WIDE = ("decay", "dt", "A", "D", "dt_bias", "initial_state", "state")  # float32 in every call
_REFERENCE = "from attnops.verify.recurrent_of_call import recurrent_reference"


def recurrences(operation: Any) -> Kind:
    """Of calls of one operation."""

    def parts(case: CallCase, subject: Subject) -> CallParts:
        table, layout = operation.operands, case.level("layout")
        names = [row.name for row in table if not row.optional or case.has(row.name)]
        inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}"]
        tokens, batch = case.sizes["tokens"], case.sizes["batch"]
        for name in names:
            if name == "segment_ids":
                shape = tuple(_sizes(case)[dim] for dim in table[name].dims_in(layout))
                inputs.append(
                    f'x["{name}"] = np.broadcast_to(np.arange({tokens}) * 3 // {tokens + 1}, {shape}).astype(np.int32)'
                )
            elif name == "lengths":
                inputs.append(f'x["{name}"] = np.maximum({tokens} - 1 - np.arange({batch}), 0).astype(np.int32)')
            else:
                inputs += drawn_arrays(table, (name,), _sizes(case), case, layout)
        run = [*called(case, subject.convention, layout=layout), "return r.attention_outputs, r.state"]
        expected = (
            f'plan = f.plan(**x, layout="{layout}")',
            "return list(recurrent_reference(plan.problem, arrays(some), type(f), plan.config).values())",
        )
        smooth = tuple(name for name in names if table[name].gradient)
        return CallParts((_REFERENCE,), tuple(inputs), tuple(run), expected, ("outputs", "state"), smooth)

    return Kind(
        "the required arrays alone",
        {name: {"yes": title} for name, title in (ARRAYS | _OF_CALLS).items()}
        | {
            "tokens": {"odd": "odd length", "one": "one token", "chunks": "more than one chunk of tokens"},
            "heads": {"gqa": "grouped heads"},
            "dims": {"value": "value dim of its own"},
            "values": STATE_VALUES,
            "dtype": DTYPES,
            "layout": {"bhtd": "layout [batch, heads, length, dim]", "thd": "packed layout [length, heads, dim]"},
            "gradient": {"yes": "gradient"},
            "transform": TRANSFORMS,
        },
        {"batch": 2, "tokens": 8, "kv_heads": 2, "group": 1, "dim": 8, "value_dim": 8},
        parts,
        changes={
            "tokens.odd": {"tokens": 7}, "tokens.one": {"tokens": 1}, "tokens.chunks": {"tokens": 70},
            "heads.gqa": {"group": 2}, "dims.value": {"value_dim": 6}, "layout.thd": {"batch": 1},
        },
        brings={"transform.remat": {"gradient": "yes"}},
        apart=(("layout.thd", "lengths"), *NARROW),
        steps=(
            {"batch": 1}, *({"tokens": n} for n in (1, 2, 3, 5)), {"kv_heads": 1},
            *({"dim": n, "value_dim": n} for n in (1, 2, 4)),
        ),
        absent=absent_from(operation, ARRAYS | _OF_CALLS),
    )  # fmt: skip


def absent_from(operation: Any, arrays: Mapping[str, str]) -> Any:
    """What an operation's table lacks, as a test of a feature."""
    rows = {row.name: row for row in operation.operands}
    dims = {dim for row in operation.operands for dim in row.dims}

    def absent(one: Feature) -> str | None:
        if one.factor in arrays:
            if one.factor not in rows or not rows[one.factor].optional:
                return "no optional array of this name"
            return "needs raw gates, which the config declares" if one.factor == "dt_bias" and "A_log" in rows else None
        needs = {"heads": "kv_heads", "dims": "value_dim"}.get(one.factor)
        return "channels have no heads" if needs is not None and needs not in dims else None

    return absent


def _sizes(case: CallCase) -> dict[str, int]:
    size = dict(case.sizes)
    heads = size["kv_heads"] * size["group"]
    return size | {
        "q_len": size["tokens"], "heads": heads, "head_dim": size["dim"], "channels": heads * size["value_dim"],
        "state_dim": size["dim"], "width": 4, "history": 3,
    }  # fmt: skip


def drawn_arrays(table: Any, names: Any, size: Mapping[str, int], case: CallCase, layout: str) -> list[str]:
    """Lines that draw arrays into `x`."""
    lines = []
    for name in names:
        shape = tuple(size[dim] for dim in table[name].dims_in(layout))
        drawn = _DRAWS.get(name, "{normal}").format(normal=f"rng.standard_normal({shape})", shape=shape)
        if name in _VALUES:
            drawn = sized(case, "large", sized(case, "denormal", drawn))
        lines.append(f'x["{name}"] = jnp.asarray({drawn}, jnp.{"float32" if name in _WIDE else case.level("dtype")})')
    return lines
