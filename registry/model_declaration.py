"""ModelDeclaration: every layer of a model as Declarations of its attention and its state, from the model's config."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from ..errors import ConfigError, is_whole, shown
from ..models.config_dict import as_dict
from ..models.layers import LayerAttention
from ..models.model_attention import model_attention
from ..models.model_config import read_model_config
from ..planning.cache.kept_states import KeptState
from ..planning.cache.layer_groups import LayerGroup, layer_groups
from .declaration import LATENT_SIZES, Declaration
from .layer_cache import bytes_of, kept_keys, kept_state, state_fields, window_tokens
from .layer_calls import layer_call, model_call
from .layer_states import state_declarations
from .metadata import PICKUP, OperationMetadata
from .model_metadata import metadata_of

__all__ = ["LayerDeclaration", "ModelDeclaration", "write_layers"]

_LIMIT = 2**31 - 1  # indices are int32 on devices


@dataclass(frozen=True)
class LayerDeclaration:
    """Layers that are alike: their numbers, from 0; their kind ('global', 'local 4096', 'mamba2'); and the declaration of their
    attention; None: they have none.

    latent: the declaration of latent attention, for LatentAttention; `declaration` has a key and a value for each head then.
    indexer: (name, size) of the part of the model that picks keys for each query, which no declaration has: attention to all keys
    of the mask is declared. Empty if there is none. reads_layer: the layer whose keys and values these read; None: their own.
    recurrence: the declaration of the operation with a state; convolution: of the causal convolution; None: they have none.
    """

    layers: tuple[int, ...]
    kind: str
    name: str
    declaration: Declaration | None
    latent: Declaration | None = None
    indexer: tuple[tuple[str, int], ...] = ()
    reads_layer: int | None = None
    recurrence: Declaration | None = None
    convolution: Declaration | None = None

    @property
    def declarations(self) -> dict[str, Declaration]:
        """Every declaration by the name of its file: the first by the layers' name, the others with their operation after it."""
        every = [one for one in (self.declaration, self.recurrence, self.convolution) if one is not None]
        return {self.name + (f"_{one.operation}" if number else ""): one for number, one in enumerate(every)}

    def cache(self, tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays that one of these layers keeps of a sequence of `tokens` tokens: key and value [tokens, kv_heads, dim], no
        more tokens than a window; latent and rotary_key [tokens, dim]; index_key [tokens, dim] of an indexer; state and
        convolution, without the batch of the operation's initial_state."""
        keys: dict[str, jax.ShapeDtypeStruct] = {}
        if self.declaration is not None and self.reads_layer is None:
            own = not self.kind.endswith(" shared")  # such a layer uses another's selection
            keys = kept_keys(self.declaration, self.latent, dict(self.indexer) if own else {}, tokens)
        return keys | kept_state(self.recurrence, self.convolution)


@dataclass(frozen=True)
class ModelDeclaration:
    """A model's layers. `distinct` has each distinct kind of layer once, with the numbers of its layers.

    family: the model_type. positions: max_position_embeddings, None if the model has none; key_positions: of keys that
    have their own. notes: what was decided or left out.
    """

    family: str
    positions: int | None
    distinct: tuple[LayerDeclaration, ...]
    notes: tuple[str, ...]
    key_positions: int | None = None

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        operation: str = "splash",
        batch: int | None = None,
        q_len: int | None = None,
        kv_len: int | None = None,
        mode: str | None = None,
        dtype: str | None = None,
        layout: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        family: str | None = None,
        part: str | None = None,
        ignore: Collection[str] = (),
        assume: str | None = None,
    ) -> Self:
        """Read a config: the path of a config.json or its folder, a dict, or a transformers config object.

        operation, metadata: those of every declaration. `metadata` overrides the config, and the names that OperationMetadata
        takes from any config (attn_dtype, mesh and so on) override those of transformers. batch, q_len, kv_len, mode, dtype,
        layout: those of the call. If q_len and kv_len differ, the queries are the last of kv_len tokens, and a decode or
        insert has kv_lengths. family, part, ignore, assume: see read_model_config. Errors: ConfigError.
        """
        data, name = as_dict(config)
        for argument, size in (("batch", batch), ("q_len", q_len), ("kv_len", kv_len)):
            if size is not None and not is_whole(size, 1, _LIMIT):
                raise ConfigError(f"{argument}={shown(size)}; wanted an integer from 1 to 2**31 - 1.")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata={shown(metadata)}; wanted a dict of OperationMetadata's fields.")
        framework_fields = {key: data.pop(key) for key in PICKUP.values() if key in data}
        read = read_model_config(data, family=family, part=part, ignore=ignore, name=name, assume=assume)
        attention = model_attention(read, dtype)
        call = model_call(attention, batch=batch, q_len=q_len, kv_len=kv_len, mode=mode, layout=layout)
        metadata_fields = metadata_of(attention) | _of_framework(framework_fields) | dict(metadata or {})
        of_states = _of_framework(framework_fields) | dict(metadata or {})
        groups: dict[LayerAttention, list[int]] = {}
        for number, layer in enumerate(attention.layers):
            groups.setdefault(layer, []).append(number)
        kinds = [layer.kind for layer in groups]
        distinct = []
        for layer, numbers in groups.items():
            declaration = latent = recurrence = convolution = None
            if layer.mask is not None:
                its = call | layer_call(layer, attention, call)
                fields = {"operation": operation, "metadata": metadata_fields, "call": its}
                declaration = Declaration.from_dict(fields, read.name)
                if attention.latent:
                    rest = {key: value for key, value in its.items() if key not in LATENT_SIZES}
                    fields = fields | {"latent": dict(attention.latent), "call": rest}
                    latent = Declaration.from_dict(fields, read.name)
            if layer.state is not None:
                recurrence, convolution = state_declarations(layer.state, call, of_states, read.name)
            name = layer.kind.replace(" + ", "_and_").replace(" ", "_").replace("±", "")
            name += f"_layer_{numbers[0]}" if kinds.count(layer.kind) > 1 else ""
            indexer = attention.indexer if layer.indexed else ()
            its_own = (layer.kind, name, declaration, latent, indexer, layer.reads_layer, recurrence, convolution)
            distinct.append(LayerDeclaration(tuple(numbers), *its_own))
        return cls(read.family, attention.positions, tuple(distinct), attention.notes, attention.key_positions)

    @property
    def layers(self) -> tuple[LayerDeclaration, ...]:
        """One entry per layer of the model, in order. Layers that are alike share one."""
        by_number = {number: layer for layer in self.distinct for number in layer.layers}
        return tuple(by_number[number] for number in range(len(by_number)))

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers grouped by window (a chunk counts as one) and by sizes that differ, and those with a state by what they
        keep, as for KVCache(layers=...), which takes `stateless_layers` too. Layers with another mask keep all tokens; a layer
        with attention and a state is in two groups."""
        attending = {number: layer for number, layer in enumerate(self.layers) if layer.declaration is not None}
        windows = [window_tokens(x.declaration) for x in attending.values() if x.declaration is not None]
        sizes = [_kept_sizes(layer) for layer in attending.values()]
        differ = any(own != sizes[0] for own in sizes) or (bool(self._state_groups) and any("kind" in x for x in sizes))
        geometry = sizes if differ else None
        groups = (*layer_groups(windows, geometry, tuple(attending)), *self._state_groups)
        return tuple(sorted(groups, key=lambda group: (group.layers[0], group.of_states)))  # type: ignore[index]

    @property
    def _state_groups(self) -> tuple[LayerGroup, ...]:
        """The layers with a state, grouped by what they keep."""
        alike: dict[tuple[KeptState, ...], list[int]] = {}
        for number, layer in enumerate(self.layers):
            if states := state_fields(layer.recurrence, layer.convolution):
                alike.setdefault(states, []).append(number)
        return tuple(
            LayerGroup(layers=tuple(numbers), kind="state", states=states) for states, numbers in alike.items()
        )

    @property
    def stateless_layers(self) -> tuple[int, ...]:
        """The layers that keep nothing of a sequence, as for KVCache(stateless_layers=...)."""
        return tuple(number for number, layer in enumerate(self.layers) if not layer.declarations)

    @property
    def reads_layer(self) -> dict[int, int]:
        """For each layer without keys and values of its own the one whose it reads, as for KVCache(reads_layer=...)."""
        read = enumerate(layer.reads_layer for layer in self.layers)
        return {number: source for number, source in read if source is not None}

    def cache_bytes(self, tokens: int) -> int:
        """The bytes that the model keeps of one sequence of `tokens` tokens; see LayerDeclaration.cache."""
        return sum(len(layer.layers) * bytes_of(layer.cache(tokens)) for layer in self.distinct)

    def full_attention_bytes(self, tokens: int) -> int | None:
        """The same if each layer with a state or a window attended to all tokens instead, layers without attention with the heads
        of the first that has it. None if none has it."""
        attending = [(layer.declaration, layer.latent) for layer in self.distinct]
        first = next(((one, latent) for one, latent in attending if one is not None), None)
        if first is None:
            return None
        total = 0
        for layer in self.distinct:
            if layer.reads_layer is None and layer.declarations:
                attention, latent = (layer.declaration, layer.latent) if layer.declaration is not None else first
                assert attention is not None
                total += len(layer.layers) * bytes_of(kept_keys(attention, latent, {}, tokens, whole=True))
        return total

    def layer(self, number: int) -> LayerDeclaration:
        """The declaration of layer `number`, from 0. Errors: ConfigError for a layer that the model doesn't have."""
        count = len(self.layers)
        if not is_whole(number, 0, count - 1):
            raise ConfigError(f"layer {shown(number)}: this {self.family} model has layers 0 to {count - 1}.")
        return self.layers[number]

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the declarations of each distinct layer, one file each, named by its kind. Errors: ConfigError."""
        return write_layers(self.distinct, folder)


def _kept_sizes(layer: LayerDeclaration) -> dict[str, Any]:
    """The fields of a group of a cache that say what attention keeps of a token: latents, or keys and values of each head."""
    assert layer.declaration is not None
    if layer.latent is not None and (sizes := layer.latent.latent) is not None:
        return {"kind": "latent", "head_dim": sizes.latent_dim + sizes.rope_dim, "value_dim": sizes.latent_dim}
    call = layer.declaration.call
    value_dim = call.head_dim if call.value_dim is None else call.value_dim
    return {"kv_heads": call.kv_heads, "head_dim": call.head_dim, "value_dim": value_dim}


def write_layers(layers: Sequence[LayerDeclaration], folder: str | Path) -> tuple[Path, ...]:
    """Write the declarations of each of these layers, one file each, named by its kind. Errors: ConfigError."""
    folder, paths = Path(folder), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, declaration in [item for layer in layers for item in layer.declarations.items()]:
            path = folder / f"{name}.json"
            path.write_text(declaration.to_json() + "\n", encoding="utf-8")
            paths.append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}; wanted a folder to write to.") from None
    return tuple(paths)


def _of_framework(base_config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that a config has under the names of OperationMetadata's base_config, as JSON values."""
    whole = OperationMetadata(base_config=base_config).to_dict() if base_config else {}
    fields = {
        "partition_axis" if name == "sequence_axis_name" else name
        for name in PICKUP
        if base_config.get(PICKUP[name]) is not None
    }
    return {name: value for name, value in whole.items() if name in fields and value is not None}
