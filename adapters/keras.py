"""keras: layers on the JAX backend with a declared attention. Requires keras."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..errors import ConfigError, InputError, shown
from ..operators.api.attention import Attention
from ..scores import Score
from .extra import extra
from .front import Declared, attend, declared_attention, refuse_score
from .keras_ops import calls_the_op, declare_calls, restore_calls

with extra("keras"):
    import keras

__all__ = ["KerasAttention", "attention_of"]

_Layer = TypeVar("_Layer", bound="keras.Layer")
_PLACE = "_compute_attention"  # which keras lets users override
_MAX_NAMES = 12  # classes that a message names
# Compiled steps that keras keeps, the last one those of keras-hub's tasks.
_COMPILED = ("train_function", "test_function", "predict_function", "generate_function")
_KINDS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def attention_of(model: _Layer, declared: Declared, *, score: Score | None = None, **metadata: Any) -> _Layer:
    """Make a model's attention layers (or the layer itself) run the declared attention.

    These are every MultiHeadAttention and GroupQueryAttention, and layers of other classes whose own code calls
    keras.ops.dot_product_attention. The layers are changed in place, and the model is returned; weights, names and saved files
    stay keras' own. Compiled steps are discarded. declared: an Attention, a Declaration, its dict, or the path of its JSON file.
    metadata: fields of OperationMetadata that replace the file's, such as mesh. score: that of the layers' calls, with its
    arrays, which aren't trained: they aren't keras' variables. With several attention axes its positions count through all of
    them, the last one fastest. With "enabled": false the layers get keras' own attention back.
    Errors: ConfigError for a backend other than JAX, for flash_attention=True, and for dropout of weights in a layer that calls
    the op; InputError for a model without such a layer, which names those that it has, or with one whose class has its own
    attention.
    """
    attention = declared_attention(declared, metadata)
    if not attention.enabled:
        refuse_score(score)
    if keras.backend.backend() != "jax":
        raise ConfigError(
            f"keras runs on {shown(keras.backend.backend())}; wanted 'jax': set KERAS_BACKEND=jax before keras is imported."
        )
    if not isinstance(model, keras.Layer):
        raise InputError(f"{type(model).__name__} isn't a keras model or layer.")
    inside = list(model._flatten_layers())
    layers = [x for x in inside if isinstance(x, _KINDS)]
    callers = [x for x in inside if not isinstance(x, _KINDS) and calls_the_op(x)]
    if not layers and not callers:
        raise InputError(
            f"{type(model).__name__} holds no built MultiHeadAttention or GroupQueryAttention, and no layer whose class calls "
            f"keras.ops.dot_product_attention, so there is no attention to replace. Its layers: {_classes(inside)}."
        )
    for layer in layers:
        _check(layer)
    for layer in layers:
        if attention.enabled:
            setattr(layer, _PLACE, KerasAttention(layer, attention, score))
        elif _PLACE in vars(layer):
            delattr(layer, _PLACE)
    for layer in callers:
        if attention.enabled:
            declare_calls(layer, attention, score)
        else:
            restore_calls(layer)
    for x in inside:
        if isinstance(x, keras.Model):
            for name in _COMPILED:
                if hasattr(x, name):
                    setattr(x, name, None)
    return model


@dataclass(frozen=True, eq=False)
class KerasAttention:
    """A declared attention that replaces one layer's `_compute_attention`; `attention.plans` holds the plans of the calls."""

    layer: Any
    attention: Attention
    score: Score | None = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        attention_mask: jax.Array | None = None,
        training: bool | None = None,
        return_attention_scores: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """(output, scores or None), like keras' own.

        Shapes: query [batch, ..., heads, dim], key and value likewise; the layer's attention axes are attended over;
        attention_mask broadcasts to [batch, ..., heads, q ..., kv ...] as keras aligns it. The scores are those before dropout.
        """
        grouped = isinstance(self.layer, keras.layers.GroupQueryAttention)
        names = ("head_dim", "dropout", "sliding_window") if grouped else ("key_dim", "dropout", "_sliding_window")
        dim, dropout, window = (getattr(self.layer, name) for name in names)
        if grouped and self.layer.num_repeats > 1:  # keras has repeated them
            key, value = (x[:, :, :: self.layer.num_repeats] for x in (key, value))
        if return_attention_scores is None:
            return_attention_scores = grouped and self.layer._return_attention_scores
        axes = (1,) if grouped else tuple(self.layer._attention_axes)
        if (use_causal_mask or window is not None) and axes != (1,):
            raise InputError(
                f"use_causal_mask and sliding_window apply to axis 1 only; the layer attends over {axes}. Hint: pass a mask."
            )
        heads = [_rows(x, axes) for x in (query, key, value)]
        cells = (*heads[0].shape[:-3], heads[0].shape[-2], *(x.shape[-3] for x in heads[:2]))
        spans = [[x.shape[axis] for axis in axes] for x in (query, key)]
        drops = bool(dropout and training)
        result = attend(
            self.attention,
            *heads,
            layout="bthd",
            mask=None if attention_mask is None else _mask(attention_mask, cells, spans),
            causal=use_causal_mask,
            # The mask array already has the window; passing it too tells which blocks are hidden.
            sliding_window=None if window is None else (window - 1, window - 1),
            score=self.score,
            query_offset=0 if use_causal_mask or window is not None else None,
            softmax_scale=1 / math.sqrt(dim),
            dropout_prob=dropout if drops else 0.0,
            dropout_rng=self.layer._dropout_layer.seed_generator.next() if drops else None,
            deterministic=not drops,
            return_weights=bool(return_attention_scores),
        )
        output = _back(result.output, query.shape, axes)
        if result.weights is None:
            return output, None
        scores = result.weights.reshape(*result.weights.shape[:-2], *spans[0], *spans[1])
        return output, scores.astype(output.dtype)


def _classes(layers: Iterable[Any]) -> str:
    """The classes of layers, those that seem to attend first."""
    names = list(dict.fromkeys(type(layer).__name__ for layer in layers))
    names.sort(key=lambda name: "attention" not in name.lower())
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def _check(layer: Any) -> None:
    kind = next(kind for kind in _KINDS if isinstance(layer, kind))
    if getattr(type(layer), _PLACE) is not getattr(kind, _PLACE):
        raise InputError(
            f"layer {shown(layer.name)} is a {type(layer).__name__}, whose class has its own attention ({_PLACE}), which "
            "would be lost. Hint: call attnops.dot_product_attention in it instead."
        )
    if layer._flash_attention:
        raise ConfigError(
            f"layer {shown(layer.name)} has flash_attention=True, but the declaration decides what runs; leave it None, and call "
            "keras.config.disable_flash_attention() if it was enabled for all."
        )


def _rows(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """[..., heads, dim] with the attended axes merged into one, before the heads: [..., length, heads, dim]."""
    last = x.ndim - 2
    x = jnp.moveaxis(x, axes, range(last - len(axes), last))
    return x.reshape(*x.shape[: last - len(axes)], -1, *x.shape[last:])


def _back(x: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """The inverse of `_rows`."""
    last = len(shape) - 2
    x = x.reshape(*x.shape[:-3], *(shape[axis] for axis in axes), *x.shape[-2:])
    return jnp.moveaxis(x, range(last - len(axes), last), axes)


def _mask(mask: jax.Array, cells: tuple[int, ...], spans: list[list[int]]) -> jax.Array:
    """The mask as keras aligns it, [..., heads, q, kv]: missing dimensions are inserted before those of queries and keys."""
    n_trailing = 2 * len(spans[0])
    shape = tuple(mask.shape)
    expected = (*cells[:-2], *spans[0], *spans[1])
    shape = (*shape[:-n_trailing], *(1,) * (len(expected) - len(shape)), *shape[-n_trailing:])
    if len(shape) != len(expected) or any(n not in (1, m) for n, m in zip(shape, expected, strict=True)):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}; wanted one that broadcasts to {expected}, [batch, ..., heads, query "
            "axes, key axes]; dimensions before the query's may be left out, starting from the right."
        )
    mask = mask.reshape(shape)
    if n_trailing > 2:
        mask = jnp.broadcast_to(mask, (*shape[:-n_trailing], *spans[0], *spans[1]))
        mask = mask.reshape(*shape[:-n_trailing], *cells[-2:])
    return mask
