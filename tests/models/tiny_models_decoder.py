"""The tiny decoders in JAX: their attention layers are what ModelDeclaration reads from the config, run by attnops.

Norms, projections and experts are plain products; what attends for a layer is in tiny_models_caches.py. A step's tokens are
packed, row after row: [rows * q, ...].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tiny_models import CONFIGS, is_sparse, rotary, weights
from tiny_models_caches import DenseCache, PagedCache

from attnops import ModelDeclaration

__all__ = ["Decoder"]


class Decoder:
    """A model by its name, over pages or on arrays. form: that of latent attention on arrays; None leaves it to attnops. fold:
    LatentAttention makes the queries of their latents, with both projections multiplied first or not; None passes queries."""

    def __init__(
        self, name: str, *, paged: bool, mesh: Any = None, form: str | None = None, fold: bool | None = None
    ) -> None:
        self.name, self.config, self.mesh = name, CONFIGS[name], mesh
        self.weights = {key: jnp.asarray(x) for key, x in weights(name).items()}
        self.tables = tuple(jnp.asarray(x, jnp.float32) for x in rotary(name))
        self.minimax = name == "minimax_m3_vl_text"
        fields: dict[str, Any] = {"model_type": name} | self.config
        if self.minimax:  # as published: the text part of a model that also sees images
            fields = {"model_type": "minimax_m3_vl", "text_config": fields}
        read = ModelDeclaration.from_config(fields, operation="vanilla")
        made: Any = {"fold_query": fold} if fold is not None else {"query_latent_dim": None, "rope_pairs": None}
        form_of = {} if form is None else {"form": form}
        self.makes = fold is not None
        self.cache: Any = PagedCache(read, mesh, made) if paged else DenseCache(read, mesh, made | form_of)

    def step(self, weights: Any, state: Any, ids: Any, place: Any, first: Any) -> tuple[Any, Any]:
        """(logits [rows, q, vocab], state) for ids [rows, q], the first at position `first`. place: where a paged step writes."""
        rows, q_len = ids.shape
        positions = jnp.tile(first + jnp.arange(q_len, dtype=jnp.int32), rows)
        turn = tuple(table[positions][:, None] for table in self.tables)
        x, kept = weights["embed_tokens.weight"][ids.reshape(-1)], None
        for n in range(self.config["num_hidden_layers"]):
            w = _within(weights, f"layers.{n}.")
            h = self.norm(x, w["input_layernorm.weight"])
            attend = self._grouped if self.minimax else self._latent
            out, state, kept = attend(n, _within(w, "self_attn."), h, turn, positions, state, place, kept)
            x = x + _linear(out.reshape(len(x), -1), w["self_attn.o_proj.weight"])
            h = self.norm(x, w["post_attention_layernorm.weight"])
            mlp = _within(w, "mlp.")
            x = x + (self._experts(mlp, h) if is_sparse(self.name, n) else self._gated(mlp, h))
        logits = _linear(self.norm(x, weights["norm.weight"]), weights["lm_head.weight"])
        return logits.reshape(rows, q_len, -1), state

    def norm(self, x: Any, weight: Any) -> Any:
        scaled = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return scaled * _last(weight + 1.0 if self.minimax else weight, x)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _latent(self, n: int, w: Any, h: Any, turn: Any, positions: Any, state: Any, place: Any, kept: Any) -> Any:
        c, tokens = self.config, len(h)
        nope, rank = c["qk_nope_head_dim"], c["kv_lora_rank"]
        residual = self.norm(_linear(h, w["q_a_proj.weight"]), w["q_a_layernorm.weight"])
        query = _linear(residual, w["q_b_proj.weight"]).reshape(tokens, c["num_attention_heads"], -1)
        q_nope, q_rope = query[..., :nope], _rotate(query[..., nope:], turn, True)
        residual_of = residual
        if beta := c["rope_parameters"].get("llama_4_scaling_beta"):  # Mistral 4's, of which a note of the plan tells
            passed = positions // np.int32(c["rope_parameters"]["original_max_position_embeddings"])
            scale = 1.0 + beta * jnp.log1p(passed.astype(jnp.float32))
            q_nope, q_rope = (x * scale[:, None, None] for x in (q_nope, q_rope))
            residual_of = residual * scale[:, None]
        joined = _linear(h, w["kv_a_proj_with_mqa.weight"])
        latent = self.norm(joined[:, :rank], w["kv_a_layernorm.weight"])
        rope_key = _rotate(joined[:, None, rank:], turn, True)[:, 0]
        up = w["kv_b_proj.weight"].reshape(c["num_attention_heads"], -1, rank).transpose(2, 0, 1)
        if "indexer.wk.weight" in w:
            heads, pairs = c["index_n_heads"], self.name == "glm_moe_dsa"
            index_query = _linear(residual, w["indexer.wq_b.weight"]).reshape(tokens, heads, -1)
            key = _linear(h, w["indexer.wk.weight"])
            key = key - key.mean(-1, keepdims=True)
            key = key * lax.rsqrt(jnp.square(key).mean(-1, keepdims=True) + 1e-6)
            key = key * _last(w["indexer.k_norm.weight"], key) + _last(w["indexer.k_norm.bias"], key)
            given = _rotate(index_query, turn, pairs), _rotate(key[:, None], turn, pairs)[:, 0]
            head_weights = _linear(h, w["indexer.weights_proj.weight"]) * heads**-0.5
            kept, state = self.cache.select(n, (*given, head_weights), positions, state, place)
        arrays = (q_nope, q_rope, latent, rope_key, up[..., :nope], up[..., nope:])
        made_of = {}
        if self.makes:  # pairs of their rotary part stay where they are, so those of the keys do
            arrays = (None, None, latent, _in_place(rope_key), *arrays[4:])
            w_uq = w["q_b_proj.weight"].reshape(c["num_attention_heads"], -1, c["q_lora_rank"]).transpose(2, 0, 1)
            made_of = {"query_latent": residual_of, "w_uq": w_uq, "q_cos": turn[0][:, 0], "q_sin": turn[1][:, 0]}
        out, state = self.cache.latent(n, arrays, made_of, positions, state, place, kept)
        return out, state, kept

    def _grouped(self, n: int, w: Any, h: Any, turn: Any, positions: Any, state: Any, place: Any, kept: Any) -> Any:
        c, tokens = self.config, len(h)

        def heads(name: str, norm: str | None) -> Any:
            x = _linear(h, w[f"{name}.weight"]).reshape(tokens, -1, 8)
            return x if norm is None else _rotate(self.norm(x, w[f"{norm}.weight"]), turn, False)

        arrays = heads("q_proj", "q_norm"), heads("k_proj", "k_norm"), heads("v_proj", None)
        assert c["head_dim"] == c["index_head_dim"] == 8
        if "indexer.k_proj.weight" in w:
            given = heads("indexer.q_proj", "indexer.q_norm"), heads("indexer.k_proj", "indexer.k_norm")[:, 0]
            kept, state = self.cache.blocks(n, given, positions, state, place)
        out, state = self.cache.grouped(n, arrays, positions, state, place, kept)
        return out, state, None

    # -- experts -------------------------------------------------------------------------------------------------------

    def _activated(self, gate: Any, up: Any) -> Any:
        if self.minimax:
            gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
            return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
        return jax.nn.silu(gate) * up

    def _gated(self, w: Any, h: Any) -> Any:
        if "gate_up_proj.weight" in w:
            gate, up = jnp.split(_linear(h, w["gate_up_proj.weight"]), 2, -1)
        else:
            gate, up = _linear(h, w["gate_proj.weight"]), _linear(h, w["up_proj.weight"])
        return _linear(self._activated(gate, up), w["down_proj.weight"])

    def _experts(self, w: Any, h: Any) -> Any:
        c, logits = self.config, _linear(h, w["gate.weight"])
        score = jax.nn.softmax(logits) if self.name == "mistral4" else jax.nn.sigmoid(logits)
        bias = w.get("gate.e_score_correction_bias")
        choice = score if bias is None else score + bias[None]
        if groups := c.get("n_group"):
            grouped = choice.reshape(len(h), groups, -1)
            best = lax.top_k(lax.top_k(grouped, 2)[0].sum(-1), c["topk_group"])[1]
            used = jax.nn.one_hot(best, groups).sum(1) > 0
            choice = jnp.where(used[..., None], grouped, -jnp.inf).reshape(choice.shape)
        picked = lax.top_k(choice, c["num_experts_per_tok"])[1]
        weight = score * jax.nn.one_hot(picked, score.shape[-1]).sum(1)
        weight = weight / weight.sum(-1, keepdims=True) * c["routed_scaling_factor"]
        gate, up = jnp.split(jnp.einsum("th,eih->eti", h, w["experts.gate_up_proj"]), 2, -1)
        each = jnp.einsum("eti,ehi->eth", self._activated(gate, up), w["experts.down_proj"])
        return jnp.einsum("te,eth->th", weight, each) + self._gated(_within(w, "shared_experts."), h)


def _within(weights: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): x for key, x in weights.items() if key.startswith(prefix)}


def _last(x: Any, like: Any) -> Any:
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


def _linear(x: Any, weight: Any) -> Any:
    return jnp.einsum("ti,oi->to", x, weight, precision="highest")


def _rotate(x: Any, turn: Any, pairs: bool) -> Any:
    """x [tokens, heads, dim]. pairs: columns 2i and 2i + 1 make one, else i and i + half of what is rotated."""
    cos, sin = turn
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if pairs else (rotated[..., :half], rotated[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _in_place(x: Any) -> Any:
    """Columns i and i + half as 2i and 2i + 1."""
    return jnp.stack(jnp.split(x, 2, -1), -1).reshape(x.shape)
