"""Fixtures shared by all tests: the pool of ranks, small models, tokenizers and data, all made on the spot."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# read when torch is imported: the other cores are the other ranks', and the tests' that run beside this one. More are
# another order of sums, for who asks for it
os.environ.setdefault("OMP_NUM_THREADS", "1")

# asked of the driver, CUDA is not begun in a process from which ranks are forked
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

if not torch.cuda.is_available():
    # read when triton is imported, by this process or a rank: kernels then run in Python, on the CPU
    os.environ["TRITON_INTERPRET"] = "1"

from tests.distributed.pool import RankPool, start_fork_server
from tests.gpus import SetCapability
from tests.tiers import mark_tiers
from tests.tiny import save_model, save_tokenizer

BEGUN = time.monotonic()
gc.disable()  # until all tests are collected, none of which is garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tiers(items)
    for item in items:
        if starts_processes(item):
            item.add_marker("processes")


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test is not for `make check`, between two edits: it takes ranks, watched processes, benchmarks, or what
    its module runs by `subprocess`."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    module = getattr(item, "module", None)
    return (
        "ranks" in fixtures
        or "campaign" in fixtures
        or "benchmarks" in item.path.parts
        or hasattr(module, "subprocess")
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin no more tests once the time is over that CI has, which would be stopped without a result."""
    if time.time() > float(os.environ.get("TESTS_END_AT", "inf")):
        pytest.skip("no time was left for it (TESTS_END_AT, in seconds since 1970)")


def pytest_collection_finish() -> None:
    # torch, transformers and the tests themselves stay; a collection that walks through them takes half a second
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # packages complain of objects that outlive the process
    # whose end somebody has to wait for: else the seconds of its forks, the ranks, are counted by nobody. What another
    # fork still holds of it would have that wait for ever
    fork_server: Any = forkserver
    stop = threading.Thread(target=fork_server._forkserver._stop, daemon=True)
    stop.start()
    stop.join(timeout=10.0)
    if "PYTEST_XDIST_WORKER" not in os.environ and not config.option.collectonly:
        print(f"\n{seconds_used(time.monotonic() - BEGUN, os.times())}")


def seconds_used(wall: float, times: os.times_result) -> str:
    """Of this process and of all that it, and what it started, waited for: workers, ranks, forks."""
    cpu = sum(times[:4])
    return f"{wall:.0f} s, and {cpu:.0f} CPU seconds, those of ranks and forks too; {os.cpu_count()} cores"


@pytest.fixture(scope="session")
def in_common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all processes of one run of the tests, which pytest-xdist starts, have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, in_common: Path) -> None:
    """Keep `datasets` and the planner from writing to, or reading from, the cache of whoever runs the tests.

    What the planner measures, and what is seen of models, is common to the processes that pytest-xdist starts.
    """
    directory = tmp_path_factory.mktemp("datasets-cache")
    os.environ["HF_DATASETS_CACHE"] = str(directory)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"  # what runs say is compared
    if "datasets" in sys.modules:
        # it read the variables when it was imported
        sys.modules["datasets"].config.HF_DATASETS_CACHE = directory
        sys.modules["datasets"].disable_progress_bars()
    os.environ["XDG_CACHE_HOME"] = str(in_common / "cache")
    if any("ranks" in getattr(item, "fixturenames", []) for item in request.session.items):
        start_fork_server()  # which has these variables, and nothing of any test


@pytest.fixture
def leaving_group() -> Iterator[None]:
    """For tests that load an engine in their own process, which stays in a process group of its own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def runner(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What runs the rows of tests/parity's table."""
    from tests.parity.runner import Runner  # which takes seconds that other tests need not

    return Runner(ranks, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Mixtral (8 experts, top-2, fp32, per-expert names) with a tokenizer."""
    path = tmp_path_factory.mktemp("tiny-mixtral")
    save_model(path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 rows of prompt and response, of unequal lengths."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"say {i}", "response": "x" * (i % 7 + 1) + str(i)} for i in range(50)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def set_capability(monkeypatch: pytest.MonkeyPatch) -> SetCapability:
    """Has torch report a GPU's compute capability."""
    return lambda found: monkeypatch.setattr("torch.cuda.get_device_capability", lambda *device: found)
