# make run        the main example, from a fresh checkout
# make test       the tests that CI runs            make test-all   every test, slow ones too
# make lint       style                             make types      static types
# make docs       the manual, into site/            make clean      remove all that make has made

PYTHON ?= python3
VENV   ?= .venv

BIN        := $(VENV)/bin
RUN_STAMP  := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test

.DEFAULT_GOAL := run
.NOTPARALLEL:
.PHONY: run test test-all lint types docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make an install happen once, and again when pyproject.toml has changed.
$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,tpu,tokamax,flax,equinox,dev,docs]"
	touch $(RUN_STAMP) $@

run: $(RUN_STAMP)
	$(BIN)/python examples/main_job.py

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(TEST_STAMP)
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=attnops-search

lint: $(TEST_STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(TEST_STAMP)
	$(BIN)/python tools/check_types.py

docs: $(TEST_STAMP)
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .types build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
