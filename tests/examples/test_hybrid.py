"""The hybrid decoders: with transformers' weights their logits are transformers', whole and in parts, on one device and eight."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from hybrid_decoder_probe import MODELS, NEW, PROMPTS
from hybrid_rows import Rows, recorded, served_logits

pytest.importorskip("optax")

from attnops import Attention
from attnops.registry.model_declaration import ModelDeclaration

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "hybrid"
WITHIN = 3e-5  # of the largest logit
ALONE: dict[str, Any] = {"mesh": None, "sequence_parallel": "auto"}


@pytest.fixture
def hybrid(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("hybrid")


def close(found: Any, rows: Rows) -> None:
    """The logits are transformers', and so are the tokens that they choose."""
    wanted = rows.logits[rows.valid]
    np.testing.assert_allclose(np.asarray(found)[rows.valid], wanted, rtol=0, atol=WITHIN * np.abs(wanted).max())
    for row, prompt in enumerate(PROMPTS):
        chosen = np.asarray(found)[row, prompt - 1 : prompt + NEW - 1].argmax(-1)
        assert chosen.tolist() == rows.tokens[row, prompt : prompt + NEW].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_declarations_are_those_of_the_config(name: str) -> None:
    """Each file is what attnops reads from the config, with a mesh and how sequences are split."""
    declared = ModelDeclaration.from_config(FOLDER / name / "config.json", batch=8, q_len=128)
    files = {path.stem for path in (FOLDER / name).glob("*.json")} - {"config"}
    assert files == {file for kind in declared.distinct for file in kind.declarations}
    for kind in declared.distinct:
        for file, one in kind.declarations.items():
            split = "ring" if one is kind.declaration else "state"
            wanted = Attention(one, mesh={"dp": 2, "sp": 2, "tp": 2}, sequence_parallel=split)
            assert Attention(FOLDER / name / f"{file}.json") == wanted


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_called_as_in_transformers(hybrid: ModuleType, name: str) -> None:
    from hybrid_weights import shapes

    assert shapes(hybrid.Model.load(name)) == {key: x.shape for key, x in recorded(name).weights.items()}


def in_parts(hybrid: ModuleType, name: str, chunk: int, **metadata: Any) -> None:
    from hybrid_decoding import logits_in_parts

    model, rows = hybrid.Model.load(name, **metadata), recorded(name)
    placed = hybrid.placed(rows.weights, model.mesh)
    close(logits_in_parts(model, placed, rows.tokens, np.array(PROMPTS), chunk), rows)


@pytest.mark.parametrize("name", ["nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_chunks_of_ragged_prompts_and_64_tokens(hybrid: ModuleType, name: str) -> None:
    in_parts(hybrid, name, 32, **ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_whole_prompts_and_64_tokens(hybrid: ModuleType, name: str) -> None:
    in_parts(hybrid, name, max(PROMPTS), **ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_in_parts_on_eight_devices(hybrid: ModuleType, name: str) -> None:
    in_parts(hybrid, name, 32, mesh={"dp": 4, "tp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [1, 8])
def test_whole_sequences(hybrid: ModuleType, name: str, devices: int) -> None:
    """On eight devices rows, tokens and heads are split, as declared."""
    model, rows = hybrid.Model.load(name, **(ALONE if devices == 1 else {})), recorded(name)
    placed = hybrid.placed(rows.weights, model.mesh)
    run = jax.jit(lambda weights, tokens: model(weights, tokens, hybrid.Whole(model, tokens)))
    close(run(placed, rows.tokens), rows)
    for layer in model.layers:
        for attend in filter(None, (layer.attention, layer.recurrence, layer.convolution)):
            (plan,) = attend.plans
            assert plan.problem.devices == devices
            if devices == 8:
                found = plan.placement.sequence if attend is layer.attention else plan.placement
                assert found.strategy == ("ring" if attend is layer.attention else "state")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_served_from_pages_and_slots(hybrid: ModuleType, name: str) -> None:
    """Four sequences that come one after the other: chunks of prompts beside single tokens, 64 of each."""
    rows, steps = recorded(name), hybrid.Steps.load(name)
    close(served_logits(steps, hybrid.placed(rows.weights, None), rows), rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_served_by_the_loop(hybrid: ModuleType, name: str) -> None:
    """Continuous batching gives transformers' tokens: to prompts that come together, again to those whose prefixes are in the
    cache, and when pages are short, so that sequences give theirs back and run again."""
    rows = recorded(name)
    engine = hybrid.engine(hybrid.Steps.load(name), hybrid.placed(rows.weights, None))

    def serve(loop: Any) -> None:
        asked = [hybrid.Request(str(n), rows.tokens[n, :prompt].tolist(), NEW) for n, prompt in enumerate(PROMPTS)]
        loop.serve(asked)
        loop.pool.check()
        for n, prompt in enumerate(PROMPTS):
            assert asked[n].out == rows.tokens[n, prompt : prompt + NEW].tolist()

    loop = hybrid.ServingLoop(engine)
    serve(loop)
    assert (loop.totals.prefilled, loop.totals.matched) == (sum(PROMPTS), 0)
    serve(loop)
    # Whole multiples of four pages, each without the last token of its prompt.
    assert loop.totals.matched == sum((prompt - 1) // 32 * 32 for prompt in PROMPTS) > 0
    alone = hybrid.ServingLoop(engine, share=False)
    for number in range(3):
        alone.pool.alloc(("somebody", number), 8 * 32)
    serve(alone)
    assert alone.totals.preempted > 0


# The states are whole on each device of sp, whose recurrences repeat their work, of which a step warns.
@pytest.mark.filterwarnings("ignore::attnops.ShardingWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_served_on_eight_devices(hybrid: ModuleType, name: str) -> None:
    """Sequences are split over dp, the pages of each over sp, heads over tp."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("dp", "sp", "tp"))
    rows, steps = recorded(name), hybrid.Steps.load(name, mesh, pages_axis="dp", page_sequence_axis="sp")
    close(served_logits(steps, hybrid.placed(rows.weights, mesh), rows, mesh), rows)


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
@pytest.mark.parametrize("name", MODELS)
def test_training_on_eight_devices_is_training_on_one(hybrid: ModuleType, name: str) -> None:
    rows = np.random.default_rng(0).integers(0, 96, (4, 65)).astype(np.int32)
    found = []
    for metadata in (ALONE, {}):
        model = hybrid.Model.load(name, **metadata)
        trainer = hybrid.Trainer(model, hybrid.placed(hybrid.initial(model, 0), model.mesh), 10)
        found.append([trainer.step(rows) for _ in range(4)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    assert found[0][-1] < found[0][0] - 0.1


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_the_whole_example() -> None:
    command = [sys.executable, str(FOLDER / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
