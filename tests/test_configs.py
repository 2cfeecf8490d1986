"""The configurations that come with the project, and the scripts that start them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from expertmesh.moe.experts.model_layers import moe_layers, moe_shape
from expertmesh.moe.hf_model.build import build_model, count_parameters
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import check_sizes
from expertmesh.training.attention.by_sample import apply_packing
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.cluster.commands import main
from expertmesh.training.config.optimizers import LARGEST_BLOCK, block_size
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.planning import plan_flags
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.planner.pipelines import dry_run_pipeline, pipelined
from expertmesh.training.planning.planner.search import Plan, forecast
from expertmesh.training.planning.rehearsal import rehearse_command
from expertmesh.training.planning.tables import launch_line, speed
from tests.processes import free_ports
from tests.published.models import CONFIGS as PUBLISHED_CONFIGS
from tests.sharding.planned import launched

ROOT = Path(__file__).parents[1]
H100 = preset("H100", "infiniband-ndr")
STATE_BYTES = {
    "adamw_torch_fused": 4 + 4 + 8, "adamw_torch_8bit": 4 + 4 + 2 + 8 / LARGEST_BLOCK, "adamw_bf16": 2 + 2 + 4,
}  # fmt: skip
"""Of a parameter, its gradient and both moments."""
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
README = (ROOT / "configs" / "README.md").read_text()
POSITIONS = re.compile(r"([\d,]+) positions per step on (\d+) GPUs?")
FORECAST = re.compile(
    r"# Forecast of (\d+) H100: ([\d.]+) GiB per GPU, ([\d,]+)(?: to ([\d,]+))? tokens/s per GPU, "
    r"([\d.]+)%(?: to ([\d.]+)%)? MFU"
)
OPTIMIZERS = {"adamw_torch_fused": "fp32 AdamW", "adamw_torch_8bit": "8-bit AdamW", "adamw_bf16": "all state in bf16"}
LORA, DPO = "_lora", "_dpo_lora"
"""Ends of the name of a recipe that trains adapters, and of one of these on preference pairs."""
RECIPES = [file.stem for file in CONFIGS if file.stem != "tiny"]
FULL = [name for name in RECIPES if not name.endswith(LORA)]
ADAPTERS = [name for name in RECIPES if name.endswith(LORA)]
PUBLISHED = {
    "deepseek_v3": "deepseek-v3",
    "glm_4_5_air": "glm-4.5-air",
    "gpt_oss_120b": "gpt-oss-120b",
    "gpt_oss_20b": "gpt-oss-20b",
    "mixtral_8x22b": "mixtral-8x22b",
    "mixtral_8x7b": "mixtral-8x7b",
    "olmoe_7b": "olmoe-1b-7b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_next_80b_a3b": "qwen3-next-80b",
    "qwen3_vl_30b_a3b": "qwen3-vl-30b-a3b",
}
"""By the recipe that trains all of a model, the directory of its published config.json."""


class Forecast(NamedTuple):
    """memory: GiB per GPU. speed: tokens a second and GPU, with natural and with balanced routing. mfu: in percent."""

    gpus: float
    memory: float
    speed: float
    balanced_speed: float
    mfu: float
    balanced_mfu: float


def forecast_in(text: str) -> Forecast:
    """The one that a recipe's head states."""
    ((*figures,),) = FORECAST.findall(text)
    gpus, memory, speed, balanced_speed, mfu, balanced_mfu = (figure.replace(",", "") for figure in figures)
    # of one where routing makes no difference there is one figure
    stated = (gpus, memory, speed, balanced_speed or speed, mfu, balanced_mfu or mfu)
    return Forecast(*map(float, stated))


def text_of(name: str) -> str:
    return (ROOT / "configs" / f"{name}.yaml").read_text()


def config_of(name: str, *flags: str) -> TrainConfig:
    return parse_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), "--dataset", "d", "--model", "m", *flags])


def published(name: str) -> Path:
    return PUBLISHED_CONFIGS / PUBLISHED[name.removesuffix(DPO).removesuffix(LORA)]


def gpus_of(name: str) -> int:
    """The GPUs for which the file counts positions."""
    ((_, gpus),) = POSITIONS.findall(text_of(name))
    return int(gpus)


@cache
def model_of(name: str) -> Any:
    """On the meta device, built as train_ep.py builds it; once for all tests of a recipe."""
    hf, config = find_config(str(published(name))).load(), config_of(name)
    attention = choose_attention(config.attn_implementation, bool(config.packing), hf, config.images)
    return build_model(hf, attention, images=config.images)


def image_tokens(name: str) -> int:
    """Of the image that each sample has by a recipe's head; 0: it has none."""
    (tokens,) = re.findall(r"--image-tokens (\d+)", text_of(name)) or ["0"]
    assert bool(int(tokens)) == config_of(name).images
    return int(tokens)


def assert_keeps(name: str, config: TrainConfig) -> None:
    """The run is the recipe's in all that this says."""
    recipe = config_of(name)
    given = [key for key in yaml.safe_load(text_of(name)) if key != "model"]
    assert {key: getattr(config, key) for key in given} == {key: getattr(recipe, key) for key in given}


@pytest.mark.parametrize("name", [file.stem for file in CONFIGS])
def test_forecasts_take_every_recipe(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan --config` with all that it says in the line that starts it, and `rehearse --config` as far as its flags."""
    gpus = 4 if name == "tiny" else gpus_of(name)
    flags = ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--gpus", str(gpus), "--model", "m"]
    arguments, rest = plan_flags.build_parser().parse_known_args(flags)
    asked = plan_flags.asked_by(arguments, rest)
    config = asked.config()
    assert_keeps(name, config)
    line = launch_line(config, gpus, 8, asked.given.file, asked.given.config)
    assert parse_config(launched(line)) == config

    def reached(model: str) -> Any:
        raise ExpertMeshError(f"{model} would be read")

    monkeypatch.setattr(rehearse_command, "find_config", reached)
    assert main(["rehearse", *flags]) == 2
    assert "m would be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", [file.stem for file in CONFIGS])
def test_flags_win_over_a_recipe(name: str) -> None:
    """Also where they exclude what it says, which is told; and the runs are those of the recipe without that."""
    file = str(ROOT / "configs" / f"{name}.yaml")
    given = yaml.safe_load(Path(file).read_text())
    base = ["--config", file, "--model", "m", "--dataset", "d"]
    warmup = "warmup_steps" if "warmup_steps" in given else "warmup_ratio"
    for flags, gone in (
        (["--warmup-ratio", "0.1"] if warmup == "warmup_steps" else ["--warmup-steps", "100"], [warmup]),
        (["--chat-template", "chatml"], ["prompt_template"]),
        (["--global-batch-size", "64"], ["gradient_accumulation_steps"]),
        (["--eval-dataset", "e"], ["eval_ratio"]),
        (["--packing"], ["group_by_length"]),
        (["--adapter", "none"], ["base_dtype"]),
    ):
        config = parse_config([*base, *flags])
        default = TrainConfig(model="-")
        left_out = [key for key in gone if key in given and given[key] != getattr(default, key)]
        told = [line for line in config.without_effect if " overrides " in line]
        assert [line.split(" overrides ")[1].partition(":")[0] for line in told] == left_out
        assert all(getattr(config, key) == getattr(default, key) for key in left_out)


@pytest.mark.parametrize("name", ["mixtral_8x7b", pytest.param("deepseek_v3", marks=pytest.mark.release)])
def test_a_plan_of_a_recipe_is_the_recipes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layout that is tried has all that the recipe says of it, and fits; so do the lines that start them."""
    flags = ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--model", str(published(name))]
    flags += ["--gpus", str(gpus_of(name)), "--tp-size", "1", "--imbalance", "1"]
    assert main(["plan", *flags, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert plans[0]["fits"]
    for plan in plans:
        run = parse_config(launched(plan["launch"]))
        assert_keeps(name, run)
        assert (plan["ep"], plan["micro_batch"]) == (run.ep_size, run.per_device_train_batch_size)


def test_a_dry_run_of_the_smallest_recipe(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `--config`, as a plan of it."""
    flags = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--model", str(tiny_model), "--gpus", "4", "--json"]
    for command, more in (("plan", ["--tp-size", "1", "--gradient-checkpointing", "none"]), ("rehearse", [])):
        assert main([command, *flags, "--imbalance", "1", *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert all(each["ep"] == 4 for each in told) if command == "plan" else len(told) == 1


MEMORY = {
    "mixtral_8x7b": ["of 8: 58.6 GB"],
    "mixtral_8x22b": ["35.2 GB of 32 GPUs", "140.6 GB of 8"],
    "olmoe_7b": ["of 8: 13.8 GB"],
    "qwen3_30b_a3b": ["of 8: 38.3 GB"],
    "qwen3_next_80b_a3b": ["50.0 GB of 16 GPUs", "99.9 GB of 8"],
    "qwen3_vl_30b_a3b": ["of 8: 39.0 GB"],
    "gpt_oss_20b": ["of 8: 41.8 GB"],
    "gpt_oss_120b": ["58.4 GB of 16 GPUs", "116.8 GB of 8"],
    "glm_4_5_air": ["53.4 GB of 16 GPUs", "106.9 GB of 8"],
    "deepseek_v3": ["41.9 GB of 128 GPUs", "83.9 GB of 64"],
}
"""By recipe, what its comments say of state per GPU."""


def first_of(names: Iterable[str]) -> list[Any]:
    """As parameters of a test, which is `slow` with all others but the first that is Mixtral 8x7B's."""
    return [pytest.param(name, marks=() if name.startswith("mixtral_8x7b") else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", first_of(MEMORY))
def test_a_recipe_fits_its_model(name: str) -> None:
    """What the comments state of memory and layouts is so, what train_ep.py would refuse is not asked for, and what is
    asked for has an effect."""
    model, text = model_of(name), text_of(name)
    counts = count_parameters(model)
    for said in MEMORY[name]:
        (gpus,) = map(int, re.findall(r"of (\d+)", said))
        config = config_of(name, *([] if gpus == gpus_of(name) else flags_on_192_gb(name)))
        assert f"{counts.total / gpus * STATE_BYTES[config.optim] / 1e9:.1f} GB" in said
        assert said in text
        if "would take" in text:
            fp32 = counts.total / gpus * STATE_BYTES["adamw_torch_fused"] / 1e9
            assert f"fp32 state would take {fp32:.1f} GB." in text
        check_sizes(config.topology(gpus), moe_shape(model).num_experts)

    config = config_of(name)
    if config.router_aux_loss_coef or config.router_z_loss_coef:
        assert hasattr(model.config, "router_aux_loss_coef")
        assert all(layer.router is not None for layer in moe_layers(model))
    # parameters without blocks have unquantized moments
    whole = sum(p.numel() for p in model.parameters() if block_size(p.shape) is None) / counts.total
    assert whole < 0.02 or config.optim != "adamw_torch_8bit"
    check_batch(name, model)


@pytest.mark.parametrize("name", first_of(ADAPTERS))
def test_a_recipe_of_adapters_fits_its_model(name: str) -> None:
    """What the comments state of rank, learning rate and layout is so. (Of memory: `test_rehearsed_recipes`.)"""
    model, text, config = model_of(name), text_of(name), config_of(name)
    shape, gpus = moe_shape(model), gpus_of(name)
    check_sizes(config.topology(gpus), shape.num_experts)
    check_batch(name, model)
    assert (config.adapter, config.ep_size) == ("lora", gpus)
    assert f"Rank: {config.lora_rank} per expert. {shape.top_k} experts are active per token" in text
    assert f"rank {config.lora_rank * shape.top_k} of a dense layer" in text
    of_all = 5e-7 if name.endswith(DPO) else config_of(name.removesuffix(LORA)).learning_rate
    assert config.learning_rate == pytest.approx(10 * of_all)
    base = "bf16" if config.base_dtype == "bfloat16" else config.base_dtype
    assert f"beside a frozen base in {base}" in " ".join(text.split())


def check_batch(name: str, model: Any) -> None:
    """What a recipe's comments state of its model's parameters and of a step."""
    config, text = config_of(name), text_of(name)
    assert f"({count_parameters(model).total / 1e9:.1f} B parameters" in text
    if config.packing:
        apply_packing(model)
    ((positions, _),) = POSITIONS.findall(text)
    rows = (
        config.per_device_train_batch_size * (config.gradient_accumulation_steps or 1) * gpus_of(name) // config.pp_size
    )
    assert f"{rows * config.max_seq_length * config.sequences_per_row:,}" == positions


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_why(name: str) -> None:
    """Its learning rate, batch, epochs and balancing, with the figures of its settings."""
    config, text = config_of(name), text_of(name)
    why = dict(re.findall(r"^# (\w[\w ]*): (.*)", text, re.MULTILINE))
    assert f"{config.learning_rate:.0e}".replace("e-0", "e-") in why["Learning rate"]
    ((positions, _),) = POSITIONS.findall(text)
    assert f"{positions} positions" in why["Batch"]
    assert config.num_train_epochs == 2
    assert "two" in why["Epochs"]
    coefficient = config.router_aux_loss_coef
    assert f"{coefficient}," in why["Balancing"] if coefficient else "none" in why["Balancing"]


def planned_recipe(name: str, gpus: int, *flags: str) -> tuple[Plan, Plan]:
    """On so many H100, with natural routing, as `plan` has it by default, and with balanced routing: a pipeline by dry
    runs of its ranks, as of one that `plan` recommends."""
    config, file = config_of(name, *flags), find_config(str(published(name)))
    forecasts = Forecasts(file.content, file.load)
    natural = GivenRouting(samples=1, busiest=None, image_tokens=image_tokens(name))
    balanced = replace(natural, busiest=1.0)
    asked = Asked(forecasts.with_stages(config), gpus, Cluster(H100, 8, H100.device.memory), 0, natural)
    plan, even = (planned(forecasts, replace(asked, routing=routing)) for routing in (natural, balanced))
    return plan, even


def planned(forecasts: Forecasts, asked: Asked) -> Plan:
    (plan,) = forecast(forecasts, [asked])
    assert isinstance(plan, Plan), plan
    if asked.config.pp_size > 1:
        plan = replace(plan, account=dry_run_pipeline(forecasts, pipelined(forecasts, asked))[0])
    return plan


def told_of(plan: Plan, even: Plan) -> str:
    return f"{plan.memory.total / 2**30:.1f} GiB per GPU, {speed(plan, even)}"


def assert_stated(plan: Plan, even: Plan, stated: Forecast, now: str) -> None:
    assert stated.gpus == plan.world_size
    assert stated.memory == pytest.approx(plan.memory.total / 2**30, rel=0.02), now
    assert stated.speed == pytest.approx(plan.tokens_per_second, rel=0.05), now
    assert stated.mfu == pytest.approx(100 * plan.share_of_peak, rel=0.05), now
    assert stated.balanced_speed == pytest.approx(even.tokens_per_second, rel=0.05), now
    assert stated.balanced_mfu == pytest.approx(100 * even.share_of_peak, rel=0.05), now


def test_the_recipes_are_those_of_the_table() -> None:
    """Each has a row in the README of configs/, and each model a recipe of each kind."""
    assert sorted(PUBLISHED) == FULL
    assert sorted(name + LORA for name in PUBLISHED) == sorted(name for name in ADAPTERS if not name.endswith(DPO))
    assert all(f"| `{file.name}` |" in README for file in CONFIGS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_row(name: str) -> None:
    """In the README of configs/: the GPUs, the layout, what is trained and with which optimizer."""
    config, (gpus, larger, layout, state) = config_of(name), row_of(name)
    assert int(gpus) == gpus_of(name)
    assert layout == f"ep {config.ep_size}" + (f", pp {config.pp_size}" if config.pp_size > 1 else "")
    if config.adapter == "lora":
        assert state == f"LoRA, base in {'bf16' if config.base_dtype == 'bfloat16' else config.base_dtype}"
    else:
        assert state == OPTIMIZERS[config.optim]
    assert bool(larger) == ("192 GB" in text_of(name))


def row_of(name: str) -> list[str]:
    """Its cells behind the file and the model."""
    (row,) = (line for line in README.splitlines() if line.startswith(f"| `{name}.yaml` |"))
    return [cell.strip() for cell in row.strip("| ").split("|")][2:]


@pytest.mark.release
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_stated_of_a_recipe(name: str) -> None:
    """In its head: the forecast. In the README: that it fits on the GPUs of 80 and of 192 GB."""
    plan, even = planned_recipe(name, gpus_of(name))
    now = f"# Forecast of {plan.world_size} H100: {told_of(plan, even)}"
    assert FORECAST.search(text_of(name)), now
    assert_stated(plan, even, forecast_in(text_of(name)), now)
    assert plan.memory.total <= 80 * 2**30
    _, larger, *_ = row_of(name)
    if larger:
        assert planned_recipe(name, int(larger), *flags_on_192_gb(name))[0].memory.total <= 192e9


def flags_on_192_gb(name: str) -> list[str]:
    """Those that the recipe's head names beside fewer, larger GPUs."""
    ((_, flags),) = re.findall(r"192 GB GPUs?([\w ]+, with `(.*)`)?", text_of(name)) or [("", "")]
    return str(flags).split()


@pytest.fixture
def flags(tiny_model: Path, tiny_data: Path) -> list[str]:
    return [
        str(ROOT / "configs" / "tiny.yaml"), "--model", str(tiny_model), "--dataset", str(tiny_data), "--use-cpu",
        "--ep-size", "2", "--max-steps", "2", "--per-device-train-batch-size", "4", "--logging-steps", "1",
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.release
def test_torchrun_script(flags: list[str], tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "configs/launch/torchrun.sh"), *flags, "--output-dir", str(tmp_path / "out")]
    settings = environment(GPUS_PER_NODE="2", PORT=str(*free_ports(1)))
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert " 2/2 " in done.stdout


FAKE_SRUN = """#!/usr/bin/env bash
# Stands in for Slurm's: two tasks; as with --kill-on-bad-exit, the first that fails ends the other, and the highest
# code is srun's own.
shift
export SLURM_NTASKS=2 SLURM_NODEID=0
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & tasks=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & tasks="$tasks $!"
worst=0
for _ in 1 2; do
    wait -n
    code=$?
    if [ $code -gt $worst ]; then worst=$code; fi
    if [ $code -ne 0 ]; then kill $tasks 2>/dev/null; fi
done
exit $worst
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
if [ "$1" = show ]; then echo localhost; fi
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], str]]:
    """Runs slurm.sbatch of a checkout with flags, with stand-ins for srun and scontrol; and what scontrol was told."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": str(free_ports(1)[0] - 20000),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "CALLS": str(tmp_path / "calls"),
    }

    def run(root: Path, flags: list[str], **more: str) -> tuple[subprocess.CompletedProcess[str], str]:
        settings = environment(**job, **more, SLURM_SUBMIT_DIR=str(root), PYTHONPATH=str(ROOT / ".package"))
        settings["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{settings['PATH']}"
        if not flags[0].endswith(".yaml"):
            flags = [str(ROOT / "configs" / "tiny.yaml"), *flags]
        command = ["bash", str(ROOT / "configs/launch/slurm.sbatch"), *flags, "--output-dir", str(tmp_path / "out")]
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
        return done, (tmp_path / "calls").read_text()

    return run


@pytest.mark.release
def test_slurm_script(flags: list[str], slurm: Callable[..., Any], tmp_path: Path) -> None:
    """With stand-ins for srun and scontrol, it trains."""
    done, calls = slurm(ROOT, flags)
    assert done.returncode == 0, done.stderr
    assert " 2/2 " in done.stdout
    assert calls == "show hostnames n[1-2]\n"
    metrics = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if "loss" in line] == [1, 2]


STUB = """
import os, sys, time
from pathlib import Path

out, how, rank = Path(sys.argv[sys.argv.index("--output-dir") + 1]), os.environ["HOW"], os.environ["RANK"]
if how == "fails":  # the other is taken down
    if rank == "1":
        raise SystemExit(2)
    time.sleep(3)
time.sleep(int(rank))  # the second rank is done a second after the first
if how in ("saves", "loses a rank"):
    step = out / "checkpoints" / "step-00000002"
    step.mkdir(parents=True, exist_ok=True)
    (step / "checkpoint.json").write_text("")
if how == "loses a rank":
    if rank == "1":
        os.kill(os.getpid(), 9)
    time.sleep(3)
Path(f"done-{rank}").touch()
raise SystemExit(75)
"""


@pytest.mark.parametrize(
    ("how", "more", "code", "is_requeued", "said"),
    [
        ("saves", {}, 75, True, ""),
        ("saves", {"SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"}, 75, False, "requeued 3 times (MAX_REQUEUES)"),
        (
            "saves nothing",
            {},
            75,
            False,
            "ended with 75, and no checkpoint was saved in this job",
        ),
        ("loses a rank", {}, 137, True, ""),
        ("fails", {}, 2, False, ""),
        ("a mistake", {}, 2, False, "train_ep.py: error: --weight-column w: --task dpo"),
    ],
)
def test_how_a_slurm_job_ends(
    slurm: Callable[..., Any], how: str, more: dict[str, str], code: int, is_requeued: bool, said: str, tmp_path: Path
) -> None:
    """It is requeued where that resumes something, and no more often than asked; else it ends with the first code."""
    (tmp_path / "train_ep.py").write_text(STUB)
    earlier = tmp_path / "out" / "checkpoints" / "step-00000001"
    earlier.mkdir(parents=True)
    (earlier / "checkpoint.json").touch()
    mistake = ["--task", "dpo", "--weight-column", "w"] if how == "a mistake" else []
    done, calls = slurm(tmp_path, ["--model", "m", "--dataset", "d", *mistake], HOW=how, **more)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("requeue " in calls) == is_requeued
    if how.startswith("saves"):
        assert (tmp_path / "done-1").exists(), "every rank comes to its end"


TRAIN_JOB = {
    "apiVersion": str, "kind": str, "metadata": {"name": str}, "spec": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str, "numNodes": int, "resourcesPerNode": {"limits": {"nvidia.com/gpu": int}},
            "env": [{"name": str, "value": str}], "command": [str], "args": [str],
        },
        "runtimePatches": [{"manager": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [{
            "name": str, "template": {"spec": {"template": {"spec": {
                "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
                "containers": [{"name": str, "volumeMounts": [{"name": str, "mountPath": str}]}],
            }}}},
        }]}}}}],
    },
}  # fmt: skip
"""Of the fields of Kubeflow Trainer's API v1alpha1 (its `trainjob_types.go`, release 2.2) those that are used."""


def test_train_job() -> None:
    """Its fields are the API's, the patched names those of the runtime, and train_ep.py takes its arguments."""
    job = yaml.safe_load((ROOT / "configs/launch/trainjob.yaml").read_text())
    check_fields(job, TRAIN_JOB, "trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (job["spec"]["runtimeRef"]["name"], job["spec"]["trainer"]["command"]) == ("torch-distributed", ["torchrun"])
    ((replicated,),) = (
        patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"] for patch in job["spec"]["runtimePatches"]
    )
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["name"] == container["name"] == "node"
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}

    script, *flags = job["spec"]["trainer"]["args"]
    checkout = script.removesuffix("/train_ep.py")
    config = parse_config([flag.replace(checkout, str(ROOT)) for flag in flags])
    (recipe,) = (Path(flag).stem for flag in flags if flag.startswith("--config="))
    assert config.resume == "auto"
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == gpus_of(recipe)


def check_fields(found: Any, known: Any, where: str) -> None:
    if isinstance(known, dict):
        assert found.keys() <= known.keys(), where
        for name, value in found.items():
            check_fields(value, known[name], f"{where}: {name}")
    elif isinstance(known, list):
        for value in found:
            check_fields(value, known[0], where)
    else:
        assert isinstance(found, known), where


def write_forecasts() -> None:
    """Write anew what the heads of configs/ state of forecasts: `python -m tests.test_configs`."""
    figures = FORECAST.pattern.partition("H100: ")[2]
    for name in RECIPES:
        plan, even = planned_recipe(name, gpus_of(name))
        now, _, _ = told_of(plan, even).partition(" (natural")
        text = re.sub(f"(H100: ){figures}", rf"\g<1>{now}", text_of(name))
        (ROOT / "configs" / f"{name}.yaml").write_text(text)
        print(name, *FORECAST.findall(text))


if __name__ == "__main__":
    write_forecasts()


def test_pages_count_the_models_with_recipes() -> None:
    words = ("nine", "ten", "eleven", "twelve", "thirteen")
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "choose-a-method.md").read_text()
    assert f"such settings for {words[len(FULL) - 9]} models" in " ".join(page.split())
