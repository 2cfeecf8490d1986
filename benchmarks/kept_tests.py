"""A pytest plugin that keeps each test's result as it ends, and leaves out those that an earlier session has kept:
`pytest -p benchmarks.kept_tests` with `KEPT_TESTS=FILE`. Under pytest-xdist it is the controller that writes.

A line of FILE is a JSON object: id, outcome ("passed", "failed", "skipped"), seconds, and of a failure its last lines.

After an illegal access every further call on a GPU fails in that process. A worker of pytest-xdist that has lost its
GPU so ends, and another takes its place: else it would fail all tests that are left, faster than the others run them.
"""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "KEPT_TESTS"
_BEFORE = "KEPT_TESTS_BEFORE"
"""How many results there were when this session began; set by the controller for workers."""
LOST = 70
"""Exit code of a worker that has lost its GPU."""


def read(file: Path) -> list[dict[str, Any]]:
    """The results so far; a line that is being written is left out."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def synchronize() -> None:
    """Wait for the GPU, where this process uses one.

    Raises:
        RuntimeError: a kernel has failed.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_configure(config: pytest.Config) -> None:
    file, is_worker = Path(os.environ[VARIABLE]), hasattr(config, "workerinput")
    if not is_worker and file.is_file():
        # a line that a killed process has not ended would run into the next
        content = file.read_bytes()
        os.truncate(file, content.rfind(b"\n") + 1)
    if not is_worker:
        os.environ[_BEFORE] = str(len(read(file)))
    config.pluginmanager.register(_Kept(file, is_worker), "kept-tests")


class _Kept:
    def __init__(self, file: Path, is_worker: bool):
        self.file = file
        self.is_worker = is_worker
        # all workers leave out the same, as tests go by their number: also one in the place of one that has crashed
        self.known = {each["id"] for each in read(file)[: int(os.environ[_BEFORE])]}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self.known]
        if left_out:
            items[:] = [item for item in items if item.nodeid not in self.known]
            config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """A kernel that fails after its test would be told of in the next one."""
        yield
        synchronize()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        try:
            synchronize()
        except RuntimeError:
            if self.is_worker:
                os._exit(LOST)  # what its test's call came to has been told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_told = report.when == "call" or report.outcome != "passed"
        if self.is_worker or not is_told or report.nodeid in self.known:
            return
        self.known.add(report.nodeid)
        line: dict[str, Any] = {"id": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            line["last"] = str(report.longrepr)[-2000:]
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"\n{line['outcome']} in {line['seconds']} s: {line['id']}", flush=True)
