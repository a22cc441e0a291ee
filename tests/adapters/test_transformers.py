"""transformers' models on a declared attention, against their own eager one: tiny random weights, a CPU."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnops[transformers]'")
transformers = pytest.importorskip("transformers", reason="pip install 'attnops[transformers]'")

from attnops import Attention, ConfigError, InputError  # noqa: E402
from attnops.adapters.transformers import TransformersAttention, attention_for, register  # noqa: E402
from attnops.errors import InputTypeError, UnknownNameError  # noqa: E402
from attnops.verify import reference_attention  # noqa: E402

register()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_PART = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
WHISPER = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in _PART.items()}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", GROUPED),
    "mistral": ("AutoModelForCausalLM", {**GROUPED, "sliding_window": 6}),
    "qwen2": ("AutoModelForCausalLM", GROUPED),
    "qwen3": ("AutoModelForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": ("AutoModelForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("AutoModelForCausalLM", {**GEMMA, **MIXED}),
    "gpt_oss": (
        "AutoModelForCausalLM",
        {**GROUPED, **MIXED, "head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "phi3": ("AutoModelForCausalLM", {**GROUPED, "sliding_window": 6}),
    "gpt2": (
        "AutoModelForCausalLM",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0, "eos_token_id": None},
    ),
    "deepseek_v3": (
        "AutoModelForCausalLM",
        {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
         "v_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "moe_intermediate_size": 16},
    ),
    "bloom": (
        "AutoModelForCausalLM",
        {"vocab_size": 64, "hidden_size": 30, "n_layer": 2, "n_head": 6, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None},
    ),
    "mpt": (
        "AutoModelForCausalLM",
        {"vocab_size": 64, "d_model": 30, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, "pad_token_id": 0,
         "attn_config": {"softmax_scale": 0.3, "clip_qkv": 2.0}, "eos_token_id": None},
    ),
    "bert": ("AutoModel", SIZES),
    "modernbert": (
        "AutoModel",
        {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
         "eos_token_id": None, "decoder_start_token_id": 0, "dropout_rate": 0.0},
    ),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {**WHISPER, "vocab_size": 64, "d_model": 32, "max_source_positions": 16, "max_target_positions": 64, "num_mel_bins": 8,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1, "suppress_tokens": None,
         "begin_suppress_tokens": None},
    ),
}  # fmt: skip
QUICK = ("llama", "gemma2", "gpt_oss", "bloom", "mpt")
each_family = pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
# transformers' and torch's own, of these configs and this machine.
pytestmark = pytest.mark.filterwarnings("default")

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[0, :4] = 0
NOISE = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))


def _models(family: str, *implementations: str) -> list[Any]:
    """One model for each implementation, with the same weights; vectors, sinks among them, aren't zeros."""
    found: list[Any] = []
    for implementation in implementations:
        name, fields = FAMILIES[family]
        config = transformers.AutoConfig.for_model(family, **fields)
        torch.manual_seed(0)
        model = getattr(transformers, name).from_config(config, attn_implementation=implementation).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.5)
        if found:
            model.load_state_dict(found[0].state_dict())
        found.append(model)
    return found


def _inputs(family: str) -> dict[str, Any]:
    if family == "whisper":
        return {"input_features": NOISE}
    return {"input_ids": torch.where(PADDED == 1, IDS, 0), "attention_mask": PADDED}


def _results(model: Any, family: str) -> tuple[Any, dict[str, Any]]:
    """What the model gives at tokens that count, and the gradients of some number of it."""
    decodes = model.config.is_encoder_decoder
    out = model(**_inputs(family), **({"decoder_input_ids": IDS} if decodes else {}))
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    out = out if decodes else out * PADDED[..., None]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    return out.detach(), {name: x.grad for name, x in model.named_parameters()}


@each_family
def test_outputs_and_gradients_are_those_of_eager(family: str) -> None:
    (wanted, their), (got, our) = (_results(model, family) for model in _models(family, "eager", "attnops"))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for name, gradient in their.items():
        assert (gradient is None) == (our[name] is None), name
        if gradient is not None:
            most = max(float(gradient.abs().max()), 1e-2)
            assert (our[name] - gradient).abs().max() <= 1e-4 * most, name
    if family == "gpt_oss":
        assert our["model.layers.0.self_attn.sinks"].abs().min() > 1e-6


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (
            "codegen",
            {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": None},
        ),
        ("xglm", {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 32}),
    ],
)
def test_a_model_that_computes_attention_itself_is_refused(family: str, sizes: dict[str, Any]) -> None:
    """It would add the bool masks to its logits, or get none: other logits, without an error."""
    config = transformers.AutoConfig.for_model(family, vocab_size=64, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attnops").eval()
    with pytest.raises(ConfigError, match=rf"modeling_{family} computes attention itself.*'eager'"):
        model(input_ids=IDS)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_models_with_alibi_run_the_declared_attention(family: str) -> None:
    """Tokens that the mask leaves out in the middle have no position in BLOOM; MPT counts them."""
    function = attention_for("vanilla")
    transformers.AttentionInterface.register("alibi", function)
    register(function.attention, name="alibi")
    eager, model = _models(family, "eager", "alibi")
    mask = torch.ones_like(IDS)
    mask[:, 3:6] = 0
    wanted, got = (x(input_ids=IDS, attention_mask=mask).logits for x in (eager, model))
    torch.testing.assert_close(got[:, 6:], wanted[:, 6:], atol=1e-5, rtol=1e-5)
    assert [plan.implementation for plan in function.attention.plans] == ["vanilla.forward_native"]
    with pytest.raises(ConfigError, match="returns no weights here") if family == "bloom" else contextlib.nullcontext():
        model(input_ids=IDS, output_attentions=True)


@each_family
def test_greedy_generation_with_left_padding_is_token_equal(family: str) -> None:
    if not FAMILIES[family][0].endswith(("CausalLM", "Seq2SeqLM", "SpeechSeq2Seq")):
        pytest.skip("an encoder")
    wanted, got = (
        model.generate(
            **_inputs(family), max_new_tokens=20, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        for model in _models(family, "eager", "attnops")
    )
    assert got.sequences.tolist() == wanted.sequences.tolist()
    for ours, theirs in zip(got.scores, wanted.scores, strict=True):  # which tell more than tokens
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_static_cache(family: str) -> None:
    wanted, got = (
        model.generate(**_inputs(family), max_new_tokens=8, do_sample=False, cache_implementation="static")
        for model in _models(family, "eager", "attnops")
    )
    assert got.tolist() == wanted.tolist()


def test_a_growing_cache_compiles_for_few_sizes() -> None:
    for name, rounds, sizes in (("rounded", True, [6, 32, 64]), ("each", False, [6, *range(7, 46)])):
        function = attention_for("vanilla", round_lengths=rounds)
        transformers.AttentionInterface.register(name, function)
        transformers.AttentionMaskInterface.register(name, transformers.masking_utils.sdpa_mask)
        (model,) = _models("llama", name)
        steps = 40 if rounds else 3
        model.generate(input_ids=IDS[:, :6], max_new_tokens=steps, do_sample=False)
        plans = function.attention.plans
        assert [plan.problem.kv_len for plan in plans] == sizes[:steps]
        said = [any("keys are padded to" in note for note in plan.notes) for plan in plans]
        assert said == [rounds and plan.problem.q_len == 1 for plan in plans]


def _draw(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class _Module(torch.nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


@pytest.mark.parametrize(
    ("q", "kv", "causal", "call", "visible"),
    [
        (5, 5, True, {}, np.tril(np.ones((5, 5), bool))),
        (5, 5, False, {}, np.ones((5, 5), bool)),
        (5, 5, False, {"is_causal": True}, np.tril(np.ones((5, 5), bool))),
        (5, 5, True, {"sliding_window": 2}, np.tril(np.ones((5, 5), bool)) & ~np.tril(np.ones((5, 5), bool), -2)),
        (5, 9, True, {}, np.tril(np.ones((5, 9), bool))),  # an empty static cache
        (1, 9, True, {}, np.ones((1, 9), bool)),
        (1, 1, True, {}, np.ones((1, 1), bool)),
        (1, 9, True, {"mask": True}, None),
        (3, 9, True, {"mask": True, "position_bias": True, "s_aux": True, "softcap": 2.0, "scaling": 0.5}, None),
        (5, 5, True, {"added": True, "position_bias": True}, np.ones((5, 5), bool)),
    ],
)
def test_one_call_against_the_reference(q: int, kv: int, causal: bool, call: dict[str, Any], visible: Any) -> None:
    query, key, value = _draw(2, 4, q, 8), _draw(2, 2, kv, 8, seed=1), _draw(2, 2, kv, 8, seed=2)
    call, mask, bias, sinks = dict(call), None, np.zeros((1, 1, 1, 1)), None
    if call.pop("mask", False):
        mask = _draw(2, 1, q, kv) > -0.5
        mask[..., 0] = True
        visible = mask.numpy()
    elif call.pop("added", False):
        mask = _draw(2, 1, q, kv, seed=7)
        bias = bias + mask.numpy()
    if call.pop("position_bias", False):
        call["position_bias"] = _draw(1, 4, q, kv, seed=8)
        bias = bias + call["position_bias"].numpy()
    if call.pop("s_aux", False):
        call["s_aux"] = _draw(4, seed=9)
        sinks = call["s_aux"].numpy()
    got, weights = attention_for("vanilla")(_Module(causal), query, key, value, mask, **call)
    wanted = reference_attention(
        *(x.transpose(1, 2).numpy() for x in (query, key, value)),
        scale=call.get("scaling", 8**-0.5),
        mask=visible,
        bias=np.broadcast_to(bias, (2, 4, q, kv)),
        sinks=sinks,
        soft_cap=call.get("softcap"),
    )
    assert weights is None
    np.testing.assert_allclose(got, wanted.output, atol=3e-6)


def test_rounded_keys_have_no_gradient_and_change_none() -> None:
    shapes = ((1, 4, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 4, 1, 9))
    results = []
    for rounds in (True, False):
        tensors = [_draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
        sinks = _draw(4).requires_grad_()
        function = attention_for("vanilla", round_lengths=rounds)
        out, _ = function(_Module(True), *tensors[:3], None, position_bias=tensors[3], s_aux=sinks)
        out.square().sum().backward()
        assert function.attention.plans[0].problem.kv_len == (32 if rounds else 9)
        results.append([out.detach(), *(x.grad for x in (*tensors, sinks))])
    for rounded, plain in zip(*results, strict=True):
        torch.testing.assert_close(rounded, plain, atol=2e-6, rtol=1e-5)


def test_dropout_in_training_follows_torchs_seed() -> None:
    (model,) = _models("llama", "attnops")
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model(IDS).logits.detach())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_names(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    path.write_text(json.dumps({"operation": "sdpa"}))
    assert register() == register("vanilla", block_q=64) == register(Attention("sdpa")) == "attnops"
    assert register(path) == register(str(path)) == f"attnops:{path}"
    assert register("splash", name="mine") == "mine"
    of_file, eager = _models("llama", f"attnops:{path}", "eager")
    function = transformers.AttentionInterface()[f"attnops:{path}"]
    torch.testing.assert_close(of_file(IDS).logits, eager(IDS).logits, atol=1e-5, rtol=1e-5)
    assert {plan.operation.name for plan in function.attention.plans} == {"sdpa"}
    assert function == TransformersAttention(Attention(path))
    register()
    for name in ("eager", "sdpa", "flash_attention_2", 3):
        with pytest.raises(ConfigError, match="wanted a string that transformers doesn't use itself"):
            register(name=name)
    with pytest.raises(ConfigError, match=r'"enabled": false; set attn_implementation="sdpa"'):
        register({"operation": "vanilla", "enabled": False})
    with pytest.raises(UnknownNameError, match="Did you mean 'vanilla'"):
        register("vanila")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"output_attentions": True}, ConfigError, "output_attentions .*returns no weights here; use attn_impl"),
        ({"cu_seq_lens_q": IDS}, ConfigError, "cu_seq_lens_q .*for Flash Attention; remove them"),
        ({"cache": object()}, ConfigError, "cache .*continuous batching"),
        ({"temperature": 2.0}, ConfigError, "temperature .*doesn't support it"),
        ({"query": _draw(2, 4, 8)}, InputError, r"query has shape \(2, 4, 8\); wanted \[batch, heads, length, dim\]"),
        ({"key": _draw(2, 4, 5, 8).half()}, InputTypeError, "wanted one dtype"),
        ({"query": _draw(2, 4, 5, 8).double()}, InputTypeError, "query is torch.float64; wanted one of"),
        (
            {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.int64)},
            InputTypeError,
            "attention_mask is torch.int64",
        ),
        ({"position_bias": torch.ones(2, 1, 5, 5) > 0}, InputTypeError, "position_bias is torch.bool"),
        ({"attention_mask": torch.ones(2, 5) > 0}, InputError, r"mask has shape \(2, 5\); wanted one that broadcasts"),
        ({"sliding_window": 0}, InputTypeError, "sliding_window is 0; wanted a number of tokens"),
        (
            {"sliding_window": 3, "is_causal": False},
            InputError,
            "sliding_window=3 with 5 keys, no mask and no causality",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: Any, match: str) -> None:
    call: dict[str, Any] = {"query": _draw(2, 4, 5, 8), "key": _draw(2, 4, 5, 8), "value": _draw(2, 4, 5, 8)}
    with pytest.raises(error, match=match):
        attention_for("vanilla")(_Module(True), **{"attention_mask": None} | call | change)


def test_what_has_no_effect_is_taken() -> None:
    x = _draw(2, 4, 5, 8)
    attention_for("vanilla")(
        _Module(True),
        x,
        x,
        x,
        None,
        position_ids=IDS,
        cache_position=IDS,
        use_cache=True,
        output_attentions=False,
        cache=None,
    )
