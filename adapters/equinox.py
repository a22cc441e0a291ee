"""equinox: its MultiheadAttention with a declared attention inside. Requires equinox (`pip install 'attnops[equinox]'`)."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jaxtyping import Array, Bool, Float

from ..errors import ConfigError, InputError, a_type
from ..operators.api.attention import Attention
from ..scores import Score
from .extra import extra
from .front import Declared, attend, declared_attention, refuse_score

with extra("equinox"):
    import equinox as eqx

__all__ = ["MultiheadAttention", "attention_of"]

_Model = TypeVar("_Model")


def attention_of(model: _Model, declared: Declared, *, score: Score | None = None, **metadata: Any) -> _Model:
    """The same model, with every equinox.nn.MultiheadAttention in it (or the model itself) running the declared attention.

    Weights, sizes and the tree of leaves don't change. declared: an Attention, a Declaration, its dict, or the path of
    its JSON file. metadata: fields of OperationMetadata that replace the file's, such as mesh. score: that of every layer's
    calls; its arrays become leaves of each layer, which are trained. With "enabled": false the model is returned unchanged.
    Errors: InputError for a model without such a layer.
    """
    attention = declared_attention(declared, metadata)
    layers = [x for x in jax.tree.leaves(model, is_leaf=_is_layer) if _is_layer(x)]
    if not layers:
        raise InputError(
            f"{type(model).__name__} holds no equinox.nn.MultiheadAttention, so there is no attention to replace."
        )
    if not attention.enabled:
        refuse_score(score)
        return model
    return jax.tree.map(
        lambda x: MultiheadAttention(x, attention, score=score) if _is_layer(x) else x, model, is_leaf=_is_layer
    )


def _is_layer(x: object) -> bool:
    return isinstance(x, eqx.nn.MultiheadAttention)


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """equinox.nn.MultiheadAttention with a declared attention in place of its own; made from an existing layer.

    `attention` is the Attention, static: `attention.plans` holds the plans of the calls so far. `score` is that of its calls,
    with arrays as leaves. Inside jax.vmap, which equinox uses for batches, a plan describes one row.
    """

    attention: Attention = eqx.field(static=True)
    score: Score | None

    def __init__(
        self, layer: eqx.nn.MultiheadAttention, declared: Declared, *, score: Score | None = None, **metadata: Any
    ) -> None:
        for field in dataclasses.fields(eqx.nn.MultiheadAttention):
            setattr(self, field.name, getattr(layer, field.name))
        self.attention, self.score = declared_attention(declared, metadata), score
        if not self.attention.enabled:
            raise ConfigError(
                'the declaration says "enabled": false; keep the layer, or use attention_of, which keeps it.'
            )

    def __call__(
        self,
        query: Float[Array, "q_len query_size"],
        key_: Float[Array, "kv_len key_size"],
        value: Float[Array, "kv_len value_size"],
        mask: Bool[Array, "q_len kv_len"] | Bool[Array, "heads q_len kv_len"] | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
    ) -> Float[Array, "q_len output_size"]:
        """The same as equinox's own, for one row: see equinox.nn.MultiheadAttention.__call__."""
        if deterministic is not None:
            warnings.warn("deterministic is deprecated by equinox; use inference", DeprecationWarning, stacklevel=2)
            inference = deterministic
        q_len, kv_len = query.shape[0], key_.shape[0]
        if value.shape[0] != kv_len:
            raise InputError(f"key_ has {kv_len} rows, value has {value.shape[0]}; wanted the same.")
        accepted_shapes = ((q_len, kv_len), (self.num_heads, q_len, kv_len))
        if mask is not None and tuple(mask.shape) not in accepted_shapes:
            raise InputError(
                f"mask has shape {tuple(mask.shape)}; wanted {accepted_shapes[0]} or, with one per head, {accepted_shapes[1]}."
            )
        projections = ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        heads = tuple(jax.vmap(layer)(x).reshape(x.shape[0], self.num_heads, -1) for layer, x in projections)
        if process_heads is not None:
            processed = tuple(process_heads(*heads))
            got, same = tuple(x.shape for x in processed), tuple(x.shape for x in heads)
            if got != same:
                raise InputError(f"process_heads gave shapes {got}; wanted them unchanged, {same}.")
            heads = processed
        inference = self.dropout.inference if inference is None else inference
        if not isinstance(inference, bool):
            raise InputError(f"inference is {a_type(inference)}; wanted True or False: it is a compile-time constant.")
        if self.dropout.p > 0 and not inference and key is None:
            raise InputError(f"dropout of {self.dropout.p} requires key=jax.random.key(...), or inference=True.")
        result = attend(
            self.attention,
            *heads,
            layout="bthd",
            mask=mask,
            dropout_prob=self.dropout.p,
            dropout_rng=key,
            deterministic=inference,
            score=self.score,
        )
        return jax.vmap(self.output_proj)(result.output.reshape(q_len, -1))
