"""The memory forecast of a run: told, held against the memory there is, and set beside what was measured."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.planning import rank_memory as memory
from expertmesh.training.planning.cluster_commands import main as plan
from expertmesh.training.planning.memory import Memory
from expertmesh.training.planning.rank_memory import Forecast, available_memory, resident
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.families.configs import tiny_config
from tests.sharding.planned import launched

GIB = 2**30


def forecast_of(lasting: float, activations: float, available: float) -> Forecast:
    held = Memory(parameters=lasting * GIB, activations=activations * GIB)
    return Forecast("loss", held, held, 1.0 * GIB, available * GIB)


def test_what_no_batch_fits_is_refused() -> None:
    """On a CPU, of which there are no plans, nothing is promised."""
    config = TrainConfig(model="m")
    with pytest.raises(
        ExpertMeshError, match=r"parameters 10\.0 \+ the process itself 1\.0 = 11\.0 GiB per rank"
    ) as raised:
        forecast_of(10, 1, 9).check(4, config)
    assert "may need less memory" in str(raised.value)
    forecast_of(10, 1, 9 + 2).check(4, config)


@pytest.mark.parametrize(
    "flags",
    [
        "--ep-size 2 --pp-size 2 --pipeline-layers 1,1 --gradient-checkpointing --elastic",
        "--bf16 --offload-activations --gradient-checkpointing --compile --eval-ratio 0.1",
        "--adapter lora --base-dtype nf4 --merge --optim adamw_bf16 --learning-rate 1 --gradient-checkpointing",
    ],
)
def test_what_would_fit_is_tried_by_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """The refusal of a run on GPUs names a command that takes what it says, and tries."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    tiny_config("mixtral").save_pretrained(tmp_path)
    given = ["--model", str(tmp_path), "--dataset", "d", "--max-seq-length", "64", "--resume", "auto"]
    config = parse_config([*given, *flags.split()])
    with pytest.raises(ExpertMeshError, match="to find settings that fit, run `") as raised:
        replace(forecast_of(10, 1, 0.8), before=0.0).check(4, config)
    command = shlex.split(str(raised.value).split("`")[1])
    assert command[:4] == ["python", "-m", "expertmesh.sharding", "plan"]
    assert plan([*command[3:], "--per-device-train-batch-size", "1", "--tp-size", "1", "--ep-size", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"fits on 4 GPUs \(.*; 2 per node\): .* of 0\.8 GiB per GPU", said)
    run = parse_config(launched(said))
    for name in ("model", "max_seq_length", "bf16", "optim", "adapter", "base_dtype"):
        assert getattr(run, name) == getattr(config, name)


@pytest.mark.parametrize(("available", "warned"), [(20, False), (13, True), (12, True)])
def test_a_close_fit_is_warned_of(available: float, warned: bool) -> None:
    lines = forecast_of(10, 1, available).details()
    assert "parameters 10.00 + activations 1.00 = 11.00 GiB" in lines[0]
    assert any(line.startswith("warning: ") for line in lines) == warned


def test_ranks_share_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_free", lambda: 8.0 * GIB)
    monkeypatch.setattr(memory, "_cgroup_free", lambda: 6.0 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_memory(torch.device("cpu"), before=0.5 * GIB) == (0.5 + 1.5) * GIB


def test_a_cgroups_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory._cgroup_free() is None
    for name, content in (("max", "max"), ("current", "300"), ("stat", "anon 1\ninactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(content)
    assert memory._cgroup_free() is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._cgroup_free() == 750


def run_with_little_memory(argv: list[str]) -> tuple[int, str]:
    """train_ep.py where all but a few kilobytes are taken."""
    whole = memory.available_memory
    memory.available_memory = lambda device, before: resident() + 1000.0
    try:
        return run_main(argv)
    finally:
        memory.available_memory = whole


@pytest.mark.slow
def test_a_run_that_cannot_fit(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]
    argv += ["--max-steps", "1", "--save-steps", "0", "--no-export", "--ep-size", "2"]
    code, errors = ranks.run(run_with_little_memory, 2, argv, join_group=False)[0]
    assert code == 2
    assert "--model does not fit: " in errors
    assert "--force starts anyway" in errors
    for code, errors in ranks.run(
        run_with_little_memory, 2, [*argv, "--force", "--overwrite-output-dir"], join_group=False
    ):
        assert code == 0, errors
