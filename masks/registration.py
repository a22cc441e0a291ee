"""register_mask: a kind of static mask of one's own, as one class."""

from __future__ import annotations

from typing import Any, TypeVar

from ..errors import MaskError, shown
from .algebra import Mask
from .pytrees import register_static
from .serial import LEAVES, kinds

__all__ = ["register_mask"]

M = TypeVar("M", bound=Mask)


def register_mask(cls: type[M]) -> type[M]:
    """Class decorator: a frozen dataclass that is a Mask becomes a kind, for calls, files, `jax.export` and every implementation.

    The class has `kind`, fields of JSON values, `test` and `block_bounds`; OffsetMask adds an offset. Whoever evaluates mask
    functions elementwise takes it. Errors: MaskError for a kind that is taken or isn't a name, and for a class without fields.
    """
    kind: Any = getattr(cls, "kind", None)
    if not isinstance(kind, str) or not kind.isidentifier():
        raise MaskError(f"{cls.__name__}.kind is {shown(kind)}; wanted a name, such as 'dilated'")
    if kind in kinds():
        raise MaskError(f"{cls.__name__}.kind is {shown(kind)}, which exists already; choose another name")
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise MaskError(f"{cls.__name__} isn't a frozen dataclass; decorate it with @dataclass(frozen=True) first")
    if cls.feature is None:
        cls.feature = "mask_function"
    LEAVES[kind] = cls
    register_static(cls)
    return cls
