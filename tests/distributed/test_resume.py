"""Training checkpoints: a run that is stopped and resumed, on any ranks, is the run that was never stopped."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import MixtralForCausalLM

from benchmarks.chaos import is_complete
from expertmesh import train_ep
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.training_state import resuming, saving
from expertmesh.checkpoints.training_state.marker import recorded_transposed, whole_checkpoints
from expertmesh.checkpoints.training_state.resuming import find_checkpoint
from expertmesh.checkpoints.training_state.saving import Saver
from expertmesh.moe.util.command import INTERRUPTED
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.training.data.batch import collate
from expertmesh.training.evaluate import Best
from expertmesh.training.finished import Finished
from expertmesh.training.loop import Run, Trained
from expertmesh.training.monitoring import log
from expertmesh.training.run import STOPPED
from tests.distributed.pool import RankPool
from tests.distributed.reference import attention_mask, random_samples
from tests.distributed.test_checkpoints import read
from tests.distributed.test_shards import DAMAGES, spoilt_by
from tests.distributed.test_train_ep import ROOT, assert_equal_weights, run_main
from tests.tiny import relative_error, save_model, save_tokenizer

# 50 rows in batches of 12: six steps end in the second epoch, and the fifth is a short batch
STEPS, SAVE_AT = 6, 4


def flags(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--use-cpu",
        "--max-steps", str(STEPS), "--save-steps", str(SAVE_AT), "--learning-rate", "1e-3", "--warmup-steps", "2",
        "--lr-scheduler-type", "cosine", "--weight-decay", "0.1", "--router-z-loss-coef", "0.01", *more,
    ]  # fmt: skip


def shares(world_size: int, accumulation: int = 1) -> list[str]:
    rows = 12 // (world_size * accumulation)
    return ["--per-device-train-batch-size", str(rows), "--gradient-accumulation-steps", str(accumulation)]


def run(ranks: RankPool, world_size: int, argv: list[str]) -> str:
    """What rank 0 wrote to standard error."""
    results = ranks.run(run_main, world_size, argv, join_group=False)
    assert [code for code, _ in results] == [0] * world_size, results
    return str(results[0][1])


def stop_at_checkpoint(finished: Path, out: Path) -> None:
    """Make `out` what a run killed between the checkpoint and the end leaves behind."""
    shutil.copytree(finished, out)
    shutil.rmtree(out / "hf")
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS:08d}")
    (out / "finished.json").unlink()


@pytest.fixture(scope="module")
def finished(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run at dp 2, ep 2, with checkpoints at step 4 of 6 and at its end."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run(ranks, 4, [*flags(tiny_model, tiny_data, out, *shares(4)), "--ep-size", "2"])
    assert [path.name for path in whole_checkpoints(out / "checkpoints")] == ["step-00000006", "step-00000004"]
    return out


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("world_size", "ep_size", "dense_shard"),
    [(4, 2, "full"), (4, 4, "full"), (4, 1, "full"), (1, 1, "full"), (2, 2, "full"), (4, 2, "hybrid")],
)
def test_resume_on_any_ranks(
    ranks: RankPool,
    finished: Path,
    tiny_model: Path,
    tiny_data: Path,
    tmp_path: Path,
    world_size: int,
    ep_size: int,
    dense_shard: str,
) -> None:
    out = tmp_path / "run"
    stop_at_checkpoint(finished, out)
    arrangement = ["--ep-size", str(ep_size), "--dense-shard", dense_shard, "--resume", "auto"]
    run(ranks, world_size, [*flags(tiny_model, tiny_data, out, *shares(world_size)), *arrangement])
    before, after = (
        [json.loads(line) for line in (p / "metrics.jsonl").read_text().splitlines()] for p in (finished, out)
    )
    assert [line["step"] for line in after] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "z_loss"):
        assert [line[name] for line in after] == pytest.approx([line[name] for line in before], rel=1e-5)
    weights, expected = read(out / "hf"), read(finished / "hf")
    assert_equal_weights(weights, expected)
    if (world_size, ep_size, dense_shard) == (4, 2, "full"):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("background", ["--async-save", "--no-async-save"])
def test_same_ranks_same_bits_with_noise_and_accumulation(
    ranks: RankPool, tiny_data: Path, tmp_path: Path, background: str
) -> None:
    """Dropout and router jitter resume from the same random state, in the middle of an epoch."""
    save_model(tmp_path / "model", router_jitter_noise=0.1, attention_dropout=0.1)
    save_tokenizer(tmp_path / "model")
    common = [*shares(2, accumulation=3), "--ep-size", "2", "--save-steps", "2", background]
    run(ranks, 2, [*flags(tmp_path / "model", tiny_data, tmp_path / "whole", *common)])
    expected = read(tmp_path / "whole" / "hf")
    for step in (2, 4):
        out = tmp_path / str(step)
        from_step = ["--resume", str(tmp_path / "whole" / "checkpoints" / f"step-{step:08d}")]
        run(ranks, 2, [*flags(tmp_path / "model", tiny_data, out, *common), *from_step])
        weights = read(out / "hf")
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_what_a_save_leaves_and_keeps(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Two of six are kept, nothing temporary stays, and the newest is the run's result."""
    out = tmp_path / "run"
    common = [*shares(2), "--ep-size", "2", "--save-steps", "1", "--save-total-limit", "2"]
    run(ranks, 2, flags(tiny_model, tiny_data, out, *common))
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006"]
    last = out / "checkpoints" / "step-00000006"
    assert checkpoints_main(["verify", str(last), str(out / "hf")]) == 0
    assert checkpoints_main(["verify", str(last), str(out / "checkpoints" / "step-00000005")]) == 1
    assert checkpoints_main(["export", str(last), str(tmp_path / "hf"), "--max-shard-size", "60KB"]) == 0
    exported, expected = read(tmp_path / "hf"), read(out / "hf")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert checkpoints_main(["inspect", str(last), "--check"]) == 0
    # and as EP shards
    assert checkpoints_main(["convert", str(last), str(tmp_path / "shards"), "--ep-size", "4"]) == 0
    assert checkpoints_main(["verify", str(tmp_path / "shards"), str(out / "hf")]) == 0


def run_with_late_copies(argv: list[str]) -> None:
    """A run whose checkpoints' tensors are copied as late as can be."""
    may_copy = threading.Event()
    stage, wait = DefaultStager._stage, Saver.wait_for_copies

    def late(self: Any, state: Any, **kwargs: Any) -> Any:
        assert may_copy.wait(60)
        may_copy.clear()
        return stage(self, state, **kwargs)

    def wait_for_copies(self: Saver) -> None:
        if self.copying is not None:
            may_copy.set()
        wait(self)

    with (
        mock.patch.object(DefaultStager, "_stage", late),
        mock.patch.object(Saver, "wait_for_copies", wait_for_copies),
    ):
        assert run_main(argv)[0] == 0


@pytest.mark.slow
def test_nothing_changes_before_it_is_copied(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    common = [*shares(2), "--ep-size", "2", "--save-steps", "1", "--max-steps", "3"]
    run(ranks, 2, flags(tiny_model, tiny_data, tmp_path / "plain", *common))
    ranks.run(run_with_late_copies, 2, flags(tiny_model, tiny_data, tmp_path / "late", *common), join_group=False)
    saved = sorted(path.name for path in (tmp_path / "plain" / "checkpoints").glob("step-*"))
    assert len(saved) == 3
    for name in saved:
        both = [str(tmp_path / variant / "checkpoints" / name) for variant in ("plain", "late")]
        assert checkpoints_main(["verify", *both]) == 0


def run_as_on_a_gpu(argv: list[str]) -> list[int]:
    """A run whose saver takes this for a GPU, but for pinning; how many tensors each staging found no memory for."""
    made: list[int] = []
    stage, new = StateDictStager.stage, StateDictStager._stage_untyped_storage

    def count_stage(self: Any, *given: Any, **settings: Any) -> Any:
        made.append(0)
        return stage(self, *given, **settings)

    def count_new(self: Any, storage: Any, *given: Any, **settings: Any) -> Any:
        made[-1] += storage not in self._cached_storage_mapping
        return new(self, storage, *given, **settings)

    def options(use_async_staging: bool, **others: bool) -> StagingOptions:
        assert others == {"use_pinned_memory": True, "use_shared_memory": False, "use_non_blocking_copy": True}
        return StagingOptions(False, False, use_async_staging, False)

    with (
        mock.patch.object(StateDictStager, "stage", count_stage),
        mock.patch.object(StateDictStager, "_stage_untyped_storage", count_new),
        mock.patch.object(saving, "_is_on_gpu", return_value=True),
        mock.patch.object(saving, "StagingOptions", options),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        code, said = run_main(argv)
        assert code == 0, said
    return made


@pytest.mark.slow
def test_memory_for_copies_is_made_before_the_first_checkpoint(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """After the first step, when it is copied into for nothing; a checkpoint then finds all but the random state's."""
    common = [*shares(1), "--save-steps", "2", "--max-steps", "4", "--no-export"]
    run(ranks, 1, flags(tiny_model, tiny_data, tmp_path / "plain", *common))
    argv = flags(tiny_model, tiny_data, tmp_path / "prepared", *common)
    (made,) = ranks.run(run_as_on_a_gpu, 1, argv, join_group=False)
    assert len(made) == 3
    assert made[0] > 50
    assert made[1:] == [1, 1]
    for name in ("step-00000002", "step-00000004"):
        both = [str(tmp_path / variant / "checkpoints" / name) for variant in ("plain", "prepared")]
        assert checkpoints_main(["verify", *both]) == 0


def resumed_logits(argv: list[str]) -> torch.Tensor:
    """Logits of the sharded model that a resumed run holds before its first step."""
    found = {}

    def instead_of_training(run: Run, resume_from: Path | None) -> Trained:
        assert resume_from is not None
        run.engine.load_state(resume_from)
        batch = collate([[sample] for sample in random_samples([9, 5])])
        with torch.no_grad():
            found["logits"] = run.model.eval()(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch)).logits
        return Trained(True, Best(), False)

    with mock.patch("expertmesh.training.run.train", instead_of_training):
        assert run_main([*argv, "--no-export"])[0] == 0
    return found["logits"]


@pytest.mark.slow
def test_export_gives_the_sharded_models_logits(
    ranks: RankPool, finished: Path, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Trained at dp 2, ep 2, saved, exported: transformers computes what the ranks compute."""
    saved = finished / "checkpoints" / "step-00000004"
    assert checkpoints_main(["export", str(saved), str(tmp_path / "hf")]) == 0
    batch = collate([[sample] for sample in random_samples([9, 5])])
    with torch.no_grad():
        model = MixtralForCausalLM.from_pretrained(tmp_path / "hf")
        expected = model(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch)).logits
    argv = [*flags(tiny_model, tiny_data, tmp_path / "out", *shares(4)), "--ep-size", "2", "--resume", str(saved)]
    is_token = attention_mask(batch).bool()
    for found in ranks.run(resumed_logits, 4, argv, join_group=False):
        assert relative_error(found[is_token], expected[is_token]) < 1e-5


@pytest.mark.sample(9)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_by_file_and_an_older_one_taken(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, finished: Path, tmp_path: Path, damage: str
) -> None:
    """File by file: named by --resume PATH as an error, by --resume auto as a warning. What one rank found all are
    told of in the same way, whatever it was: several ranks look for one kind of damage."""
    world_size = 2 if damage == "byte in the middle" else 1
    saved = finished / "checkpoints" / "step-00000004"
    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    assert {"checkpoint.json", "state/.metadata", "state/__3_0.distcp", "model/config.json"} <= set(names)
    for name in spoilt_by(damage, names):
        out = tmp_path / name.replace("/", "-")
        shutil.copytree(finished / "checkpoints", out / "checkpoints")
        shutil.rmtree(out / "checkpoints" / f"step-{STEPS:08d}")
        spoilt = out / "checkpoints" / saved.name
        DAMAGES[damage](spoilt / name)
        argv = [*flags(tiny_model, tiny_data, out, *shares(world_size)), "--ep-size", str(world_size)]
        results = ranks.run(run_main, world_size, [*argv, "--resume", str(spoilt)], join_group=False)
        assert [code for code, _ in results] == [2] * world_size
        assert str(spoilt / name) in results[0][1], results[0][1]
    # with an older one behind it, auto resumes from there and says so
    (out / "checkpoints" / "step-00000004").rename(out / "checkpoints" / "step-00000005")
    shutil.copytree(saved, out / "checkpoints" / "step-00000004")
    (out / "checkpoints" / "step-00000006").mkdir()
    told = run(ranks, world_size, [*argv, "--resume", "auto", "--no-export"])
    assert "step-00000006 is not complete and is skipped" in told
    assert f"step-00000005/{name}" in told
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [5, 6]


def test_nothing_to_resume_starts_afresh(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    run(ranks, 1, [*flags(tiny_model, tiny_data, tmp_path / "run", *shares(1)), "--resume", "auto", "--max-steps", "1"])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--seed", "7"], "that run had seed 42, this one has 7"),
        (["--gradient-accumulation-steps", "2"], "that run had global batch size 12, this one has 24"),
        (
            ["--rope-scaling", "yarn:2"],
            "that run had no --rope-scaling, this one has --rope-scaling yarn:2; take the same",
        ),
        (["--resume", "/no/such"], "/no/such"),
    ],
)
def test_another_run_is_not_resumed(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, finished: Path, tmp_path: Path, changes: list[str], said: str
) -> None:
    stop_at_checkpoint(finished, tmp_path / "run")
    argv = [*flags(tiny_model, tiny_data, tmp_path / "run", *shares(2)), "--ep-size", "2", "--resume", "auto", *changes]
    results = ranks.run(run_main, 2, argv, join_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert said in results[0][1]


def test_another_model_is_not_resumed(ranks: RankPool, tiny_data: Path, finished: Path, tmp_path: Path) -> None:
    for name, key, value in (("deeper", "num_hidden_layers", 3), ("wider", "intermediate_size", 64)):
        changes: dict[str, Any] = {key: value}
        save_model(tmp_path / name, **changes)
        save_tokenizer(tmp_path / name)
        stop_at_checkpoint(finished, tmp_path / f"{name} run")
        argv = [*flags(tmp_path / name, tiny_data, tmp_path / f"{name} run", *shares(1)), "--resume", "auto"]
        ((code, told),) = ranks.run(run_main, 1, argv, join_group=False)
        assert code == 2
        assert "is of another model" in told


def run_otherwise(argv: list[str]) -> tuple[int, str]:
    """A run with a transformers for which nothing beside experts is held transposed."""
    with mock.patch("expertmesh.moe.hf_model.build.hold_transposed"):
        return run_main(argv)


def test_a_checkpoint_with_matrices_the_other_way_round(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """It is exported as that run exported it, and its optimizer's state, of other rows, is not resumed."""
    name, out = "model.layers.0.self_attn.o_proj.weight", tmp_path / "run"
    argv = [*flags(tiny_model, tiny_data, out, *shares(1)), "--max-steps", "2", "--save-steps", "2"]
    ((code, told),) = ranks.run(run_otherwise, 1, argv, join_group=False)
    assert code == 0, told
    saved = out / "checkpoints" / "step-00000002"
    assert recorded_transposed(saved) == set()
    assert checkpoints_main(["export", str(saved), str(tmp_path / "hf")]) == 0
    weights, expected = read(tmp_path / "hf"), read(out / "hf")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert checkpoints_main(["verify", str(saved), str(out / "hf")]) == 0
    shutil.rmtree(out / "hf")
    ((code, told),) = ranks.run(run_main, 1, [*argv, "--max-steps", "3", "--resume", "auto"], join_group=False)
    assert code == 2
    assert str(saved) in told
    assert f"for which {name} is held the other way round" in told
    assert "`expertmesh-checkpoints export`" in told


def run_main_and_signal(argv: list[str], metrics: Path, number: int) -> tuple[int, str]:
    """train_ep.py on this rank; rank 1 gets a signal after two steps."""

    def send() -> None:
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    if os.environ["RANK"] == "1":
        threading.Thread(target=send, daemon=True).start()
    return run_main(argv)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preemption(
    ranks: RankPool, finished: Path, tiny_model: Path, tiny_data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """One rank is told to stop: all finish the step, save, and end with the code for it; then the run resumes."""
    out = tmp_path / "run"
    steps = 200
    argv = [*flags(tiny_model, tiny_data, out, *shares(4)), "--ep-size", "2", "--max-steps", str(steps)]
    argv += ["--lr-scheduler-type", "constant_with_warmup", "--save-steps", "1000"]
    results = ranks.run(run_main_and_signal, 4, argv, out / "metrics.jsonl", int(number), join_group=False)
    assert [code for code, _ in results] == [STOPPED] * 4
    (saved,) = whole_checkpoints(out / "checkpoints")
    step = int(saved.name.removeprefix("step-"))
    assert 2 <= step < steps
    assert len((out / "metrics.jsonl").read_text().splitlines()) == step
    if number == signal.SIGUSR1:
        return  # from here on the signal makes no difference
    more = ["--max-steps", str(step + 2)]
    run(ranks, 4, [*argv, *more, "--resume", "auto"])
    run(ranks, 4, [*argv, *more, "--output-dir", str(tmp_path / "whole")])
    weights, expected = read(out / "hf"), read(tmp_path / "whole" / "hf")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_stopped_run_with_adapters_is_at_the_step_it_stopped_at(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """In the log and the report, not at the step that it was to end at."""
    out, steps = tmp_path / "run", 400
    argv = [*flags(tiny_model, tiny_data, out, *shares(2)), "--ep-size", "2", "--adapter", "lora", "--lora-rank", "4"]
    argv += ["--max-steps", str(steps), "--save-steps", "1000"]
    results = ranks.run(run_main_and_signal, 2, argv, out / "metrics.jsonl", int(signal.SIGTERM), join_group=False)
    assert [code for code, _ in results] == [STOPPED] * 2
    (saved,) = whole_checkpoints(out / "checkpoints")
    step = int(saved.name.removeprefix("step-"))
    assert 2 <= step < steps
    logged = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(1, step + 1))
    report = (out / "report.html").read_text()
    assert f'"step":{step},"num_steps":{steps},' in report
    assert '"state":"finished"' not in report


INTERRUPTED_WHILE_SAVING = """
import os, signal, threading
from expertmesh import train_ep
from expertmesh.checkpoints.training_state import saving
from expertmesh.training import engine
from expertmesh.moe.util.command import run_command

writing, train_step = threading.Event(), engine.train_step

def write_for_ever(file):
    writing.set()
    threading.Event().wait()

def step(*arguments, **more):
    if engine.train_step.steps == 3:
        writing.wait()
        os.kill(os.getpid(), signal.SIGINT)
    engine.train_step.steps += 1
    return train_step(*arguments, **more)

step.steps = 1
saving._describe, engine.train_step = write_for_ever, step
run_command(train_ep.main)
"""


@pytest.mark.slow
def test_interrupted_while_saving(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves nothing of the checkpoint under way, one line, and the exit code that shells know."""
    argv = flags(tiny_model, tiny_data, tmp_path / "run", *shares(1), "--save-steps", "2")
    command = [sys.executable, "-c", INTERRUPTED_WHILE_SAVING, *argv]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=300)
    assert done.returncode == INTERRUPTED == 130
    assert done.stderr.startswith("rank 0 was interrupted in step 3, ")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_interrupted_command() -> None:
    """Quietly."""
    code = (
        "from expertmesh.moe.util.command import run_command; import os; run_command(lambda: os.kill(os.getpid(), 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


@pytest.fixture
def small_disk(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system on which one checkpoint of the tiny model fits, and two do not."""
    size = sum(file.stat().st_size for file in (finished / "checkpoints" / f"step-{SAVE_AT:08d}").rglob("*"))
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.sample(10)
@pytest.mark.parametrize("background", ["--async-save", "--no-async-save"])
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_full_disk(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, small_disk: Path, tmp_path: Path, on_error: str, background: str
) -> None:
    out = small_disk / "run"
    argv = [*flags(tiny_model, tiny_data, out, *shares(2)), "--ep-size", "2", "--save-steps", "2", "--no-export"]
    results = ranks.run(run_main, 2, [*argv, "--on-save-error", on_error, background], join_group=False)
    assert [code for code, _ in results] == [2 if on_error == "stop" else 0] * 2, results
    if on_error == "stop":
        assert "checkpoint of step 4" in results[0][1]
        assert "MB free" in results[0][1]
    else:
        assert len((out / "metrics.jsonl").read_text().splitlines()) == STEPS
    # the earlier one is complete, and nothing is left of the other
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002"]
    assert checkpoints_main(["inspect", str(out / "checkpoints" / "step-00000002"), "--check"]) == 0
    if on_error == "continue":
        return
    resumed = [*flags(tiny_model, tiny_data, tmp_path / "on", *shares(2)), "--save-steps", "0", "--resume"]
    run(ranks, 2, [*resumed, str(out / "checkpoints" / "step-00000002")])


def test_what_a_kill_leaves_behind(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, finished: Path, tmp_path: Path
) -> None:
    """Half of every file that a run writes, a half-written checkpoint, and a log cut off in the line of a step: the
    resumed run ends with the files of one that was never killed, and nothing beside them."""
    out = tmp_path / "run"
    stop_at_checkpoint(finished, out)
    logged = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(logged[:-40])
    for name in ("metrics.jsonl", "config.yaml", "environment.json", "report.html.4711"):
        (out / f"{name}.part").write_bytes(logged * 2)
    (out / "checkpoints" / "best.part").symlink_to("step-00000003")
    for name in (".hf-4711", "checkpoints/.step-00000005-4711"):
        (out / f"{name}.part").mkdir()
        (out / f"{name}.part" / "config.json").write_text("{")
    run(ranks, 4, [*flags(tiny_model, tiny_data, out, *shares(4)), "--ep-size", "2", "--resume", "auto"])
    found, expected = ({str(path.relative_to(p)) for path in p.rglob("*")} for p in (out, finished))
    assert found == expected
    assert is_complete(out / "metrics.jsonl", finished / "metrics.jsonl")
    weights, expected_weights = read(out / "hf"), read(finished / "hf")
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


@pytest.mark.parametrize("waits_as", ["new", "old"])
def test_a_named_checkpoint_whose_replacement_a_kill_interrupted(
    ranks: RankPool, finished: Path, tmp_path: Path, waits_as: str
) -> None:
    """It is found under its name, by --resume PATH and by the commands that read it, through a link too."""
    saved = tmp_path / "step-00000004"
    away = tmp_path / f".step-00000004-{waits_as}.part"
    (tmp_path / "best").symlink_to(saved.name)
    shutil.copytree(finished / "checkpoints" / saved.name, away)
    assert ranks.run(_find, 2, tmp_path / "best") == [tmp_path / "best"] * 2
    for command in (["inspect", str(saved)], ["verify", str(tmp_path / "best"), str(tmp_path / "best")]):
        saved.rename(away)
        assert checkpoints_main(command) == 0
    saved.rename(away)
    assert checkpoints_main(["export", str(saved), str(tmp_path / "hf")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "hf", saved.name]


def _find(path: Path) -> Path | None:
    return find_checkpoint(str(path), path.parent)[0]


@pytest.mark.slow
def test_to_check_a_checkpoint_may_take_longer_than_a_collective(ranks: RankPool, finished: Path) -> None:
    saved = finished / "checkpoints" / "step-00000006"
    assert ranks.run(_find_slowly, 2, saved, join_group=False) == [[saved, saved]] * 2


def _find_slowly(path: Path) -> list[Path | None]:
    """Rank 0 takes twice as long to read a file as a collective may."""
    group = start_process_group(use_cpu=True, timeout_seconds=60)
    _set_pg_timeout(timedelta(seconds=2))

    def slowly(*given: Any) -> None:
        if group.rank == 0:
            time.sleep(4 if not slept else 0)
            slept.append(given)

    slept: list[Any] = []
    found = []
    with mock.patch.object(resuming, "check_file", slowly):
        for named in ("auto", str(path)):
            slept.clear()
            found.append(find_checkpoint(named, path.parent, group)[0])
    _set_pg_timeout(timedelta(seconds=60))
    end_process_group()
    return found


@pytest.mark.slow
def test_going_back_gives_up_what_came_later(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Resumed from an earlier checkpoint than the newest, what it saves is the newest."""
    out = tmp_path / "run"
    constant = ["--lr-scheduler-type", "constant", "--warmup-steps", "0"]
    argv = [*flags(tiny_model, tiny_data, out, *shares(1)), *constant, "--save-steps", "1"]
    run(ranks, 1, argv)
    back = ["--resume", str(out / "checkpoints" / "step-00000003"), "--max-steps", "4", "--save-total-limit", "1"]
    run(ranks, 1, [*argv, *back])
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000004"]
    run(ranks, 1, [*argv, "--resume", "auto"])
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == list(range(1, 7))


@pytest.mark.release
def test_other_weights_or_data_are_not_resumed(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, finished: Path, tmp_path: Path
) -> None:
    """Other weights or data of the same shapes and counts are refused, but for what --allow-changed names."""
    save_model(tmp_path / "model", seed=1)
    save_tokenizer(tmp_path / "model")
    lines = tiny_data.read_text().splitlines()
    (tmp_path / "reversed.jsonl").write_text("\n".join(reversed(lines)))
    (tmp_path / "other.jsonl").write_text("\n".join(lines[:-1] + [lines[-1].replace("x49", "y49")]))
    assert checkpoints_main(["convert", str(tiny_model), str(tmp_path / "shards"), "--ep-size", "2"]) == 0
    cases: dict[str, tuple[Path, Path, list[str], str]] = {
        "model": (tmp_path / "model", tiny_data, [], "is of another model"),
        "form": (tmp_path / "shards", tiny_data, [], "which may contain the same weights in another form"),
        "order": (tiny_model, tmp_path / "reversed.jsonl", [], "the same samples in another order"),
        "data": (tiny_model, tmp_path / "other.jsonl", [], "is of other data"),
        "targets": (tiny_model, tiny_data, ["--train-on", "all"], "of which others are trained on"),
    }
    for name, (model, data, more, said) in cases.items():
        out = tmp_path / f"{name} run"
        stop_at_checkpoint(finished, out)
        argv = [*flags(model, data, out, *shares(2)), "--ep-size", "2", "--resume", "auto", *more]
        results = ranks.run(run_main, 2, argv, join_group=False)
        assert [code for code, _ in results] == [2, 2], name
        assert said in results[0][1]
        which = "model" if name in ("model", "form") else "data"
        assert f"--allow-changed {which}" in results[0][1]
        argv += ["--allow-changed", which]
        assert [code for code, _ in ranks.run(run_main, 2, argv, join_group=False)] == [0, 0], name


def _said(argv: list[str]) -> str:
    """What a run that ends well writes to standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        assert train_ep.main(argv) == 0
    return output.getvalue()


def test_a_run_beyond_its_steps_says_so(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, finished: Path, tmp_path: Path
) -> None:
    for steps, told in (
        (3, "the run is at step 4 already, beyond the 3 of --max-steps"),
        (SAVE_AT, "all 4 steps of --max-steps are done already: nothing is trained"),
    ):
        out = tmp_path / str(steps)
        stop_at_checkpoint(finished, out)
        argv = [*flags(tiny_model, tiny_data, out, *shares(1)), "--resume", "auto", "--max-steps", str(steps)]
        (said,) = ranks.run(_said, 1, argv, join_group=False)
        assert told in said
        assert "what is exported is the model of step 4" in said
        assert (out / "hf" / "model.safetensors").exists()


def test_what_is_not_exported_is_saved(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """The last step, also where --save-steps does not divide it."""
    argv = [*flags(tiny_model, tiny_data, tmp_path / "run", *shares(1)), "--no-export"]
    run(ranks, 1, argv)
    assert [path.name for path in whole_checkpoints(tmp_path / "run" / "checkpoints")] == [
        f"step-{step:08d}" for step in (STEPS, SAVE_AT)
    ]
    (said,) = ranks.run(_said, 1, [*argv, "--overwrite-output-dir", "--save-steps", "0"], join_group=False)
    assert "the trained weights are not saved" in said


def _tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was written, and what is in it."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize(
    "more",
    [[], ["--save-steps", "0"], ["--no-export"], ["--no-export", "--save-steps", "0"], ["--adapter", "lora"]],
    ids=" ".join,
)
def test_a_finished_run_started_again_does_nothing(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, more: list[str]
) -> None:
    """By the very same command, on other ranks, also where it was shorter than --save-steps."""
    out = tmp_path / "run"
    data = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(out), "--use-cpu"]
    argv = [*data, "--resume", "auto", "--max-steps", "2", "--global-batch-size", "4", *more]
    run(ranks, 2, argv)
    before = _tree(out)
    saved = [path.name for path in whole_checkpoints(out / "checkpoints")]
    assert saved == ([] if "0" in more else ["step-00000002"])
    for steps in ("2", "1"):
        (said,) = ranks.run(_said, 1, [*argv, "--max-steps", steps], join_group=False)
        assert f"finished already, at step 2{', more than the 1' if steps == '1' else ''}" in said
        assert _tree(out) == before
    ((code, said),) = ranks.run(run_main, 1, [*argv, "--seed", "7"], join_group=False)
    assert (code, "that run had seed 42, this one has 7" in said) == (2, True), said
    assert _tree(out) == before
    ((code, said),) = ranks.run(run_main, 1, [*argv, "--max-steps", "3"], join_group=False)
    if more == ["--save-steps", "0"]:
        assert (code, "finished at step 2 and left no training checkpoint" in said) == (2, True), said
        assert _tree(out) == before
    else:
        assert code == 0, said
        steps_made = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps_made == [1, 2, 3]
        (said,) = ranks.run(_said, 1, [*argv, "--max-steps", "3"], join_group=False)
        assert "finished already, at step 3" in said


def _without_a_record(argv: list[str]) -> str:
    """What a run says that cannot write finished.json."""
    with mock.patch.object(Finished, "write", side_effect=OSError(28, "No space left on device")):
        return _said(argv)


@pytest.mark.parametrize("adapter", [[], ["--adapter", "lora"]], ids=["", "adapter"])
def test_killed_between_export_and_record_a_run_without_checkpoints_has_finished(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, adapter: list[str]
) -> None:
    out = tmp_path / "run"
    argv = [*flags(tiny_model, tiny_data, out, *shares(1)), "--resume", "auto", "--max-steps", "1", "--save-steps", "0"]
    argv += adapter
    (said,) = ranks.run(_without_a_record, 1, argv, join_group=False)
    assert "finished.json was not written: No space left on device" in said
    before = _tree(out)
    exported = out / ("adapter" if adapter else "hf")
    exported.rename(out / f".{exported.name}-new.part")  # or a moment earlier
    (said,) = ranks.run(_said, 1, argv, join_group=False)
    assert "finished already, at step 1; nothing is trained or written" in said
    assert _tree(out) == before
    if adapter:
        ((code, said),) = ranks.run(run_main, 1, [*argv, "--merge"], join_group=False)
        assert (code, f"merge {tiny_model} {out / 'adapter'} {out / 'hf'}`" in said) == (2, True), said
        assert _tree(out) == before
        shutil.rmtree(out / "adapter")
    else:
        ((code, said),) = ranks.run(run_main, 1, [*argv, "--max-shard-size", "1MB"], join_group=False)
        assert (code, "finished at step 1 and left no training checkpoint" in said) == (2, True), said
        assert _tree(out) == before
        shutil.rmtree(out / "hf")
    (said,) = ranks.run(_said, 1, argv, join_group=False)  # what it has announced and is not there is made anew
    assert "finished already" not in said
    assert (out / "finished.json").exists()
    assert not list(out.glob("finished.json?*"))


def _without_a_report(argv: list[str]) -> str:
    """What a run says that ends before it can write report.html."""
    with mock.patch.object(log, "write_report", side_effect=OSError("killed")):
        return _said(argv)


@pytest.mark.parametrize("stale", [False, True], ids=["missing", "of a run under way"])
def test_killed_before_its_report_a_finished_run_gets_it_when_started_again(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, stale: bool
) -> None:
    out = tmp_path / "run"
    argv = [*flags(tiny_model, tiny_data, out, *shares(1)), "--resume", "auto", "--max-steps", "1", "--save-steps", "0"]
    ranks.run(_without_a_report, 1, argv, join_group=False)
    report = out / "report.html"
    assert not report.exists()
    if stale:
        report.write_text("running")
        os.utime(report, ns=(0, (out / "finished.json").stat().st_mtime_ns - 1))
    (said,) = ranks.run(_said, 1, argv, join_group=False)
    assert "finished already, at step 1" in said
    assert "report.html is written now" in said
    assert '"state":"finished"' in report.read_text()
    before = _tree(out)
    (said,) = ranks.run(_said, 1, argv, join_group=False)
    assert "report.html" not in said
    assert _tree(out) == before


def test_a_record_of_another_release(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Without a setting of exports, or a field, which counts as no record: nothing that it exported is lost."""
    out = tmp_path / "run"
    argv = [*flags(tiny_model, tiny_data, out, *shares(1)), "--resume", "auto", "--max-steps", "1", "--save-steps", "0"]
    run(ranks, 1, argv)
    record = json.loads((out / "finished.json").read_text())
    del record["settings"]["max_shard_size"]
    for content, told in (
        (json.dumps(record), "finished at step 1 and left no training checkpoint to go on from"),
        (json.dumps({**record, "order": None}), "already contains hf"),
        ("{", "already contains hf"),
    ):
        (out / "finished.json").write_text(content)
        before = _tree(out)
        ((code, said),) = ranks.run(run_main, 1, argv, join_group=False)
        assert (code, told in said) == (2, True), said
        assert _tree(out) == before


def test_an_export_that_is_gone_is_made_again(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "hf")
    argv = [*flags(tiny_model, tiny_data, out, *shares(1)), "--resume", "auto"]
    (said,) = ranks.run(_said, 1, argv, join_group=False)
    assert "finished already" not in said
    assert "all 6 steps of --max-steps are done already" in said
    weights, expected = read(out / "hf"), read(finished / "hf")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
