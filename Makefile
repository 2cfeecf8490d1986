# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Another torch, say one for a given CUDA: TORCH="torch==2.11.0 --index-url ..." make install
TORCH  ?= torch==2.13.0

.PHONY: install demo test lint format clean

install: $(VENV)/.installed

# torch first and alone: another package's range for it could pull in a newer build with gigabytes of CUDA.
# MegaBlocks last and without its pins (torch < 2.7.1): no resolver could put it beside this torch. No part of
# expertmesh needs it to import, and beside a CUDA torch it may want a compiler: so its failure is only told.
$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) "setuptools>=77" wheel numpy packaging
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[test,lint]"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1 \
		|| echo "make install: MegaBlocks could not be installed; expertmesh works without it" >&2
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
