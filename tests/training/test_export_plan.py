"""What an export would refuse is refused before the first step, and so is a disk without room for it."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.run import disk
from expertmesh.training.run.disk import checkpoints_at_once
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import tell
from tests.families.configs import tiny_model
from tests.tiny import save_model, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 MB, so that all else that a run writes is small beside it."""
    path = tmp_path_factory.mktemp("model")
    save_model(path, vocab_size=2**15, hidden_size=64)
    save_tokenizer(path)
    return path


def run(ranks: RankPool, model: Path, data: Path, out: Path, *flags: Any) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a run."""
    argv = ["--model", model, "--dataset", data, "--use-cpu", "--max-steps", 2, "--output-dir", out, *flags]
    (told,) = ranks.run(tell, 1, list(map(str, argv)), join_group=False)
    return told


@pytest.mark.parametrize(
    ("flags", "file", "said"),
    [
        (["--adapter", "lora", "--adapter-format", "per-expert"], "", "--adapter-format per-expert: "),
        (["--adapter", "lora"], "vocab.txt", "vocab.txt: cannot be read: Input/output error"),
        (["--save-steps", "1"], "generation_config.json", "generation_config.json: eos_token_id is 'x'"),
    ],
    ids=["form", "side file", "generation config"],
)
def test_before_the_first_step(
    ranks: RankPool, tiny_data: Path, tmp_path: Path, flags: list[str], file: str, said: str
) -> None:
    base = tmp_path / "base"
    tiny_model("granitemoe", 0).save_pretrained(base)  # whose files have all of a layer's experts in one tensor
    save_tokenizer(base)
    if file == "vocab.txt":
        (base / file).symlink_to("/proc/self/mem")  # a regular file, whose beginning cannot be read
    elif file:
        (base / file).write_text('{"eos_token_id": "x"}')
    code, _, errors = run(ranks, base, tiny_data, tmp_path / "out", *flags)
    assert code == 2
    assert said in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    assert not (tmp_path / "out" / "checkpoints").exists()


def sizes(model: Path, work: Path, adapter: str) -> list[tuple[str, int, int]]:
    """Of what an engine writes, the bytes that were planned, and that there are."""
    settings: dict[str, Any] = {} if adapter == "none" else {"adapter": adapter, "merge": True}
    engine = expertmesh.load(model, use_cpu=True, **settings)
    tokens = engine.tokenizer(["some text to learn"], return_tensors="pt")
    engine.step({**tokens, "labels": tokens["input_ids"]})
    planned = {**engine.plan_exports(merges=adapter != "none"), "saved": engine.checkpoint_bytes}
    engine.export(work / ("hf" if adapter == "none" else "adapter"))
    if adapter != "none":
        engine.merge(work / "adapter", work / "hf")
    engine.save(work / "saved")
    there = {name: sum(f.stat().st_size for f in (work / name).rglob("*") if f.is_file()) for name in planned}
    return [(name, planned[name], there[name]) for name in sorted(planned)]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_sizes_are_known_before(ranks: RankPool, model: Path, tmp_path: Path, adapter: str) -> None:
    (found,) = ranks.run(sizes, 1, model, tmp_path, adapter)
    assert [name for name, _, _ in found] == ["hf", "saved"] if adapter == "none" else ["adapter", "hf", "saved"]
    for name, planned, there in found:
        # but for headers, tables and model cards, and what each tensor of a checkpoint takes beside its values
        assert planned <= there <= 1.02 * planned + 300_000, name


# ---- the disk ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or not resized(place, 1, "-t", "tmpfs", "none"):
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def resized(place: Path, megabytes: int, *more: str) -> bool:
    options = ["-o", f"{'' if more else 'remount,'}size={megabytes}m"]
    return subprocess.run(["mount", *options, *more, place], capture_output=True, check=False).returncode == 0


def test_a_disk_that_is_too_small(ranks: RankPool, model: Path, tiny_data: Path, small_disk: Path) -> None:
    """Refused where not even the export fits; where it fits, but not beside the checkpoint (50 MB), what was trained
    stays there, and is exported once there is room."""
    out = small_disk / "out"
    resized(small_disk, 12)
    code, _, errors = run(ranks, model, tiny_data, out)
    assert code == 2
    assert f"--output-dir {out}: the export takes 1" in errors
    assert "MB are free; free some, give another --output-dir" in errors
    assert not (out / "metrics.jsonl").exists()

    resized(small_disk, 61)
    code, said, errors = run(ranks, model, tiny_data, out)
    assert code == 2
    assert "disk    a checkpoint of 5" in said
    assert "checkpoints and export take 6" in errors + said
    saved = out / "checkpoints" / "step-00000002"
    assert "cannot be written: No space left on device; the weights are kept in " + str(saved) in errors
    assert errors.count("\n") == 1
    assert not (out / "hf").exists()

    resized(small_disk, 200)
    code, said, errors = run(ranks, model, tiny_data, out, "--resume", "auto")
    assert code == 0, errors
    assert "all 2 steps of --max-steps are already done" in said
    assert (out / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "num_steps", "expected"),
    [
        ({"save_steps": 0}, 100, 0),
        ({}, 0, 0),
        ({}, 100, 1),  # of the last step
        ({"save_steps": 10}, 100, 10),
        ({"save_steps": 30}, 100, 4),
        ({"save_steps": 10, "save_total_limit": 2}, 100, 3),  # the third until it is complete
        ({"save_steps": 10, "save_total_limit": 2, "eval_ratio": 0.1}, 100, 4),  # and the best
        ({"save_steps": 60, "save_total_limit": 5}, 100, 2),
    ],
)
def test_checkpoints_at_once(settings: dict[str, Any], num_steps: int, expected: int) -> None:
    config = TrainConfig(model="m", dataset=["d"], **settings)
    assert checkpoints_at_once(config, num_steps) == expected


GB = 10**9


@pytest.mark.parametrize(
    ("settings", "free", "said"),
    [
        ({}, 100, ["10 checkpoints of 6.0 GB + export of 2.0 GB = 62.0 GB in {out}, 100.0 GB free"]),
        ({"save_total_limit": 1}, 20, ["2 checkpoints of 6.0 GB + export of 2.0 GB = 14.0 GB in {out}, 20.0 GB free"]),
        ({}, 20, ["10 ", "62.0 GB together, and 20.0 GB are free; --save-total-limit 2 keeps as few as fit, or free"]),
        ({}, 7, ["10 ", "62.0 GB together, and 7.0 GB are free; --save-steps 0 saves none, or free"]),
        ({}, 5, "a training checkpoint takes 6.0 GB, and 5.0 GB are free; free some"),
        ({"on_save_error": "continue"}, 5, ["10 ", "62.0 GB together"]),
        ({"save_steps": 200}, 5, ["a checkpoint of 6.0 GB + export", "8.0 GB together, and 5.0 GB are free; --save-"]),
        ({}, 1, "the export takes 2.0 GB, and 1.0 GB are free; free some, give another --output-dir, or --no-export"),
    ],
)  # fmt: skip
def test_what_is_said_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], free: int, said: list[str] | str
) -> None:
    config = TrainConfig(**{"model": "m", "dataset": ["d"], "save_steps": 10, **settings})
    space = SimpleNamespace(f_bavail=free * GB, f_frsize=1, f_blocks=1)
    monkeypatch.setattr(disk.os, "statvfs", lambda _: space)
    number = checkpoints_at_once(config, 100)
    given = tmp_path, number, 6 * GB, {"hf": 2 * GB}, 100
    if isinstance(said, str):
        with pytest.raises(ExpertMeshError, match=said):
            disk._lines(config, *given, None)
        return
    lines = disk._lines(config, *given, (50 * free * GB, "a node with more"))
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part.format(out=tmp_path) in line
    least = disk._lines(replace(config, on_save_error="continue"), *given, (3 * GB - 1, "slow-node"))[0]
    assert f"in {tmp_path} on slow-node, 3.0 GB free" in least
    # of this node, what was found a moment before
    here = disk._lines(config, *given, (3 * GB, disk.node_name()))[0]
    assert f"in {tmp_path}, {free}.0 GB free" in here


def test_what_a_run_replaces_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of an earlier run or, where that goes on, its checkpoints; of a link, what it leads to stays."""
    (tmp_path / "hf").mkdir()
    (saved := tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for path, size in ((tmp_path / "hf" / "a", 2), (saved / "b", 3), (elsewhere / "c", 50)):
        with path.open("wb") as file:
            file.truncate(size * GB)
    (tmp_path / "adapter").symlink_to(elsewhere)
    monkeypatch.setattr(disk.os, "statvfs", lambda _: SimpleNamespace(f_bavail=4 * GB, f_frsize=1, f_blocks=1))
    for settings, room in (({"overwrite_output_dir": True}, 9), ({"resume": "auto"}, 7)):
        config = TrainConfig(model="m", dataset=["d"], **settings)
        (line,) = disk._lines(config, tmp_path, 1, 2 * GB, {"hf": 2 * GB}, 100, None)
        assert f"in {tmp_path}, {room}.0 GB free" in line
