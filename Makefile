# `make quickstart` and `make test` need nothing but Python 3.11 or newer: they make .venv, install, and run.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
WORKERS ?= 3
BIN := .venv/bin
PINS := pyproject.toml setup.py constraints.txt
# Kernels are compiled with the oldest Triton that pyproject.toml allows, too. Triton is for Linux only.
OLDEST_TRITON := $(if $(filter Linux,$(shell uname)),.venv/triton-3.6)

.PHONY: quickstart test lint clean

quickstart: .venv/core  ## fine-tune a small model, then ask it what it has learned
	$(BIN)/tune run sft nano/tools_lora
	$(BIN)/tune run evaluate nano/tools

# One thread for each worker, or they fight for the cores. Three workers, because many tests wait for other processes.
# Compiled modules are kept: tests start hundreds of processes.
test: .venv/dev $(OLDEST_TRITON)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --numprocesses $(WORKERS) --dist worksteal --durations 15 $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/python:
	@test -n "$(PYTHON)" || { echo "tunekit needs Python 3.11 or newer (with venv); none was found" >&2; exit 1; }
	@echo "Installing into .venv; the first time this takes a few minutes"
	$(PYTHON) -m venv .venv
	@touch $@

.venv/core: .venv/python $(PINS)
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable .
	@touch $@

.venv/triton-3.6: .venv/python
	rm -rf $@ $@.part
	$(BIN)/python -m pip install -qq --no-deps --target $@.part triton==3.6.0
	mv $@.part $@
	@touch $@

.venv/dev: .venv/python $(PINS)
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@mkdir -p .venv/typing/tunekit  # pyright looks up tunekit.recipes and tunekit.kernels here
	@ln -sfn ../../../recipes ../../../kernels .venv/typing/tunekit/
	@touch .venv/core $@
