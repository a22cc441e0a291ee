"""Masks from JSON values. The inverse is Mask.to_dict; the round trip is exact."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import MaskError, a_type, nearest, shown
from .algebra import And, Full, Mask, Not, Or
from .block_sparse import Blocks
from .checks import DEEPEST
from .functions import MaskFunction
from .slots import SEGMENT_IDS
from .static import Causal, Chunked, Prefix, SlidingWindow

__all__ = ["DYNAMIC_KINDS", "LEAVES", "kinds", "mask_from_dict"]

LEAVES: dict[str, type[Any]] = {
    cls.kind: cls for cls in (Full, Causal, SlidingWindow, Chunked, Prefix, MaskFunction, Blocks)
}
"""The static leaves by kind: those of attnops, and those that register_mask adds."""
_SHORT: dict[str, Mask] = {"causal": Causal(), "full": Full()}
DYNAMIC_KINDS = ("segment_ids", "kv_lengths", "positions", "dense_mask", "chosen_blocks")
_COMBINED = (And.kind, Or.kind, Not.kind)


# Names that other libraries and configs have for a kind's fields, and what is written here instead.
_KEYS = "left, the keys before the query's own: {} - 1"
_OTHER_NAMES: dict[str, dict[str, str]] = {
    SlidingWindow.kind: {name: _KEYS.format(name) for name in ("window", "window_size", "size", "n", "tokens")}
    | {"before": "left", "after": "right", "sliding_window": _KEYS.format("sliding_window")},
    Chunked.kind: dict.fromkeys(("chunk", "chunk_size", "attention_chunk_size"), "size"),
    Prefix.kind: dict.fromkeys(("prefix", "prefix_length", "size", "n"), "length"),
}


def kinds() -> tuple[str, ...]:
    """Every kind of mask that can be declared."""
    return (*LEAVES, *_COMBINED)


def mask_from_dict(data: Any) -> Mask:
    """Build a mask from the result of `Mask.to_dict`, or from "causal" or "full".

    Fields with a default may be left out. Anything unknown, of a wrong type, or nested deeper than 64 levels
    raises MaskError, which says where.
    """
    return _read(data, "mask", 1)


def _in_python(data: Any) -> str:
    """A hint for a value from Python that isn't a mask."""
    if isinstance(data, type) and issubclass(data, Mask):
        return f". In Python, pass an object: {data.__name__}(...)"
    if hasattr(data, "dtype") and hasattr(data, "shape"):
        return ". An array isn't declared; pass it to the call, as mask=array"
    return ""


def _read(data: Any, at: str, depth: int) -> Mask:
    if depth > DEEPEST:
        raise MaskError(f"the mask is nested deeper than {DEEPEST} levels; put all parts of an and (or) into one list")
    if isinstance(data, str):
        return _short(data, at)
    if not isinstance(data, dict):
        expected = 'an object such as {"kind": "causal"}, or "causal", or "full"'
        raise MaskError(f"{at} is {shown(data)}; wanted {expected}{_in_python(data)}")
    if "kind" not in data:
        raise MaskError(f'{at} has no kind; wanted one of {", ".join(kinds())}: add "kind"')
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in kinds():
        if kind == SEGMENT_IDS.kind:
            _fields(data, at, (), ())
            return SEGMENT_IDS
        if kind in DYNAMIC_KINDS:
            raise MaskError(f"{at}.kind is {shown(kind)}, which holds arrays; a config can't: pass it in the call")
        hint = nearest(kind, kinds())
        raise MaskError(f"{at}.kind is {shown(kind)}; wanted one of {', '.join(kinds())}.{hint}")
    if kind in LEAVES:
        return _leaf(LEAVES[kind], data, at)
    if kind == Not.kind:
        return Not(_read(_fields(data, at, ("mask",), ())["mask"], f"{at}.mask", depth + 1))
    parts = _fields(data, at, ("masks",), ())["masks"]
    if not isinstance(parts, (list, tuple)):
        raise MaskError(f"{at}.masks is {a_type(parts)}; wanted a list of masks: put it in [ ]")
    masks = [_read(part, f"{at}.masks[{i}]", depth + 1) for i, part in enumerate(parts)]
    return And(masks) if kind == And.kind else Or(masks)


def _short(name: str, at: str) -> Mask:
    if name not in _SHORT:
        hint = f'anything else is an object with "kind".{nearest(name, _SHORT)}'
        raise MaskError(f'{at} is {shown(name)}; wanted "causal" or "full": {hint}')
    return _SHORT[name]


def _leaf(cls: type[Any], data: dict[Any, Any], at: str) -> Mask:
    fields = dataclasses.fields(cls)
    required = tuple(f.name for f in fields if f.default is dataclasses.MISSING)
    optional = tuple(f.name for f in fields if f.default is not dataclasses.MISSING)
    try:
        return cls(**_fields(data, at, required, optional))
    except MaskError as error:
        raise MaskError(str(error) if str(error).startswith(at) else f"{at}: {error}") from None


def _fields(data: dict[Any, Any], at: str, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    known = (*required, *optional)
    for key in data:
        if key != "kind" and key not in known:
            names, other = ", ".join(("kind", *known)), _OTHER_NAMES.get(data["kind"], {}).get(key)
            hint = nearest(key, known) if other is None else f" Here it is {other}."
            raise MaskError(f"{at} has an unknown key {shown(key)}; {data['kind']} has {names}.{hint}")
    for key in required:
        if key not in data:
            raise MaskError(f'{at} has no {shown(key)}; {data["kind"]} requires it: add "{key}"')
    return {key: data[key] for key in known if key in data}
