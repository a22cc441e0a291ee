"""ModelDeclaration: every attention layer of a model as a Declaration, from the model's config."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..errors import ConfigError, is_whole, shown
from ..masks.page_mask import page_mask
from ..models.layers import LayerAttention, LayerHeads, LayerSizes
from ..models.model_attention import ModelAttention, model_attention
from ..models.model_config import as_dict, read_model_config
from ..planning.cache.layer_groups import LayerGroup, layer_groups
from ..sharding.modes import GENERATION, canonical_mode
from .declaration import LATENT_SIZES, Declaration
from .metadata import PICKUP, OperationMetadata
from .model_metadata import metadata_of

__all__ = ["LayerDeclaration", "ModelDeclaration", "is_cached", "write_layers"]

_LIMIT = 2**31 - 1  # indices are int32 on devices


@dataclass(frozen=True)
class LayerDeclaration:
    """Layers with the same attention: their numbers, from 0; their kind ('global', 'local 4096'); and their declaration.

    latent: the declaration of latent attention, for LatentAttention; `declaration` has a key and a value for each head then.
    indexer: (name, size) of the part of the model that picks keys for each query, which no declaration has: attention to all keys
    of the mask is declared. Empty if there is none. reads_layer: the layer whose keys and values these read; None: their own.
    """

    layers: tuple[int, ...]
    kind: str
    name: str
    declaration: Declaration
    latent: Declaration | None = None
    indexer: tuple[tuple[str, int], ...] = ()
    reads_layer: int | None = None


@dataclass(frozen=True)
class ModelDeclaration:
    """A model's attention. `distinct` has each distinct kind of attention once, with the numbers of its layers.

    family: the model_type. positions: max_position_embeddings. notes: what was decided or left out.
    """

    family: str
    positions: int
    distinct: tuple[LayerDeclaration, ...]
    notes: tuple[str, ...]

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
    ) -> Self:
        """Read a config: the path of a config.json or its folder, a dict, or a transformers config object.

        operation, metadata: those of every declaration. `metadata` overrides the config, and the names that OperationMetadata
        takes from any config (attn_dtype, mesh and so on) override those of transformers. batch, q_len, kv_len, mode, dtype,
        layout: those of the call. If q_len and kv_len differ, the queries are the last of kv_len tokens, and a decode or
        insert has kv_lengths. family, part, ignore: see read_model_config. Errors: ConfigError.
        """
        data, name = as_dict(config)
        for argument, size in (("batch", batch), ("q_len", q_len), ("kv_len", kv_len)):
            if size is not None and not is_whole(size, 1, _LIMIT):
                raise ConfigError(f"{argument}={shown(size)}; wanted an integer from 1 to 2**31 - 1.")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata={shown(metadata)}; wanted a dict of OperationMetadata's fields.")
        framework_fields = {key: data.pop(key) for key in PICKUP.values() if key in data}
        read = read_model_config(data, family=family, part=part, ignore=ignore, name=name)
        attention = model_attention(read, dtype)
        call = _call(attention, batch=batch, q_len=q_len, kv_len=kv_len, mode=mode, layout=layout)
        metadata_fields = metadata_of(attention) | _of_framework(framework_fields) | dict(metadata or {})
        groups: dict[LayerAttention, list[int]] = {}
        for number, layer in enumerate(attention.layers):
            groups.setdefault(layer, []).append(number)
        kinds = [layer.kind for layer in groups]
        distinct = []
        for layer, numbers in groups.items():
            its = call | {"mask": layer.mask}
            if layer.softmax_scale is not None:
                its["softmax_scale"] = layer.softmax_scale
            if layer.score is not None:
                its["score"] = layer.score
            if layer.sizes is not None:
                its |= _of_image(layer.sizes, attention, call)
            if layer.heads is not None:
                its |= _of_heads(layer.heads, attention.q_heads)
            fields = {"operation": operation, "metadata": metadata_fields, "call": its}
            declaration, latent = Declaration.from_dict(fields, read.name), None
            if attention.latent:
                rest = {key: value for key, value in its.items() if key not in LATENT_SIZES}
                fields = fields | {"latent": dict(attention.latent), "call": rest}
                latent = Declaration.from_dict(fields, read.name)
            name = layer.kind.replace(" ", "_").replace("±", "")
            name += f"_layer_{numbers[0]}" if kinds.count(layer.kind) > 1 else ""
            indexer = attention.indexer if layer.indexed else ()
            its_own = (layer.kind, name, declaration, latent, indexer, layer.reads_layer)
            distinct.append(LayerDeclaration(tuple(numbers), *its_own))
        return cls(read.family, attention.positions, tuple(distinct), attention.notes)

    @property
    def layers(self) -> tuple[LayerDeclaration, ...]:
        """One declaration per layer of the model, in order. Layers with the same attention share one."""
        by_number = {number: layer for layer in self.distinct for number in layer.layers}
        return tuple(by_number[number] for number in range(len(by_number)))

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers grouped by window (a chunk counts as one) and by sizes that differ, as for KVCache(layers=...). Layers with
        another mask keep all tokens."""
        windows: list[int | None] = []
        for layer in self.layers:
            mask = layer.declaration.call.mask
            over_pages = None if mask is None else page_mask(mask)
            left = None if over_pages is None else over_pages.most_left
            windows.append(None if left is None else left + 1)
        calls = [layer.declaration.call for layer in self.layers]
        sizes = [
            (call.kv_heads, call.head_dim, call.head_dim if call.value_dim is None else call.value_dim)
            for call in calls
        ]
        if len(set(sizes)) == 1:
            return layer_groups(windows)
        names = ("kv_heads", "head_dim", "value_dim")
        return layer_groups(windows, [dict(zip(names, own, strict=True)) for own in sizes])

    @property
    def reads_layer(self) -> dict[int, int]:
        """For each layer without keys and values of its own the one whose it reads, as for KVCache(reads_layer=...)."""
        read = enumerate(layer.reads_layer for layer in self.layers)
        return {number: source for number, source in read if source is not None}

    def layer(self, number: int) -> LayerDeclaration:
        """The declaration of layer `number`, from 0. Errors: ConfigError for a layer that the model doesn't have."""
        count = len(self.layers)
        if not is_whole(number, 0, count - 1):
            raise ConfigError(f"layer {shown(number)}: this {self.family} model has layers 0 to {count - 1}.")
        return self.layers[number]

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write one declaration file per distinct layer, named by its kind. Errors: ConfigError."""
        return write_layers(self.distinct, folder)


def write_layers(layers: Sequence[LayerDeclaration], folder: str | Path) -> tuple[Path, ...]:
    """Write the declaration of each of these layers, named by its kind. Errors: ConfigError."""
    folder, paths = Path(folder), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for layer in layers:
            path = folder / f"{layer.name}.json"
            path.write_text(layer.declaration.to_json() + "\n", encoding="utf-8")
            paths.append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}; wanted a folder to write to.") from None
    return tuple(paths)


def _of_image(sizes: LayerSizes, attention: ModelAttention, call: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a layer that attends to an image's patches. Errors: ConfigError for lengths, a mode or a layout that it can't
    have."""
    given = {name: call[name] for name in ("q_len", "kv_len") if call.get(name) not in (None, attention.positions)}
    if given or is_cached(call.get("mode")) or call.get("layout") == "thd":
        raise ConfigError(
            f"{attention.name}: {given or {name: call.get(name) for name in ('mode', 'layout')}}: the layers attend to the "
            f"patches of an image, {attention.positions} at most; leave lengths, mode and layout out."
        )
    rows = call.get("batch", 1) * sizes.windows
    fields: dict[str, Any] = {"q_heads": sizes.q_heads, "kv_heads": sizes.q_heads, "head_dim": sizes.head_dim}
    fields |= {"batch": rows, "q_len": sizes.tokens, "kv_len": sizes.tokens}
    return fields | ({"dense_mask": [rows, 1, sizes.tokens, sizes.tokens]} if sizes.masked else {})


def _of_heads(heads: LayerHeads, q_heads: int) -> dict[str, Any]:
    """The fields of a layer whose heads aren't those of all layers."""
    fields: dict[str, Any] = {"kv_heads": heads.kv_heads, "head_dim": heads.head_dim, "value_dim": heads.value_dim}
    return fields | ({"softmax_aux": [q_heads]} if heads.sinks else {})


def _of_framework(base_config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that a config has under the names of OperationMetadata's base_config, as JSON values."""
    whole = OperationMetadata(base_config=base_config).to_dict() if base_config else {}
    fields = {
        "partition_axis" if name == "sequence_axis_name" else name
        for name in PICKUP
        if base_config.get(PICKUP[name]) is not None
    }
    return {name: value for name, value in whole.items() if name in fields and value is not None}


def is_cached(mode: str | None) -> bool:
    """Whether a mode attends to a cache, so that each row has its own length. Errors: InputError."""
    return mode is not None and canonical_mode(mode) in GENERATION


def _call(
    attention: ModelAttention,
    *,
    batch: int | None,
    q_len: int | None,
    kv_len: int | None,
    mode: str | None,
    layout: str | None,
) -> dict[str, Any]:
    call: dict[str, Any] = {
        "q_heads": attention.q_heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
    }
    if attention.value_dim != attention.head_dim:
        call["value_dim"] = attention.value_dim
    optional = {
        "batch": batch,
        "q_len": q_len,
        "kv_len": kv_len,
        "mode": mode,
        "layout": layout,
        "dtype": attention.dtype,
    }
    call |= {name: value for name, value in optional.items() if value is not None}
    if attention.logits_soft_cap is not None:
        call["logits_soft_cap"] = attention.logits_soft_cap
    if attention.sinks:
        call["softmax_aux"] = [attention.q_heads]
    if attention.return_weights:
        call["return_weights"] = True
    if kv_len is not None and q_len is None:
        raise ConfigError(f"kv_len={kv_len} without q_len; give both.")
    if attention.cross:
        if q_len is not None and kv_len is None:
            raise ConfigError(
                f"q_len={q_len} without kv_len, but the keys of cross-attention are the encoder's; give both."
            )
        return call
    shorter = kv_len is not None and q_len is not None and q_len != kv_len
    cached = is_cached(mode)
    if (shorter or cached) and not attention.causal:
        raise ConfigError(
            f"q_len={q_len}, kv_len={kv_len}, mode={mode!r}: this model's tokens see each other in both directions, so queries "
            "and keys are the same tokens; give q_len alone."
        )
    if shorter and q_len is not None and kv_len is not None and q_len > kv_len:
        raise ConfigError(f"q_len={q_len} is more than kv_len={kv_len}; the queries are the last of the kv_len tokens.")
    if cached or (shorter and q_len == 1 and mode is None):
        call["kv_lengths"] = True
    elif shorter and q_len is not None and kv_len is not None:
        call["query_offset"] = kv_len - q_len
    return call
