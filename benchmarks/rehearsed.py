"""What dry runs of short models tell of a step, beside a dry run of all its layers, at full size."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.rehearsal.engine import account_of

MOST_ERROR = 0.005
"""What short models' peak is held to, of all layers'."""
H100 = Cluster(preset("H100", "infiniband-ndr"), 8, 0.0)

PUBLISHED = Path(__file__).parents[1] / "tests" / "published" / "configs"
MODELS = {
    "Mixtral 8x7B": "mixtral-8x7b",
    "Mixtral 8x22B": "mixtral-8x22b",
    "OLMoE 7B": "olmoe-1b-7b",
    "Qwen3 30B-A3B": "qwen3-30b-a3b",
    "GPT-OSS 20B": "gpt-oss-20b",
    "GPT-OSS 120B": "gpt-oss-120b",
    "Qwen3 235B-A22B": "qwen3-235b-a22b",
    "GLM-4.5-Air": "glm-4.5-air",
    "GLM-4.6": "glm-4.6",
    "Kimi K2": "kimi-k2",
    "DeepSeek-V3": "deepseek-v3",
    "MiniMax-M2": "minimax-m2.5",
    "Jamba 52B": "jamba-v0.1",
}
"""Of each model, the directory of its published config.json; MiniMax-M2.5 has the sizes of M2."""


def model_config(name: str) -> Any:
    file = find_config(str(PUBLISHED / MODELS[name]))
    if file.content["model_type"] != "kimi_k2":
        return file.load()
    # transformers has it by the name of its architecture alone
    return CONFIG_MAPPING["deepseek_v3"].from_dict(file.content | {"model_type": "deepseek_v3"})


@dataclass(frozen=True)
class Case:
    """model: a key of MODELS. flags: of train_ep.py."""

    model: str
    world_size: int
    flags: dict[str, Any]

    @property
    def config(self) -> TrainConfig:
        settings: dict[str, Any] = dict(bf16=True, per_device_train_batch_size=1, max_seq_length=4096)
        return TrainConfig(model=self.model, dataset=["-"], **(settings | self.flags))


def cases() -> Iterator[Case]:
    selective, full = dict(gradient_checkpointing="selective"), dict(gradient_checkpointing="full")
    low, bits8 = dict(optim="adamw_bf16"), dict(optim="adamw_torch_8bit")
    lora: dict[str, Any] = dict(adapter="lora")
    for model, world_size, flags in (
        ("Mixtral 8x7B", 8, dict(ep_size=8, **selective, **bits8)),
        ("Mixtral 8x7B", 16, dict(ep_size=1, **full)),
        ("Mixtral 8x7B", 64, dict(ep_size=8, gradient_accumulation_steps=2)),
        ("Mixtral 8x7B", 1024, dict(ep_size=8, dense_shard="hybrid", **selective)),
        ("Mixtral 8x22B", 256, dict(ep_size=8, **selective)),
        ("OLMoE 7B", 8, dict(ep_size=8)),
        ("OLMoE 7B", 64, dict(ep_size=1, **selective)),
        ("Qwen3 30B-A3B", 8, dict(ep_size=8, reshard_after_forward=False, **selective, **bits8)),
        ("Qwen3 30B-A3B", 16, dict(ep_size=8, max_seq_length=16384, **full)),
        ("Qwen3 30B-A3B", 1, dict(**lora, base_dtype="nf4", **selective)),
        ("Qwen3 30B-A3B", 512, dict(ep_size=32, per_device_train_batch_size=2, **full)),
        ("GPT-OSS 20B", 8, dict(ep_size=8, **selective)),
        ("GPT-OSS 120B", 64, dict(ep_size=16, **selective, **low)),
        ("GLM-4.5-Air", 64, dict(ep_size=8, **full)),
        ("GLM-4.5-Air", 8, dict(ep_size=8, **selective, **lora)),
        ("DeepSeek-V3", 512, dict(ep_size=64, **full, **low)),
        ("DeepSeek-V3", 1024, dict(ep_size=32, **selective)),
        ("MiniMax-M2", 128, dict(ep_size=32, **selective)),
        ("Jamba 52B", 32, dict(ep_size=8, max_seq_length=1024, **full)),
        ("Mixtral 8x7B", 8, dict(ep_size=4, freeze=["embeddings", "router"], **selective, **low)),
    ):
        yield Case(model, world_size, flags)


def print_rehearsed() -> None:
    """Print one row per case, as soon as it is known."""
    print("Rank 0: most bytes of tensors, GiB, bytes sent and FLOPs. Times in s.")
    figures = f"{'all layers':>10}{'in':>5}{'short':>9}{'in':>5}{'off':>8}  also equal"
    print(f"{'model':<15}{'GPUs':>6}  {'setting':<66}{figures}")
    errors = []
    for case in cases():
        of_model = model_config(case.model)
        forecasts = Forecasts(of_model.to_dict(), partial(_given, of_model), is_kept=False)
        asked = forecasts.settled(Asked(case.config, case.world_size, H100))
        facts = forecasts.facts(asked.config)
        begun = time.perf_counter()
        short = account_of(asked, of_model, facts)
        between = time.perf_counter()
        complete = account_of(asked, of_model, facts, every_layer=True)
        ended = time.perf_counter()
        errors.append(short.memory.peak / complete.memory.peak - 1)
        alike = {
            "bytes": isclose(*(sum(each.total for each in account.sent) for account in (short, complete))),
            "FLOPs": isclose(short.total.flops, complete.total.flops),
        }
        said = ", ".join(f"{name} {value}" for name, value in case.flags.items())
        said = said.replace("gradient_checkpointing ", "").replace("optim ", "").replace("_size", "")
        print(
            f"{case.model:<15}{case.world_size:>6}  {said:<66}"
            f"{complete.memory.peak / 2**30:>10.2f}{ended - between:>5.0f}"
            f"{short.memory.peak / 2**30:>9.2f}{between - begun:>5.0f}{errors[-1]:>+8.2%}"
            f"  {', '.join(name for name, is_equal in alike.items() if is_equal)}",
            flush=True,
        )
    within = sum(abs(error) <= MOST_ERROR for error in errors)
    print(f"within {MOST_ERROR:.1%}: {within} of {len(errors)}; the worst {max(errors, key=abs):+.2%}\n")


def _given(config: Any) -> Any:
    return config
