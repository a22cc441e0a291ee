"""What a config's score computes, against transformers' own attention modules: outputs and gradients, in float32 on the CPU.

The modules get the query, key and value that attnops gets, in place of their projections.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ModelDeclaration, OperationMetadata, OperationRegistry
from attnops.models.image_families import IMAGE_FAMILIES
from attnops.models.scored_families import SCORED_FAMILIES

torch = pytest.importorskip("torch", reason="pip install 'attnops[transformers]'")
pytest.importorskip("transformers", reason="pip install 'attnops[transformers]'")

BATCH, LENGTH, HEADS, DIM = 2, 20, 6, 8
WIDTH = HEADS * DIM
T5 = {
    "d_model": WIDTH, "d_kv": DIM, "d_ff": 16, "num_layers": 2, "num_heads": HEADS, "vocab_size": 8,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip


class Given(torch.nn.Module):
    """In place of a projection: what it would return."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.x = x

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.x


@dataclasses.dataclass
class Case:
    """A config and its module. run: the module's output [batch, q, heads, dim] from (module, q, k, v, parameters). arrays: what
    is passed in the call, from (q, parameters), by jax. parameters: shapes of what is learnt."""

    config: dict[str, Any]
    module: str
    make: Callable[[Any, Any], Any]
    run: Callable[..., Any]
    parameters: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    arrays: Callable[[Any, Any], dict[str, Any]] = lambda q, p: dict(p)
    part: str | None = None
    layer: int = 0
    kv_heads: int = HEADS
    tokens: int = LENGTH
    normalised: bool = False
    hidden: Callable[[], np.ndarray] | None = None


def _flat(x: Any) -> Any:
    return x.reshape(*x.shape[:2], -1)


def _causal(length: int = LENGTH) -> Any:
    visible = torch.tril(torch.ones(length, length, dtype=torch.bool))
    return torch.zeros(1, 1, length, length).masked_fill(~visible, torch.finfo(torch.float32).min)


def _shaped(out: Any) -> Any:
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(BATCH, -1, HEADS, DIM)


def _bloom(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    module.query_key_value, module.dense = Given(torch.stack([q, k, v], 3).reshape(BATCH, LENGTH, -1)), Given(None)
    module.dense.forward = lambda x: x
    theirs = build_alibi_tensor(torch.ones(BATCH, LENGTH), HEADS, torch.float32)
    alibi = (p["slopes"][:, None] * torch.arange(LENGTH)).repeat(BATCH, 1)[:, None]
    torch.testing.assert_close(alibi, theirs)
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1), torch.zeros(1), alibi, _causal()))


def _mpt(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    module.Wqkv, module.out_proj = Given(torch.cat([_flat(q), _flat(k), _flat(v)], 2)), torch.nn.Identity()
    theirs = build_mpt_alibi_tensor(HEADS, 32, alibi_bias_max=5)
    bias = (p["slopes"][:, None] * torch.arange(-31, 1))[:, None]
    torch.testing.assert_close(bias, theirs)
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1), bias, attention_mask=_causal()[0, 0] < 0))


def _falcon(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    whole = torch.cat([q, k, v], 2) if k.shape[2] == 1 else torch.stack([q, k, v], 3)
    module.query_key_value, module.dense = Given(whole.reshape(BATCH, LENGTH, -1)), torch.nn.Identity()
    theirs = build_alibi_tensor(torch.ones(BATCH, LENGTH), HEADS, torch.float32)
    alibi = (p["slopes"][:, None] * torch.arange(LENGTH)).repeat(BATCH, 1)[:, None] * math.sqrt(DIM)
    torch.testing.assert_close(alibi, theirs, rtol=2**-8, atol=0)  # the product of slope and position is in bfloat16
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1), alibi, _causal()))


def _t5(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    names = ("query", "key", "value", "output") if hasattr(module, "query") else ("q", "k", "v", "o")
    for name, x in zip(names, (q, k, v), strict=False):
        setattr(module, name, Given(_flat(x)))
    setattr(module, names[3], torch.nn.Identity())
    if p:
        module.relative_attention_bias.weight = p["table"]
    umt5 = type(module).__name__.startswith("UMT5")
    mask = _causal() if module.is_causal else torch.zeros(1, 1, LENGTH, LENGTH)
    states = {} if p else {"encoder_hidden_states" if umt5 else "key_value_states": torch.zeros(BATCH, LENGTH, 1)}
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1), **{"attention_mask" if umt5 else "mask": mask}, **states))


def _longt5(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    from transformers.models.longt5.modeling_longt5 import _get_local_attention_mask

    module.q, module.k, module.v, module.o = Given(_flat(q)), Given(_flat(k)), Given(_flat(v)), torch.nn.Identity()
    module.relative_attention_bias.weight = p["table"]
    mask = _get_local_attention_mask(torch.ones(BATCH, LENGTH), module.block_len, "cpu")
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1), mask=mask))


def _pix2struct_vision(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    module.query, module.key, module.value = Given(_flat(q)), Given(_flat(k)), Given(_flat(v))
    module.output = torch.nn.Identity()
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1)))


def _llama4(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    module.q_proj, module.k_proj, module.v_proj = Given(_flat(q)), Given(_flat(k)), Given(_flat(v))
    module.o_proj = torch.nn.Identity()
    return _shaped(module(torch.zeros(BATCH, LENGTH, 1), None, _causal()))


def _beit(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    module.q_proj, module.k_proj, module.v_proj = Given(_flat(q)), Given(_flat(k)), Given(_flat(v))
    module.o_proj = torch.nn.Identity()
    bias = 0
    for own, table in zip(module.biases, (p["table"], p["table_2"]), strict=True):
        own.relative_position_bias_table = table
        bias = bias + own((3, 3))
    return _shaped(module(torch.zeros(BATCH, 10, 1), bias))


def _beit_module(cls: Any, config: Any) -> Any:
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    module = cls(config)
    module.biases = torch.nn.ModuleList(BeitRelativePositionBias(config) for _ in range(2))
    return module


def _shift() -> Any:
    """The -100 of transformers' own shifted windows: a grid of 8x8 in windows of 4x4, shifted by 2."""
    from transformers import SwinConfig
    from transformers.models.swin.modeling_swin import SwinLayer

    config = SwinConfig(window_size=4, attn_implementation="eager")
    layer = SwinLayer(config, 8, (8, 8), 1, shift_size=2)
    return layer.get_attn_mask(8, 8, torch.float32, "cpu")[-BATCH:]  # two of the four, as a batch of one


def _swin(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    module.q_proj, module.k_proj, module.v_proj = Given(_flat(q)), Given(_flat(k)), Given(_flat(v))
    module.o_proj = torch.nn.Identity()
    module.relative_position_bias.relative_position_bias_table = p["table"]
    return _shaped(module(torch.zeros(BATCH, 16, 1), _shift() if module.shifted else None))


def _swinv2(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    module.query, module.key, module.value = Given(_flat(q)), Given(_flat(k)), Given(_flat(v))
    module.logit_scale = p["logit_scale"]
    mlp = module.continuous_position_bias_mlp
    mlp[2].weight = p["weight"]
    return _shaped(module(torch.zeros(BATCH, 16, WIDTH), _shift() if module.shifted else None))


def _swinv2_arrays(q: Any, p: Any) -> dict[str, Any]:
    """The table of the model's small network with two layers; its first is that of `_swinv2_module`."""
    steps = np.arange(-3, 4) / 3 * 8
    steps = np.sign(steps) * np.log2(np.abs(steps) + 1) / math.log2(8)
    places = np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2).astype(np.float32)
    first = np.maximum(places @ _first_layer(), 0)
    table = 16 * jax.nn.sigmoid(jnp.asarray(first) @ p["weight"].T)
    scale = jnp.exp(jnp.minimum(p["logit_scale"], math.log(100.0)))
    return {"table": table, "temperature": scale[:, 0, 0]}


def _first_layer() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((2, 512)).astype(np.float32) * 0.1


def _swinv2_module(cls: Any, config: Any, shifted: bool) -> Any:
    module = cls(config, WIDTH, HEADS, 4)
    module.shifted = shifted
    with torch.no_grad():
        module.continuous_position_bias_mlp[0].weight.copy_(torch.tensor(_first_layer().T))
        module.continuous_position_bias_mlp[0].bias.zero_()
    return module


def _swin_module(cls: Any, config: Any, shifted: bool) -> Any:
    module = cls(config, WIDTH, HEADS, 4)
    module.shifted = shifted
    return module


def _decomposed(module: Any, q: Any, k: Any, v: Any, p: Any) -> Any:
    height, width = module.grid
    together = torch.stack([q, k, v], 2).reshape(BATCH, height, width, -1)
    module.qkv, module.proj = Given(together), torch.nn.Identity()
    module.rel_pos_h, module.rel_pos_w = p["rows"], p["columns"]
    return _shaped(module(torch.zeros(BATCH, height, width, 1)))


def _decomposed_arrays(grid: tuple[int, int]) -> Callable[[Any, Any], dict[str, Any]]:
    """What the models multiply their queries with: a vector for each distance along an axis."""

    def arrays(q: Any, p: Any) -> dict[str, Any]:
        places = np.arange(grid[0] * grid[1])
        found = {}
        for name, rows, at, size in (
            ("height", "rows", places // grid[1], grid[0]),
            ("width", "columns", places % grid[1], grid[1]),
        ):
            distance = at[:, None] - np.arange(size)[None] + size - 1
            found[name] = jnp.einsum("bqhd,qkd->bhqk", q, p[rows][distance])
        return found

    return arrays


def _grid_module(cls: Any, config: Any, grid: tuple[int, int], window: int) -> Any:
    module = cls(config, window) if cls.__name__.startswith("Sam") else cls(config, input_size=grid)
    module.grid = grid
    return module


SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": WIDTH, "depths": [2], "num_heads": [HEADS], "window_size": 4}
VIT = {
    "image_size": 20, "patch_size": 4, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "window_size": 3,
}  # fmt: skip
SAM = VIT | {"model_type": "sam_vision_model", "global_attn_indexes": [1]}
VITDET = VIT | {"model_type": "vitdet", "window_block_indices": [0], "use_relative_position_embeddings": True}
SHIFTED = {"hidden": lambda: _shift().numpy()[:, None] == 0}
FALCON = {
    "model_type": "falcon",
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "alibi": True,
}


def _t5_case(model: str, name: str, part: str, **more: Any) -> Case:
    said = {key: value for key, value in T5.items() if not (model.startswith("pix2struct") and key == "d_model")}
    said |= {"hidden_size": WIDTH} if model.startswith("pix2struct") else {}
    buckets = {} if part == "cross" else {"table": (8, HEADS)}

    def make(cls: Any, config: Any) -> Any:
        config.is_decoder = part != "encoder"
        if name.endswith("LocalAttention"):
            return cls(config, has_relative_attention_bias=True)
        return cls(config, has_relative_attention_bias=bool(buckets), layer_idx=0, is_causal=part == "decoder")

    run = _longt5 if name.endswith("LocalAttention") else _t5
    return Case({"model_type": model} | said | more, name, make, run, buckets, part=part)


CASES = {
    "bloom": Case(
        {"model_type": "bloom", "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS},
        "BloomAttention", lambda cls, config: cls(config, 0), _bloom, {"slopes": ()},
    ),
    "mpt": Case(
        {"model_type": "mpt", "d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 32,
         "attn_config": {"alibi_bias_max": 5, "softmax_scale": 0.3}},
        "MptAttention", lambda cls, config: cls(config, 0), _mpt, {"slopes": ()},
    ),
    "falcon": Case(FALCON, "FalconAttention", lambda cls, c: cls(c, 0), _falcon, {"slopes": ()}, kv_heads=1),
    "falcon-heads": Case(
        FALCON | {"multi_query": False}, "FalconAttention", lambda cls, config: cls(config, 0), _falcon, {"slopes": ()}
    ),
    "t5-encoder": _t5_case("t5", "T5Attention", "encoder"),
    "t5-decoder": _t5_case("t5", "T5Attention", "decoder", num_decoder_layers=3),
    "t5-cross": _t5_case("t5", "T5Attention", "cross"),
    "mt5-encoder": _t5_case("mt5", "MT5Attention", "encoder"),
    "mt5-decoder": _t5_case("mt5", "MT5Attention", "decoder"),
    "umt5-encoder": _t5_case("umt5", "UMT5Attention", "encoder"),
    "umt5-decoder": _t5_case("umt5", "UMT5Attention", "decoder"),
    "longt5-encoder": _t5_case("longt5", "LongT5LocalAttention", "encoder", local_radius=4),
    "pix2struct-decoder": _t5_case("pix2struct_text_model", "Pix2StructTextAttention", "decoder"),
    "pix2struct-cross": _t5_case("pix2struct_text_model", "Pix2StructTextAttention", "cross"),
    "pix2struct-vision": Case(
        {"model_type": "pix2struct_vision_model", "hidden_size": WIDTH, "d_kv": DIM, "num_hidden_layers": 2,
         "num_attention_heads": HEADS},
        "Pix2StructVisionAttention", lambda cls, config: cls(config), _pix2struct_vision,
    ),
    "llama4": Case(
        {"model_type": "llama4_text", "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS,
         "num_key_value_heads": 2, "head_dim": DIM, "floor_scale": 3, "attn_scale": 0.7},
        "Llama4TextAttention", lambda cls, config: cls(config, 3), _llama4, layer=3, kv_heads=2,
    ),
    "swin": Case(
        {"model_type": "swin"} | SWIN, "SwinAttention", lambda cls, c: _swin_module(cls, c, False), _swin,
        {"table": (49, HEADS)}, tokens=16,
    ),
    "swin-shifted": Case(
        {"model_type": "swin"} | SWIN, "SwinAttention", lambda cls, c: _swin_module(cls, c, True), _swin,
        {"table": (49, HEADS)}, tokens=16, layer=1, **SHIFTED,
    ),
    "swinv2": Case(
        {"model_type": "swinv2"} | SWIN, "Swinv2SelfAttention", lambda cls, c: _swinv2_module(cls, c, False), _swinv2,
        {"logit_scale": (HEADS, 1, 1), "weight": (HEADS, 512)}, _swinv2_arrays, tokens=16, normalised=True,
    ),
    "swinv2-shifted": Case(
        {"model_type": "swinv2"} | SWIN, "Swinv2SelfAttention", lambda cls, c: _swinv2_module(cls, c, True), _swinv2,
        {"logit_scale": (HEADS, 1, 1), "weight": (HEADS, 512)}, _swinv2_arrays, tokens=16, normalised=True, layer=1,
        **SHIFTED,
    ),
    "beit": Case(
        {"model_type": "beit", "image_size": 12, "patch_size": 4, "hidden_size": WIDTH, "num_hidden_layers": 2,
         "num_attention_heads": HEADS, "use_relative_position_bias": True, "use_shared_relative_position_bias": True},
        "BeitAttention", _beit_module, _beit, {"table": (28, HEADS), "table_2": (28, HEADS)}, tokens=10,
    ),
    "sam-window": Case(
        SAM, "SamVisionAttention", lambda cls, c: _grid_module(cls, c, (3, 3), 3), _decomposed,
        {"rows": (5, DIM), "columns": (5, DIM)}, _decomposed_arrays((3, 3)), tokens=9,
    ),
    "sam-grid": Case(
        SAM, "SamVisionAttention", lambda cls, c: _grid_module(cls, c, (5, 5), 0), _decomposed,
        {"rows": (9, DIM), "columns": (9, DIM)}, _decomposed_arrays((5, 5)), tokens=25, layer=1,
    ),
    "vitdet-window": Case(
        VITDET, "VitDetAttention", lambda cls, c: _grid_module(cls, c, (3, 3), 0), _decomposed,
        {"rows": (5, DIM), "columns": (5, DIM)}, _decomposed_arrays((3, 3)), tokens=9,
    ),
    "vitdet-grid": Case(
        VITDET | {"image_size": [20, 24]}, "VitDetAttention", lambda cls, c: _grid_module(cls, c, (5, 6), 0), _decomposed,
        {"rows": (9, DIM), "columns": (11, DIM)}, _decomposed_arrays((5, 6)), tokens=30, layer=1,
    ),
}  # fmt: skip


def _module(case: Case) -> Any:
    from transformers import AutoConfig

    said = copy.deepcopy(case.config)
    model_type = said.pop("model_type")
    config = AutoConfig.for_model(model_type, **said)
    config._attn_implementation = "eager"
    package = {"pix2struct_text_model": "pix2struct", "pix2struct_vision_model": "pix2struct", "llama4_text": "llama4"}
    package["sam_vision_model"] = "sam"
    name = package.get(model_type, model_type)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return case.make(getattr(module, case.module), config).eval()


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_what_transformers_computes(name: str) -> None:
    case = CASES[name]
    random = np.random.default_rng(sum(map(ord, name)))
    numbers = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, d_out = numbers(BATCH, case.tokens, HEADS, DIM), numbers(BATCH, case.tokens, HEADS, DIM)
    k, v = (numbers(BATCH, case.tokens, case.kv_heads, DIM) for _ in range(2))
    lengths = {} if "image_size" in case.config else {"q_len": LENGTH, "kv_len": LENGTH}
    model = ModelDeclaration.from_config(case.config, part=case.part, operation="vanilla", **lengths)
    declaration = model.layer(case.layer).declaration
    score = declaration.call.score

    parameters = {name: numbers(*shape) for name, shape in case.parameters.items() if shape}
    if "slopes" in case.parameters:
        parameters["slopes"] = np.asarray(score.with_heads(HEADS).arrays()[0], np.float32)
        score = score.with_arrays([None])

    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    theirs = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in parameters.items()}
    wanted = case.run(_module(case), *leaves, theirs)
    gradients = torch.autograd.grad(wanted, [*leaves, *theirs.values()], torch.tensor(d_out))

    metadata = OperationMetadata.from_dict(declaration.metadata)
    attend: Any = OperationRegistry.create("vanilla", metadata)
    visible = {} if case.hidden is None else {"mask": jnp.asarray(case.hidden())}

    def ours(q: Any, k: Any, v: Any, parameters: dict[str, Any]) -> Any:
        passed = case.arrays(q, parameters)
        if case.normalised:
            q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        arguments = declaration.call_arguments({"query": q, "key": k, "value": v, **visible, **passed})
        return attend(**(arguments | {"score": score})).attention_outputs

    found, back = jax.vjp(ours, *map(jnp.asarray, (q, k, v)), {n: jnp.asarray(x) for n, x in parameters.items()})
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=2e-5, rtol=2e-5)
    *of_inputs, of_parameters = back(jnp.asarray(d_out))
    every = [*zip("qkv", of_inputs, strict=True), *((n, of_parameters[n]) for n in parameters)]
    for (what, gradient), want in zip(every, gradients, strict=True):
        np.testing.assert_allclose(gradient, want.numpy(), atol=1e-4, rtol=1e-4, err_msg=what)
    if score is not None:  # and without it they are another model
        plain = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)).attention_outputs
        assert float(jnp.abs(plain - found).max()) > 1e-2


def test_every_family_with_a_score_is_here() -> None:
    named = {f"{case.config['model_type']} {case.part or ''}".strip() for case in CASES.values()}
    # Cross-attention and LongT5's decoder are T5's.
    same = {"longt5 decoder", "longt5 cross", "mt5 cross", "umt5 cross"}
    assert named | same == {*SCORED_FAMILIES, *IMAGE_FAMILIES, "llama4_text"}


@pytest.mark.parametrize("name", CASES)
def test_objects_of_transformers_are_read_like_their_fields(name: str) -> None:
    from transformers import AutoConfig

    case = CASES[name]
    said = copy.deepcopy(case.config)
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    wanted = ModelDeclaration.from_config(case.config, part=case.part).distinct
    assert ModelDeclaration.from_config(config, part=case.part).distinct == wanted
    assert ModelDeclaration.from_config(config.to_dict(), part=case.part).distinct == wanted
