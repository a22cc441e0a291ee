"""The logits of the tiny decoders in NumPy, float64, a whole sequence at once; written from the models' own formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny_models import CONFIGS, LENGTH, is_sparse, rotary, tokens, weights, yarn_scale

__all__ = ["reference_logits"]


def reference_logits(name: str) -> np.ndarray:
    """float64 [ROWS, LENGTH, vocab]."""
    c, p = CONFIGS[name], {key: x.astype(np.float64) for key, x in weights(name).items()}
    minimax = name == "minimax_m3_vl_text"
    x = p["embed_tokens.weight"][tokens(name)]
    kept = None
    for n in range(c["num_hidden_layers"]):
        own = {key.removeprefix(f"layers.{n}."): w for key, w in p.items() if key.startswith(f"layers.{n}.")}
        h = _rms(x, own["input_layernorm.weight"], minimax)
        if minimax:
            x = x + _grouped(name, n, own, h)
        else:
            added, kept = _latent(name, n, own, h, kept)
            x = x + added
        h = _rms(x, own["post_attention_layernorm.weight"], minimax)
        x = x + (_experts(name, own, h) if is_sparse(name, n) else _gated(name, own, h, "mlp."))
    return _rms(x, p["norm.weight"], minimax) @ p["lm_head.weight"].T


def _rms(x: Any, weight: Any, plus_one: bool = False) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (weight + plus_one)


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight + bias


def _rotate(x: Any, name: str, pairs: bool) -> Any:
    """x [..., tokens, heads, dim]; pairs: columns 2i and 2i + 1 make one, else i and i + half."""
    cos, sin = (table[:, None] for table in rotary(name))
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if pairs else (rotated[..., :half], rotated[..., half:])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _split(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:-1], heads, -1)


SEEN = np.tril(np.ones((LENGTH, LENGTH), bool))


def _attend(query: Any, key: Any, value: Any, seen: Any, scale: float) -> Any:
    """query, key, value [rows, tokens, heads, dim]; seen bool [rows | 1, heads | 1, q, kv]."""
    logits = np.where(seen, np.einsum("bqhd,bkhd->bhqk", query, key) * scale, -np.inf)
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    output = np.einsum("bhqk,bkhd->bqhd", odds / odds.sum(-1, keepdims=True), value)
    return output.reshape(*output.shape[:2], -1)


def _latent(name: str, n: int, own: dict[str, Any], h: Any, kept: Any) -> tuple[Any, Any]:
    """(what attention adds, which keys each query was left) of a layer with latents."""
    c, heads = CONFIGS[name], CONFIGS[name]["num_attention_heads"]
    nope, rank, rope = c["qk_nope_head_dim"], c["kv_lora_rank"], c["rope_parameters"]
    w = {key.removeprefix("self_attn."): x for key, x in own.items()}
    residual = _rms(h @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
    query = _split(residual @ w["q_b_proj.weight"].T, heads)
    query = np.concatenate([query[..., :nope], _rotate(query[..., nope:], name, True)], -1)
    joined = h @ w["kv_a_proj_with_mqa.weight"].T
    both = _split(_rms(joined[..., :rank], w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T, heads)
    shared = np.repeat(_rotate(joined[..., None, rank:], name, True), heads, -2)
    key, value = np.concatenate([both[..., :nope], shared], -1), both[..., nope:]
    if beta := rope.get("llama_4_scaling_beta"):
        at = np.arange(LENGTH) // rope["original_max_position_embeddings"]
        query = query * (1 + beta * np.log1p(at))[:, None, None]
    scale = query.shape[-1] ** -0.5
    if rope["rope_type"] == "yarn":
        scale *= yarn_scale(rope["factor"], rope["mscale_all_dim"]) ** 2
    if "indexer.wk.weight" in w:
        kept = _selected(name, w, h, residual)
    seen = SEEN[None] if kept is None else kept & SEEN
    return _attend(query, key, value, seen[:, None], scale) @ w["o_proj.weight"].T, kept


def _selected(name: str, w: dict[str, Any], h: Any, residual: Any) -> Any:
    """bool [rows, q, kv]: the keys with the greatest scores; the rotary pairs of GLM's indexer are those of its attention."""
    c, pairs = CONFIGS[name], name == "glm_moe_dsa"
    heads = c["index_n_heads"]
    query = _rotate(_split(residual @ w["indexer.wq_b.weight"].T, heads), name, pairs)
    key = _layer_norm(h @ w["indexer.wk.weight"].T, w["indexer.k_norm.weight"], w["indexer.k_norm.bias"])
    key = _rotate(key[..., None, :], name, pairs)[..., 0, :]
    each = np.maximum(np.einsum("bqhd,bkd->bqhk", query, key) * c["index_head_dim"] ** -0.5, 0)
    score = np.einsum("bqh,bqhk->bqk", h @ w["indexer.weights_proj.weight"].T * heads**-0.5, each)
    order = np.argsort(-np.where(SEEN, score, -np.inf), -1, kind="stable")[..., : c["index_topk"]]
    kept = np.zeros(score.shape, bool)
    np.put_along_axis(kept, order, True, -1)
    return kept


def _grouped(name: str, n: int, own: dict[str, Any], h: Any) -> Any:
    """What attention adds in a layer of MiniMax M3."""
    c = CONFIGS[name]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    w = {key.removeprefix("self_attn."): x for key, x in own.items()}
    query = _rotate(_rms(_split(h @ w["q_proj.weight"].T, heads), w["q_norm.weight"], True), name, False)
    key = _rotate(_rms(_split(h @ w["k_proj.weight"].T, kv_heads), w["k_norm.weight"], True), name, False)
    key, value = (np.repeat(x, heads // kv_heads, -2) for x in (key, _split(h @ w["v_proj.weight"].T, kv_heads)))
    seen = SEEN[None, None]
    if "indexer.k_proj.weight" in w:
        seen = seen & np.repeat(_blocks(name, w, h), heads // c["index_n_heads"], 1)
    return _attend(query, key, value, seen, query.shape[-1] ** -0.5) @ w["o_proj.weight"].T


def _blocks(name: str, w: dict[str, Any], h: Any) -> Any:
    """bool [rows, index heads, q, kv]: the blocks with the greatest score of one key, and those that end at the query's own."""
    c = CONFIGS[name]
    size, count = c["index_block_size"], LENGTH // c["index_block_size"]
    query = _rms(_split(h @ w["indexer.q_proj.weight"].T, c["index_n_heads"]), w["indexer.q_norm.weight"], True)
    key = _rms(_split(h @ w["indexer.k_proj.weight"].T, 1), w["indexer.k_norm.weight"], True)
    query, key = (_rotate(x, name, False) for x in (query, key))
    score = np.where(SEEN, np.einsum("bqhd,bkd->bhqk", query, key[..., 0, :]), -np.inf)
    of_block = score.reshape(*score.shape[:-1], count, size).max(-1)
    distance = (np.arange(LENGTH) // size)[:, None] - np.arange(count)
    of_block = np.where((distance >= 0) & (distance < c["index_local_blocks"]), np.inf, of_block)
    order = np.argsort(-of_block, -1, kind="stable")[..., : c["index_topk_blocks"]]
    kept = np.zeros(of_block.shape, bool)
    np.put_along_axis(kept, order, True, -1)
    return np.repeat(kept, size, -1)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _activated(name: str, gate: Any, up: Any) -> Any:
    if name == "minimax_m3_vl_text":  # its clamps and gain are those of the class
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return (up + 1) * gate * _sigmoid(1.702 * gate)
    return gate * _sigmoid(gate) * up


def _gated(name: str, own: dict[str, Any], h: Any, at: str) -> Any:
    if f"{at}gate_up_proj.weight" in own:
        gate, up = np.split(h @ own[f"{at}gate_up_proj.weight"].T, 2, -1)
    else:
        gate, up = (h @ own[f"{at}{part}_proj.weight"].T for part in ("gate", "up"))
    return _activated(name, gate, up) @ own[f"{at}down_proj.weight"].T


def _experts(name: str, own: dict[str, Any], h: Any) -> Any:
    c = CONFIGS[name]
    logits = h @ own["mlp.gate.weight"].T
    if name == "mistral4":
        score = np.exp(logits - logits.max(-1, keepdims=True))
        score /= score.sum(-1, keepdims=True)
    else:
        score = _sigmoid(logits)
    choice = score + own.get("mlp.gate.e_score_correction_bias", 0.0)
    if groups := c.get("n_group"):
        grouped = _split(choice, groups)
        best = np.sort(grouped, -1)[..., -2:].sum(-1)
        used = best >= np.sort(best, -1)[..., -c["topk_group"], None]
        choice = np.where(used[..., None], grouped, -np.inf).reshape(choice.shape)
    limit = np.sort(choice, -1)[..., -c["num_experts_per_tok"], None]
    weight = np.where(choice >= limit, score, 0)
    weight *= c["routed_scaling_factor"] / weight.sum(-1, keepdims=True)
    result = _gated(name, own, h, "mlp.shared_experts.")
    for expert in range(logits.shape[-1]):
        gate, up = np.split(h @ own["mlp.experts.gate_up_proj"][expert].T, 2, -1)
        result = result + weight[..., expert, None] * (
            _activated(name, gate, up) @ own["mlp.experts.down_proj"][expert].T
        )
    return result
