"""A decoder of Qwen3-Next's or Nemotron-H's class in plain JAX, whose layers are declared in JSON.

A model's folder has its config.json, which says which layer is of which kind, and a declaration of each operation of each kind,
as `attnops plan --model config.json --write FOLDER` writes them. Nothing here names a kernel or a mesh.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nemotron_h_layers
import qwen3_next_layers
from hybrid_parts import Weights, along, rms_norm

from attnops import Attention
from attnops.registry.model_declaration import LayerDeclaration, ModelDeclaration

FOLDER = Path(__file__).resolve().parent
_BLOCKS: dict[str, Callable[..., jax.Array]] = {
    "qwen3_next": qwen3_next_layers.block,
    "nemotron_h": nemotron_h_layers.block,
}


@dataclass(frozen=True)
class Layer:
    """A layer's declared operations; None for those that it doesn't have. declared: its kind as the config says."""

    declared: LayerDeclaration
    attention: Attention | None
    recurrence: Attention | None
    convolution: Attention | None

    @property
    def kind(self) -> str:
        return self.declared.kind


@dataclass(frozen=True, eq=False)
class Model:
    """A model without its weights; hashable by identity, so it can be a static argument of jit. config: its config.json."""

    family: str
    config: dict[str, Any]
    layers: tuple[Layer, ...]

    @classmethod
    def load(cls, name: str, **metadata: Any) -> Model:
        """The model of a folder here. metadata: fields that replace those of its declarations, such as mesh=None.

        Errors: FileNotFoundError for a declaration that is missing."""
        config = json.loads((FOLDER / name / "config.json").read_text())
        declared = ModelDeclaration.from_config(FOLDER / name / "config.json")
        kinds = {}
        for kind in declared.distinct:
            found = {
                one.operation: Attention(FOLDER / name / f"{file}.json", **metadata)
                for file, one in kind.declarations.items()
            }
            kinds[kind.layers] = Layer(
                kind, *(None if one is None else found[one.operation] for one in _operations(kind))
            )
        return cls(declared.family, config, tuple(kinds[kind.layers] for kind in declared.layers))

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return next(layer.attention.operation.metadata.mesh for layer in self.layers if layer.attention is not None)

    def __call__(self, weights: Weights, tokens: jax.Array, past: Any) -> jax.Array:
        """Logits float32 [..., tokens, vocabulary] of tokens int32 [..., tokens]; what came before them is in `past`."""
        qwen = self.family == "qwen3_next"
        x = weights[f"model.{'embed_tokens' if qwen else 'embeddings'}.weight"][tokens]
        for number in range(len(self.layers)):
            x = _BLOCKS[self.family](self.config, past, number, of_layer(weights, number), past.placed(x))
        name, epsilon = ("norm", "rms_norm_eps") if qwen else ("norm_f", "layer_norm_epsilon")
        scale = along(weights[f"model.{name}.weight"], x)
        x = rms_norm(x, self.config[epsilon]) * (1 + scale if qwen else scale)
        return (x @ weights["lm_head.weight"].T).astype(jnp.float32)


def _operations(kind: LayerDeclaration) -> tuple[Any, Any, Any]:
    return kind.declaration, kind.recurrence, kind.convolution


def of_layer(weights: Weights, number: int) -> Weights:
    """A layer's weights by their names within it."""
    start = f"model.layers.{number}."
    return {name.removeprefix(start): x for name, x in weights.items() if name.startswith(start)}
