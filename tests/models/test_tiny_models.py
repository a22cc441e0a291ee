"""Whole decoders of five model families against their formulas in NumPy, float64: the logits of a prefill, of chunks, and of 32
tokens one by one, on arrays and over pages, on one device and on eight; and the formulas against transformers' own modules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, LENGTH, tokens
from tiny_models_decoder import Decoder
from tiny_models_probe import RECORD, module_logits
from tiny_models_reference import reference_logits

PROMPT, CHUNK = 8, 4
QUICK = ("deepseek_v32", "minimax_m3_vl_text")
LATENT = [name for name in CONFIGS if name != "minimax_m3_vl_text"]
wanted = functools.cache(reference_logits)


def _mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()).reshape(4, 2), ("dp", "tp"))


def _close(name: str, logits: Any, first: int = 0, last: int = LENGTH) -> None:
    whole = wanted(name)
    np.testing.assert_allclose(logits, whole[:, first:last], rtol=0, atol=1e-5 * np.abs(whole).max())


def _in_steps(name: str, model: Decoder) -> None:
    """Two chunks of the prompt, then 32 tokens one by one."""
    ids = tokens(name)
    run, state, paged = jax.jit(model.step), model.cache.init(), hasattr(model.cache, "place")
    for first in (*range(0, PROMPT, CHUNK), *range(PROMPT, LENGTH)):
        count = CHUNK if first < PROMPT else 1
        place = model.cache.place(first, count) if paged else None
        logits, state = run(model.weights, state, ids[:, first : first + count], place, jnp.int32(first))
        _close(name, logits, first, first + count)


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS])
def test_over_pages(name: str) -> None:
    _in_steps(name, Decoder(name, paged=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_over_pages_of_eight_devices(name: str) -> None:
    _in_steps(name, Decoder(name, paged=True, mesh=_mesh()))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, form) for name in LATENT for form in ("expanded", "absorbed", None)), ("minimax_m3_vl_text", None)],
)
def test_on_arrays(name: str, form: str | None, devices: int) -> None:
    model = Decoder(name, paged=False, form=form, mesh=_mesh() if devices == 8 else None)
    logits, _ = jax.jit(model.step)(model.weights, {}, tokens(name), None, jnp.int32(0))
    _close(name, logits)
    _in_steps(name, model)


@pytest.mark.slow
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", LATENT)
def test_with_queries_made_of_their_latents(name: str, fold: bool) -> None:
    _in_steps(name, Decoder(name, paged=True, fold=fold, mesh=_mesh() if fold else None))
    model = Decoder(name, paged=False, fold=fold, form="absorbed" if fold else None)
    logits, _ = jax.jit(model.step)(model.weights, {}, tokens(name), None, jnp.int32(0))
    _close(name, logits)


# -- the formulas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formulas_are_those_of_transformers(name: str) -> None:
    """From the record of tiny_models_probe.py; without one, from transformers itself where it is installed."""
    if RECORD.exists():
        found = np.load(RECORD)[name]
    else:
        pytest.importorskip("torch", reason="there is no record, and torch isn't installed")
        pytest.importorskip("transformers", reason="there is no record, and transformers isn't installed")
        found = module_logits(name)
    np.testing.assert_allclose(found, wanted(name), rtol=0, atol=1e-5 * np.abs(wanted(name)).max())
