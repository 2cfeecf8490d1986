# Two commands do everything on a fresh machine: `make demo` and `make test`. `make test-rest` runs tests that repeat
# those of `make test` for more models and settings, `make test-all` both and what neither has; `make test-gpu` what needs
# a GPU. Between two edits: `make check`, which is lint, types, the site and the tests that start no processes; and
# `make format`. `make docs` builds the site of docs/ in build/site. `make test-floor` runs all under the lowest versions
# supported, in an environment of its own (some 5 GB); `make test-cuda-build` the tests of `make test` under torch's build
# for CUDA, which needs no card.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# not quiet: mkdocs then counts no warnings, and --strict passes all
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal
# bytecode is kept also where an environment says not to: tests start hundreds of interpreters
RUN    := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# what a run imports, and so leaves bytecode of also where an environment says not to
IMPORTED := import accelerate, datasets, torch.distributed.fsdp, transformers.models.mixtral.modeling_mixtral
# what compares two orders of sums most
OF_SUMS := tests/parity tests/distributed/test_own_loss.py tests/moe/test_kernels.py tests/checkpoints/test_merge.py
# Another torch, say one for a given CUDA: TORCH="torch==2.11.0 --index-url ..." make install
TORCH  ?= torch==2.13.0
# versions of the other packages; none: the newest
TESTED ?= tests/tested.txt

SOURCE         := $(abspath $(VENV)/megablocks)
# without bytecode, which pip would compile of all modules, most of them never imported, in half of an install's time
PIP            := $(BIN)/python -m pip install --quiet --no-compile
PIP_MEGABLOCKS := $(PIP) --no-deps --no-build-isolation

# a command fails if any part of a pipe does
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

.PHONY: install megablocks demo test test-rest test-orders test-all test-gpu test-floor test-cuda-build check lint docs format clean

install: $(VENV)/.installed

# who only trains needs no linters, and no site
$(VENV)/.tools: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[lint,docs]" $(addprefix --constraint ,$(TESTED))
	touch $@

# torch first and alone: another package's range for it could pull in a newer build with gigabytes of CUDA.
# MegaBlocks last and without its pins (torch < 2.7.1): no resolver could put it beside this torch. No part of
# expertmesh needs it to import, so its failure is only told.
$(VENV)/.installed: pyproject.toml Makefile $(TESTED)
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) "setuptools>=77" wheel numpy packaging
	$(PIP) --no-build-isolation --editable ".[test]" $(addprefix --constraint ,$(TESTED))
	$(MAKE) --no-print-directory megablocks \
		|| echo "make install: MegaBlocks could not be installed; expertmesh works without it" >&2
	$(RUN) $(BIN)/python -c "$(IMPORTED)"
	touch $@

# MegaBlocks compiles its helper operators where it finds nvcc and a CUDA torch. For CUDA 13 it has to be relieved of an
# argument that CUB no longer takes; and if they will not compile all the same, its Python part is installed alone, which
# finds stand-ins for them in moe/kernels/megablocks_ops.py. (Merely to be downloaded, it asks for a GPU unless told of one.)
megablocks:
	rm -rf $(SOURCE)
	TORCH_CUDA_ARCH_LIST=9.0 $(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary megablocks \
		--dest $(SOURCE) megablocks==0.10.0
	tar --extract --gzip --strip-components 1 --directory $(SOURCE) --file $(SOURCE)/megablocks-0.10.0.tar.gz
	sed -i.orig -e 's/[[:space:]]stream,$$/ stream));/' -e '/^[[:space:]]*debug_synchronous));$$/d' $(SOURCE)/csrc/cumsum.h
	$(PIP_MEGABLOCKS) $(SOURCE) stanford-stk==0.7.1 || { \
		echo "make install: MegaBlocks' operators do not compile here; expertmesh stands in for them" >&2; \
		sed -i.orig 's/CUDA_HOME is not None/False/' $(SOURCE)/setup.py; \
		$(PIP_MEGABLOCKS) $(SOURCE) stanford-stk==0.7.1; }

demo: install
	$(RUN) $(BIN)/python -m benchmarks.demo --output-dir demo-run

# five at a time on two cores: each waits for its own ranks, processes and time limits, and the cores are never idle
test: lint
	$(RUN) $(PYTEST) --numprocesses 5 -m "not slow and not release"

test-rest: install
	$(RUN) $(PYTEST) -m "slow and not release"
	$(MAKE) --no-print-directory test-orders

# as on other processors: torch and MKL add the same numbers up in other orders, each by a variable that changes most on
# AMD and on Intel alike (without vector instructions; by the code for all processors); see tests/rounding.py
test-orders: install
	$(RUN) ATEN_CPU_CAPABILITY=default $(PYTEST) -m "not slow and not release" $(OF_SUMS)
	$(RUN) MKL_CBWR=COMPATIBLE $(PYTEST) -m "not slow and not release" $(OF_SUMS)

test-all: lint
	$(RUN) $(PYTEST)

# two at a time share the card
test-gpu: install
	$(RUN) $(BIN)/python -m pytest tests/gpu --numprocesses 2 --dist loadfile

# without the linters, which are the newest versions' alone
test-floor:
	$(MAKE) --no-print-directory VENV=.venv-floor TORCH=torch==2.11.0 TESTED=tests/floor.txt install
	$(RUN) .venv-floor/bin/python -m pytest --numprocesses 3 --dist worksteal

# under a build of torch for CUDA, from PyPI whatever else pip is told here, with or without a card (some 6 GB)
test-cuda-build:
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(MAKE) --no-print-directory VENV=.venv-cuda install
	$(RUN) .venv-cuda/bin/python -m pytest --numprocesses 3 --dist worksteal -m "not slow and not release"
	$(RUN) .venv-cuda/bin/python -m benchmarks.kernels

check: lint
	$(RUN) $(PYTEST) -m "not processes and not slow and not release"

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy | sed 's|^.package/expertmesh/||'
	$(MKDOCS)

# the site of docs/, in build/site; a broken link fails
docs: $(VENV)/.tools
	$(MKDOCS)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build demo-run .mypy_cache .pytest_cache .ruff_cache *.egg-info
