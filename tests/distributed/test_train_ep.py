"""train_ep.py run whole: as users start it, what it writes, and one clear error for every bad input."""

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from safetensors.torch import load_file, save_file

from expertmesh import train_ep
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.cluster.commands import main as cluster_command
from expertmesh.training.config.train_config import parse_config
from expertmesh.training.engine import assembly
from expertmesh.training.steps.step import train_step
from tests.distributed.whole_runs import (
    ROOT,
    Runs,
    Told,
    assert_equal_weights,
    assert_same_bits,
    read,
    run_main,
    tell,
    without_forecast,
)
from tests.flags import last_of_each
from tests.tiers import tiered
from tests.tiny import relative_error, save_model, save_tokenizer


def with_a_kernel_lost(argv: list[str]) -> Told:
    """A run for which another kernel would have been better."""
    chosen = assembly.choose_kernel
    with mock.patch.object(assembly, "choose_kernel", lambda *given: replace(chosen(*given), lost="lost kernel")):
        return tell(argv)


def test_a_kernel_that_is_not_installed_is_told_of(runs: Runs) -> None:
    assert runs(1, "--max-steps 1 --no-export", call=with_a_kernel_lost).printed.count("note: lost kernel") == 1


def test_writes_metrics_and_trackers(runs: Runs) -> None:
    flags = "--ep-size 2 --max-steps 3 --learning-rate 1e-3 --report-to tensorboard --router-aux-loss-coef 0.01"
    ended = runs(2, flags)
    assert ended.values("step") == [1, 2, 3]
    assert ended.values("learning_rate") == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    first = ended.lines()[0]
    assert {"loss", "balance_loss", "grad_norm", "tokens_per_second", "expert_load_max_over_mean"} <= first.keys()
    # every token of the step is routed to two experts in each layer, padding to none
    assert [sum(layer) for layer in first["expert_tokens"]] == [2 * first["tokens"]] * 2
    assert yaml.safe_load((ended.out / "config.yaml").read_text())["ep_size"] == 2
    assert list(ended.out.rglob("events.out.tfevents*"))
    page = (Path(__file__).parents[2] / "docs" / "reference" / "output-directory.md").read_text(encoding="utf-8")
    left = [path.name + "/" * path.is_dir() for path in ended.out.iterdir()]
    assert [name for name in left if f"| `{name}" not in page] == []


def unread(argv: list[str]) -> Told:
    """A run with a pipe that nobody reads for standard output."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with contextlib.redirect_stderr(io.StringIO()) as errors, os.fdopen(write_end, "w") as stream:
        with contextlib.redirect_stdout(stream), without_forecast():
            code = train_ep.main(last_of_each(argv))
        return code, "", errors.getvalue()


@pytest.mark.parametrize("preview", ["", "--preview"])
def test_a_run_outlives_the_reader_of_its_output(runs: Runs, preview: str) -> None:
    """Its results are files: a closed `less` must not cost a night's training."""
    ended = runs(2, f"--ep-size 2 --max-steps 3 {preview}", call=unread)
    note = f"train_ep.py: standard output is no longer read; the run continues, see {ended.out}/metrics.jsonl"
    assert ended.errors.count(note) == (not preview)
    assert ended.out.exists() != bool(preview)
    if not preview:
        assert ended.values("step") == [1, 2, 3]
        assert (ended.out / "hf" / "model.safetensors").exists()


def torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def start(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    from_torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    env = {name: value for name, value in os.environ.items() if name not in from_torchrun} | more
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_plain_python_and_the_launch_line_of_a_plan(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started as a user starts it: one process without torchrun, and two by the line that a plan ends with."""
    asked = "--gpus 2 --fp32 --max-seq-length 64 --ep-size 2 --tp-size 1 --micro-batch 2 --global-batch-size 4"
    assert cluster_command(["plan", "--model", str(tiny_model), *asked.split()]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("torchrun --nproc-per-node 2 ")
    alone = "--max-seq-length 64 --per-device-train-batch-size 4"
    common = f"--model {tiny_model} --dataset {tiny_data} --output-dir {tmp_path / 'alone'}"
    for command, more in ((f"python train_ep.py {common} {alone}", {}), (line, {"DATASET": str(tiny_data)})):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        shell = ["bash", "-c", f"{command} --use-cpu --max-steps 2"]
        done = start(shell, PATH=path, OUTPUT_DIR=str(tmp_path / "pair"), **more)
        assert done.returncode == 0, done.stderr
        assert " 2/2 " in done.stdout
        assert "layout  " in done.stdout
    assert_equal_weights(read(tmp_path / "pair" / "hf"), read(tmp_path / "alone" / "hf"))


@pytest.mark.slow
@pytest.mark.parametrize("products", ["--expert-kernel torch-grouped", "--expert-precision fp8"])
def test_all_modes_at_once(runs: Runs, products: str) -> None:
    """bf16, activation checkpointing, hybrid sharding and the grouped kernel or fp8, against fp32 without any."""
    common = "--ep-size 2 --per-device-train-batch-size 4 --max-steps 3 --learning-rate 1e-3 --max-grad-norm 0.5"
    plain = runs(4, common, "plain")
    found = runs(4, f"{common} --bf16 --gradient-checkpointing --dense-shard hybrid {products}", "modes")
    assert found.values("loss") == pytest.approx(plain.values("loss"), rel=5e-3)
    assert {str(tensor.dtype) for tensor in found.weights.values()} == {"torch.float32"}
    assert_equal_weights(found.weights, plain.weights, 2e-2)


@pytest.mark.release
@pytest.mark.parametrize("precision", ["same", "fp8"])
def test_working_weights_that_are_kept(runs: Runs, precision: str) -> None:
    """Experts that no rank shares, in bf16: rounded anew in each forward, or once an update; the same bits."""
    flags = f"--gradient-accumulation-steps 2 --ep-size 2 --bf16 --expert-precision {precision} --max-steps 3"
    anew = runs(2, f"{flags} --learning-rate 1e-3 --gradient-checkpointing selective", "anew").weights
    kept = runs(2, f"{flags} --learning-rate 1e-3 --reshard-after-forward false", "kept").weights
    assert_same_bits(kept, anew)
    before = read(runs.model)
    assert any(relative_error(anew[name], before[name]) > 1e-4 for name in anew if "experts" in name)


@pytest.mark.parametrize(
    ("world_size", "flags", "why"),
    [
        (2, "--bf16", "experts are sharded over dp, or come from host memory, and are gathered"),
        (2, "--bf16 --ep-size 2", ""),
        pytest.param(1, "", "experts are held in float32, as they are computed", marks=pytest.mark.slow),
        pytest.param(1, "--bf16 --optim adamw_bf16", "experts are held in bfloat16", marks=pytest.mark.slow),
    ],
)
def test_copies_that_there_are_none_of(runs: Runs, tmp_path: Path, world_size: int, flags: str, why: str) -> None:
    ended = runs(world_size, f"{flags} --keep-expert-copies --max-steps 0 --no-export", tmp_path / "out")
    said = " ".join(ended.printed.split())
    assert (f"--keep-expert-copies has no effect: {why}" in said) == bool(why)
    assert ("has no effect" in said) == bool(why)


@pytest.mark.slow
def test_config_that_asks_for_router_logits(runs: Runs) -> None:
    """Models saved after training with HF's balancing loss say so in their config; ours is then on by default."""
    ended = runs.of(output_router_logits=True)(2, "--ep-size 2 --max-steps 1")
    assert ended.lines()[0]["balance_loss"] > 0
    assert json.loads((ended.out / "hf" / "config.json").read_text())["output_router_logits"] is True


def test_tokenizer_of_another_directory_is_exported(runs: Runs, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    save_tokenizer(tmp_path / "tokenizer")
    ended = runs(1, f"--model {tmp_path}/model --tokenizer {tmp_path}/tokenizer --max-steps 1")
    exported, own = (
        json.loads((path / "tokenizer.json").read_text()) for path in (ended.out / "hf", tmp_path / "tokenizer")
    )
    assert exported == own


def test_load_and_export_without_data(runs: Runs) -> None:
    """The README's round trip."""
    argv = ["--model", str(runs.model), "--ep-size", "2", "--max-steps", "0", "--max-shard-size", "50KB", "--use-cpu"]
    out = runs.directory
    assert runs.ranks.run(run_main, 2, [*argv, "--output-dir", str(out)], join_group=False)[0][0] == 0
    before, after = read(runs.model), read(out / "hf")
    assert_same_bits({name: after[name] for name in before}, before)


def watching_the_collector(argv: list[str]) -> Told:
    """A run that prints whether Python's garbage collector was on in each step, and after the run."""
    seen: list[bool] = []

    def step(*arguments: Any, **named: Any) -> Any:
        seen.append(gc.isenabled())
        return train_step(*arguments, **named)

    with mock.patch("expertmesh.training.engine.engine.train_step", step):
        code, _, errors = tell(argv)
    return code, str([*seen, gc.isenabled()]), errors


@pytest.mark.parametrize(("rate", "code"), [("1e-3", 0), ("1e30", 2)], ids=["ends well", "ends in an error"])
def test_the_collector_rests_while_a_run_trains(runs: Runs, rate: str, code: int) -> None:
    flags = f"--max-steps 2 --save-steps 0 --learning-rate {rate}"
    ended = runs(1, flags, code=code, call=watching_the_collector)
    assert ended.printed == "[False, False, True]"
    assert ("training has diverged" in ended.errors) == (code == 2) != (ended.out / "hf").exists()


# Bad input. Each function spoils a copy of a good model or data file.


def _truncate(model: Path, data: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _index_to(other: str) -> Callable[[Path, Path], None]:
    def write(model: Path, data: Path) -> None:
        file = model / "model.safetensors"
        weight_map = {**dict.fromkeys(load_file(file), file.name), "lm_head.weight": other}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def _not_finite(model: Path, data: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.7.w3.weight"][0, 0] = float("inf")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _config(**changes: Any) -> Callable[[Path, Path], None]:
    def write(model: Path, data: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **changes}))

    return write


def _malformed_line(model: Path, data: Path) -> None:
    lines = data.read_text().splitlines()
    lines[6] = lines[6][:-3]
    data.write_text("\n".join(lines))


def _no_text(model: Path, data: Path) -> None:
    data.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": null}\n')


BAD_INPUT: dict[str, tuple[str | Callable[[Path, Path], None], list[str]]] = {
    "experts": ("--ep-size 3", ["--ep-size 3 does not divide the 8 experts of this model; use 1, 2", "ranks: 1 or 2"]),
    "ranks": ("--ep-size 4", ["--ep-size 4 does not divide the 2 ranks; use 1 or 2"]),
    "pipeline ranks": ("--pp-size 3", ["--pp-size 3 does not divide the 2 ranks; use 1 or 2"]),
    "experts of a stage": ("--pp-size 2 --ep-size 2", ["--ep-size 2 does not divide 1 rank;"]),
    "layers": (
        "--pp-size 2 --pipeline-chunks 2",
        ["--pp-size 2 --pipeline-chunks 2: 4 stages need 4 decoder layers or more; MixtralForCausalLM has 2"],
    ),
    "layers of stages": ("--pp-size 2 --pipeline-layers 1,2", ["--pipeline-layers 1,2: has 2 stages with 3 layers"]),
    "stages": ("--pp-size 2 --pipeline-layers 1,1,2", ["--pipeline-layers 1,1,2: has 3 stages with 4"]),
    "rank of a debugger": ("--debug-ranks 2", ["--debug-ranks 2: the ranks are 0 to 1"]),
    "profiled steps": ("--profile 3-4", ["--profile 3-4: there is no step 4: the run has 1"]),
    "profiled ranks": ("--profile 1 --profile-ranks 2", ["--profile-ranks 2: the ranks are 0 to 1"]),
    "no model": ("--model /no/such/model", ["--model /no/such/model: no such directory"]),
    "truncated file": (_truncate, ["model.safetensors", "not a complete safetensors file"]),
    "missing file": (_index_to("model-2.safetensors"), ["index.json", "model-2.safetensors", "no such file"]),
    "out of the directory": (_index_to("../x.safetensors"), ["index.json", "lm_head.weight", "../x.safetensors"]),
    "not finite": (_not_finite, ["model.layers.1.block_sparse_moe.experts.7.w3.weight", "not finite"]),
    "unknown family": (_config(model_type="nothing"), ["config.json: transformers", "has no models of type nothing"]),
    "no experts": (_config(model_type="llama"), ["config.json: LlamaForCausalLM has no mixture-of-experts layer"]),
    "no language model": (_config(model_type="vit"), ["config.json: transformers has no language model of type vit"]),
    "no data": ("--dataset /no/such/data.jsonl", ["--dataset /no/such/data.jsonl: no such file"]),
    "malformed line": (_malformed_line, ["data.jsonl", "line 7 is not valid JSON"]),
    "no column": ("--response-column answer", ["prompt + answer", "prompt, response", "--response-column"]),
    "no text": (_no_text, ["data.jsonl", "line 2", "response", "None"]),
    "text column": ("--text-column nothing", ["has the columns prompt, response; it needs one of: nothing"]),
    "no held-out data": ("--eval-dataset /no/x.jsonl", ["--eval-dataset /no/x.jsonl: no such file"]),
    "template": ("--chat-template nothing", ["--chat-template nothing: neither a built-in template"]),
    "all cut off": ("--max-seq-length 2", ["no record has a trained token within --max-seq-length 2"]),
    "tracker": ("--report-to nothing", ["--report-to nothing", "tensorboard"]),
    "tracker not installed": ("--report-to wandb", ["--report-to wandb: not installed"]),
    "name of a run": ("--report-to tensorboard --run-name ../up", ["--run-name ../up"]),
    "attention": ("--attn-implementation magic", ["--attn-implementation magic"]),
    "attention not installed": ("--attn-implementation flash_attention_2", ["flash_attention_2"]),
    "packed attention": ("--packing --attn-implementation flash_attention_2", ["with --packing use sdpa"]),
    "TF32 on a CPU": ("--tf32", ["--tf32 needs a GPU; this run is on cpu; leave it out"]),
    "warm-up": ("--warmup-steps 2 --lr-scheduler-type constant", ["constant has no warm-up"]),
    "schedule": ("--lr-scheduler-type polynomial --learning-rate 0", ["--lr-scheduler-type polynomial"]),
}  # fmt: skip


# one of each stage at which input is met
MET_FIRST = ["experts", "ranks", "layers", "no model", "truncated file", "not finite", "no experts", "no data"]
MET_FIRST += ["no text", "template", "tracker", "attention", "schedule"]


@pytest.mark.parametrize("name", tiered(MET_FIRST, slow=[name for name in BAD_INPUT if name not in MET_FIRST]))
def test_bad_input(runs: Runs, tmp_path: Path, name: str) -> None:
    """One error, on one rank, that says what is wrong; every rank ends with 2, and nothing is trained or written."""
    spoil, said = BAD_INPUT[name]
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    model.mkdir()
    for file in runs.model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    data.write_bytes(runs.data.read_bytes())
    if not isinstance(spoil, str):
        spoil(model, data)
    argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]
    argv += ["--max-steps", "1", *(spoil.split() if isinstance(spoil, str) else [])]
    results = runs.ranks.run(run_main, 2, argv, join_group=False)
    assert [code for code, _ in results] == [2, 2], results
    ((_, message),) = [result for result in results if result[1]]
    assert message.startswith("train_ep.py: error: ")
    assert message.count("\n") == 1, message
    assert all(word in message for word in said), message
    if name not in ("schedule", "warm-up"):  # met after the log has been opened
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ep-sise 2", "unknown flag --ep-sise; did you mean --ep-size?"),
        ("--max-steps many", "--max-steps: invalid int value: 'many'"),
        ("--learning-rate -1", "--learning-rate -1.0: must be 0 or more"),
        ("--dense-shard half", "--dense-shard: invalid choice: 'half' (choose from "),
        ("--train-on some", "--train-on: invalid choice: 'some'"),
        ("--on-nonfinite continue", "--on-nonfinite: invalid choice: 'continue'"),
        ("--expert-kernel magic", "--expert-kernel magic is unknown; use auto, loop, torch-grouped"),
        (f"--seed {2**80}", f"--seed {2**80}: must be 0 or more, and less than"),
        ("--eval-ratio 1", "--eval-ratio 1.0: must be 0 or more, and less than 1"),
        ("--eval-ratio 0.1 --eval-dataset x.jsonl", "--eval-dataset and --eval-ratio: give one"),
        ("--early-stopping-patience 2", "--early-stopping-patience: needs evaluation data"),
        ("--load-best-model-at-end --eval-ratio 0.1 --save-steps 0", "which --save-steps 0 does not save"),
        ("--packing --group-by-length", "--packing and --group-by-length"),
        ("--chat-template mistral --prompt-template {prompt}", "--prompt-template and --chat-template"),
        ("--prompt-template x", "must contain {prompt}"),
        ("--detect-anomaly --compile", "--detect-anomaly cannot look inside layers that --compile compiles"),
        ("--check-replicas -1", "--check-replicas -1: must be 0 or more"),
        ("--router-warn-steps -1", "--router-warn-steps -1: must be 0 or more"),
        ("--router-warn-load 0.5", "--router-warn-load 0.5: must be 1 or more"),
        ("--generate-steps -1", "--generate-steps -1: must be 0 or more"),
        ("--pp-size 0", "--pp-size 0: must be 1 or more"),
        ("--pp-size 2 --pipeline-layers 2,x", "--pipeline-layers 2,x: give the number of layers"),
        ("--pipeline-layers 2,2", "--pipeline-layers 2,2: --pp-size 1 has no pipeline"),
        (
            "--pp-size 2 --pipeline-chunks 2 --pipeline-schedule 1f1b",
            "--pipeline-schedule 1f1b takes one stage per rank, not --pipeline-chunks 2; use interleaved",
        ),
        (
            "--pp-size 2 --pipeline-schedule interleaved --pipeline-chunks 1",
            "give --pipeline-chunks 2",
        ),
    ],
)  # fmt: skip
def test_flags_that_are_refused_as_they_are_read(flags: str, said: str) -> None:
    with pytest.raises(ExpertMeshError) as error:
        parse_config(["--model", ".", "--dataset", "d", *flags.split()])
    assert said in str(error.value)


@pytest.mark.parametrize(
    "late",
    tiered(
        ["os.environ['LOCAL_RANK'] == '0' and time.sleep(1)"], slow=["os.environ['LOCAL_RANK'] != '0' and end_late()"]
    ),
    ids=["first rank begins late", "other ranks end late"],
)
def test_mistakes_under_torchrun_are_told_first_and_last(tmp_path: Path, late: str) -> None:
    """By the first rank of the node, however late it is; the others are no failures, which torchrun would list, however
    long they take to end. So the error is the first line, and the last but torchrun's own rule."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n\n"
        "def end_late():\n"
        "    end = os._exit\n"
        "    os._exit = lambda code: (time.sleep(1), end(code))\n\n"
        f"if 'LOCAL_RANK' in os.environ:\n    {late}\n"
    )
    command = [*torchrun(3), "train_ep.py", "--model", "/nowhere", "--dataset", "d", "--use-cpu"]
    done = start(command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    said = "train_ep.py: error: --model /nowhere: no such directory"
    lines = [line for line in done.stderr.splitlines() if "OMP_NUM_THREADS" not in line and "*****" not in line]
    assert (lines[0], lines[-2]) == (said, f"  traceback : {said}"), done.stderr
    assert "<NO_OTHER_FAILURES>" in done.stderr
