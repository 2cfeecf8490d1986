# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The suite and the demo are written for torch 2.13; a machine with a CUDA driver gets the default build instead.
TORCH  ?= torch==2.13.0

.PHONY: install demo test lint format clean

install: $(VENV)/.installed

# torch first and alone: another package's range for it could pull in a newer build with gigabytes of CUDA.
# MegaBlocks last and without its pins (see pyproject.toml); it is not needed to import any part of expertmesh.
$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" "setuptools>=77" wheel numpy packaging
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[test,lint]"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1
	touch $@

demo: install
	$(RUN) $(BIN)/python -m benchmarks.demo --output-dir demo-run

test: lint
	$(RUN) $(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo-run .mypy_cache .pytest_cache .ruff_cache *.egg-info
