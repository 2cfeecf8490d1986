"""What dry runs of short models tell of a step, beside a dry run of all its layers, at full size."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from benchmarks.commands import print_rows
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


def model_config(name: str) -> Any:
    file = find_config(str(PUBLISHED / name))
    if file.content["model_type"] != "kimi_k2":
        return file.load()
    # transformers has it by the name of its architecture alone
    return CONFIG_MAPPING["deepseek_v3"].from_dict(file.content | {"model_type": "deepseek_v3"})


@dataclass(frozen=True)
class Case:
    """model: a directory of PUBLISHED. flags: of train_ep.py."""

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
        ("mixtral-8x7b", 8, dict(ep_size=8, **selective, **bits8)),
        ("mixtral-8x7b", 16, dict(ep_size=1, **full)),
        ("mixtral-8x7b", 64, dict(ep_size=8, gradient_accumulation_steps=2)),
        ("mixtral-8x7b", 1024, dict(ep_size=8, dense_shard="hybrid", **selective)),
        ("mixtral-8x22b", 256, dict(ep_size=8, **selective)),
        ("olmoe-1b-7b", 8, dict(ep_size=8)),
        ("olmoe-1b-7b", 64, dict(ep_size=1, **selective)),
        ("qwen3-30b-a3b", 8, dict(ep_size=8, reshard_after_forward=False, **selective, **bits8)),
        ("qwen3-30b-a3b", 16, dict(ep_size=8, max_seq_length=16384, **full)),
        ("qwen3-30b-a3b", 1, dict(**lora, base_dtype="nf4", **selective)),
        ("qwen3-30b-a3b", 512, dict(ep_size=32, per_device_train_batch_size=2, **full)),
        ("gpt-oss-20b", 8, dict(ep_size=8, **selective)),
        ("gpt-oss-120b", 64, dict(ep_size=16, **selective, **low)),
        ("glm-4.5-air", 64, dict(ep_size=8, **full)),
        ("glm-4.5-air", 8, dict(ep_size=8, **selective, **lora)),
        ("deepseek-v3", 512, dict(ep_size=64, **full, **low)),
        ("deepseek-v3", 1024, dict(ep_size=32, **selective)),
        ("minimax-m2.5", 128, dict(ep_size=32, **selective)),
        ("jamba-v0.1", 32, dict(ep_size=8, max_seq_length=1024, **full)),
        ("mixtral-8x7b", 8, dict(ep_size=4, freeze=["embeddings", "router"], **selective, **low)),
    ):
        yield Case(model, world_size, flags)


def print_rehearsed() -> None:
    rows, errors = [], []
    for case in cases():
        of_model = model_config(case.model)
        forecasts = Forecasts(of_model.to_dict(), partial(model_config, case.model), is_kept=False)
        asked = forecasts.settled(Asked(case.config, case.world_size, H100))
        facts = forecasts.facts(asked.config)
        begun = time.perf_counter()
        short = account_of(asked, of_model, facts)
        between = time.perf_counter()
        complete = account_of(asked, of_model, facts, every_layer=True)
        ended = time.perf_counter()
        errors.append(short.memory.peak / complete.memory.peak - 1)
        # minutes in all: what is known is told at once
        print(f"{case.model}, {case.world_size} GPUs: {errors[-1]:+.2%}", file=sys.stderr, flush=True)
        alike = {
            "bytes": isclose(*(sum(each.total for each in account.sent) for account in (short, complete))),
            "FLOPs": isclose(short.total.flops, complete.total.flops),
        }
        said = ", ".join(f"{name} {value}" for name, value in case.flags.items())
        rows.append(
            {
                "model": case.model,
                "GPUs": case.world_size,
                "setting": said.replace("gradient_checkpointing ", "").replace("optim ", "").replace("_size", ""),
                "all layers": f"{complete.memory.peak / 2**30:.2f}",
                "in": f"{ended - between:.0f}",
                "short": f"{short.memory.peak / 2**30:.2f}",
                "in ": f"{between - begun:.0f}",
                "off": f"{errors[-1]:+.2%}",
                "also equal": ", ".join(name for name, is_equal in alike.items() if is_equal),
            }
        )
    print("Rank 0: most bytes of tensors, GiB, bytes sent and FLOPs. Times in s.")
    print_rows(rows, text=["setting", "also equal"])
    within = sum(abs(error) <= MOST_ERROR for error in errors)
    print(f"within {MOST_ERROR:.1%}: {within} of {len(errors)}; the worst {max(errors, key=abs):+.2%}\n")
