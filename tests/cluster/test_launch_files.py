"""configs/launch/skypilot.yaml and trainjob.yaml as SkyPilot and Kubeflow Trainer read them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertmesh.training.config.train_config import parse_config
from tests.distributed.whole_runs import ROOT
from tests.real.conftest import kept_packages

pytestmark = pytest.mark.slow

TRAINER = "kubeflow-trainer-api==2.3.0"
SKYPILOT = (
    "skypilot==0.14.1", "aiofiles", "aiohappyeyeballs", "aiohttp", "aiosignal", "aiosqlite", "alembic", "asyncpg",
    "attrs", "bcrypt", "bracex", "cachetools", "casbin", "cffi", "click<8.2", "cryptography", "durationpy", "fastapi",
    "frozenlist", "gitdb", "gitpython", "greenlet", "httpcore", "httptools", "httpx", "ijson", "importlib_metadata<9",
    "invoke", "jsonschema", "jsonschema-specifications", "kubernetes", "mako", "multidict", "oauthlib",
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions", "orjson", "paramiko", "passlib",
    "pendulum", "prettytable", "prometheus-client", "propcache", "psycopg2-binary", "pulp", "pycasbin", "pycparser",
    "pyjwt", "pynacl", "python-dateutil<2.10", "python-dotenv", "python-multipart", "referencing", "requests-oauthlib",
    "rpds-py", "setproctitle", "simpleeval", "six", "smmap", "sqlalchemy", "sqlalchemy-adapter", "starlette",
    "tabulate", "uvicorn", "watchfiles", "wcmatch", "wcwidth", "websocket-client", "websockets", "yarl", "zipp",
)  # fmt: skip
"""SkyPilot, and what it needs of what we have not."""
READ_TASK = (
    "import json, sys; from sky import Task; task = Task.from_yaml(sys.argv[1]); (found,) = task.resources\n"
    "print(json.dumps([task.num_nodes, found.accelerators, task.setup, task.run]))"
)
READ_JOB = (
    "import json, sys, yaml; from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as Job\n"
    "print(json.dumps(Job.from_dict(yaml.safe_load(open(sys.argv[1]))).to_dict(), default=str))"
)


def ask(packages: Path, code: str, file: Path, home: Path) -> tuple[int, str]:
    """Exit code and output of Python with other packages."""
    environment = {**os.environ, "PYTHONPATH": str(packages), "HOME": str(home)}
    environment["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
    words = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def skypilot() -> Path:
    return kept_packages("skypilot", "--no-deps", *SKYPILOT)


def test_skypilot(skypilot: Path, tmp_path: Path) -> None:
    """SkyPilot takes the file, and what it would run starts torchrun on each node with flags of train_ep.py."""
    code, said = ask(skypilot, READ_TASK, ROOT / "configs/launch/skypilot.yaml", tmp_path)
    assert code == 0, said
    nodes, accelerators, setup, run = json.loads(said.splitlines()[-1])
    assert (nodes, accelerators, setup) == (2, {"H100": 8}, "make install")

    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("PATH=$PWD/.venv/bin:$PATH")
    (torchrun := tmp_path / ".venv/bin/torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    given = {
        "SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"
    }  # fmt: skip
    environment = {**os.environ, **given}
    done = subprocess.run(["bash", "-e", "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")[:-1]
    script = words.index(next(word for word in words if word.endswith("train_ep.py")))
    told = dict(zip(words[:script:2], words[1:script:2], strict=True))
    assert [told[name] for name in ("--nnodes", "--nproc-per-node", "--rdzv-endpoint")] == ["2", "8", "10.0.0.1:29500"]
    words = [word.replace("configs/", f"{ROOT}/configs/") for word in words[script + 1 :]]
    assert parse_config(words).resume == "auto"


def test_skypilot_refuses_what_it_does_not_know(skypilot: Path, tmp_path: Path) -> None:
    """Else it would say nothing of a mistake in the file."""
    (wrong := tmp_path / "wrong.yaml").write_text(
        (ROOT / "configs/launch/skypilot.yaml").read_text().replace("num_nodes", "nodes")
    )
    code, said = ask(skypilot, READ_TASK, wrong, tmp_path)
    assert code != 0
    assert "nodes" in said


def test_train_job(tmp_path: Path) -> None:
    """Kubeflow's models keep every field: they leave out those that they do not know, which is how a mistake shows."""
    packages = kept_packages("kubeflow", "--no-deps", TRAINER)
    file = ROOT / "configs/launch/trainjob.yaml"
    job = yaml.safe_load(file.read_text())
    code, said = ask(packages, READ_JOB, file, tmp_path)
    assert code == 0, said
    assert given(json.loads(said)) == given(job)
    job["spec"]["trainer"]["nodes"] = job["spec"]["trainer"].pop("numNodes")
    (wrong := tmp_path / "wrong.yaml").write_text(yaml.safe_dump(job))
    code, said = ask(packages, READ_JOB, wrong, tmp_path)
    assert code != 0 or given(json.loads(said)) != given(job)


def given(fields: Any) -> Any:
    """Without what is not set."""
    if isinstance(fields, dict):
        return {name: given(value) for name, value in fields.items() if value is not None}
    return [given(value) for value in fields] if isinstance(fields, list) else fields
