"""The configurations that come with the project, and the scripts that start them."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from moe import build_model, count_parameters, moe_layers, moe_shape
from sharding import check_ep_size
from sharding.planner.hardware import preset
from sharding.planner.search import Cluster, Plan, forecast
from sharding.planner.table import summary
from training import TrainConfig, check_packing, choose_attention, parse_config
from training.low_bit import LARGEST_BLOCK, block_size
from training.rehearsal.cached import CachedMeasure
from training.rehearsal.planning import setting_of

ROOT = Path(__file__).parents[1]
H100 = preset("H100", "infiniband-ndr")
STATE_BYTES = {
    "adamw_torch_fused": 4 + 4 + 8, "adamw_torch_8bit": 4 + 4 + 2 + 8 / LARGEST_BLOCK, "adamw_bf16": 2 + 2 + 4,
}  # fmt: skip
"""Of a parameter, its gradient and both moments."""
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RECIPES = [file.stem for file in CONFIGS if file.stem != "tiny"]
QWEN3: dict[str, Any] = dict(hidden_size=2048, num_hidden_layers=48, vocab_size=151936)
GPT_OSS: dict[str, Any] = dict(
    hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
    num_experts_per_tok=4, vocab_size=201088,
)  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral_8x7b": ("mixtral", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, vocab_size=32000,
    )),
    "mixtral_8x22b": ("mixtral", dict(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
        num_local_experts=8, vocab_size=32768,
    )),
    "olmoe_7b": ("olmoe", dict(
        hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
        num_experts=64, num_experts_per_tok=8, vocab_size=50304,
    )),
    "qwen3_30b_a3b": ("qwen3_moe", QWEN3 | dict(
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8,
    )),
    "qwen3_next_80b_a3b": ("qwen3_next", QWEN3 | dict(
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
    )),
    "gpt_oss_20b": ("gpt_oss", GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32)),
    "gpt_oss_120b": ("gpt_oss", GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128)),
    "glm_4_5_air": ("glm4_moe", dict(
        hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, attention_bias=True, use_qk_norm=False,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, vocab_size=151552,
    )),
    "deepseek_v3": ("deepseek_v3", dict(
        hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
        n_group=8, topk_group=4, first_k_dense_replace=3, vocab_size=129280,
    )),
}  # fmt: skip
"""Model type and sizes, as each model's published config.json has them."""


def text_of(name: str) -> str:
    return (ROOT / "configs" / f"{name}.yaml").read_text()


def config_of(name: str) -> TrainConfig:
    return parse_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), "--dataset", "d", "--model", "m"])


@cache
def model_of(name: str) -> Any:
    """On the meta device, built as train_ep.py builds it; once for all tests of a recipe."""
    model_type, sizes = PUBLISHED[name]
    hf, config = CONFIG_MAPPING[model_type](**sizes), config_of(name)
    return build_model(hf, choose_attention(config.attn_implementation, config.packing, hf))


@pytest.mark.parametrize("name", [file.stem for file in CONFIGS])
def test_every_key_is_known(name: str) -> None:
    assert config_of(name).ep_size in (4, 8)


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("mixtral_8x7b", 8, "of 8: 58.6 GB"),
        ("mixtral_8x22b", 32, "35.2 GB of 32 GPUs"),
        ("mixtral_8x22b", 8, "140.6 GB of 8"),
        ("olmoe_7b", 8, "of 8: 13.8 GB"),
        ("qwen3_30b_a3b", 8, "of 8: 38.3 GB"),
        ("qwen3_next_80b_a3b", 16, "50.0 GB of 16 GPUs"),
        ("qwen3_next_80b_a3b", 8, "99.9 GB of 8"),
        ("gpt_oss_20b", 8, "of 8: 41.8 GB"),
        ("gpt_oss_120b", 16, "58.4 GB of 16 GPUs"),
        ("gpt_oss_120b", 8, "116.8 GB of 8"),
        ("glm_4_5_air", 16, "53.4 GB of 16 GPUs"),
        ("glm_4_5_air", 8, "106.9 GB of 8"),
        ("deepseek_v3", 128, "41.9 GB of 128 GPUs"),
        ("deepseek_v3", 64, "83.9 GB of 64"),
    ],
)
def test_memory_and_arrangements_that_the_comments_state(name: str, gpus: int, said: str) -> None:
    config, model = config_of(name), model_of(name)
    counts = count_parameters(model)
    assert f"({counts.total / 1e9:.1f} B parameters" in text_of(name)
    assert f"{counts.total / gpus * STATE_BYTES[config.optim] / 1e9:.1f} GB" in said
    assert said in text_of(name)
    if "would take" in text_of(name):
        fp32 = counts.total / gpus * STATE_BYTES["adamw_torch_fused"] / 1e9
        assert f"fp32 state would take {fp32:.1f} GB." in text_of(name)
    check_ep_size(config.ep_size, gpus, moe_shape(model).num_experts)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_model(name: str) -> None:
    """What train_ep.py would refuse is not asked for, and what is asked for has an effect."""
    config, model = config_of(name), model_of(name)
    if config.packing:
        check_packing(model)
    if config.router_aux_loss_coef or config.router_z_loss_coef:
        assert hasattr(model.config, "router_aux_loss_coef")
        assert all(layer.router is not None for layer in moe_layers(model))
    # parameters without blocks have whole moments
    whole = sum(p.numel() for p in model.parameters() if block_size(p.shape) is None) / count_parameters(model).total
    assert whole < 0.02 or config.optim != "adamw_torch_8bit"
    positions, gpus = re.findall(r"([\d,]+) positions a step on (\d+) GPUs", text_of(name))[0]
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * int(gpus)
    assert f"{rows * config.max_seq_length:,}" == positions


def planned_recipe(name: str) -> Plan:
    """On as many H100 as the file counts positions for; the busiest expert has 1.2 times the mean."""
    ((_, gpus),) = re.findall(r"([\d,]+) positions a step on (\d+) GPUs", text_of(name))
    model_type, sizes = PUBLISHED[name]
    config = config_of(name)
    hf = CONFIG_MAPPING[model_type](**sizes)
    measure = CachedMeasure(config, hf.to_dict(), lambda: hf, "cuda")
    setting = setting_of(config, int(gpus), imbalance=1.2)
    return forecast(measure, setting, Cluster(H100, 8, H100.device.memory))


@pytest.mark.parametrize("name", RECIPES)
def test_forecasts_that_the_comments_state(name: str) -> None:
    plan = planned_recipe(name)
    now = f"# Forecast of {plan.setting.world_size} H100: {summary(plan, H100)}"
    pattern = r"# Forecast of (\d+) H100: ([\d.]+) GiB a GPU, ([\d,]+) tokens/s a GPU, ([\d.]+)% MFU"
    found = re.findall(pattern, text_of(name))
    assert found, now
    gpus, memory, speed, share = (float(figure.replace(",", "")) for figure in found[0])
    assert gpus == plan.setting.world_size
    assert memory == pytest.approx(plan.memory.total / 2**30, rel=0.02), now
    assert speed == pytest.approx(plan.tokens_per_second, rel=0.05), now
    assert share == pytest.approx(100 * plan.share_of_peak(H100), rel=0.05), now


def test_the_recipes_are_those_of_the_table() -> None:
    assert sorted(PUBLISHED) == RECIPES
    assert all(f"| `{file.name}` |" in (ROOT / "configs" / "README.md").read_text() for file in CONFIGS)


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


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def test_torchrun_script(flags: list[str], tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "configs/launch/torchrun.sh"), *flags, "--output-dir", str(tmp_path / "out")]
    port = str(free_port())
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(GPUS_PER_NODE="2", PORT=port),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


FAKE_SRUN = """#!/usr/bin/env bash
# Stands in for Slurm's: two tasks; as with --kill-on-bad-exit, the first that fails ends the other.
shift
export SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait -n || { code=$?; kill $first $second 2>/dev/null; wait; exit $code; }
wait -n
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
if [ "$1" = show ]; then echo localhost; fi
"""


def test_slurm_script(flags: list[str], tmp_path: Path) -> None:
    """With stand-ins for srun and scontrol: it trains, and a run that ends with 75 is put into the queue again."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NODELIST": "n[1-2]", "CALLS": str(tmp_path / "calls")}

    def run(root: Path, **more: str) -> subprocess.CompletedProcess[str]:
        settings = environment(**slurm, **more, SLURM_SUBMIT_DIR=str(root))
        settings["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{settings['PATH']}"
        command = ["bash", str(ROOT / "configs/launch/slurm.sbatch"), *flags, "--output-dir", str(tmp_path / "out")]
        return subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)

    done = run(ROOT)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert (tmp_path / "calls").read_text() == "show hostnames n[1-2]\n"
    metrics = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]

    # the second rank is done a second after the first
    stub = "import os, time; time.sleep(int(os.environ['RANK'])); open(os.environ['RANK'], 'w'); raise SystemExit(75)"
    (tmp_path / "train_ep.py").write_text(stub)
    assert run(tmp_path).returncode == 75
    assert (tmp_path / "1").exists(), "every rank comes to its end"
    assert (tmp_path / "calls").read_text().endswith(f"requeue {slurm['SLURM_JOB_ID']}\n")
