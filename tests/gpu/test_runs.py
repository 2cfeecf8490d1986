"""train_ep.py whole, with what a CPU cannot show: each run against the same on the CPU; twice the same bits; and memory
as forecast."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.moe.kernels.kernel_entries import MEGABLOCKS_SPARSE_ENTRY
from expertmesh.training.cluster.commands import main as plan_or_rehearse
from expertmesh.training.planning.planner.hardware import DEVICES
from tests.distributed.test_determinism import FLAGS, assert_same_twice
from tests.distributed.whole_runs import ROOT, Ended, Runs
from tests.encoded import save_mxfp4
from tests.gpu.one_card import assert_near, run_on
from tests.mtp import predicting
from tests.mtp import save as save_mtp
from tests.parity.case import Case, hf_model
from tests.pictures import save_seeing, written
from tests.tiny import save_model, save_tokenizer

FEATURES: dict[str, tuple[str, str, float]] = {
    # what both have, what the GPU alone has, and the tolerance
    "bf16": ("--bf16", "", 2e-2),
    "fp32": ("", "", 1e-4),
    "TF32": ("", "--tf32", 1e-2),
    "packed": ("--packing --bf16", "", 2e-2),
    "selective checkpointing": ("--bf16", "--gradient-checkpointing selective --keep-expert-products 2", 2e-2),
    "full checkpointing": ("--bf16", "--gradient-checkpointing full --offload-activations", 2e-2),
    "offloaded": ("--bf16", "--offload", 2e-2),
    "compiled": ("--bf16", "--compile", 2e-2),
    "compiled and recomputed": ("--bf16", "--compile --gradient-checkpointing selective", 2e-2),
    "grouped": ("--bf16", "--expert-kernel torch-grouped", 2e-2),
    "looped": ("--bf16", "--expert-kernel loop", 2e-2),
    "MegaBlocks": ("--bf16", "--expert-kernel megablocks-sparse", 2e-2),
    "whole logits": ("--bf16", "--cross-entropy full", 2e-2),
    "eager": ("--bf16", "--attn-implementation eager", 2e-2),
    "experts in fp8": ("--bf16 --expert-precision fp8", "", 2e-2),
    "dense layers in fp8": ("--bf16 --dense-precision fp8", "", 2e-2),
    "profiled": ("--bf16", "--profile 2", 2e-2),
    "evaluated": ("--bf16", "--eval-ratio 0.2 --eval-steps 2 --generate-steps 2 --generate-max-new-tokens 4", 2e-2),
    "8-bit state": ("--optim adamw_torch_8bit", "", 1e-3),
    "in bf16 alone": ("--bf16 --optim adamw_bf16", "", 2e-2),
    "Muon": ("--optim muon --learning-rate 1e-3", "", 1e-2),
    "Shampoo": ("--optim shampoo --shampoo-frequency 1 --learning-rate 1e-3", "", 1e-2),
    "adapters": ("--bf16 --adapter lora", "", 2e-2),
    "adapters without MegaBlocks": ("--bf16 --adapter lora", "--expert-kernel torch-grouped", 2e-2),
    "adapters on an nf4 base": ("--bf16 --adapter lora --base-dtype nf4", "", 2e-2),
    "adapters on an fp8 base": ("--bf16 --adapter lora --base-dtype fp8", "", 2e-2),
}
FAMILIES = ["gpt_oss", "deepseek_v3", "qwen3_next", "gemma4", "lfm2_moe"]
"""With sinks and windows, latent attention, states, several kinds of layers, and convolutions."""


@pytest.fixture(scope="module")
def on_cpu(card_runs: Runs) -> dict[str, Ended]:
    """Runs on the CPU, by their flags."""
    return {}


def skip_what_is_not_there(flags: str) -> None:
    if MEGABLOCKS_SPARSE_ENTRY.name in flags and find_spec("megablocks") is None:
        pytest.skip("megablocks is not installed")
    if "fp8" in flags and "base-dtype" not in flags and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch multiplies so on Hopper alone")


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_as_on_a_cpu(card_runs: Runs, device: str, on_cpu: dict[str, Ended], feature: str) -> None:
    """Losses and gradient norms of each step."""
    common, more, tolerance = FEATURES[feature]
    if device == "cuda":
        skip_what_is_not_there(f"{common} {more}")
    if "--eval-ratio" in more:  # other rows are trained on
        common, more = more, ""
    if common not in on_cpu:
        on_cpu[common] = run_on("cpu", card_runs, 1, common, f"{feature} on a CPU")
    found = run_on(device, card_runs, 1, f"{common} {more}", feature)
    for name in ("loss", "grad_norm"):
        expected = on_cpu[common].values(name)
        assert found.values(name) == pytest.approx(expected, rel=tolerance * (1 if name == "loss" else 3)), name
    if "--profile" in more:
        files = {path.name for path in (found.out / "profile").iterdir()}
        assert ("rank-0.step-2.memory.pickle" in files) == (device == "cuda"), files


def pairs(path: Path) -> None:
    rows = [{"prompt": f"say {i}:", "chosen": "hello" * (1 + i % 3), "rejected": f"world {i}"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def marked(path: Path) -> None:
    rows = [{"prompt": f"say {i}:", "completion": "hello" * (1 + i % 3), "label": i % 2 == 0} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def teacher(path: Path) -> None:
    save_model(path, seed=1, hidden_size=128, intermediate_size=128)
    save_tokenizer(path)


def published_in_mxfp4(path: Path) -> None:
    save_mxfp4(hf_model(Case([], family="gpt_oss", changes={"hidden_size": 64, "intermediate_size": 64})), path)
    save_tokenizer(path)


def with_mtp(path: Path) -> None:
    save_mtp(predicting("deepseek_v3"), path)


def with_images(path: Path) -> None:
    save_seeing(path)
    written(path / "data")


TASKS: dict[str, tuple[str, Callable[[Path], None] | None, str]] = {
    # flags in which X is the path of what is made, what makes it, and what the GPU alone has
    "DPO": ("--task dpo --dataset X", pairs, ""),
    "KTO": ("--task kto --dataset X", marked, ""),
    "a teacher": ("--teacher X --teacher-top-k 5", teacher, ""),
    "multi-token prediction": ("--model X --train-mtp", with_mtp, ""),
    "images": ("--model X --dataset X/data/train.jsonl --images --train-vision tower projector", with_images, ""),
    "packed images": ("--model X --dataset X/data/train.jsonl --images --packing", with_images, "--offload"),
    "adapters on an mxfp4 base": ("--model X --adapter lora --base-dtype mxfp4", published_in_mxfp4, ""),
    "experts in host memory": ("--adapter lora", None, "--offload-experts"),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_tasks_as_on_a_cpu(card_runs: Runs, device: str, tmp_path: Path, task: str) -> None:
    """Losses and gradient norms of each step."""
    flags, make, more = TASKS[task]
    if make is not None:
        make(tmp_path / "made.jsonl")
    flags = f"--bf16 --router-aux-loss-coef 0 --router-z-loss-coef 0 {flags.replace('X', str(tmp_path / 'made.jsonl'))}"
    expected = run_on("cpu", card_runs, 1, flags, tmp_path / "cpu")
    found = run_on(device, card_runs, 1, f"{flags} {more if device == 'cuda' else ''}", tmp_path / "card")
    for name in ("loss", "grad_norm"):
        assert found.values(name) == pytest.approx(expected.values(name), rel=5e-2), name


@pytest.mark.release
@pytest.mark.parametrize("family", FAMILIES)
def test_families_as_on_a_cpu(card_runs: Runs, device: str, tmp_path: Path, family: str) -> None:
    hf_model(Case([], family=family), seed=1).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    runs = Runs(card_runs.ranks, tmp_path / "model", card_runs.data, tmp_path)
    for more in ("--router-aux-loss-coef 0", "--router-aux-loss-coef 0 --packing"):
        found, expected = (
            run_on(place, runs, 1, f"--bf16 {more}", f"{number}{more}") for number, place in enumerate((device, "cpu"))
        )
        for name in ("loss", "grad_norm"):
            assert found.values(name) == pytest.approx(expected.values(name), rel=5e-2), (more, name)


@pytest.mark.release
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch_8bit", "adamw_bf16", "muon", "shampoo"])
def test_offloaded_parameters_are_updated_alike(card_runs: Runs, device: str, tmp_path: Path, optim: str) -> None:
    """With a checkpoint on the way; sums of the optimizer are made on another device, and last digits may differ."""
    flags = f"--optim {optim} --learning-rate 1e-3 --save-steps 2"
    plain, offloaded = (
        run_on(device, card_runs, 1, f"{flags} {more}", tmp_path / f"run{more}") for more in ("", "--offload")
    )
    assert_near(offloaded, plain, card_runs.model, 1e-3, of_weights=0.1 if optim == "adamw_bf16" else 1e-2)


def in_a_process(runs: Runs, flags: str, out: Path) -> Ended:
    """A run of one rank by train_ep.py itself."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG")}
    paths = ["--model", str(runs.model), "--dataset", str(runs.data), "--output-dir", str(out)]
    command = [sys.executable, "train_ep.py", *paths, *flags.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Ended(out, [0], done.stdout, done.stderr)


@pytest.mark.parametrize(
    "more",
    [
        "--bf16 --expert-kernel torch-grouped",
        "--bf16 --expert-kernel loop --packing",
        "--cross-entropy chunked --gradient-checkpointing selective",
        "--cross-entropy full",
    ],
)
def test_twice_the_same_bits(card_runs: Runs, tmp_path: Path, more: str) -> None:
    """Each time in a process of its own: cuBLAS reads its setting once."""
    assert_same_twice(*(in_a_process(card_runs, f"{FLAGS} 1 {more}", tmp_path / name) for name in ("first", "second")))


WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}
"""So that activations and weights are more than what the allocator rounds up."""


def test_presets_have_what_the_driver_reports() -> None:
    boards = {"NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
    card = torch.cuda.get_device_properties(0)
    name = {**boards, "NVIDIA B200": "B200"}.get(card.name)
    if name is None:
        pytest.skip(f"no preset is of a {card.name}")
    assert 0.99 * card.total_memory < DEVICES[name].memory <= card.total_memory


@pytest.mark.release
@pytest.mark.parametrize("more", ["--bf16", "--bf16 --gradient-checkpointing full", "--bf16 --cross-entropy full", ""])
def test_memory_is_as_forecast(
    card_runs: Runs, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    """The most that torch's allocator has given out, against a dry run of the step; on a CPU the process is more."""
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    steps, length = (3, 1024) if device == "cuda" else (1, 128)
    shape = f"--max-seq-length {length} --per-device-train-batch-size 2"
    save_model(model, **WIDE)
    save_tokenizer(model)
    data.write_text(f"{json.dumps({'text': 'say hello to the world ' * 300})}\n" * 6)
    runs = Runs(card_runs.ranks, model, data, tmp_path)
    found = in_a_process(runs, f"--max-steps {steps} --no-export {shape} {more}", tmp_path / "run")
    argv = f"rehearse --model {model} --gpus 1 --ep-size 1 --tp-size 1 --json {shape} {more}"
    assert plan_or_rehearse(argv.split()) == 0
    (account,) = json.loads(capsys.readouterr().out)
    measured = 1e6 * max(line["peak_memory_mb"] for line in found.lines("peak_memory_mb"))
    assert measured >= 0.95 * account["memory"]["peak"]
    if device == "cuda":
        assert measured == pytest.approx(account["memory"]["peak"], rel=0.1)
