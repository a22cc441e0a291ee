"""Latent attention against transformers' own modules, random weights, float32 on the CPU: both forms, prefill, chunks and decode.

The module's projections, norms and rotary embedding run in torch; attnops gets what they return.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from attnops import LatentAttention, ModelDeclaration

torch = pytest.importorskip("torch", reason="pip install 'attnops[transformers]'")
pytest.importorskip("transformers", reason="pip install 'attnops[transformers]'")

BATCH, LENGTH, HEADS, NOPE, ROPE, VALUE, LATENT, WIDTH = 2, 40, 4, 16, 8, 12, 32, 48
CONFIG = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 1, "vocab_size": 16,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "kv_lora_rank": LATENT, "q_lora_rank": 24,
    "max_position_embeddings": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}  # fmt: skip


def _module(scaling: dict[str, Any] | None) -> tuple[dict[str, Any], Any, Any, Any]:
    """A config as a dict, the attention module, its file, and the config object."""
    configuration = importlib.import_module("transformers.models.deepseek_v3.configuration_deepseek_v3")
    file = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    fields = CONFIG | ({} if scaling is None else {"rope_scaling": scaling})
    config = configuration.DeepseekV3Config(**fields, attn_implementation="eager")
    torch.manual_seed(0)
    module = file.DeepseekV3Attention(config, 0).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.ndim > 1 else torch.nn.init.normal_(weight, 1.0, 0.1)
    return fields | {"model_type": "deepseek_v3"}, module, file, config


def _parts(module: Any, file: Any, config: Any, x: Any, cos: Any, sin: Any) -> list[np.ndarray]:
    """What LatentAttention takes, as the module computes it."""
    query = (
        module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
        .view(BATCH, LENGTH, HEADS, NOPE + ROPE)
        .transpose(1, 2)
    )
    latent, key = module.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
    apply = file.apply_rotary_pos_emb_interleave if config.rope_interleave else file.apply_rotary_pos_emb
    q_rope, rope_key = apply(query[..., NOPE:], key.view(BATCH, 1, LENGTH, ROPE), cos, sin)
    up = module.kv_b_proj.weight.view(HEADS, NOPE + VALUE, LATENT).permute(2, 0, 1)
    parts = (
        query[..., :NOPE].transpose(1, 2), q_rope.transpose(1, 2), module.kv_a_layernorm(latent), rope_key[:, 0], up[..., :NOPE],
        up[..., NOPE:],
    )  # fmt: skip
    return [part.detach().numpy() for part in parts]


@pytest.mark.parametrize("form", ["expanded", "absorbed", None])
@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_deepseek_v3(scaling: dict[str, Any] | None, form: str | None) -> None:
    fields, module, file, config = _module(scaling)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    cos, sin = file.DeepseekV3RotaryEmbedding(config)(x, torch.arange(LENGTH)[None].expand(BATCH, -1))
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None].expand(BATCH, 1, -1, -1)
    wanted = module(x, (cos, sin), hidden)[0].detach().numpy()
    (layer,) = ModelDeclaration.from_config(fields, operation="vanilla").distinct
    assert layer.latent is not None
    assert layer.latent.latent is not None
    file_fields = layer.latent.to_dict()
    made = {name: file_fields["latent"].pop(name) for name in ("query_latent_dim", "rope_pairs")}
    assert made == {"query_latent_dim": 24, "rope_pairs": "interleaved"}
    file_fields["latent"] |= {} if form is None else {"form": form}
    attend = LatentAttention(file_fields)
    q_nope, q_rope, latent, rope_key, w_uk, w_uv = _parts(module, file, config, x, cos, sin)

    def outputs(first: int, last: int) -> np.ndarray:
        """Of some rows, against all keys so far."""
        rows = slice(first, last)
        call = {"query_offset": first} if first else {}
        attended = attend(q_nope[:, rows], q_rope[:, rows], latent[:, :last], rope_key[:, :last], w_uk, w_uv, **call)
        heads = np.array(attended.attention_outputs).reshape(BATCH, last - first, HEADS * VALUE)
        return module.o_proj(torch.from_numpy(heads)).detach().numpy()

    most = np.abs(wanted).max()
    np.testing.assert_allclose(outputs(0, LENGTH), wanted, atol=3e-6 * most)
    chunked = [
        outputs(0, 5),
        outputs(5, 8),
        *(outputs(n, n + 1) for n in range(8, LENGTH)),
    ]  # then 32 tokens, one by one
    np.testing.assert_allclose(np.concatenate(chunked, 1), wanted, atol=3e-6 * most)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_deepseek_v32_with_the_selection_of_its_indexer(form: str) -> None:
    """The module's own indexer leaves 5 keys to each query; LatentAttention gets them as a mask array."""
    configuration = importlib.import_module("transformers.models.deepseek_v32.configuration_deepseek_v32")
    file = importlib.import_module("transformers.models.deepseek_v32.modeling_deepseek_v32")
    fields = CONFIG | {"rope_scaling": YARN, "index_topk": 5, "index_n_heads": 2, "index_head_dim": 16}
    config = configuration.DeepseekV32Config(**fields, attn_implementation="eager")
    config.rope_interleave = True  # of all models of this type
    torch.manual_seed(0)
    module = file.DeepseekV32Attention(config, 0).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.ndim > 1 else torch.nn.init.normal_(weight, 1.0, 0.1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
    cos, sin = file.DeepseekV32RotaryEmbedding(config)(x, positions)
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None].expand(BATCH, 1, -1, -1)
    picked: list[np.ndarray] = []
    module.indexer.register_forward_hook(lambda _, inputs, output: picked.append(output.numpy().astype(np.int64)))
    wanted = module(x, (cos, sin), hidden, position_ids=positions)[0].detach().numpy()
    selection = np.zeros((BATCH, 1, LENGTH, LENGTH), bool)
    np.put_along_axis(selection[:, 0], picked[0], True, axis=-1)
    (layer,) = ModelDeclaration.from_config(fields | {"model_type": "deepseek_v32"}, operation="vanilla").distinct
    assert dict(layer.indexer) == {"heads": 2, "head_dim": 16, "top_k": 5}
    assert layer.latent is not None
    declared = layer.latent.to_dict()
    declared["latent"] |= {"form": form, "query_latent_dim": None, "rope_pairs": None}
    attended = LatentAttention(declared)(*_parts(module, file, config, x, cos, sin), mask=selection)
    heads = np.array(attended.attention_outputs).reshape(BATCH, LENGTH, HEADS * VALUE)
    found = module.o_proj(torch.from_numpy(heads)).detach().numpy()
    np.testing.assert_allclose(found, wanted, atol=3e-6 * np.abs(wanted).max())
