"""`python -m expertmesh.sharding`: plans, pictures of the mesh, and mistakes."""

import contextlib
import inspect
import io
import json
import re
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args, get_args_parser
from transformers import AutoModelForCausalLM

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import Topology
from expertmesh.training.cluster.check import (
    GroupSpeed,
    check_groups,
    mark_slow,
    measured_hardware,
    measured_links,
)
from expertmesh.training.cluster.commands import main
from expertmesh.training.cluster.mesh_command import print_speeds
from expertmesh.training.cluster.mesh_picture import picture
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.model_setup.rates import AT_BEST, published
from expertmesh.training.planning import plan_command
from expertmesh.training.planning.plan_flags import read_flags
from expertmesh.training.planning.planner.hardware import (
    DEVICES,
    Hardware,
    chosen_hardware,
    load_measured,
    preset,
    save_measured,
)
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.rank_memory import _plan_line
from tests.distributed.pool import RankPool
from tests.families.configs import skip_if_older, tiny_config
from tests.published.models import CONFIGS
from tests.sharding.planned import ByFormula, by_formula, launched
from tests.tiers import tiered

ALONE = ("--micro-batch", "1", "--tp-size", "1")
"""One sequence a rank, and no tensor parallelism beside."""


@pytest.fixture(autouse=True)
def forecasts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a formula, where a test does not ask for dry runs: what a plan says of figures does not depend on them."""
    if "dry_runs" not in request.fixturenames:
        monkeypatch.setattr(plan_command, "_forecasts", by_formula)


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures are those of dry runs, and none are kept from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def config_file() -> Path:
    """The published one of Mixtral 8x7B."""
    return CONFIGS / "mixtral-8x7b" / "config.json"


def test_plan_recommends_what_runs(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(config_file.parent), "--gpus", "16", "--micro-batch", "2", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "46.70 B parameters" in out
    assert "…" not in out, "off a terminal nothing is cut"
    heads = {"data", "expert", "dense", "state", "activ.", "gathered", "slack", "between", "GiB", "GB/step", "tokens/s"}
    assert heads <= set(out.split()), "nor left out"
    line = out.strip().splitlines()[-1]
    assert line.startswith("torchrun --nnodes 2")
    config = parse_config(launched(line))
    assert not config.packing, "it was not forecast"
    assert (config.bf16, config.per_device_train_batch_size, config.global_batch_size) == (True, 2, 256)
    assert 16 % config.ep_size == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a plan is made in little time."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_config("mixtral").save_pretrained(directory)
    return directory


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """What `plan --json` says of all layouts."""
    assert main(["plan", *arguments, "--json"]) in (0, 1)
    return list(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(
            ["--adapter", "lora", "--base-dtype", "nf4", "--packing", "--learning-rate", "3e-4"]
            + ["--tp-size", "1,2", "--pp-size", "1"],
        ),
        ["--fp32", "--gradient-accumulation-steps", "4", "--pp-size", "2", "--offload-activations", "--tp-size", "1"],
    ],
    ids=" ".join,
)
def test_a_launch_line_forecasts_what_it_was_printed_for(
    tiny: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """Given back, it makes one layout, with the same figures to the last digit, of each of the first ten; where these
    were estimates, the figures of dry runs."""
    cluster = ["--gpus", "4", "--gpus-per-node", "2"]
    for plan in told(capsys, *cluster, "--model", str(tiny), "--seq-length", "64", "--micro-batch", "1", *flags)[:10]:
        line = launched(plan["launch"])
        names = [word for word in line if word.startswith("--")]
        assert len(set(names)) == len(names), "a flag is given twice"
        (again,) = told(capsys, *cluster, *line)
        if plan["is_estimate"]:
            assert not again["is_estimate"]
            assert again["launch"] == plan["launch"]
        else:
            assert again == plan
        run = parse_config(line)
        assert (run.max_seq_length, run.packing) == (64, "--packing" in flags)
        layout = [run.ep_size, run.tp_size, run.pp_size, run.dense_shard, run.gradient_checkpointing]
        assert layout == [plan[name] for name in ("ep", "tp", "pp", "dense_shard", "gradient_checkpointing")]
        assert run.micro_batches(4) == plan["accumulation"]


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--ep-size", "2"], "ep", 2),
        (["--dense-shard", "hybrid"], "dense_shard", "hybrid"),
        (["--gradient-checkpointing", "full"], "gradient_checkpointing", "full"),
        (["--gradient-checkpointing"], "gradient_checkpointing", "full"),
        (["--per-device-train-batch-size", "4"], "micro_batch", 4),
        (["--per_device_train_batch_size=4"], "micro_batch", 4),
        (["--gradient-accumulation-steps", "3"], "accumulation", 3),
        (["--pp-size", "2"], "pp", 2),
        (["--pp-size", "2", "--pipeline-chunks", "1"], "chunks", 1),
        (["--pp-size", "2", "--pipeline-schedule", "zero-bubble"], "schedule", "zero-bubble"),
        (["--tp-size", "2"], "tp", 2),
        (["--cp-size", "2"], "cp", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_plan_keeps_to_what_was_given(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], name: str, value: Any
) -> None:
    """On the command line as in a YAML file, over which flags win."""
    common = ["--gpus", "4", "--model", str(tiny), "--seq-length", "64"]
    common += [] if "--tp-size" in flags else ["--tp-size", "1"]
    common += [] if name == "micro_batch" else ["--micro-batch", "1"]
    common += [] if name == "gradient_checkpointing" else ["--gradient-checkpointing", "selective"]
    plans = told(capsys, *common, *flags)
    assert {plan[name] for plan in plans} == {value}
    config = parse_config(["--model", "m", "--dataset", "d", *flags])
    file = tmp_path / "run.yaml"
    names = [flag.partition("=")[0][2:].replace("-", "_") for flag in flags if flag.startswith("--")]
    file.write_text("".join(f"{key}: {getattr(config, key)}\n" for key in names) + "max_seq_length: 32\n")
    from_file = told(capsys, *common, "--config", str(file))
    figures = [{key: plan[key] for key in plan if key != "launch"} for plan in from_file]
    assert figures == [{key: plan[key] for key in plan if key != "launch"} for plan in plans]
    line = launched(from_file[0]["launch"])
    assert line[:2] == ["--config", str(file)]
    assert told(capsys, "--gpus", "4", *line) == from_file[:1]


def test_a_step_has_a_batch_by_default(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that suits what is trained, in complete micro-batches; the output says so."""
    common = ["--gpus", "4", "--model", str(tiny), "--tp-size", "1", "--seq-length", "64", "--micro-batch", "2"]
    common += ["--gradient-checkpointing", "none", "--ep-size", "2"]
    for flags, batch in (([], 256), (["--adapter", "lora"], 64), (["--global-batch-size", "8"], 8)):
        for plan in told(capsys, *common, *flags):
            assert plan["accumulation"] * plan["micro_batch"] * 4 // plan["pp"] == batch
    assert main(["plan", *common, "--adapter", "lora"]) == 0
    assert "a step of 64 sequences (by default; --global-batch-size sets another" in capsys.readouterr().out
    assert main(["plan", *common, "--global-batch-size", "6", "--pp-size", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: 6 sequences per step do not fill the micro-batches: figures are of steps of 8" in out


def test_a_plan_of_pairs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags count pairs, which are two sequences each."""
    common = ["--gpus", "4", "--model", str(tiny), "--tp-size", "1", "--pp-size", "1", "--seq-length", "64"]
    common += ["--gradient-checkpointing", "none", "--ep-size", "2", "--task", "dpo"]
    for plan in told(capsys, *common, "--global-batch-size", "8"):
        pairs = plan["micro_batch"]
        assert plan["accumulation"] * pairs * 4 == 8
        assert f"--per-device-train-batch-size {pairs} " in f"{plan['launch']} "
    assert main(["plan", *common, "--micro-batch", "2", "--global-batch-size", "6"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a step of 6 pairs" in out
    assert "note: a micro-batch of 4 sequences has 2 pairs" in out
    assert "note: 6 pairs per step do not fill the micro-batches: figures are of steps of 8" in out


def test_sizes_that_are_refused_are_left_out(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first; the others are planned. Where none was asked for nothing is said of it."""

    def refusing(asked: Any, config: TrainConfig, progress: Any) -> ByFormula:
        said = find_config(config.model).content
        return ByFormula(said, lambda question: "too long" if question.config.tp_size == 1 else None)

    monkeypatch.setattr(plan_command, "_forecasts", refusing)
    common = ["plan", "--gpus", "4", "--model", str(tiny), "--seq-length", "64", "--micro-batch", "1"]
    for sizes in (["--tp-size", "1,2"], []):
        assert main([*common, *sizes, "--json"]) == 0
        said = capsys.readouterr()
        assert {plan["tp"] for plan in json.loads(said.out)} == {2}
        *left_out, note = said.err.splitlines()
        assert left_out == ["left out: --tp-size 1: too long"] * bool(sizes)
        assert note.startswith("note: in `launch`, set ")
    assert main([*common, "--tp-size", "1"]) == 2
    assert f"{tiny}: too long" in capsys.readouterr().err


def test_advice_has_been_tried(shallow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing fits, each way that is named fits when it is taken."""
    common = ["--model", str(shallow), *ALONE]
    (smallest, *_) = told(capsys, *common, "--gpus", "1")
    common += ["--gpu-memory", str(int(0.6 * smallest["memory"]["total"]))]
    assert main(["plan", *common, "--gpus", "1"]) == 1
    advice = " ".join(capsys.readouterr().out.split()).split("more GPUs: ")[1]
    named = [found.split() for found in re.findall(r"((?:--[\w-]+ \w+ ?)+): [\d.]+ GiB per GPU", advice)]
    assert [words[0] for words in named][-1] == "--gpus"
    assert ["--optim", "adamw_bf16"] in named
    assert ["--adapter", "lora", "--base-dtype", "nf4"] in named
    for words in named:
        assert main(["plan", *common, *words, *([] if "--gpus" in words else ["--gpus", "1"])]) == 0, words
        capsys.readouterr()


def test_published_in_mxfp4_is_advised_to_stay_so() -> None:
    for name, base in (("gpt-oss-20b", "mxfp4"), ("mixtral-8x7b", "nf4")):
        assert plan_command._fewer_bytes(str(CONFIGS / name))[-1] == {"adapter": "lora", "base_dtype": base}


@pytest.mark.parametrize(
    ("fits_from", "refused", "found", "tried"),
    [
        (2, (), 2, [2]),
        (8, (), 8, [2, 64, 4, 8]),
        (64, (), 64, [2, 64, 4, 8, 16, 32]),
        (128, (), None, [2, 64]),
        (8, (2, 32, 64), 8, [2, 64, 32, 16, 4, 8]),
        (2, (2, 4, 8, 16, 32, 64), None, [2, 64, 32, 16, 8, 4]),
    ],
)
def test_of_more_the_least_that_fits(
    fits_from: int, refused: tuple[int, ...], found: int | None, tried: list[int]
) -> None:
    """And where the most does not, nothing between is dry-run."""
    asked = []

    def fit(changes: dict[str, int]) -> Any:
        asked.append(changes["gpus"])
        if changes["gpus"] in refused:
            raise ExpertMeshError("not so many")
        return "a plan" if changes["gpus"] >= fits_from else None

    got = plan_command._first([{"gpus": 2**n} for n in range(1, 7)], fit)
    assert got == (None if found is None else ({"gpus": found}, "a plan"))
    assert asked == tried


def test_of_no_more_none_fits() -> None:
    """As of shorter sequences where they are short already."""
    assert plan_command._first([], lambda changes: None) is None


def test_what_fits_in_no_way(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card has less than CUDA's context: nothing is named as if it helped."""
    card = ["--gpus", "1", "--gpu-memory", "1MiB", "--gradient-checkpointing", "full"]
    assert main(["plan", *card, "--model", str(tiny), "--seq-length", "64", *ALONE]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "more GPUs:" not in out
    assert "none of these makes it fit: --optim adamw_torch_8bit, --optim adamw_bf16, --adapter lora" in out


@pytest.mark.parametrize(("gpus", "fits"), [(8, False), (16, True)])
def test_16_bytes_a_parameter_need_more_than_8_gpus(
    config_file: Path, capsys: pytest.CaptureFixture[str], gpus: int, fits: bool
) -> None:
    code = main(["plan", "--model", str(config_file), "--gpus", str(gpus), "--json", *ALONE])
    plans = json.loads(capsys.readouterr().out)
    assert (code == 0) == fits == plans[0]["fits"]
    assert 8 in {plan["ep"] for plan in plans} <= {1, 2, 4, 8}
    speeds = [plan["tokens_per_second_a_gpu"] for plan in plans if plan["fits"]]
    assert speeds == sorted(speeds, reverse=True)
    for plan in plans:
        memory = plan["memory"]
        assert memory["total"] == pytest.approx(sum(n for name, n in memory.items() if name != "total"), abs=8)
        assert plan["fits"] == (memory["total"] <= 80 * 2**30)


def test_memory_decides(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(config_file), "--gpu-memory", "40GiB", *ALONE]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing fits" in out
    assert "tried one at a time in the smallest layout or on more GPUs: --adapter lora: " in out
    assert "--adapter lora --base-dtype nf4: " in out
    assert "--gpus 32: " in out
    assert "--optim" not in out.split("nothing fits")[1], "which takes more than 40 GiB all the same"


@pytest.mark.parametrize(
    ("flags", "rate", "precision", "command"),
    [
        ([], "989", "bf16", "--bf16"),
        (["--fp32"], "67", "fp32", ""),
        (["--fp32", "--tf32"], "494.5", "fp32 with TF32 matmuls", "--tf32"),
    ],
)
def test_plan_in_a_precision(
    shallow: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    rate: str,
    precision: str,
    command: str,
) -> None:
    """The best rate of matmuls, and the flag that the run is started with."""
    assert main(["plan", "--model", str(shallow), "--gpus", "64", "--verbose", *ALONE, *flags]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f": {rate} TFLOP/s, " in out
    assert "attained of it: matmul 0.18 to 0.75, " in out
    assert f" in {precision} with adamw_torch_fused" in out
    config = parse_config(launched(out))
    assert [config.bf16, config.tf32] == [command == "--bf16", command == "--tf32"]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide, with few layers, whose state takes less than what they compute; and few experts, for few plans."""
    return changed_config(tmp_path_factory.mktemp("shallow"), num_hidden_layers=4, num_local_experts=2)


def changed_config(directory: Path, **changes: int) -> Path:
    """That of Mixtral 8x7B, but for these."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads((CONFIGS / "mixtral-8x7b" / "config.json").read_text()) | changes))
    return file


def test_plan_with_flags_of_a_run(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunked overlap applies where tokens are sent, and GEMM outputs are kept where checkpointing is selective; what
    is recommended says all of it."""
    flags = ["--overlap-chunks", "2", "--keep-expert-products", "4", "--expert-precision", "fp8"]
    common = ["plan", "--model", str(config_file), "--gpus", "64", *ALONE]
    assert main([*common, *flags]) == 0
    given = capsys.readouterr().out.split("recommended")[1].split()
    assert given[given.index("--expert-precision") + 1] == "fp8"
    selective = given[given.index("--gradient-checkpointing") + 1] == "selective"
    assert ("--keep-expert-products" in given) == selective
    assert ("--overlap-chunks" in given) == (int(given[given.index("--ep-size") + 1]) in (2, 4))


def test_plan_with_shared_rows_and_inputs_in_host_memory(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is recommended says both."""
    common = ["plan", "--model", str(config_file), "--gpus", "64", *ALONE, "--gradient-checkpointing", "full"]
    assert main([*common, "--cp-size", "4", "--offload-activations", "--seq-length", "131072"]) == 0
    config = parse_config(launched(capsys.readouterr().out))
    assert (config.cp_size, config.offload_activations) == (4, True)


def test_plan_of_several_tensor_parallel_sizes(shallow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is measured, those that the model cannot have are left out, and the launch line says which is best."""
    common = ["plan", "--model", str(shallow), "--gpus", "16", "--global-batch-size", "64", "--pp-size", "1"]
    common += ["--micro-batch", "2"]
    assert main([*common, "--json", "--tp-size", "1,2,4,8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {plan["tp"] for plan in found} == {1, 2, 4, 8}
    speeds = [plan["tokens_per_second_a_gpu"] for plan in found if plan["fits"]]
    assert speeds == sorted(speeds, reverse=True)
    for plan in found:
        assert (plan["tp"] > 1) == (plan["seconds"]["gathers"] > 0)
        assert plan["accumulation"] * 2 * 16 // plan["tp"] == 64
        # over ep ranks that tp divides
        assert plan["dense_shard"] == "full" or plan["ep"] % plan["tp"] == 0
    assert main([*common, "--tp-size", "4", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert parse_config(launched(said)).tp_size == 4
    assert "gathers of activations" in said


@pytest.mark.usefixtures("dry_runs")
@pytest.mark.release
def test_tensor_parallelism_that_a_model_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal is kept as what was measured is; where it was not asked for, nothing is said of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_config("deepseek_v3").save_pretrained(tmp_path)
    common = ["plan", "--model", str(tmp_path), "--gpus", "2", "--seq-length", "32", "--micro-batch", "1"]
    assert main([*common, "--global-batch-size", "1"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("expertmesh.training.planning.rehearsal.building.build_rehearsed", None)
    assert main([*common, "--tp-size", "2"]) == 2
    said = "--tp-size 2: transformers has no tensor-parallel plan (base_model_tp_plan) for the attention of deepseek_v3"
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("dry_runs")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "CONFIG", "--overlap-chunks", "0"], "--overlap-chunks 0: must be 1 or more"),
        (
            ["--model", "CONFIG", "--cp-size", "3"],
            "--cp-size 3 does not divide the 8 ranks; use 1, 2, 4 or 8",
        ),
        (["--model", "CONFIG", "--cp-size", "0"], "--cp-size 0: must be 1 or more"),
        (["--model", "CONFIG", "--sweep"], "--sweep was removed: give one number of GPUs, as in --gpus 64"),
        (["--model", "CONFIG", "--plot", "x.svg"], "--plot was removed: draw what --json prints"),
        (["--model", "CONFIG", "--ep-size", "3"], "--ep-size 3 does not divide the 8 experts of this model"),
        (["--model", "CONFIG", "--ep-size", "8", "--pp-size", "2"], "--ep-size 8 does not divide the 4 ranks"),
        (
            ["--model", "CONFIG", "--ep-size", "8", "--overlap-chunks", "2"],
            "--overlap-chunks 2: at --ep-size 8 a rank has 1 of 8 experts",
        ),
        (
            ["--model", "CONFIG", "--seq-length", "1024", "--max-seq-length", "2048"],
            "--seq-length 1024 and --max-seq-length 2048 are one setting with two values; give one of them",
        ),
        (["--model", "CONFIG", "--fp32", "--bf16"], "--fp32 and --bf16 True are one setting with two values"),
        (["--model", "CONFIG", "--micro-batch", "0"], "--per-device-train-batch-size 0: must be 1 or more"),
        (
            ["--model", "CONFIG", "--global-batch-size", "8", "--gradient-accumulation-steps", "2"],
            "--global-batch-size and --gradient-accumulation-steps: give one of them",
        ),
        (["--model", "CONFIG", "--use-cpu"], "--use-cpu: the forecast is of a run on GPUs; leave it out"),
        (["--model", "CONFIG", "--max-steps", "0"], "--max-steps 0: a run with it takes no step to forecast"),
        (["--model", "CONFIG", "--preview"], "--preview: a run with it takes no step to forecast"),
        (["--model", "CONFIG", "--prepare-only"], "--prepare-only: a run with it takes no step to forecast"),
        (["--model", "CONFIG", "--resume", "auto", "--elastic"], "--elastic: would choose another --ep-size"),
        (["--gpus", "8"], "--model is missing: a directory, a config.json, or a hub id"),
        (
            ["--model", "CONFIG", "--cp-size", "64", "--gpus", "64"],
            "--cp-size 64 does not divide the 32 attention heads of this model's layers",
        ),
        (["--model", "CONFIG", "--tp-size", "3"], "--tp-size 3 does not divide the 8 ranks; use 1, 2, 4 or 8"),
        (["--model", "CONFIG", "--tp-size", "0"], "--tp-size 0: must be a number, or several as in 1,2,4"),
        (["--model", "CONFIG", "--tp-size", "1;2"], "--tp-size 1;2: must be a number, or several as in 1,2,4"),
        (
            ["--model", "CONFIG", "--gpus", "16", "--tp-size", "16"],
            "--tp-size 16: a group has node 0, ranks 0-7 and node 1, ranks 8-15; its ranks exchange activations in",
        ),
        (
            ["--model", "CONFIG", "--gpus", "16", "--gpus-per-node", "16", "--tp-size", "16"],
            "16 does not divide the 8 key and value heads of this model (num_key_value_heads); use 1, 2, 4 or 8",
        ),
        (
            ["--model", "CONFIG", "--cp-size", "4", "--tp-size", "4"],
            "--cp-size 4 and --tp-size 4 make groups of 16 ranks, which do not divide the 8 ranks",
        ),
        (["--model", "CONFIG", "--gpu", "A100", "--expert-precision", "fp8"], "the fp8 matmul rate of"),
        (["--model", "/nowhere"], "--model /nowhere: no such file"),
        (["--model", "no/such-model"], "--model no/such-model is not a directory, and the hub has no config.json"),
        (["--model", "CONFIG", "--gpus", "0"], "--gpus 0: must be 1 or more"),
        (["--model", "CONFIG", "--adaptor", "lora"], "unknown flag --adaptor; did you mean --adapter?"),
        (["--model", "CONFIG", "--gpu", "P100"], "--gpu P100 is unknown; use A100"),
        (
            ["--model", "CONFIG", "--tf32"],
            "--tf32 is for fp32 matmuls, but this plan is for bf16; add --bf16 false",
        ),
        (["--model", "CONFIG", "--network", "string"], "--network string is unknown"),
        (["--model", "CONFIG", "--gpu-memory", "much"], "--gpu-memory much: write it like"),
        (["--model", "CONFIG", "--gpu-memory", "80"], "--gpu-memory 80: are 80 bytes; write it like 80GiB"),
        (["--model", "CONFIG", "--imbalance", "0.5"], "--imbalance 0.5: must be 1 "),
        (
            ["--model", "CONFIG", "--calibrate", "CONFIG"],
            "is not what `python -m expertmesh.sharding mesh --check --json` or `python -m "
            "benchmarks.rates --write` writes",
        ),
    ],
    ids=lambda value: " ".join(value[2:] or value) if isinstance(value, list) else "",
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    config_file = changed_config(tmp_path, num_hidden_layers=2)
    assert main(["plan", *(str(config_file) if word == "CONFIG" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "rehearse"])
def test_measured_rates_and_presets(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """What a file of rates has is no preset's: such a flag is refused, but --gpu where only it only sets the memory."""
    card, host, bare = (tmp_path / f"{name}.json" for name in ("card", "host", "bare"))
    measured = preset("H100", "infiniband-ndr")
    save_measured(measured, card)
    save_measured(replace(measured, device=replace(measured.device, memory=0.0)), host)
    save_measured(replace(measured, rates=AT_BEST), bare)
    common = [command, "--model", str(tiny), "--gpus", "2", "--max-seq-length", "32", "--tp-size", "1"]
    for file, flags, said in (
        (card, ["--network", "pcie4"], f"--network pcie4: --calibrate {card} has the rates of the links; leave out"),
        (host, ["--network", "pcie4"], f"--network pcie4: --calibrate {host} has the rates of the links; leave out"),
        (card, ["--gpu", "A100"], f"--gpu A100: --calibrate {card} has a GPU's rates and memory; leave out"),
        (
            host,
            ["--gpu", "A100", "--gpu-memory", "1GiB"],
            f"--gpu A100: with --calibrate {host} it only sets the memory",
        ),
        (bare, ["--flash-attention", "3"], f"--flash-attention 3: --calibrate {bare} has no rates of it"),
        (bare, ["--flash-attention", "4"], f"--flash-attention 4: --calibrate {bare} has no rates of it"),
    ):
        assert main([*common, "--calibrate", str(file), *flags]) == 2
        assert said in capsys.readouterr().err
    arguments = Namespace(gpu="h200", gpu_memory="", network=None, calibrate=host, flash_attention=2)
    found = chosen_hardware(arguments)
    assert found.device == replace(measured.device, memory=DEVICES["H200"].memory)
    assert found.name == f"rates of {host}, memory of H200"
    for file in (host, card):
        arguments = Namespace(gpu=None, gpu_memory="3GiB", network=None, calibrate=file, flash_attention=2)
        assert chosen_hardware(arguments) == replace(
            measured, device=replace(measured.device, memory=3 * 2**30), name=f"rates of {file}"
        )


@pytest.mark.parametrize(
    ("name", "reported"),
    [("A100", 79.14 * 2**30), ("H100", 81082 * 2**20), ("H200", 139.72 * 2**30), ("B200", 178.35 * 2**30)],
)
def test_memory_of_presets(name: str, reported: float) -> None:
    """As torch reports it of such a card, rounded down: not what is printed on it (tests/gpu compares with a card)."""
    assert 0.998 * reported < DEVICES[name].memory <= reported


def test_names_of_presets_in_any_case() -> None:
    def chosen(gpu: str, network: str) -> Hardware:
        return chosen_hardware(Namespace(gpu=gpu, gpu_memory="", network=network, calibrate=None, flash_attention=2))

    assert chosen("a100", "InfiniBand-HDR") == chosen("A100", "infiniband-hdr")
    with pytest.raises(ExpertMeshError, match="--gpu a10 is unknown; use A100, H100, H200, B200, or --calibrate"):
        chosen("a10", "pcie4")
    with pytest.raises(ExpertMeshError, match="--flash-attention 3: is for H100 and H200, not for --gpu b200"):
        chosen_hardware(Namespace(gpu="b200", gpu_memory="", network=None, calibrate=None, flash_attention=3))
    with pytest.raises(ExpertMeshError, match="--flash-attention 4: --gpu H100 has no rates of it"):
        chosen_hardware(Namespace(gpu=None, gpu_memory="", network=None, calibrate=None, flash_attention=4))
    newer = Namespace(gpu="b200", gpu_memory="", network=None, calibrate=None, flash_attention=4)
    assert chosen_hardware(newer).rates == published("B200").with_flash_attention(4)


@pytest.mark.usefixtures("dry_runs")
@pytest.mark.parametrize("command", ["plan", pytest.param("rehearse", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", tiered(["mixtral"], slow=["qwen3_next", "jamba"]))
def test_whose_code_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family: str, command: str
) -> None:
    """Of functions for which the family's file names a package with kernels; also as read from the cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_config = tiny_config(family)
    model_config.save_pretrained(tmp_path)
    arguments = [command, "--model", str(tmp_path), "--gpus", "2", "--max-seq-length", "16"]
    arguments += ["--per-device-train-batch-size", "1", "--tp-size", "1", "--ep-size", "2"]
    arguments += ["--gradient-checkpointing", "none", "--imbalance", "1"]
    source = inspect.getsource(sys.modules[type(AutoModelForCausalLM.from_config(model_config)).__module__])
    has_packages = re.search(r"\b(mamba_ssm|fla)\b", source) is not None
    assert has_packages == (family != "mixtral")
    for _ in range(2):
        assert main(arguments) == 0
        said = " ".join(capsys.readouterr().out.split())
        named = re.search(
            r"is installed; without it transformers' Python code computes ([\w, ]+), token by token", said
        )
        assert (named is not None) == has_packages
        assert all(f"def {name}(" in source for name in (named[1].split(", ") if named else ()))
        assert "assumed: liger-kernel is installed, and computes norms" in said


def test_what_the_file_has_fixed_is_told(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What flags have fixed whoever gave them knows."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny}\nmax_seq_length: 16\nep_size: 2\ndense_shard: full\n")
    common = ["plan", "--config", str(recipe), *ALONE, "--gpus", "4", "--gradient-checkpointing", "none"]
    for flags, fixed in (([], "--ep-size 2 --dense-shard full"), (["--ep-size", "4"], "--dense-shard full")):
        assert main([*common, *flags]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"note: {recipe} fixes {fixed}: only the rest was searched" in said
    assert main([*common, "--ep-size", "4", "--dense-shard", "hybrid"]) == 0
    assert " fixes " not in capsys.readouterr().out


def started(line: str) -> tuple[int, TrainConfig]:
    """How many ranks torchrun starts by a launch line, as its own parser reads it, and with which settings."""
    words = shlex.split(line)
    assert words[0] == "torchrun"
    read, _, flags = config_from_args(get_args_parser().parse_args(words[1:]))
    assert read.min_nodes == read.max_nodes
    assert flags[0] == "-m" or "expertmesh.train_ep" in flags
    return read.max_nodes * read.nproc_per_node, parse_config(flags[flags.index("expertmesh.train_ep") + 1 :])


@pytest.mark.parametrize("flags", [[], ["--pp-size", "2", "--global-batch-size", "24"]], ids=" ".join)
@pytest.mark.parametrize("per_node", [None, 2, 6])
def test_a_launch_line_starts_what_was_planned(
    tiny: Path, capsys: pytest.CaptureFixture[str], per_node: int | None, flags: list[str]
) -> None:
    """Over numbers of GPUs that fill nodes and others; where nodes cannot be alike, the numbers that are told do."""
    common = ["--model", str(tiny), *ALONE, "--max-seq-length", "16", "--gradient-checkpointing", "none", *flags]
    of_nodes = [] if per_node is None else ["--gpus-per-node", str(per_node)]
    for gpus in (2, 12, 20, 26, 32):
        code = main(["plan", *common, *of_nodes, "--gpus", str(gpus), "--json"])
        said = capsys.readouterr()
        here = gpus if per_node is None else per_node
        if code == 2:
            assert per_node is not None
            assert gpus > per_node
            assert gpus % per_node
            fits = re.search(r"give --gpus (\d+) or (\d+), or --gpus-per-node ([\d, or]+)$", said.err.strip())
            assert fits is not None, said.err
            assert all(int(number) % per_node == 0 for number in fits.groups()[:2])
            assert {gpus % int(number) for number in re.findall(r"\d+", fits[3])} == {0}
            continue
        assert ("fill nodes of 8 GPUs" in said.err) == (per_node is None and gpus > 8 and gpus % 8 > 0)
        plans = json.loads(said.out)
        assert plans
        for plan in plans:
            world_size, config = started(plan["launch"])
            assert world_size == gpus == plan["pp"] * plan["dp"] * plan["ep"]
            assert int(re.search(r"--nproc-per-node (\d+)", plan["launch"])[1]) <= here  # type: ignore[index]
            told = ("dense_shard", "gradient_checkpointing")
            assert [plan[name] for name in told] == [getattr(config, name) for name in told]
            sizes = [config.pp_size, config.ep_size, config.cp_size, config.tp_size]
            assert [plan[name] for name in ("pp", "ep", "cp", "tp")] == sizes
            assert plan["micro_batch"] == config.per_device_train_batch_size
            assert plan["accumulation"] == config.micro_batches(world_size)
            if plan["pp"] > 1:
                assert (plan["schedule"], plan["chunks"]) == (config.schedule_name, config.pipeline_chunks)


def test_nodes_that_nobody_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A prime number of GPUs fills none; one node may have more than the usual number, if that is said."""
    assert main(["plan", "--model", "m", "--gpus", "11"]) == 2
    assert "--gpus 11: do not fill nodes of 8 GPUs; give --gpus 8 or 16, or --gpus-per-node 1 or 11" in (
        capsys.readouterr().err
    )
    assert main(["mesh", "--world-size", "12", "--ep-size", "4"]) == 0
    said = capsys.readouterr()
    assert "note: --world-size 12 do not fill nodes of 8 GPUs: taken as 2 nodes of 6" in said.err
    assert "12 ranks = dp 3 x ep 4, 6 per node, 2 nodes" in said.out
    assert main(["mesh", "--world-size", "12", "--ep-size", "4", "--gpus-per-node", "8"]) == 2
    assert "--world-size 12: do not fill nodes of 8 GPUs; give --world-size 8 or 16, or" in capsys.readouterr().err
    assert main(["mesh", "--world-size", "12", "--ep-size", "4", "--gpus-per-node", "12"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("world_size", "here", "planned"), [(4, 2, 2), (12, 8, 6), (16, 16, 16), (12, 12, 12)])
def test_the_plan_that_a_run_names_has_its_nodes(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, world_size: int, here: int, planned: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    line = _plan_line(TrainConfig(model=str(tiny), dataset=["d"]), world_size, 2**30)
    asked = read_flags(shlex.split(line)[4:])
    assert (asked.world_size, asked.gpus_per_node) == (world_size, planned)


def test_a_directory_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_picture_of_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--world-size", "16", "--ep-size", "8", "--gpus-per-node", "8"]) == 0
    out = capsys.readouterr().out
    assert "ep: 2 groups of 8 (all-to-all of tokens), all within a node" in out
    assert "dp: 8 groups of 2 (the same experts, sharded over them), 8 of them cross nodes" in out
    assert "  3 11   crosses nodes" in out
    assert main(["mesh", "--gpus", "16", "--ep-size", "8", "--gpus-per-node", "8"]) == 0
    assert capsys.readouterr().out == out, "as `plan` and `rehearse` call it"
    assert main(["mesh", "--world-size", "16", "--ep-size", "3"]) == 2
    assert "--ep-size 3 does not divide the 8 experts" in capsys.readouterr().err


def test_picture_of_shared_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--world-size", "16", "--ep-size", "8", "--cp-size", "4", "--gpus-per-node", "2"]) == 0
    out = capsys.readouterr().out
    assert "16 ranks = dp 2 x ep 8 = data 4 x cp 4, 2 per node" in out
    assert "cp: 4 groups of 4 (each sequence split over them, attention by heads), 4 of them cross nodes\n" in out
    assert "\n  0 1 2 3   crosses" in out
    shared = ["mesh", "--world-size", "16", "--ep-size", "8", "--gpus-per-node", "4", "--tp-size", "2"]
    assert main([*shared, "--cp-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "16 ranks = dp 2 x ep 8 = data 4 x cp 2 x tp 2, 4 per node" in out
    assert "tp: 8 groups of 2 (heads, dense MLPs and the vocabulary divided), all within a node\n  0 1\n  2 3\n" in out
    assert (
        "cp: 8 groups of 2 (each sequence split over them, attention by heads), all within a node\n  0 2\n  1 3" in out
    )
    assert main([*shared[:-1], "8"]) == 2
    error = capsys.readouterr().err
    assert "--tp-size 8: a group has node 0, ranks 0-3 and node 1, ranks 4-7; " in error
    assert "must be on one node: use --tp-size 1, 2 or 4. " in error
    assert main(["mesh", "--world-size", "16", "--ep-size", "8", "--cp-size", "3"]) == 2
    assert "--cp-size 3 does not divide the 16 ranks; use 1, 2, 4, 8 or 16" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What one sees, apart from colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.getvalue()).splitlines()


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, arguments: list[str]) -> list[str]:
    """The lines that a command prints on a terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")  # which rich takes for 80 columns wide
    with contextlib.redirect_stdout(Terminal()) as terminal:
        assert main(arguments) == 0
    assert "…" not in terminal.getvalue()
    return terminal.lines


def test_plan_fits_the_terminal(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are left out, with a word about it; of those that stay, every figure is as it is in a pipe."""
    monkeypatch.chdir(config_file.parent)  # a path of its own would be longer than the terminal
    arguments = ["plan", "--model", "config.json", "--verbose", *ALONE, "--gpus", "16", "--top", "40"]
    assert main(arguments) == 0
    piped = capsys.readouterr().out
    figures = set(re.findall(r"[\d.,]*\d", piped))
    # the last column of a plan's row
    speeds = re.compile(r"^ *(?:full|hybrid|yes|no|\d).* \d,\d{3}$", re.MULTILINE)
    for width in (60, 80, 100, 200):
        lines = at_a_terminal(monkeypatch, width, arguments)
        assert all(len(line) <= width or line.startswith("torchrun ") for line in lines), width
        # the time it took, and the width it tells, are no figures of the plan
        shown = [line for line in lines if "columns:" not in line]
        untimed = re.sub(r"found\s+in\s+[\d.]+\s+s", "", "\n".join(shown))
        assert set(re.findall(r"[\d.,]*\d", untimed)) <= figures, width
        assert len(speeds.findall("\n".join(shown))) == len(speeds.findall(piped)), f"{width}: no tokens/s is lost"
        is_whole = not any("left out" in line or "in all lines" in line for line in lines)
        assert is_whole == (width >= 200), width


def test_columns_that_are_the_same_in_all_rows_are_told_once(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", "--model", str(config_file), "--gpus", "16", *ALONE, "--top", "2", "--verbose"]
    lines = at_a_terminal(monkeypatch, 80, arguments)
    assert len(re.findall("in all lines: [^.]*micro-batch 1", "\n".join(lines))) == 1
    (head,) = (line for line in lines if line.split()[:1] == ["weights"])
    assert not {"batch", "parallel"} & {*head.split()}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize(("world", "ep", "experts"), [(16, 8, 8), (256, 16, 128), (4096, 64, 512)])
def test_mesh_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int, world: int, ep: int, experts: int) -> None:
    arguments = ["mesh", "--world-size", str(world), "--ep-size", str(ep), "--num-experts", str(experts)]
    lines = at_a_terminal(monkeypatch, width, arguments)
    assert max(map(len, lines)) <= width
    assert any(line.startswith("dp 0 ") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_speeds_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    groups = [tuple(range(index, 128, 8)) for index in range(2)]
    sent, seconds = (32768.0, 234.5e9), (123456e-6, 1.0)
    speeds = [GroupSpeed("dp", ranks, "all-reduce", sent, seconds, ranks[0] == 1) for ranks in groups]
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.redirect_stdout(Terminal()) as terminal:
        print_speeds(speeds, 32768)
    lines = terminal.lines
    assert max(map(len, lines)) <= width
    assert sum("123,456 us   234.500" in line for line in lines) == 2
    assert sum("1 to 121 in steps of 8" in line for line in lines) == 1
    assert [line.split()[-1] for line in lines].count("slow") == 1


@pytest.mark.parametrize(
    ("topology", "experts"),
    [(Topology(4096, 8), 8), (Topology(4096, 128), 128), (Topology(8, 2, "hybrid"), 8)],
    ids=str,
)
def test_any_picture_fits_a_terminal(topology: Topology, experts: int) -> None:
    lines = picture(topology, 8, experts)
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 45


def measure_groups(topology: Topology) -> tuple[list[GroupSpeed], Any]:
    import torch

    from expertmesh.sharding.mesh import build_mesh

    device = torch.device("cpu")
    speeds = check_groups(build_mesh("cpu", topology), 256, device, 2)
    return speeds, measured_hardware(speeds, 2, device)


@pytest.mark.slow
def test_check_measures_every_group(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(measure_groups, 4, Topology(4, 2, "full", 4))
    for speeds, _ in results:
        assert speeds == results[0][0]
        found = {(speed.name, speed.ranks) for speed in speeds}
        everyone = (0, 1, 2, 3)
        assert found == {
            *(("ep", (0, 1)), ("ep", (2, 3)), ("dp", (0, 2)), ("dp", (1, 3))),
            *(("dense", everyone), ("cp", everyone)),
        }
        assert all(speed.latency > 0 and speed.bandwidth > 0 for speed in speeds)
    hardware = results[0][1]
    # ranks 0 and 1 share a node: the ep groups are inside, the others cross
    assert hardware.inside == measured_links([s for s in results[0][0] if s.name == "ep"], 2)[0]
    save_measured(hardware, tmp_path / "rates.json")
    assert load_measured(tmp_path / "rates.json") == hardware


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_check_measures_the_groups_of_a_pipeline(ranks: RankPool, tp_size: int) -> None:
    """Those of each stage, and of the ranks that pass micro-batches on to one another."""
    speeds, _ = ranks.run(measure_groups, 4, Topology(4, 2, pp_size=2, tp_size=tp_size))[0]
    of_stages = ["dense", "ep", *["tp"] * (tp_size > 1)]
    expected = {("pp", (0, 2)), ("pp", (1, 3)), *((name, ranks) for name in of_stages for ranks in ((0, 1), (2, 3)))}
    assert {(speed.name, speed.ranks) for speed in speeds} == expected


@pytest.mark.slow
def test_check_measures_inside_nodes_where_every_group_spans_them(ranks: RankPool) -> None:
    speeds, _ = ranks.run(measure_groups, 4, Topology(4, 4))[0]
    assert {(speed.name, speed.ranks) for speed in speeds} == {
        *(("ep", (0, 1, 2, 3)), ("dense", (0, 1, 2, 3))),
        *(("node", (0, 1)), ("node", (2, 3)), ("across nodes", (0, 2)), ("across nodes", (1, 3))),
    }


def test_a_slow_group_is_flagged() -> None:
    speeds = [
        GroupSpeed("ep", (i, i + 1), "all-to-all", (0.0, bandwidth), (1e-6, 1.0))
        for i, bandwidth in ((0, 10.0), (2, 4.0), (4, 9.0))
    ]
    assert [speed.is_slow for speed in mark_slow(speeds)] == [False, True, False]


def test_check_needs_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--world-size", "8", "--ep-size", "2", "--check"]) == 2
    assert "--check runs under torchrun" in capsys.readouterr().err


@pytest.mark.usefixtures("dry_runs")
@pytest.mark.release
def test_a_model_that_fails_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it would in training: decays, buffers in fp32, are multiplied with activations in bf16."""
    skip_if_older("trains this model in bf16")
    tiny_config("minimax").save_pretrained(tmp_path)
    plan = ["plan", "--model", str(tmp_path), "--gpus", "2", "--seq-length", "64", "--micro-batch", "1", "--no-cache"]
    plan += ["--ep-size", "2", "--pp-size", "1", "--gradient-checkpointing", "none"]
    assert main(plan) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sharding: error: {tmp_path}: the dry run fails in the forward of decoder layer 1, in ")
    assert "self_attn: RuntimeError: expected scalar type torch.float32 but found torch.bfloat16" in line
    assert main([*plan, "--fp32"]) == 0


@pytest.mark.usefixtures("dry_runs")
@pytest.mark.release
def test_a_model_that_asks_how_many_tokens_a_mask_shows(tmp_path: Path) -> None:
    """All of them, for the forecast: the most that it could be."""
    tiny_config("qwen4_exp").save_pretrained(tmp_path)
    plan = ["plan", "--model", str(tmp_path), "--gpus", "1", "--seq-length", "16", "--micro-batch", "1", "--no-cache"]
    assert main([*plan, "--gradient-checkpointing", "none"]) == 0


@pytest.mark.parametrize("flags", [[], ["--packing"]], ids=" ".join)
def test_sequences_are_full(tiny: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    """As it is printed, and as a run has it by forecast; also packed ones, of one sample."""
    forecasts = ByFormula(find_config(str(tiny)).content)
    monkeypatch.setattr(plan_command, "_forecasts", lambda *_: forecasts)
    assert main(["plan", "--model", str(tiny), *ALONE, "--gpus", "2", *flags]) == 0
    assert {asked.routing.samples for asked in forecasts.questions} == {1}
    assert {asked.routing.busiest for asked in forecasts.questions} == {None, 1.0}
