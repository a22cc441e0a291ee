"""Convention: how a function of attention is called, and what its arguments mean, as a declaration of names and templates.

A template is Python source of part of the call. It may name the arrays `q`, `k`, `v`, `mask`, `bias`, `q_segments`,
`kv_segments`, `kv_lengths`, `sinks`, `slopes`, `temperature`, `table` and `log_gate`, and has placeholders such as
`{left}`. A plain name stands for the usual template.
"""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from ..errors import ConfigError, UnknownNameError, nearest, shown

__all__ = ["Convention", "built_in_conventions", "convention_named"]

# What a plain argument name stands for.
_USUAL = {
    "causal": "{name}=True",
    "causal_offset": "{name}={offset}",
    "window": "{name}=({left}, {right})",
    "mask": "{name}={mask}",
    "bias": "{name}=bias",
    "kv_lengths": "{name}=kv_lengths",
    "scale": "{name}={scale}",
    "soft_cap": "{name}={cap}",
    "sinks": "{name}=sinks",
    "alibi": "{name}=slopes",
    "temperature": "{name}=temperature",
    "relative": "{name}=table",
    "forgetting": "{name}=log_gate",
    "lse": "{name}=True",
}
_ARGUMENTS = (*_USUAL, "segments")


class Convention(BaseModel):
    """How a function is called. A feature whose argument is None can't be expressed, and isn't judged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    about: str = ""  # where the meaning is documented
    family: Literal["attention", "pages", "latent", "indexer", "paged_indexer", "selected", "recurrence", "slots"] = (
        "attention"
    )
    framework: Literal["jax", "torch"] = "jax"
    package: str = ""  # the distribution to install
    target: str = ""  # module:function of the library's own
    imports: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()  # lines before the call
    call: str = "{f}({q}, {k}, {v}{arguments})"
    always: tuple[str, ...] = ()  # arguments of every call
    output: str = ""  # where the output is in the result: "[0]", ".attention_outputs"
    layouts: dict[str, str] = {"bthd": ""}  # layout -> the argument that says it
    shared_heads: Literal["native", "repeat"] | None = "native"  # repeat: the caller repeats key and value
    value_dim: bool = True
    causal: str | None = None
    not_causal: str = ""  # the argument of a call that isn't causal
    aligned: tuple[Literal["start", "end", "offset"], ...] = ()  # where fewer queries than keys may stand
    causal_offset: str | None = None
    window: str | None = None
    window_sides: tuple[Literal["left", "both", "open"], ...] = ("left", "both", "open")
    window_needs_causal: bool = False
    unlimited: str = "None"
    segments: str | None = None
    kv_lengths: str | None = None
    mask: str | None = None
    mask_means: Literal["visible", "hidden", "additive"] = "visible"
    masks: tuple[Literal["padding", "dense"], ...] = ("padding", "dense")
    bias: str | None = None
    biases: tuple[Literal["yes", "broadcast", "infinite"], ...] = ("yes", "broadcast", "infinite")
    bias_gradient: bool = True
    scale: str | None = None
    default_scale: Literal["rsqrt", "one"] = "rsqrt"
    soft_cap: str | None = None
    sinks: str | None = None
    alibi: str | None = None
    temperature: str | None = None  # [heads], multiplied to logits
    relative: str | None = None  # [6, heads], added by distance: from -3 and farther to 2 and farther
    forgetting: str | None = None  # [batch, heads, kv]: the logarithm of each key's forget gate
    lse: str | None = None
    lse_at: str = "[1]"
    lse_layout: Literal["bht", "bth"] = "bht"
    terms: str = ""  # one argument that several features make: a feature's template starts with & and goes into {terms}
    term_join: str = " & "
    no_terms: str = ""
    dead_rows: Literal["zero", "unspecified"] = "unspecified"  # zero: a row that sees no key has output 0
    gradient: bool = True
    apart: tuple[
        tuple[str, str], ...
    ] = ()  # factors that are documented to exclude each other, or to have another meaning
    length_step: int = 1  # lengths and head dims are multiples of these, unless a feature asks for others
    dim_step: int = 1
    cannot: dict[str, str] = {}  # feature or factor -> why it isn't judged
    # Of families other than attention: feature or factor -> a template or several, "" for what needs no argument.
    arguments: dict[str, str | tuple[str, ...]] = {}

    @field_validator(*_ARGUMENTS, mode="before")
    @classmethod
    def _filled(cls, value: Any, info: Any) -> Any:
        usual = _USUAL.get(info.field_name)
        if isinstance(value, str) and value.isidentifier() and usual is not None:
            return usual.replace("{name}", value)
        return value


def built_in_conventions() -> tuple[str, ...]:
    """The names that `--as` takes."""
    folder = resources.files(__package__) / "conventions"
    return tuple(sorted(file.name.removesuffix(".toml").replace("+", ":") for file in folder.iterdir()))


def convention_named(name: str) -> Convention:
    """A built-in convention, or that of a TOML file. Errors: UnknownNameError, ConfigError."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{shown(name)}: {error}; wanted a TOML file with a convention.") from None
        return _read(text, name)
    if name not in built_in_conventions():
        raise UnknownNameError(
            f"no convention {shown(name)}; wanted {', '.join(built_in_conventions())}, or a .toml file."
            f"{nearest(name, built_in_conventions())}"
        )
    file = resources.files(__package__) / "conventions" / f"{name.replace(':', '+')}.toml"
    return _read(file.read_text(encoding="utf-8"), name)


def _read(text: str, name: str) -> Convention:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: {error}; wanted TOML.") from None
    extends = values.pop("extends", None)
    base: dict[str, Any] = {} if extends is None else convention_named(str(extends)).model_dump(exclude_unset=True)
    for field in ("cannot", "arguments"):
        values[field] = {**base.get(field, {}), **values.get(field, {})}
    try:
        return Convention(**(base | {"name": re.sub(r"\.toml$", "", Path(name).name)} | values))
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"{name}: {lines}.") from None
