"""The memory forecast of a run: told, held against the memory there is, and set beside what was measured."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.checkpoints.training_state.saving import Saver
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime import memory
from expertmesh.sharding.runtime.memory import available_memory, free_of_process, free_on_host, resident
from expertmesh.training.cluster.commands import main as plan
from expertmesh.training.config.tasks import TASKS
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.data.batch import AS_LONG_AS_LONGEST, collate_rows
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.sequences import make_rows
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.planning import plan_command, rank_memory
from expertmesh.training.planning.memory import Memory
from expertmesh.training.planning.rank_memory import Forecast, longest_sequence
from expertmesh.training.run import run
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import tell_with_forecast
from tests.families.configs import tiny_config
from tests.sharding.planned import by_formula, launched
from tests.tiers import tiered
from tests.training.test_pairs import tokenizer_in

GIB = 2**30


def forecast_of(lasting: float, activations: float, available: float) -> Forecast:
    held = Memory(parameters=lasting * GIB, activations=activations * GIB)
    return Forecast("", "loss", held, 1.0 * GIB, available * GIB)


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
    """The refusal of a run on GPUs names a command that takes what it says, and tries (here by a formula)."""
    monkeypatch.setattr(plan_command, "_forecasts", by_formula)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    tiny_config("mixtral").save_pretrained(tmp_path)
    given = ["--model", str(tmp_path), "--dataset", "d", "--max-seq-length", "64", "--resume", "auto"]
    config = parse_config([*given, *flags.split()])
    with pytest.raises(ExpertMeshError, match="to find settings that fit, run `") as raised:
        replace(forecast_of(10, 1, 8), before=0.0).check(4, config)
    command = shlex.split(str(raised.value).split("`")[1])
    assert command[:4] == ["python", "-m", "expertmesh.sharding", "plan"]
    assert plan([*command[3:], "--per-device-train-batch-size", "1", "--tp-size", "1", "--ep-size", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"fits on 4 GPUs \(.*; 2 per node\): .* of 8\.0 GiB per GPU", said)
    run = parse_config(launched(said))
    for name in ("model", "max_seq_length", "bf16", "optim", "adapter", "base_dtype"):
        assert getattr(run, name) == getattr(config, name)


@pytest.mark.parametrize(("available", "warned"), [(20, False), (13, True), (12, True)])
def test_a_close_fit_is_warned_of(available: float, warned: bool) -> None:
    """On GPUs with what searches."""
    config = TrainConfig(model="m")
    lines = forecast_of(10, 1, available).details(4, config)
    assert "parameters 10.00 + activations 1.00 = 11.00 GiB" in lines[0]
    assert any(line.startswith("warning: ") for line in lines) == warned
    on_gpu = replace(forecast_of(10, 1, available), before=0.0).details(4, config)
    assert any("; to find settings that fit, run `python -m expertmesh.sharding plan" in line for line in on_gpu) == (
        warned and available < 11 / 0.9
    )


@pytest.mark.parametrize(("asks", "dense", "total"), [(True, 5, 16), (True, 2, 13.5), (False, 5, 13.5)])
def test_what_generations_keep_gathered(asks: bool, dense: float, total: float) -> None:
    """In place of a step's activations, where it is more."""
    asked = {"eval_generate": ["q"], "save_steps": 0} if asks else {"save_steps": 0}
    forecast = forecast_of(10, 2.5, 20).of_run(TrainConfig(model="m", **asked), 2, dense * GIB)
    assert forecast.total == pytest.approx(total * GIB)
    assert ("generation of answers" in forecast.details(4, TrainConfig(model="m"))[0]) == (total == 16)


@pytest.mark.parametrize(
    ("flags", "num_steps", "beyond"),
    [
        ("--save-steps 2", 3, 24),
        ("--save-steps 2 --eval-ratio 0.1", 2, 24),
        ("--save-steps 2", 2, 24 - 7),  # the last step's: its activations are gone
        ("--save-steps 2 --no-async-save", 3, 0),
        ("--save-steps 0", 3, 0),
        ("--save-steps 2", 0, 0),
    ],
)
def test_copies_for_a_checkpoint_are_a_part_of_it(flags: str, num_steps: int, beyond: float) -> None:
    """On a CPU; on a GPU they are in another memory."""
    config = parse_config(["--model", "m", "--dataset", "d", *flags.split()])
    plain = replace(forecast_of(10, 7, 100), copies=24.0 * GIB)
    found = plain.of_run(config, num_steps)
    assert found.total - plain.total == beyond * GIB
    assert found.copies == (24 * GIB if beyond else 0)
    on_gpu = replace(plain, before=0.0).of_run(config, num_steps)
    assert (on_gpu.total, on_gpu.copies) == (17 * GIB, found.copies)
    for forecast, where in ((found, f"{beyond:.2f} GiB beyond that peak"), (on_gpu, "in host memory")):
        lines = [line for line in forecast.details(1, config) if "24.00 GiB per rank, " + where in line]
        assert len(lines) == (beyond > 0)


def forecast_and_copied(argv: list[str]) -> tuple[float, int]:
    """Bytes of this rank's copies for a checkpoint."""
    found: dict[str, Any] = {}
    forecast, measure = run.forecast_memory, Saver.bytes_to_copy

    def forecasting(*given: Any) -> Forecast:
        found["forecast"] = forecast(*given)
        return found["forecast"]

    def measuring(saver: Saver, *given: Any) -> int:
        found["copied"] = measure(saver, *given)
        return found["copied"]

    with (
        mock.patch.object(run, "forecast_memory", forecasting),
        mock.patch.object(Saver, "bytes_to_copy", measuring),
    ):
        code, _, errors = tell_with_forecast(argv)
    assert code == 0, errors
    return found["forecast"].copies, found["copied"]


@pytest.mark.parametrize("flags", tiered(["--ep-size 2 --adapter lora"], slow=["--ep-size 2"]))
def test_copies_are_forecast_as_they_are_made(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, flags: str
) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]
    argv += ["--max-steps", "2", "--save-steps", "1", "--no-export", *flags.split()]
    found = ranks.run(forecast_and_copied, 2, argv, join_group=False)
    # AdamW counts its steps in four bytes for each parameter
    assert found[0][0] == pytest.approx(max(copied for _, copied in found), rel=0.01)


def test_ranks_share_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_on_host", lambda: 6.0 * GIB)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_memory(torch.device("cpu"), before=0.5 * GIB) == (0.5 + 1.5) * GIB
    # what limits a process each rank has of its own
    monkeypatch.setattr(memory, "free_of_process", lambda: 1.0 * GIB)
    assert available_memory(torch.device("cpu"), before=0.5 * GIB) == (0.5 + 1.0) * GIB


SLURM = "system.slice/slurmstepd.scope/job_1/step_0/user/task_0"
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def machine(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    """What the kernel reports on a host with 100 GiB free, in files. files: limits and what is used, by cgroup."""
    written = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo}
    written["proc/meminfo"] = f"MemTotal: 9 kB\nMemAvailable:  {100 * GIB // 1024} kB\nHugePages_Total:   0\n"
    for name, text in {**written, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(directory: str, limit: str, used: float, cache: float = 0, name: str = "max") -> dict[str, str]:
    values = {name: limit, "current": f"{used:.0f}\n", "stat": f"anon 1\ninactive_file {cache:.0f}\n"}
    return {f"{directory}/memory.{key}": value for key, value in values.items()}


def v1(directory: str, limit: float, used: float, cache: float = 0) -> dict[str, str]:
    values = {"limit_in_bytes": limit, "usage_in_bytes": used}
    stat = f"inactive_file 7\ntotal_inactive_file {cache:.0f}\n"
    return {f"memory/{directory}/memory.{key}": f"{n:.0f}\n" for key, n in values.items()} | {
        f"memory/{directory}/memory.stat": stat
    }


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files", "free"),
    [
        pytest.param("", "", {}, 100, id="nothing is told"),
        pytest.param("0::/\n", V2, v2(".", str(8 * GIB), GIB), 7, id="at the root, as in a cgroup namespace"),
        pytest.param(f"0::/{SLURM}\n", V2, v2(SLURM, str(8 * GIB), GIB), 7, id="of Slurm's task"),
        pytest.param(f"0::/{SLURM}\n", "", v2(SLURM, str(8 * GIB), GIB), 7, id="mounts are not told"),
        pytest.param(f"0::/{SLURM}\n", V2, v2(SLURM, "max", GIB), 100, id="no limit"),
        pytest.param(f"0::/{SLURM}\n", V2, v2(SLURM, str(8 * GIB), 6 * GIB, 3 * GIB), 5, id="page cache gives way"),
        pytest.param(f"0::/{SLURM}\n", V2, v2(SLURM, str(8 * GIB), GIB, name="high"), 7, id="where it is throttled"),
        pytest.param(
            f"0::/{SLURM}\n",
            V2,
            v2(SLURM, str(8 * GIB), GIB) | v2("system.slice/slurmstepd.scope/job_1", str(16 * GIB), 12 * GIB),
            4,
            id="of the job, of which other tasks take the most",
        ),
        pytest.param(f"0::/{SLURM}\n", V2, v2("user.slice", str(GIB), 0), 100, id="of another cgroup"),
        pytest.param("0::/../other\n", V2, v2(".", str(8 * GIB), GIB), 7, id="of another namespace"),
        pytest.param(
            "9:cpu,cpuacct:/\n4:memory:/slurm/job_1\n0::/\n",
            V1,
            v1("slurm/job_1", 2**63 - 4096, GIB) | v1("slurm", 8 * GIB, 6 * GIB, GIB),
            3,
            id="v1, beside an empty v2",
        ),
        pytest.param(
            "4:memory:/docker/ab\n",
            V1.replace("0:29 /", "0:29 /docker/ab"),
            v1(".", 8 * GIB, GIB),
            7,
            id="v1 in a container",
        ),
        pytest.param(
            "0::/kube/pod\n",
            V2.replace("/sys/fs/cgroup", "/mnt/cg"),
            {f"../../../mnt/cg/{name}": text for name, text in v2("kube", str(8 * GIB), GIB).items()},
            7,
            id="mounted elsewhere",
        ),
        pytest.param("0::/\n", V2, v2(".", str(8 * GIB), 9 * GIB), 0, id="over the limit"),
    ],
)
def test_limits_of_cgroups(tmp_path: Path, cgroup: str, mountinfo: str, files: dict[str, str], free: float) -> None:
    """The least of those of the process's own cgroup and of each that this is in."""
    assert free_on_host(machine(tmp_path, cgroup, mountinfo, files)) == free * GIB


def test_this_hosts_free_memory() -> None:
    assert 0 < free_on_host() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_limits_of_a_process(tmp_path: Path) -> None:
    assert free_of_process(tmp_path) == math.inf
    limited = f"""
import resource
from expertmesh.sharding.runtime.memory import free_of_process
resource.setrlimit(resource.RLIMIT_AS, ({8 * GIB}, {8 * GIB}))
before = free_of_process()
held = bytearray({GIB})
print(before, before - free_of_process())
resource.setrlimit(resource.RLIMIT_DATA, ({2 * GIB}, {2 * GIB}))
print(free_of_process())
"""
    said = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=True).stdout.split()
    before, held, after = map(float, said)
    # torch's libraries alone, where it is built for GPUs, take some of the addresses
    assert 4 * GIB < before < 8 * GIB
    assert held == pytest.approx(GIB, rel=0.01)
    # the process's own code is no data
    assert 0 < after < GIB


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_sequences_are_forecast_as_long_as_batches_have_them(tmp_path: Path, task: Any, packing: bool) -> None:
    """However far --max-seq-length is above the data."""
    tokenizer, data = tokenizer_in(tmp_path), tmp_path / "data.jsonl"
    rows = [{"prompt": "q" * n, "chosen": "12345", "rejected": "1" * n, "completion": "1" * n} for n in (1, 5, 9)]
    names = ("prompt", "chosen", "rejected") if task == "dpo" else ("prompt", "completion")
    data.write_text("".join(json.dumps({name: row[name] for name in names}) + "\n" for row in rows))
    samples = load_samples("--dataset", [str(data)], tokenizer, DataOptions(4096, kind=TASKS.get(task).records), seed=0)
    entries = make_rows(samples, packing, 4096, seed=0)
    config = TrainConfig(model="m", dataset=["d"], task=task, packing=packing, max_seq_length=4096)
    batches = [collate_rows(entries, [number], None, AS_LONG_AS_LONGEST) for number in range(len(entries))]
    most = max(batch.tokens_BS.numel() for batch in batches)
    # an odd number of tokens of packed pairs has no half
    assert most <= longest_sequence(entries, config) * config.sequences_per_row <= most + 1
    streamed = TrainConfig(model="m", dataset=["d"], streaming=True, max_steps=1, packing=packing, max_seq_length=4096)
    assert longest_sequence(entries, streamed) == 4096


def run_with_little_memory(argv: list[str]) -> tuple[int, str]:
    """train_ep.py where all but a few kilobytes are taken."""
    whole = rank_memory.available_memory
    rank_memory.available_memory = lambda device, before: resident() + 1000.0
    try:
        code, _, errors = tell_with_forecast(argv)
        return code, errors
    finally:
        rank_memory.available_memory = whole


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
