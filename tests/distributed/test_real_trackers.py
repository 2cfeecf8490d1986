"""Trackers themselves, on files of this machine: a run that is stopped, killed, resumed and ended, one that fails, and
trackers that break while a run trains. Each is read by its own means."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from tests.distributed.whole_runs import ROOT, lines
from tests.processes import processes
from tests.real.conftest import kept_packages

pytestmark = pytest.mark.slow

PACKAGES = (
    "mlflow-skinny==3.17.2", "cachetools", "cloudpickle", "databricks-sdk", "fastapi", "gitpython", "gitdb", "smmap",
    "google-auth", "importlib_metadata<9", "zipp", "pyasn1", "pyasn1_modules", "cryptography", "cffi", "pycparser",
    "python-dotenv", "sqlparse", "starlette", "uvicorn", "sqlalchemy", "greenlet", "alembic", "mako",
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-proto", "opentelemetry-semantic-conventions",
    "wandb==0.31.0", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-http-transport", "googleapis-common-protos", "cwevals",
    "trackio==0.43.0", "gradio_client", "httpx", "httpcore", "orjson", "python-multipart", "brotli", "websockets",
)  # fmt: skip
"""The trackers, and what they need of what we have not: by name, as they would bring other versions of what we have."""
ALL = ["tensorboard", "mlflow", "wandb", "trackio"]
SECONDS = 300.0
Asked = list[str]


@pytest.fixture(scope="module")
def packages() -> Path:
    return kept_packages("trackers", "--no-deps", *PACKAGES)


class Run:
    """train_ep.py on one rank with trackers, whose files are in `directory`."""

    def __init__(self, directory: Path, packages: Path, model: Path, data: Path, trackers: Asked):
        self.directory = directory
        self.packages = packages
        self.out = directory / "out"
        self.data = data
        self.words = [
            *("--model", str(model), "--dataset", str(data), str(data), "--output-dir", str(self.out), "--use-cpu"),
            *("--per-device-train-batch-size", "2", "--no-export", "--save-steps", "3", "--report-to", *trackers),
        ]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT / ".package")]),
            "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(directory),
            "TRACKIO_DIR": str(directory / "trackio"),
        }

    def __call__(
        self, *flags: str, code: int = 0, at: int = 0, then: Callable[[subprocess.Popen[str]], object] = id
    ) -> str:
        """What it printed.

        Args:
            then: is done once step `at` has been logged.
        """
        words = [sys.executable, str(ROOT / "train_ep.py"), *self.words, *flags]
        with (self.directory / "said").open("w+") as said:
            run = subprocess.Popen(words, env=self.environment, cwd=self.directory, stdout=said, stderr=said, text=True)
            try:
                end = time.monotonic() + SECONDS
                while self.last_step() < at and run.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                then(run)
                found = run.wait(SECONDS)
            finally:
                run.kill()
            said.seek(0)
            printed = said.read()
        assert found == code, printed[-3000:]
        return printed

    def last_step(self) -> int:
        """0: none; of a line that is being written nothing is read."""
        file = self.out / "metrics.jsonl"
        written = file.read_text().splitlines(keepends=True) if file.exists() else []
        return max((json.loads(line)["step"] for line in written if line.endswith("\n")), default=0)

    def ask(self, code: str) -> Any:
        """What Python with the trackers' packages prints as JSON."""
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def in_mlflow(self) -> list[Any]:
        """Of each run: its state, the settings, and the losses by step."""
        return self.ask(
            "import json; from mlflow import MlflowClient; client = MlflowClient()\n"
            "experiment = client.get_experiment_by_name('expertmesh').experiment_id\n"
            "print(json.dumps([[run.info.status, run.data.params,\n"
            "  {each.step: each.value for each in client.get_metric_history(run.info.run_id, 'loss')}]\n"
            "  for run in client.search_runs([experiment])]))"
        )

    def in_wandb(self) -> list[list[dict[str, Any]]]:
        """Of each start, in their order: what wandb itself reads in its file."""
        files = sorted((self.directory / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
        words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
        found = []
        for file in files:
            done = subprocess.run([*words, str(file)], env=self.environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            found.append([json.loads(line) for line in done.stdout.splitlines()])
        return found

    def in_tensorboard(self) -> tuple[str, dict[str, Any], dict[int, float]]:
        """Status, settings, and losses by step."""
        directory = self.out / "trackers" / "expertmesh"
        plugin = EventAccumulator(str(directory / "settings")).Reload().PluginTagToContent(metadata.PLUGIN_NAME)
        status = "RUNNING"  # as TensorBoard has it of one without an end
        if metadata.SESSION_END_INFO_TAG in plugin:
            end = metadata.parse_session_end_info_plugin_data(plugin[metadata.SESSION_END_INFO_TAG])
            status = cast(Any, api_pb2).Status.Name(end.status).removeprefix("STATUS_")
        begin = metadata.parse_session_start_info_plugin_data(plugin[metadata.SESSION_START_INFO_TAG])
        settings = {name: getattr(value, value.WhichOneof("kind")) for name, value in begin.hparams.items()}
        events = EventAccumulator(str(directory)).Reload().Scalars("loss")
        return status, settings, {event.step: event.value for event in events}

    def in_trackio(self) -> list[Any]:
        """Of each run: settings, losses by step, and the titles of its alerts."""
        return self.ask(
            "import json, trackio; from trackio.sqlite_storage import SQLiteStorage\n"
            "print(json.dumps([[run.config,\n"
            "  {row['step']: row['loss'] for row in SQLiteStorage.get_logs('expertmesh', run.name) if 'loss' in row},\n"
            "  [alert['title'] for alert in run.alerts()]] for run in trackio.Api().runs('expertmesh')]))"
        )


class MLflowServer(BaseHTTPRequestHandler):
    """As much of MLflow's REST API as a run asks for; it answers nothing more once `server.is_away`."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.is_away.is_set():  # type: ignore[attr-defined]
            self.close_connection = True
            return
        run = {"info": {"run_id": "0a1b", "run_uuid": "0a1b", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
        content = json.dumps({"run": run, "experiment_id": "1"} if "/runs/" in self.path else {"experiment_id": "1"})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *given: Any) -> None:
        """Not on the console."""


@contextmanager
def mlflow_server() -> Iterator[tuple[str, threading.Event]]:
    """Its address, and what is set once it is away."""
    with ThreadingHTTPServer(("127.0.0.1", 0), MLflowServer) as server:
        server.is_away = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.is_away  # type: ignore[attr-defined]
        server.shutdown()


def by_step(run: Run) -> dict[int, Any]:
    return {line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in lines(run.out)}


def numbered(steps: dict[str, float]) -> dict[int, float]:
    """Steps, which JSON has as words."""
    return {int(step): value for step, value in steps.items()}


def ends(records: list[dict[str, Any]]) -> tuple[bool, int | None]:
    """Whether wandb was told that a run is preempted, and its exit code."""
    exits = [record["exit"].get("exit_code", 0) for record in records if record["type"] == "exit"]
    return any(record["type"] == "preempting" for record in records), exits[0] if exits else None


def test_one_run_that_is_stopped_killed_and_finished(
    packages: Path, tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    run = Run(tmp_path, packages, tiny_model, tiny_data, ALL)
    long = ("--max-steps", "5000", "--resume", "auto")
    run(*long, code=75, at=4, then=lambda started: started.send_signal(signal.SIGTERM))
    stopped = run.last_step()
    ((status, settings, _),) = run.in_mlflow()
    assert (status, settings["dataset"]) == ("KILLED", str([str(tiny_data)] * 2))
    assert settings["report_to"] == str(ALL)
    status, settings, _ = run.in_tensorboard()
    assert (status, settings["dataset"]) == ("UNKNOWN", str([str(tiny_data)] * 2))
    assert run.in_trackio()[0][2] == ["Run stopped"]

    run(*long, code=-signal.SIGKILL, at=stopped + 5, then=lambda started: started.kill())
    assert [status for status, *_ in run.in_mlflow()] == ["RUNNING"]
    assert run.in_tensorboard()[0] == "RUNNING"

    killed = run.last_step()
    last = killed + 4
    run("--max-steps", str(last), "--resume", "auto")
    expected = by_step(run)
    assert set(expected) == set(range(1, last + 1))
    ((status, settings, losses),) = run.in_mlflow()
    assert (status, settings["max_steps"], numbered(losses)) == ("FINISHED", "5000", expected)
    status, settings, shown = run.in_tensorboard()
    assert (status, settings["max_steps"], shown) == ("SUCCESS", last, expected)
    ((settings, losses, alerts),) = run.in_trackio()
    assert (settings["dataset"], numbered(losses), alerts) == ([str(tiny_data)] * 2, expected, ["Run stopped"])
    starts = run.in_wandb()
    assert len({record["run"]["run_id"] for start in starts for record in start if record["type"] == "run"}) == 1
    assert [ends(start) for start in starts] == [(True, 75), (False, None), (False, 0)]
    told = [record["config"]["update"] for record in starts[0] if record["type"] == "config"]
    assert told[0]["dataset"] == [str(tiny_data)] * 2
    losses = {
        record["history"]["item"]["_step"]: record["history"]["item"]["loss"]
        for start in starts for record in start if record["type"] == "history" and "loss" in record["history"]["item"]
    }  # fmt: skip
    # what it had not written when it was killed; the run goes on from a checkpoint behind that
    lost = expected.keys() - losses.keys()
    assert all(stopped < step <= killed for step in lost)
    assert losses == {step: loss for step, loss in expected.items() if step not in lost}


def test_a_run_that_fails(packages: Path, tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    run = Run(tmp_path, packages, tiny_model, tiny_data, ALL)
    run("--max-steps", "20", "--learning-rate", "1e30", "--max-grad-norm", "0", code=2)
    assert [status for status, *_ in run.in_mlflow()] == ["FAILED"]
    assert run.in_tensorboard()[0] == "FAILURE"
    assert [alerts for *_, alerts in run.in_trackio()] == [["Run failed"]]
    assert [ends(start) for start in run.in_wandb()] == [(False, 1)]


def test_trackers_that_break(packages: Path, tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    """Amid a run: TensorBoard's disk is full, wandb's own process is killed, MLflow's server does not answer. The run
    goes on, without waiting for long, and says what gets nothing more."""

    def plant(started: subprocess.Popen[str]) -> None:
        (events,) = (run.out / "trackers" / "expertmesh").glob("events.*")
        events.unlink()
        events.symlink_to("/dev/full")
        for each in processes():
            if "wandb-core" in each.words[0] and f"WANDB_DIR={tmp_path}" in each.settings:
                os.kill(each.number, signal.SIGKILL)
        away.set()

    run = Run(tmp_path, packages, tiny_model, tiny_data, ["tensorboard", "mlflow", "wandb"])
    with mlflow_server() as (address, away):
        run.environment["MLFLOW_TRACKING_URI"] = address
        printed = run("--max-steps", "200", at=4, then=plant)
    seconds = [line["seconds"] for line in lines(run.out)]
    assert len(seconds) == 200
    # MLflow's own patience is over four minutes
    assert max(after - before for before, after in pairwise(seconds)) < 90
    for name in ("tensorboard", "mlflow", "wandb"):
        assert f"warning: --report-to {name} gets nothing more: " in " ".join(printed.split()), printed


def test_a_package_that_breaks(packages: Path, tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    """A new run is refused before its first step; one that is resumed goes on without the tracker."""
    run = Run(tmp_path, packages, tiny_model, tiny_data, ["mlflow"])
    run("--max-steps", "3")
    (broken := tmp_path / "broken" / "mlflow").mkdir(parents=True)
    (broken / "__init__.py").write_text("import this_is_gone\n")
    run.environment["PYTHONPATH"] = os.pathsep.join([str(broken.parent), run.environment["PYTHONPATH"]])
    gone = "--report-to mlflow{}: ModuleNotFoundError: No module named 'this_is_gone'"
    printed = run("--max-steps", "5", "--resume", "auto")
    assert gone.format(" gets nothing") in " ".join(printed.split())
    assert run.last_step() == 5
    assert f"error: {gone.format('')}" in run("--max-steps", "3", "--overwrite-output-dir", code=2)
