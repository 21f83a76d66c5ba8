# What a person does with this repository. `make` alone lists it. Needs python3, a C++ compiler and GNU make.

PYTHON ?= python3
# Processes that run tests at once; each multi-rank test starts a few more of its own.
JOBS ?= 3
# Extra words for pytest, e.g. ARGS="-k parity -x"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help env lint test test-oldest test-gpu demo clean

help:  ## This list
	@echo "Onefold: every byte of training state is held once."
	@echo
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo "First time: make demo. Before a commit: make lint test. One test: make test ARGS='-k layout -x'."
	@echo "Another Python: make env PYTHON=python3.12. More cores: make test JOBS=8."

env: $(STAMP)  ## Create .venv with the locked requirements and this package, editable

$(STAMP): requirements/dev.txt pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Onefold needs Python 3.11 or newer; name one: make env PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: install the package python3-venv" \
	         "(Debian, Ubuntu: apt-get install python3-venv), or name another: make env PYTHON=..." >&2; exit 1; }
	@echo "Installing the locked requirements into $(VENV) (a minute or two, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements/dev.txt
	@if command -v $(CXX) >/dev/null; then export ONEFOLD_REQUIRE_NATIVE=1; else \
	    echo "No C++ compiler ($(CXX)): without the compiled host kernels, torch does their work more slowly," \
	         "and the tests of the kernels fail" >&2; fi; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lint: $(STAMP)  ## Style, types and sizes
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python scripts/sizes.py

test: $(STAMP)  ## All tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --durations=10 $(ARGS)

# What a release of torch can change: the graph, autograd's hooks, the compiler, saved tensors, and the bits of training.
OLDEST := 2.11
OLDEST_TESTS := $(patsubst %,tests/test_%.py,parity order accumulate backwards graphs recompute weight_access \
    parameters precision compile checkpoint meta offload)

test-oldest:  ## What training computes, with a PYTHON that has the oldest torch (2.11); installs nothing
	@$(PYTHON) -c 'import hypothesis, pytest, xdist, torch; assert torch.__version__.startswith("$(OLDEST).")' 2>/dev/null || { \
	    echo "test-oldest runs with a Python that has torch $(OLDEST), pytest, pytest-xdist, hypothesis and" \
	         "safetensors: make test-oldest PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import torch; print("torch", torch.__version__)'
	OMP_NUM_THREADS=1 PYTHONPATH=src $(PYTHON) -m pytest -n $(JOBS) --durations=10 $(ARGS) $(OLDEST_TESTS)

test-gpu:  ## Tests on CUDA devices, with the torch of PYTHON; installs nothing
	@$(PYTHON) -c 'import pytest, torch; assert torch.cuda.is_available()' 2>/dev/null || { \
	    echo "test-gpu runs with a Python that has pytest and a torch that sees a GPU:" \
	         "make test-gpu PYTHON=/path/to/python3" >&2; exit 1; }
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu --durations=10 $(ARGS)

demo: $(STAMP)  ## Train a small language model on 2 ranks under ZERO_3
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/lm/train.py --plan zero_3

clean:  ## Remove everything that make made, .venv included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
