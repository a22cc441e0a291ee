"""Declaration: the config file, with an operation, its metadata, a call or a step, and a KV cache. JSON round trips are exact."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jax
import numpy as np
from pydantic import ConfigDict, Field, StrictBool, ValidationError, field_validator, model_validator

from ..errors import ConfigError, a_type, shown
from ..planning.cache.kv_cache import KVCache
from ..planning.unset_fields import UnsetFieldsModel, explain_validation
from ..sharding import OperandTable
from ..strict_json import parse_json, read_text, refuse_surrogates
from .call_declaration import CallDeclaration, InputDtype
from .declared_arrays import ARRAYS, DeclaredArrays
from .latent_dims import Form, LatentDims
from .metadata import OperationMetadata
from .registry import Family, OperationRegistry
from .step_declaration import StepDeclaration

__all__ = ["LATENT_SIZES", "CallDeclaration", "Declaration"]

_DEEPEST = 64
LATENT_SIZES = ("q_heads", "kv_heads", "head_dim", "value_dim", "kv_dtype", "kv_scales")


class Declaration(UnsetFieldsModel):
    """The contents of a config file. `metadata` is the input of OperationMetadata.from_dict. If `enabled` is false, the adapter
    that reads the file leaves attention to its framework. `cache` and `step` declare attention over pages: the operation
    `paged` has a step instead of a call. A cache alone, or next to a call, is planned. `latent`: the call is a LatentAttention's.

    Errors of all constructors: ConfigError that names the source, the field, the value and what is expected.
    """

    model_config = ConfigDict(title="attnops declaration")

    tags: ClassVar = frozenset({"schema_version"})

    schema_uri: str | None = Field(None, alias="$schema")
    schema_version: Literal[1] = 1
    operation: str
    enabled: StrictBool = True
    metadata: dict[str, Any] = Field(default_factory=dict)
    call: CallDeclaration = Field(default_factory=CallDeclaration, json_schema_extra={"default": {}})
    latent: LatentDims | None = None
    cache: KVCache | None = None
    step: StepDeclaration | None = None

    @field_validator("metadata", mode="after")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_surrogates(value, "metadata")
        return _json_value("metadata", value)

    @model_validator(mode="after")
    def _latent_sizes(self) -> Self:
        if self.latent is None:
            return self
        given = [name for name in LATENT_SIZES if self.call.is_set(name)]
        if given:
            raise ValueError(f"call.{given[0]} is declared beside latent, from which it follows; leave it out")
        if self.step is not None and self.step.q_heads not in (None, self.latent.heads):
            raise ValueError(f"step.q_heads={self.step.q_heads}, but latent.heads={self.latent.heads}; leave it out")
        if self.cache is not None:
            # A layer that the cache doesn't have is refused where the step is read.
            known = self.step is not None and self.step.layer < self.cache.layer_count
            layer = self.step.layer if self.step is not None and known else None
            if problem := self.latent.cache_problem(self.cache, layer):
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        cache = self.cache
        if cache is None or not cache.has_pages:
            return self
        cache_sizes = {"kv_heads": cache.kv_heads, "head_dim": cache.head_dim, "value_dim": cache.value_size}
        for name, size in cache_sizes.items():
            if (value := getattr(self.call, name)) not in (None, size):
                raise ValueError(
                    f"call.{name}={value}, but the cache's is {size}; wanted the same: the cache holds the call's keys and values"
                )
        return self

    def of_form(self, form: Form) -> Self:
        """The declaration of the attention inside a latent attention, in one of its forms; steps over pages have the absorbed."""
        assert self.latent is not None
        in_pages = self.in_pages
        inner = (self.step or StepDeclaration()) if in_pages else self.call
        declared = inner.softmax_scale is not None or self.metadata.get("softmax_scale") is not None
        changes: dict[str, Any] = {} if declared else {"softmax_scale": self.latent.softmax_scale}
        changes["q_heads"] = self.latent.heads
        if not in_pages:
            kv_heads, head_dim, value_dim = self.latent.inner(form)
            changes |= {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        fields = {
            **self.to_dict(),
            "step" if in_pages else "call": inner.model_dump(mode="json", by_alias=True) | changes,
        }
        del fields["latent"]
        if not in_pages:
            fields.pop("cache", None)  # it holds latents, not the call's keys
        return type(self).from_dict(fields)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "declaration") -> Self:
        """Build a declaration from JSON values."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                f'{source}: got {a_type(data)}; wanted an object, {{"operation": "splash", "call": ...}}.'
            )
        if "model_type" in data and "operation" not in data:
            raise ConfigError(
                f"{source}: this is a model's config (model_type {shown(data['model_type'])}); wanted a declaration. "
                "ModelDeclaration.from_config, or `attnops plan --model`, makes declarations from it."
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            text = explain_validation(error, cls).replace("schema_uri", "$schema")
            raise ConfigError(f"{source}: {text}") from None

    @classmethod
    def from_json(cls, text: str, source: str = "declaration") -> Self:
        """Build a declaration from JSON text. Duplicate keys, NaN and Infinity are refused, so that nothing is lost."""
        return cls.from_dict(parse_json(text, source), source)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a UTF-8 file. Errors: ConfigError, also for a file that can't be read."""
        text = read_text(Path(path), "a JSON file with a declaration")
        return cls.from_json(text, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that were given. `from_dict` of the result gives an equal declaration."""
        return self.model_dump(mode="json", by_alias=True)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def operation_metadata(self, changes: Mapping[str, Any] | None = None) -> OperationMetadata:
        """Build the metadata, with some fields changed. Starts jax's backend if a mesh is declared."""
        return OperationMetadata.from_dict(self.checked().metadata | dict(changes or {}))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See CallDeclaration.shapes; of an indexer, see index_declaration."""
        return self._arrays().shapes()

    def draw(self, seed: int) -> dict[str, np.ndarray]:
        """See CallDeclaration.draw."""
        return self._arrays().draw(seed)

    def call_arguments(self, arrays: Mapping[str, Any], *, mode: str | None = None) -> dict[str, Any]:
        """Return the keyword arguments of the call for these arrays. `mode` overrides the declared one."""
        return self._arrays().arguments(arrays, mode)

    def _arrays(self) -> DeclaredArrays:
        checked = self.checked()
        dtype = checked.metadata.get("runtime_dtype")  # that of the computation, or float32
        dtype = next((name for name in typing.get_args(InputDtype) if name == dtype), "float32")
        configs = checked.metadata.get("operation_configs") or {}
        return ARRAYS[checked.family](OperationRegistry.get(checked.operation), checked.call, dtype, configs)

    @property
    def in_pages(self) -> bool:
        """Whether the operation's keys lie in a cache's pages. Errors: ConfigError for a file with the other kind of call."""
        operation = OperationRegistry.get(self.operation)
        paged = operation.keys_in == "pages"
        if paged and self.is_set("call"):
            raise ConfigError(f"operation {self.operation!r} runs steps over pages; declare `step` instead of `call`.")
        if not paged and self.step is not None:
            raise ConfigError(
                f"the file declares a step, but operation {self.operation!r} runs calls; use 'paged', or declare `call`."
            )
        return paged

    @property
    def family(self) -> Family:
        """What the operation does: attends, selects keys, or carries a state."""
        return OperationRegistry.get(self.operation).family

    @property
    def operands(self) -> OperandTable:
        """The operands of the operation. Errors: UnknownNameError for one that isn't registered."""
        return OperationRegistry.get(self.operation).operands


def _json_value(at: str, value: Any, depth: int = 1) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"metadata is nested deeper than {_DEEPEST}; wanted fields of OperationMetadata")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{at}={value}; wanted a finite number")
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:  # str() of it may equal another key
            raise ValueError(f"{at} has the key {shown(odd[0])}; wanted strings, as in JSON")
        return {key: _json_value(f"{at}.{key}", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(f"{at}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{at} is {a_type(value)}; wanted a JSON value, as returned by OperationMetadata.to_dict()")
    return value
