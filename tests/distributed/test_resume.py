"""Training checkpoints: a run that is stopped and resumed, on any ranks, is the run that was never stopped."""

import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.distributed_c10d import _set_pg_timeout

from benchmarks.runs import is_complete
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.training_state import marker, saving
from expertmesh.checkpoints.training_state.marker import read_marker
from expertmesh.checkpoints.training_state.resuming import find_checkpoint
from expertmesh.checkpoints.training_state.saving import Saver
from expertmesh.moe.util.command import INTERRUPTED
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.torchrun import STOPPED
from tests.distributed.pool import RankPool
from tests.distributed.test_shards import DAMAGES
from tests.distributed.whole_runs import (
    ROOT,
    SIX_STEPS,
    Ended,
    Runs,
    Told,
    assert_equal_weights,
    assert_same_bits,
    batch_of_12,
    read,
    stop_at_checkpoint,
    tell,
    tell_signalled,
)
from tests.families.configs import tiny_model as tiny_family
from tests.rounding import OTHER_ORDER, near
from tests.tiers import tiered
from tests.tiny import save_model, save_tokenizer


class Layout(NamedTuple):
    """Of a global batch of 12 sequences, three in a forward."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    shard: str = "full"
    chunks: int = 1

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self._asdict().items() if value not in (1, "full"))

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def flags(self) -> str:
        accumulation = 4 // (self.dp * self.ep // (self.cp * self.tp))
        return (
            f"--pp-size {self.pp} --ep-size {self.ep} --cp-size {self.cp} --tp-size {self.tp} "
            f"--dense-shard {self.shard} --pipeline-chunks {self.chunks} "
            f"--per-device-train-batch-size 3 --gradient-accumulation-steps {accumulation}"
        )


def of_mixtral(path: Path, **changes: Any) -> None:
    save_model(path, **{"num_hidden_layers": 4, "num_key_value_heads": 4, **changes})


def of_deepseek(path: Path) -> None:
    """With a layer that has no experts, and routers with correction biases."""
    model: Any = tiny_family("deepseek_v3", seed=1, num_hidden_layers=4)
    model.to(torch.bfloat16).save_pretrained(path)


MODELS: dict[str, Callable[[Path], None]] = {
    "mixtral": of_mixtral,
    "shallow": lambda path: of_mixtral(path, num_hidden_layers=2),
    "tied": lambda path: of_mixtral(path, tie_word_embeddings=True),
    "noise": lambda path: of_mixtral(path, router_jitter_noise=0.1, attention_dropout=0.1),
    "deepseek": of_deepseek,
}
Finished = Callable[[str, Layout, str], Ended]


@pytest.fixture(scope="module")
def deep(ranks: RankPool, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, Path(), tiny_data, tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def whole(deep: Runs) -> Finished:
    """A run with checkpoints at step 4 of 6 and at its end; made when first asked for."""

    @cache
    def made(model: str, layout: Layout, flags: str) -> Ended:
        path = deep.directory / model
        if not path.exists():
            MODELS[model](path)
            save_tokenizer(path)
        out = deep.directory / f"run-{len(list(deep.directory.iterdir()))}"
        ended = deep(layout.size, f"--model {path} {SIX_STEPS} {layout.flags} {flags}", out)
        assert ended.saved == [4, 6]
        return ended

    return made


ONE, SQUARE, TWO_STAGES = Layout(), Layout(dp=2, ep=2), Layout(pp=2)
STAGES, HEADS, POSITIONS = Layout(pp=2, ep=2), Layout(ep=2, tp=2), Layout(ep=2, cp=2)
"""Two ranks with half of all layers, with half of every attention layer's heads, and with half of every sequence."""
KINDS_OF_STATE = {
    # flags, tolerance of weights
    "lora": ("--adapter lora --lora-rank 4", 1e-4),
    "8-bit": ("--optim adamw_torch_8bit", 3e-5),
    "muon": ("--optim muon", 2e-5),
    "shampoo": ("--optim shampoo --shampoo-start 2 --shampoo-block-size 24", 2e-5),
    "biases": ("--router-bias-update-rate 0.001", 2e-5),
    "no background": ("--no-async-save", 2e-5),
    "": ("", 2e-5),
}
RESUMED = tiered(
    # model, layout before, layout after, kind of state
    quick=[("shallow", SQUARE, Layout(ep=4), "")],
    slow=[
        ("noise", Layout(ep=2), Layout(ep=2), ""),
        *(("mixtral", before, after, "") for before, after in [(SQUARE, ONE), (STAGES, HEADS), (POSITIONS, STAGES)]),
        *(("mixtral", TWO_STAGES, ONE, "lora"), ("deepseek", TWO_STAGES, TWO_STAGES, "biases")),
    ],
    release=[
        *(("mixtral", before, after, "") for before, after in [(SQUARE, SQUARE), (HEADS, POSITIONS)]),
        *(("mixtral", TWO_STAGES, TWO_STAGES, "lora"), ("deepseek", TWO_STAGES, ONE, "biases")),
        *(("mixtral", SQUARE, Layout(dp=2, ep=2, shard="hybrid"), ""), ("mixtral", POSITIONS, Layout(ep=4, tp=4), "")),
        *(("mixtral", STAGES, after, "") for after in (STAGES, Layout(pp=2, ep=2, cp=2), Layout(pp=4, ep=2))),
        *(("mixtral", HEADS, after, "") for after in (HEADS, Layout(pp=2, dp=2, tp=2))),
        *(("mixtral", Layout(pp=2, chunks=2), after, "") for after in (Layout(pp=2, chunks=2), ONE)),
        *(("mixtral", TWO_STAGES, after, "shampoo") for after in (TWO_STAGES, Layout(pp=4))),
        *(("mixtral", TWO_STAGES, Layout(pp=4), kind) for kind in ("8-bit", "muon")),
        *(("tied", TWO_STAGES, Layout(pp=4), ""), ("noise", Layout(ep=2), Layout(ep=2), "no background")),
    ],
)


@pytest.mark.parametrize(("model", "before", "after", "kind"), RESUMED, ids=str)
def test_resumed_it_is_the_run_that_was_never_stopped(
    whole: Finished, deep: Runs, tmp_path: Path, model: str, before: Layout, after: Layout, kind: str
) -> None:
    """On the same ranks to the bit, random state included, in the middle of an epoch; on others but for rounding."""
    flags, tolerance = KINDS_OF_STATE[kind]
    tolerance = 0 if before == after else tolerance
    expected = whole(model, before, flags)
    stop_at_checkpoint(expected.out, tmp_path / "run")
    argv = f"--model {deep.directory / model} {SIX_STEPS} {after.flags} {flags} --resume auto"
    found = deep(after.size, argv, tmp_path / "run")
    assert found.values("step") == [1, 2, 3, 4, 5, 6]
    assert found.values("tokens") == expected.values("tokens")
    if tolerance <= 2e-5:
        for name in ("loss", "grad_norm", "learning_rate", "target_tokens", "z_loss"):
            assert found.values(name) == near(expected.values(name), tolerance=tolerance and OTHER_ORDER), name
        assert found.values("expert_tokens") == expected.values("expert_tokens")
    if not tolerance:
        assert_same_bits(found.weights, expected.weights)
    assert_equal_weights(found.weights, expected.weights, tolerance)
    biases = {name: bias for name, bias in expected.weights.items() if name.endswith("e_score_correction_bias")}
    assert_same_bits({name: found.weights[name] for name in biases}, biases)
    assert bool(biases) == (model == "deepseek")


@pytest.fixture(scope="module")
def finished(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, with checkpoints at step 4 of 6 and at its end."""
    runs = Runs(ranks, tiny_model, tiny_data, tmp_path_factory.mktemp("finished"))
    ended = runs(2, f"{SIX_STEPS} {batch_of_12(2)} --ep-size 2")
    assert ended.saved == [4, 6]
    return ended.out


def with_late_copies(argv: list[str]) -> Told:
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

    stager, saver = mock.patch.object(DefaultStager, "_stage", late), mock.patch.object
    with stager, saver(Saver, "wait_for_copies", wait_for_copies):
        return tell(argv)


def as_on_a_gpu(argv: list[str]) -> Told:
    """A run whose saver takes this for a GPU, but for pinning; it prints how many tensors each staging found no memory
    for."""
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
        code, _, errors = tell(argv)
    return code, str(made), errors


@pytest.mark.slow
@pytest.mark.parametrize("call", [with_late_copies, as_on_a_gpu])
def test_what_is_saved_is_of_its_step(runs: Runs, call: Callable[[list[str]], Told]) -> None:
    """However late it is copied; and into memory that is made after the first step, for nothing: a checkpoint then
    finds all but the random state's."""
    flags = f"{SIX_STEPS} {batch_of_12(1)} --save-steps 2 --max-steps 4 --no-export"
    expected, found = runs(1, flags, "plain"), runs(1, flags, "other", call=call)
    assert found.saved == expected.saved == [2, 4]
    for step in (2, 4):
        assert checkpoints_main(["verify", str(found.checkpoint(step)), str(expected.checkpoint(step))]) == 0
    if call is as_on_a_gpu:
        first, *others = map(int, found.printed.strip("[]").split(", "))
        assert (first > 50, others) == (True, [1, 1])


@pytest.mark.parametrize(("damage", "world_size"), tiered([("truncated", 1)], slow=[("byte in the middle", 2)]))
def test_damage_is_found_by_file_and_an_older_one_taken(
    runs: Runs, finished: Path, tmp_path: Path, damage: str, world_size: int
) -> None:
    """File by file: named by --resume PATH as an error, by --resume auto as a warning, and told by all ranks."""
    saved = finished / "checkpoints" / "step-00000004"
    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    assert {"checkpoint.json", "state/.metadata", "state/__1_0.distcp", "model/config.json"} <= set(names)
    flags = f"{SIX_STEPS} {batch_of_12(world_size)} --ep-size {world_size}"
    for name in names:
        out = tmp_path / name.replace("/", "-")
        spoilt = out / "checkpoints" / saved.name
        shutil.copytree(saved, spoilt)
        DAMAGES[damage](spoilt / name)
        runs.refuses(world_size, f"{flags} --resume {spoilt}", str(spoilt / name), out=out)
    # with an older one behind it, auto resumes from there and says so
    spoilt.rename(out / "checkpoints" / "step-00000005")
    shutil.copytree(saved, spoilt)
    (out / "checkpoints" / "step-00000006").mkdir()
    ended = runs(world_size, f"{flags} --resume auto --no-export", out)
    assert "step-00000006 is not complete and is skipped" in ended.errors
    assert f"step-00000005/{name}" in ended.errors
    assert ended.values("step") == [5, 6]


def other_weights(there: Path, model: Path, data: Path) -> str:
    save_model(there / "model", seed=1)
    save_tokenizer(there / "model")
    return f"--model {there}/model"


def other_size(there: Path, model: Path, data: Path) -> str:
    save_model(there / "model", num_hidden_layers=3)
    save_tokenizer(there / "model")
    return f"--model {there}/model"


def other_form(there: Path, model: Path, data: Path) -> str:
    assert checkpoints_main(["convert", str(model), str(there / "shards"), "--ep-size", "2"]) == 0
    return f"--model {there}/shards"


def other_order(there: Path, model: Path, data: Path) -> str:
    (there / "data.jsonl").write_text("\n".join(reversed(data.read_text().splitlines())))
    return f"--dataset {there}/data.jsonl"


def other_row(there: Path, model: Path, data: Path) -> str:
    (there / "data.jsonl").write_text(data.read_text().replace("x49", "y49"))
    return f"--dataset {there}/data.jsonl"


@pytest.mark.parametrize(
    ("change", "said", "allowed"),
    [
        ("--seed 7", "that run had seed 42, this one has 7", ""),
        ("--resume /no/such", "/no/such", ""),
        (other_size, "is of another model", ""),
        (other_weights, "is of another model", "model"),
        (other_form, "which may contain the same weights in another form", "model"),
        (other_order, "the same samples in another order", ""),
        (other_row, "is of other data", "data"),
        ("--train-on all", "but other trained tokens", ""),
    ],
)
def test_another_run_is_not_resumed(
    runs: Runs, finished: Path, tmp_path: Path, change: Any, said: str, allowed: str
) -> None:
    """Weights or data of the same shapes and counts, too, but for what --allow-changed names."""
    stop_at_checkpoint(finished, tmp_path / "run")
    flags = f"{SIX_STEPS} {batch_of_12(1)} --resume auto "
    flags += change if isinstance(change, str) else change(tmp_path, runs.model, runs.data)
    runs.refuses(1, flags, said, f"--allow-changed {allowed}" if allowed else "")
    if allowed:
        runs(1, f"{flags} --allow-changed {allowed}")


def test_a_mixture_goes_on(runs: Runs, tmp_path: Path) -> None:
    """To the bit, with records that are repeated; and no mixture by other weights is taken for it."""
    rows = runs.data.read_text().splitlines(keepends=True)
    for name, part in (("many", rows[:40]), ("few", rows[40:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    mixed = f"--dataset {tmp_path}/many.jsonl:0.6 {tmp_path}/few.jsonl:0.4 --stopping-strategy all_exhausted"
    flags = f"{mixed} {SIX_STEPS} {batch_of_12(1)}"
    whole = runs(1, flags, "whole")
    assert "10 rows, 27 used, some repeatedly, because of its weight" in whole.printed
    stop_at_checkpoint(whole.out, tmp_path / "run")
    runs.refuses(1, f"{flags.replace(':0.6', ':0.5')} --resume auto", "other data")
    resumed = runs(1, f"{flags} --resume auto")
    assert resumed.values("loss") == whole.values("loss")
    assert_same_bits(resumed.weights, whole.weights)


def run_otherwise(argv: list[str]) -> Told:
    """A run with a transformers for which nothing beside experts is held transposed."""
    with mock.patch("expertmesh.moe.hf_model.build.hold_transposed"):
        return tell(argv)


def test_a_checkpoint_with_matrices_the_other_way_round(runs: Runs, tmp_path: Path) -> None:
    """It is exported as that run exported it, and its optimizer's state, of other rows, is not resumed."""
    ended = runs(1, f"{batch_of_12(1)} --max-steps 2 --save-steps 2", call=run_otherwise)
    saved = ended.checkpoint(2)
    assert read_marker(saved)["transposed"] == []
    assert checkpoints_main(["export", str(saved), str(tmp_path / "hf")]) == 0
    assert_same_bits(read(tmp_path / "hf"), ended.weights)
    assert checkpoints_main(["verify", str(saved), str(ended.out / "hf")]) == 0
    shutil.rmtree(ended.out / "hf")
    name = "model.layers.0.self_attn.o_proj.weight"
    said = (str(saved), f"which stores {name} transposed", "`expertmesh-checkpoints export`")
    runs.refuses(1, f"{batch_of_12(1)} --max-steps 3 --resume auto", *said)


@pytest.mark.parametrize(
    ("number", "adapter"), tiered([(signal.SIGTERM, "")], slow=[(signal.SIGUSR1, "--adapter lora --lora-rank 4")])
)
def test_preemption(runs: Runs, tmp_path: Path, number: signal.Signals, adapter: str) -> None:
    """One rank is told to stop: all finish the step, save, and end with the code for it; then the run resumes. Its
    report is of the step that it stopped at."""
    steps = 400
    flags = f"{SIX_STEPS} {batch_of_12(2)} --ep-size 2 --lr-scheduler-type constant_with_warmup {adapter}"
    given = (tmp_path / "run" / "metrics.jsonl", int(number))
    start = f"{flags} --max-steps {steps} --save-steps 1000"
    stopped = runs(2, start, code=STOPPED, call=tell_signalled, given=given)
    (step,) = stopped.saved
    assert 2 <= step < steps
    assert stopped.values("step") == list(range(1, step + 1))
    report = (stopped.out / "report.html").read_text()
    assert f'"step":{step},"num_steps":{steps},' in report
    assert '"state":"finished"' not in report
    resumed = runs(2, f"{flags} --max-steps {step + 2} --resume auto")
    assert_same_bits(resumed.weights, runs(2, f"{flags} --max-steps {step + 2}", "whole").weights)


INTERRUPTED_WHILE_SAVING = """
import os, signal, threading
from expertmesh import train_ep
from expertmesh.checkpoints.training_state import saving
from expertmesh.training.engine import engine
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
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a run in the background has not
saving.file_entry, engine.train_step = write_for_ever, step
run_command(train_ep.main)
"""


@pytest.mark.slow
def test_interrupted_while_saving(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves nothing of the checkpoint under way, one line, and the exit code that shells know."""
    argv = ["--model", tiny_model, "--dataset", tiny_data, "--output-dir", tmp_path, "--use-cpu", "--save-steps", "2"]
    command = [sys.executable, "-c", INTERRUPTED_WHILE_SAVING, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=300)
    assert done.returncode == INTERRUPTED == 130
    assert done.stderr.startswith("rank 0 was interrupted in step 3, ")
    assert done.stderr.endswith("; nothing was saved, so it begins anew\n")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_interrupted_command() -> None:
    """Quietly."""
    code = """
import os, signal
from expertmesh.moe.util.command import run_command

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a run in the background has not
run_command(lambda: os.kill(os.getpid(), signal.SIGINT))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


def tell_limited(argv: list[str], limit: int) -> Told:
    """train_ep.py where no file may grow beyond a limit, as at a quota: the disk itself has room."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return tell(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_quota_is_told_in_a_line(runs: Runs) -> None:
    """With the file, and what the disk has free; not in the words of torch's zip writer."""
    flags = f"{batch_of_12(2)} --ep-size 2 --max-steps 2 --save-steps 1 --no-export"
    ended = runs(2, flags, code=2, call=tell_limited, given=[300_000])
    (line,) = [line for line in ended.errors.splitlines() if "checkpoint of step 1" in line]
    assert f"{ended.checkpoint(1)}/state/__0_0.distcp: cannot be written to its end: the disk is full, or" in line
    assert "MB free" in line
    assert "unexpected pos" not in ended.errors
    assert ended.saved == []


@pytest.fixture
def small_disk(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system on which one checkpoint of the tiny model fits, and two do not."""
    size = sum(file.stat().st_size for file in (finished / "checkpoints" / "step-00000004").rglob("*"))
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize(
    ("on_error", "background"), tiered([("stop", "--async-save")], slow=[("continue", "--no-async-save")])
)
def test_full_disk(runs: Runs, small_disk: Path, on_error: str, background: str) -> None:
    """The earlier checkpoint is complete, and nothing is left of the other."""
    flags = (
        f"{SIX_STEPS} {batch_of_12(2)} --ep-size 2 --save-steps 2 --no-export --on-save-error {on_error} {background}"
    )
    ended = runs(2, flags, small_disk / "run", code=2 if on_error == "stop" else 0)
    assert ended.saved == [2]
    assert checkpoints_main(["inspect", str(ended.checkpoint(2)), "--check"]) == 0
    if on_error == "continue":
        assert ended.values("step") == [1, 2, 3, 4, 5, 6]
        return
    assert "checkpoint of step 4" in ended.errors
    assert "MB free" in ended.errors
    runs(2, f"{SIX_STEPS} {batch_of_12(2)} --save-steps 0 --resume {ended.checkpoint(2)}", "on")


def test_what_a_kill_leaves_behind(runs: Runs, finished: Path, tmp_path: Path) -> None:
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
    ended = runs(2, f"{SIX_STEPS} {batch_of_12(2)} --ep-size 2 --resume auto")
    found, expected = ({str(path.relative_to(p)) for path in p.rglob("*")} for p in (out, finished))
    assert found == expected
    assert is_complete(out / "metrics.jsonl", finished / "metrics.jsonl")
    assert_same_bits(ended.weights, read(finished / "hf"))


@pytest.mark.parametrize("waits_as", ["new", "old"])
def test_a_named_checkpoint_whose_replacement_a_kill_interrupted(
    ranks: RankPool, finished: Path, tmp_path: Path, waits_as: str
) -> None:
    """It is found under its name, by --resume PATH and by the commands that read it, through a link too."""
    saved, away = tmp_path / "step-00000004", tmp_path / f".step-00000004-{waits_as}.part"
    (tmp_path / "best").symlink_to(saved.name)
    shutil.copytree(finished / "checkpoints" / saved.name, away)
    assert ranks.run(_find, 2, tmp_path / "best") == [tmp_path / "best"] * 2
    for command in (
        ["inspect", str(saved)],
        ["verify", str(tmp_path / "best"), str(tmp_path / "best")],
        ["export", str(saved), str(tmp_path / "hf")],
    ):
        saved.rename(away)
        assert checkpoints_main(command) == 0
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
    with mock.patch.object(marker, "check_file", slowly):
        for named in ("auto", str(path)):
            slept.clear()
            found.append(find_checkpoint(named, path.parent, group)[0])
    _set_pg_timeout(timedelta(seconds=60))
    end_process_group()
    return found


@pytest.mark.slow
def test_going_back_gives_up_what_came_later(runs: Runs) -> None:
    """Resumed from an earlier checkpoint than the newest, what it saves is the newest."""
    flags = f"{SIX_STEPS} {batch_of_12(1)} --lr-scheduler-type constant --warmup-steps 0 --save-steps 1"
    ended = runs(1, flags)
    assert runs(1, f"{flags} --resume {ended.checkpoint(3)} --max-steps 4 --save-total-limit 1").saved == [4]
    assert runs(1, f"{flags} --resume auto").values("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (3, "the run is already at step 4, beyond the 3 of --max-steps"),
        (4, "all 4 steps of --max-steps are already done: nothing is trained"),
    ],
)
def test_a_run_beyond_its_steps_says_so(runs: Runs, finished: Path, tmp_path: Path, steps: int, told: str) -> None:
    stop_at_checkpoint(finished, tmp_path / "run")
    ended = runs(1, f"{SIX_STEPS} {batch_of_12(1)} --resume auto --max-steps {steps}")
    assert told in ended.printed
    assert "the export has the model of step 4" in ended.printed
    assert (ended.out / "hf" / "model.safetensors").exists()
