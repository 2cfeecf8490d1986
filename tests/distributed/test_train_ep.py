"""train_ep.py run whole: the same exported weights for every parallel layout, and one clear error for every bad
input."""

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from expertmesh import train_ep
from expertmesh.training.step import train_step
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import read
from tests.tiny import relative_error, save_model, save_tokenizer

ROOT = Path(__file__).parents[2]


FIXED_PRODUCTS = ["--cpu-matmul", "onednn"]
"""What `auto` would choose by a probe may be another library in the next run, and so other last bits."""


def run_main(argv: list[str]) -> tuple[int, str]:
    """(exit code, standard error) of train_ep.py on this rank."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = train_ep.main([*FIXED_PRODUCTS, *argv])
    return code, errors.getvalue()


def train(ranks: RankPool, world_size: int, model: Path, data: Path, out: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Run three steps with clipping over 16 rows each; the exported weights."""
    argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--use-cpu", "--max-steps", "3"]
    argv += ["--learning-rate", "1e-3", "--max-grad-norm", "0.5", *flags]
    for code, errors in ranks.run(run_main, world_size, argv, join_group=False):
        assert code == 0, errors
    return read(out / "hf")


def assert_equal_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= 2e-5, {name: error for name, error in errors.items() if error > 2e-5}


SHAPES: dict[str, dict[str, Any]] = {
    "6 experts top-3": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "F < D": {"intermediate_size": 16},
    "one KV head": {"num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_same_weights_of_any_shape(ranks: RankPool, tiny_data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    save_model(tmp_path / "model", **changes)
    save_tokenizer(tmp_path / "model")
    before = read(tmp_path / "model")
    aux = ("--router-aux-loss-coef", "0.05", "--router-z-loss-coef", "0.01")
    found = []
    for world_size in (1, 4):
        batch = ("--per-device-train-batch-size", str(16 // world_size), "--ep-size", str(min(world_size, 2)))
        out = tmp_path / str(world_size)
        found.append(train(ranks, world_size, tmp_path / "model", tiny_data, out, *batch, *aux))
    assert_equal_weights(found[1], found[0])
    assert any(relative_error(found[0][name], before[name]) > 1e-3 for name in before), "nothing was trained"


@pytest.mark.slow
def test_same_weights_however_a_batch_is_divided(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    def run(name: str, world_size: int, per_device: int, *flags: str) -> dict[str, torch.Tensor]:
        batch = ("--per-device-train-batch-size", str(per_device))
        return train(ranks, world_size, tiny_model, tiny_data, tmp_path / name, *batch, *flags)

    accumulate = ("--gradient-accumulation-steps", "3", "--router-z-loss-coef", "0.01")
    alone = run("1-1-accumulate", 1, 6, *accumulate)
    assert_equal_weights(run("2-2-accumulate", 2, 3, *accumulate, "--ep-size", "2"), alone)
    # without accumulation, on three ranks; once through an epoch's short last batch: 50 rows are 18 + 18 + 14
    assert_equal_weights(run("3-1-no-accumulate", 3, 6, "--router-z-loss-coef", "0.01"), alone)


def test_writes_metrics_and_trackers(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    train(
        ranks, 2, tiny_model, tiny_data, tmp_path, "--ep-size", "2", "--report-to", "tensorboard",
        "--router-aux-loss-coef", "0.01",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    first = lines[0]
    assert {"loss", "balance_loss", "grad_norm", "tokens_per_second", "expert_load_max_over_mean"} <= first.keys()
    # every token of the step is routed to two experts in each layer, padding to none
    assert [sum(layer) for layer in first["expert_tokens"]] == [2 * first["tokens"]] * 2
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["ep_size"] == 2
    assert list(tmp_path.rglob("events.out.tfevents*"))


def run_unread(argv: list[str]) -> tuple[int, str]:
    """`run_main`, with a pipe that nobody reads for standard output."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    errors = io.StringIO()
    stream = os.fdopen(write_end, "w")
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(stream):
        code = train_ep.main([*FIXED_PRODUCTS, *argv])
    stream.close()
    return code, errors.getvalue()


@pytest.mark.parametrize("preview", [False, True])
def test_a_run_outlives_the_reader_of_its_output(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, preview: bool
) -> None:
    """Its results are files: a closed `less` must not cost a night's training."""
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu"]
    argv += ["--ep-size", "2", "--max-steps", "3", *(["--preview"] if preview else [])]
    (code, said), (other_code, other_said) = ranks.run(run_unread, 2, argv, join_group=False)
    assert (code, other_code, other_said) == (0, 0, "")
    note = f"train_ep.py: standard output is no longer read; the run continues, see {tmp_path}/metrics.jsonl"
    assert said.count(note) == (not preview)
    if not preview:
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
        assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_plain_python_and_torchrun(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Started as a user starts it: one process without torchrun, and two with it."""
    common = [
        "train_ep.py", "--model", str(tiny_model), "--dataset", str(tiny_data), "--max-steps", "2", "--use-cpu",
        "--per-device-train-batch-size",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    alone = [sys.executable, *common, "4", "--output-dir", str(tmp_path / "1")]
    pair = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *common, "2", "--ep-size", "2", "--output-dir", str(tmp_path / "2"),
    ]  # fmt: skip
    for command in (alone, pair):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "step 2/2" in done.stdout
        assert "CPU matmuls: " in done.stdout
    assert_equal_weights(read(tmp_path / "2" / "hf"), read(tmp_path / "1" / "hf"))
    assert "cpu_matmul" in json.loads((tmp_path / "2" / "environment.json").read_text())


@pytest.mark.slow
def test_all_modes_at_once(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """bf16, activation checkpointing, hybrid sharding and the grouped kernel or fp8, against fp32 without any."""
    batch = ("--per-device-train-batch-size", "4")
    plain = train(ranks, 4, tiny_model, tiny_data, tmp_path / "plain", *batch, "--ep-size", "2")
    modes = ("--bf16", "--gradient-checkpointing", "--dense-shard", "hybrid")
    for products in (("--expert-kernel", "torch-grouped"), ("--expert-precision", "fp8")):
        out = tmp_path / products[1]
        found = train(ranks, 4, tiny_model, tiny_data, out, *batch, "--ep-size", "2", *modes, *products)
        losses = [
            [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
            for path in (tmp_path / "plain", out)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=5e-3), products
        assert all(tensor.dtype == torch.float32 for tensor in found.values())
        assert max(relative_error(found[name], plain[name]) for name in plain) < 2e-2, products


@pytest.mark.release
@pytest.mark.parametrize("precision", ["same", "fp8"])
def test_working_weights_that_are_kept(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, precision: str
) -> None:
    """Experts that no rank shares, in bf16: rounded anew in each forward, or once an update; the same bits."""
    batch = ("--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "2")
    flags = (*batch, "--ep-size", "2", "--bf16", "--expert-precision", precision)
    anew = train(ranks, 2, tiny_model, tiny_data, tmp_path / "anew", *flags, "--gradient-checkpointing", "selective")
    kept = train(ranks, 2, tiny_model, tiny_data, tmp_path / "kept", *flags, "--reshard-after-forward", "false")
    assert all(torch.equal(kept[name], anew[name]) for name in anew)
    before = read(tiny_model)
    assert not all(torch.equal(anew[name], before[name]) for name in anew if "experts" in name)


@pytest.mark.slow
def test_config_that_asks_for_router_logits(ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    """Models saved after training with HF's balancing loss say so in their config; ours is then on by default."""
    save_model(tmp_path / "model", output_router_logits=True)
    save_tokenizer(tmp_path / "model")
    train(ranks, 2, tmp_path / "model", tiny_data, tmp_path / "out", "--ep-size", "2")
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["balance_loss"] > 0
    assert json.loads((tmp_path / "out" / "hf" / "config.json").read_text())["output_router_logits"] is True


def test_tokenizer_of_another_directory_is_exported(ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    save_tokenizer(tmp_path / "tokenizer")
    train(ranks, 1, tmp_path / "model", tiny_data, tmp_path / "out", "--tokenizer", str(tmp_path / "tokenizer"))
    exported = (tmp_path / "out" / "hf" / "tokenizer.json").read_text()
    assert json.loads(exported) == json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())


def test_load_and_export_without_data(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """The README's round trip."""
    argv = ["--model", str(tiny_model), "--ep-size", "2", "--max-steps", "0", "--max-shard-size", "50KB", "--use-cpu"]
    assert ranks.run(run_main, 2, [*argv, "--output-dir", str(tmp_path)], join_group=False)[0][0] == 0
    before, after = read(tiny_model), read(tmp_path / "hf")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_divergence_stops_the_run(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu"]
    results = ranks.run(run_main, 2, [*argv, "--ep-size", "2", "--learning-rate", "1e30"], join_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert "training has diverged" in results[0][1]
    assert not (tmp_path / "hf").exists()


def test_no_export(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--max-steps", "1"]
    assert ranks.run(run_main, 1, [*argv, "--use-cpu", "--no-export"], join_group=False)[0][0] == 0
    assert not (tmp_path / "hf").exists()


def test_the_collector_rests_while_a_run_trains(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """And works again afterwards, also where training ends in an error."""
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--no-export"]
    argv += ["--use-cpu", "--max-steps", "2", "--save-steps", "0", "--overwrite-output-dir"]
    (found,) = ranks.run(run_and_look_at_the_collector, 1, argv, join_group=False)
    assert found == (0, [False, False], True)
    (found,) = ranks.run(run_and_look_at_the_collector, 1, [*argv, "--learning-rate", "1e30"], join_group=False)
    assert found == (2, [False, False], True)


def run_and_look_at_the_collector(argv: list[str]) -> tuple[int, list[bool], bool]:
    """(exit code, whether Python's garbage collector was on in each step, and after the run)."""
    seen: list[bool] = []

    def step(*arguments: Any, **named: Any) -> Any:
        seen.append(gc.isenabled())
        return train_step(*arguments, **named)

    with mock.patch("expertmesh.training.engine.train_step", step):
        code, _ = run_main(argv)
    return code, seen, gc.isenabled()


# Bad input. Each function spoils a copy of a good model or data file and gives further flags.


def _truncate(model: Path, data: Path) -> list[str]:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return []


def _index_to_missing(model: Path, data: Path) -> list[str]:
    _write_index(model, "model-00002-of-00002.safetensors")
    return []


def _index_to_outside(model: Path, data: Path) -> list[str]:
    _write_index(model, "../secret.safetensors")
    return []


def _write_index(model: Path, other: str) -> None:
    file = model / "model.safetensors"
    weight_map = dict.fromkeys(load_file(file), file.name)
    weight_map["lm_head.weight"] = other
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _nan(model: Path, data: Path) -> list[str]:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.7.w3.weight"][0, 0] = float("inf")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return []


def _config(**changes: Any) -> Callable[[Path, Path], list[str]]:
    def write(model: Path, data: Path) -> list[str]:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        return []

    return write


def _empty_data(model: Path, data: Path) -> list[str]:
    data.write_text("")
    return []


def _malformed_line(model: Path, data: Path) -> list[str]:
    lines = data.read_text().splitlines()
    lines[6] = lines[6][:-3]
    data.write_text("\n".join(lines))
    return []


def _not_text(model: Path, data: Path) -> list[str]:
    data.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": null}\n')
    return []


def _missing_tensor(model: Path, data: Path) -> list[str]:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return []


def _yaml(text: str) -> Callable[[Path, Path], list[str]]:
    def write(model: Path, data: Path) -> list[str]:
        (model / "run.yaml").write_text(text)
        return ["--config", str(model / "run.yaml")]

    return write


def _flags(*flags: str) -> Callable[[Path, Path], list[str]]:
    return lambda model, data: list(flags)


BAD_INPUT: dict[str, tuple[Callable[[Path, Path], list[str]], list[str]]] = {
    "ep size and experts": (
        _flags("--ep-size", "3"),
        ["--ep-size 3 does not divide the 8 experts of this model; use 1, 2, 4 or 8", "with 2 ranks: 1 or 2"],
    ),
    "ep size and ranks": (_flags("--ep-size", "4"), ["--ep-size 4 does not divide the 2 ranks; use 1 or 2"]),
    "unknown flag": (_flags("--ep-sise", "2"), ["unknown flag --ep-sise; did you mean --ep-size?"]),
    "value of a flag": (_flags("--max-steps", "many"), ["--max-steps", "many"]),
    "negative value": (_flags("--learning-rate", "-1"), ["--learning-rate -1.0: must be 0 or more"]),
    "choice": (_flags("--dense-shard", "half"), ["--dense-shard", "half", "hybrid"]),
    "kernel": (_flags("--expert-kernel", "magic"), ["--expert-kernel magic is unknown", "loop, torch-grouped"]),
    "unknown key": (_yaml("learning_rat: 1"), ["run.yaml", "unknown key learning_rat; did you mean learning_rate?"]),
    "value of a key": (_yaml("ep_size: two"), ["run.yaml", "--ep-size", "two"]),
    "YAML": (_yaml("a: [1"), ["run.yaml", "cannot be read"]),
    "no model": (_flags("--model", "/no/such/model"), ["--model /no/such/model: no such directory"]),
    "truncated file": (_truncate, ["model.safetensors", "not a complete safetensors file"]),
    "missing file": (_index_to_missing, ["index.json", "model-00002-of-00002.safetensors", "no such file"]),
    "path out of the directory": (_index_to_outside, ["index.json", "lm_head.weight", "../secret.safetensors"]),
    "not finite": (_nan, ["model.layers.1.block_sparse_moe.experts.7.w3.weight", "not finite"]),
    "unknown family": (_config(model_type="nothing"), ["config.json: transformers", "has no models of type nothing"]),
    "a family without experts": (
        _config(model_type="llama"),
        ["config.json: LlamaForCausalLM has no mixture-of-experts layer"],
    ),
    "a family without a language model": (
        _config(model_type="vit"),
        ["config.json: transformers has no language model of type vit"],
    ),
    "impossible config": (_config(num_experts_per_tok=-1), ["config.json: num_experts_per_tok is -1"]),
    "no data": (_flags("--dataset", "/no/such/data.jsonl"), ["--dataset /no/such/data.jsonl: no such file"]),
    "empty data": (_empty_data, ["--dataset", "is empty"]),
    "malformed line": (_malformed_line, ["data.jsonl", "line 7 is not valid JSON"]),
    "no column": (_flags("--response-column", "answer"), ["prompt + answer", "prompt, response", "--response-column"]),
    "no text": (_not_text, ["data.jsonl", "line 2", "response", "None"]),
    "missing tensor": (_missing_tensor, ["model.layers.0.input_layernorm.weight", "is missing"]),
    "tracker": (_flags("--report-to", "nothing"), ["--report-to nothing", "tensorboard"]),
    "tracker not installed": (_flags("--report-to", "wandb"), ["--report-to wandb: not installed"]),
    "name of a directory": (_flags("--report-to", "tensorboard", "--run-name", "../up"), ["--run-name ../up"]),
    "attention": (_flags("--attn-implementation", "magic"), ["--attn-implementation magic"]),
    "attention not installed": (_flags("--attn-implementation", "flash_attention_2"), ["flash_attention_2"]),
    "TF32 on a CPU": (_flags("--tf32"), ["--tf32 needs a GPU, and this run is on cpu; leave it out"]),
    "seed": (_flags("--seed", str(2**80)), [f"--seed {2**80}: must be below"]),
    "all cut off": (_flags("--max-seq-length", "2"), ["no record has a trained token within --max-seq-length 2"]),
    "schedule": (
        _flags("--lr-scheduler-type", "polynomial", "--learning-rate", "0"),
        ["--lr-scheduler-type polynomial"],
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, name: str) -> None:
    """One error, on one rank, that says what is wrong; every rank ends with 2, and nothing is trained or written."""
    spoil, said = BAD_INPUT[name]
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    data.write_bytes(tiny_data.read_bytes())
    argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]
    argv += ["--max-steps", "1", *spoil(model, data)]
    results = ranks.run(run_main, 2, argv, join_group=False)
    assert [code for code, _ in results] == [2, 2], results
    ((_, message),) = [result for result in results if result[1]]
    assert message.startswith("train_ep.py: error: ")
    assert message.count("\n") == 1, message
    assert all(word in message for word in said), message
    if name != "schedule":  # met when the optimizer is built, after the log has been opened
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_results_are_not_overwritten(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    train(ranks, 1, tiny_model, tiny_data, tmp_path / "out", "--max-steps", "1")
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]
    ((code, errors),) = ranks.run(run_main, 1, argv, join_group=False)
    assert code == 2
    assert "already contains hf, metrics.jsonl, config.yaml" in errors
    train(ranks, 1, tiny_model, tiny_data, tmp_path / "out", "--max-steps", "2", "--overwrite-output-dir")
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "late",
    ["os.environ['LOCAL_RANK'] == '0' and time.sleep(1)", "os.environ['LOCAL_RANK'] != '0' and end_late()"],
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
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launch, "train_ep.py", "--model", "/nowhere", "--dataset", "d", "--use-cpu"], cwd=ROOT, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    said = "train_ep.py: error: --model /nowhere: no such directory"
    lines = [line for line in done.stderr.splitlines() if "OMP_NUM_THREADS" not in line and "*****" not in line]
    assert (lines[0], lines[-2]) == (said, f"  traceback : {said}"), done.stderr
    assert "<NO_OTHER_FAILURES>" in done.stderr


@pytest.mark.release
def test_bad_input_under_torchrun_does_not_hang(tiny_data: Path, tmp_path: Path) -> None:
    """An error met after the process group has formed: the launcher ends, with a code other than 0."""
    save_model(tmp_path / "model")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train_ep.py",
        "--model", str(tmp_path / "model"), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "out"),
        "--use-cpu",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    first, *_, last, _ = [line for line in done.stderr.splitlines() if "no tokenizer there" in line or "====" in line]
    assert first.startswith("train_ep.py: error:")
    assert last.startswith("  traceback : train_ep.py: error:")
    assert done.stderr.count("train_ep.py: error:") == 2
