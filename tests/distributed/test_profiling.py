"""--profile on ranks: the files, what stands in them, and that training does not notice."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.sharding.runtime.preemption import StopRequest
from expertmesh.sharding.torchrun import STOPPED
from expertmesh.training.report.profiles import BETWEEN
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import read, tell

STEPS = 4


def run(ranks: RankPool, world_size: int, model: Path, data: Path, out: Path, *flags: str) -> str:
    """Train and export at ep 2; what rank 0 says."""
    argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--use-cpu", "--ep-size", "2"]
    argv += ["--per-device-train-batch-size", "4", "--max-steps", str(STEPS), "--learning-rate", "1e-3", *flags]
    results = ranks.run(tell, world_size, argv, join_group=False)
    assert [code for code, _, _ in results] == [0] * world_size, results
    return str(results[0][1])


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Those of steps."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def names_in(out: Path) -> set[str]:
    return {file.name for file in (out / "profile").iterdir()}


def files_of(*profiles: str) -> set[str]:
    return {f"{profile}.{kind}" for profile in profiles for kind in ("json", "trace.json.gz")}


def profile_of(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "profile" / f"{name}.json").read_text())
    return found


def trace_of(out: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(out / "profile" / f"{name}.trace.json.gz", "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def is_in(event: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """Whether it lies within one of the others."""
    return any(o["ts"] <= event["ts"] and event["ts"] + event["dur"] <= o["ts"] + o["dur"] for o in others)


@pytest.mark.release
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, ("--gradient-checkpointing", "selective")),
        (
            4,
            (
                *("--gradient-checkpointing", "full", "--router-aux-loss-coef", "0.01", "--dense-shard", "hybrid"),
                *("--gradient-accumulation-steps", "2", "--optim", "muon"),
            ),
        ),
    ],
    ids=["selective", "full, hybrid"],
)
def test_training_keeps_its_bits(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, world_size: int, flags: tuple[str, ...]
) -> None:
    run(ranks, world_size, tiny_model, tiny_data, tmp_path / "plain", *flags)
    profiled = ("--profile", "1", "3", "--profile-ranks", "1")
    run(ranks, world_size, tiny_model, tiny_data, tmp_path / "profiled", *flags, *profiled)
    for name in ("loss", "grad_norm", "expert_tokens"):
        assert [line[name] for line in lines_of(tmp_path / "plain")] == [
            line[name] for line in lines_of(tmp_path / "profiled")
        ]
    weights, expected = read(tmp_path / "profiled" / "hf"), read(tmp_path / "plain" / "hf")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert names_in(tmp_path / "profiled") == files_of("rank-1.step-1", "rank-1.step-3")
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.release
def test_where_time_and_memory_went(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Steps 2 and 3 of two ranks: the trace, the sums made of it, the report and the log."""
    flags = ("--gradient-checkpointing", "selective", "--profile", "2-3", "--profile-ranks", "all")
    said = run(ranks, 2, tiny_model, tiny_data, tmp_path, *flags)
    assert names_in(tmp_path) == files_of("rank-0.steps-2-3", "rank-1.steps-2-3")
    assert "profiling steps 2-3 on all ranks\n" in said
    assert "profiled steps 2-3: rank 0 " in said
    kinds = "trace.json.gz and json; torch takes memory snapshots only on GPUs"
    assert f", in {tmp_path}/profile/rank-0.steps-2-3.* ({kinds}); one more per profiled rank, 2 in all\n" in said

    for rank in (0, 1):
        name = f"rank-{rank}.steps-2-3"
        profile, trace = profile_of(tmp_path, name), trace_of(tmp_path, name)
        assert (profile["rank"], profile["steps"], profile["device"]) == (rank, [2, 3], "cpu")
        parts = profile["parts"]
        assert {
            "expert GEMMs", "attention projections", "attention", "dispatch", "permute, combine", "router", "norms",
            "rotary", "residuals", "embedding", "LM head, loss", "FSDP", "clipping", "optimizer step",
            "gradients added up",
        } <= parts.keys()  # fmt: skip
        assert "lasting" not in parts
        steps = [event for event in trace if event["name"] in ("step 2", "step 3")]
        assert len(steps) == 2
        assert sum(event["dur"] for event in steps) / 1e6 == pytest.approx(profile["wall_seconds"], rel=1e-3)
        ranges = [event for event in trace if event["name"] in parts]
        for part in parts.keys() - {BETWEEN}:
            mine = [event["dur"] for event in ranges if event["name"] == part]
            assert len(mine) == parts[part]["calls"]
            assert sum(mine) / 1e6 == pytest.approx(parts[part]["seconds"], rel=1e-3, abs=1e-6)
        assert all(is_in(event, steps) for event in ranges)
        assert sum(figures["seconds"] for figures in parts.values()) == pytest.approx(profile["wall_seconds"])

        # a product is called in a range, or calls, as autograd does, in one
        products = [event for event in trace if event["name"] in ("aten::mm", "aten::addmm", "aten::bmm")]
        assert products
        assert all(is_in(event, ranges) or any(is_in(called, [event]) for called in ranges) for event in products)
        known = sum(figures["calls"] for figures in parts.values())
        assert parts.get("other", {"calls": 0})["calls"] < 0.1 * known

        assert parts["expert GEMMs"]["allocated_bytes"] > 0

    page = (tmp_path / "report.html").read_text()
    assert re.findall("<summary>(rank .*?)</summary>", page) == ["rank 0, steps 2 – 3", "rank 1, steps 2 – 3"]
    assert set(re.findall("</span>(.*?)</td>", page)) >= profile_of(tmp_path, "rank-0.steps-2-3")["parts"].keys()


@pytest.mark.release
def test_a_resumed_run_passes_over_what_is_behind_it(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    saving = ("--save-steps", "2")
    run(ranks, 2, tiny_model, tiny_data, tmp_path, *saving, "--profile", "1-2")
    shutil.rmtree(tmp_path / "hf")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    said = run(ranks, 2, tiny_model, tiny_data, tmp_path, *saving, "--profile", "1-3", "--resume", "auto")
    assert "resumed from" in said
    assert "profiling step 3 on rank 0\n" in said
    assert "warning" not in said
    assert names_in(tmp_path) == files_of("rank-0.steps-1-2", "rank-0.step-3")

    # a new run begins with none
    run(ranks, 2, tiny_model, tiny_data, tmp_path, "--overwrite-output-dir", "--profile", "4", "--no-export")
    assert names_in(tmp_path) == files_of("rank-0.step-4")


@pytest.mark.release
def test_what_comes_between_two_steps_is_not_profiled(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    between = ("--eval-ratio", "0.2", "--eval-steps", "2", "--save-steps", "3")
    run(ranks, 2, tiny_model, tiny_data, tmp_path, *between, "--profile", "1-4")
    assert names_in(tmp_path) == files_of("rank-0.steps-1-2", "rank-0.step-3", "rank-0.step-4")


def run_stopped(argv: list[str]) -> tuple[int, str, str]:
    """`tell`, stopped as if by a signal after two steps."""
    with mock.patch.object(StopRequest, "is_asked", side_effect=[False, True]):
        return tell(argv)


@pytest.mark.release
def test_a_run_that_is_stopped_leaves_what_it_has(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu"]
    results = ranks.run(run_stopped, 2, [*argv, "--max-steps", "4", "--profile", "1-3"], join_group=False)
    assert [code for code, _, _ in results] == [STOPPED] * 2, results
    assert names_in(tmp_path) == files_of("rank-0.steps-1-2")


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_stops_nothing(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "profile").write_text("in the way")
    said = run(ranks, 2, tiny_model, tiny_data, tmp_path, "--overwrite-output-dir", "--profile", "2")
    assert "warning: rank 0 has no profile of step 2: " in said
    assert "File exists" in said
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_steps_and_ranks_that_are_not_there(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu"]
    for flags, told in (
        (["--max-steps", "3", "--profile", "3-4"], "--profile 3-4: there is no step 4: the run has 3"),
        (["--profile", "1", "--profile-ranks", "2"], "--profile-ranks 2: the ranks are 0 to 1"),
    ):
        for code, _, errors in ranks.run(tell, 2, [*argv, *flags], join_group=False):
            assert code == 2
            assert not errors or told in errors
