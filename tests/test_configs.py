"""The configurations that come with the project, and the scripts that start them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from moe import build_model, count_parameters
from sharding.planner.setting import OPTIMIZERS
from training import parse_config

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SIZES: dict[str, dict[str, Any]] = {
    "mixtral_8x7b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000},
    "mixtral_8x22b": {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "vocab_size": 32768},
}
HEADS = {"mixtral_8x7b": 32, "mixtral_8x22b": 48}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_key_is_known(file: Path) -> None:
    config = parse_config(["--config", str(file), "--dataset", "d", "--model", "m"])
    assert config.ep_size in (4, 8)


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("mixtral_8x7b", 8, "58.6 GB"),
        ("mixtral_8x22b", 32, "35.2 GB of 32 GPUs"),
        ("mixtral_8x22b", 8, "140.6 GB of 8"),
    ],
)
def test_memory_that_the_comments_state(name: str, gpus: int, said: str) -> None:
    hf = MixtralConfig(**SIZES[name], num_attention_heads=HEADS[name], num_key_value_heads=8, num_local_experts=8)
    counts = count_parameters(build_model(hf))
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert f"({counts.total / 1e9:.1f} B parameters)" in text
    config = parse_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), "--dataset", "d"])
    assert f"{counts.total / gpus * OPTIMIZERS[config.optim].total / 1e9:.1f} GB" in said
    assert said in text


@pytest.fixture
def flags(tiny_model: Path, tiny_data: Path) -> list[str]:
    return [
        str(ROOT / "configs" / "tiny.yaml"), "--model", str(tiny_model), "--dataset", str(tiny_data), "--use-cpu",
        "--ep-size", "2", "--max-steps", "2", "--per-device-train-batch-size", "4", "--logging-steps", "1",
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def test_torchrun_script(flags: list[str], tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "configs/launch/torchrun.sh"), *flags, "--output-dir", str(tmp_path / "out")]
    port = str(free_port())
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(GPUS_PER_NODE="2", PORT=port),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


FAKE_SRUN = """#!/usr/bin/env bash
# Stands in for Slurm's: two tasks; as with --kill-on-bad-exit, the first that fails ends the other.
shift
export SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait -n || { code=$?; kill $first $second 2>/dev/null; wait; exit $code; }
wait -n
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
if [ "$1" = show ]; then echo localhost; fi
"""


def test_slurm_script(flags: list[str], tmp_path: Path) -> None:
    """With stand-ins for srun and scontrol: it trains, and a run that ends with 75 is put into the queue again."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NODELIST": "n[1-2]", "CALLS": str(tmp_path / "calls")}

    def run(root: Path, **more: str) -> subprocess.CompletedProcess[str]:
        settings = environment(**slurm, **more, SLURM_SUBMIT_DIR=str(root))
        settings["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{settings['PATH']}"
        command = ["bash", str(ROOT / "configs/launch/slurm.sbatch"), *flags, "--output-dir", str(tmp_path / "out")]
        return subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)

    done = run(ROOT)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert (tmp_path / "calls").read_text() == "show hostnames n[1-2]\n"
    metrics = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]

    # the second rank is done a second after the first
    stub = "import os, time; time.sleep(int(os.environ['RANK'])); open(os.environ['RANK'], 'w'); raise SystemExit(75)"
    (tmp_path / "train_ep.py").write_text(stub)
    assert run(tmp_path).returncode == 75
    assert (tmp_path / "1").exists(), "every rank comes to its end"
    assert (tmp_path / "calls").read_text().endswith(f"requeue {slurm['SLURM_JOB_ID']}\n")
