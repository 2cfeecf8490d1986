"""Runs train_ep.py under Ray Train, one worker for each GPU. Where a worker or a node is lost, Ray starts all of them
again, and they resume from the newest checkpoint.

    python configs/launch/ray_train.py WORKERS CONFIG.yaml [flags of train_ep.py]

Nodes share the output directory; beside it, OUTPUT_DIR-ray is Ray's own.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from ray.train.torch import TorchTrainer

from expertmesh import train_ep
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import parse_config

MAX_FAILURES = 100


def train(settings: dict[str, Any]) -> None:
    """On each worker."""
    dist.destroy_process_group()  # Ray's; a run makes its own, with its time limit
    if code := train_ep.main(settings["words"]):
        raise RuntimeError(f"train_ep.py ended with {code}")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or not argv[0].isdigit():
        print("usage: ray_train.py WORKERS CONFIG.yaml [flags of train_ep.py]", file=sys.stderr)
        return 2
    words = ["--config", argv[1], *argv[2:]]
    words += [] if "--resume" in words else ["--resume", "auto"]
    try:
        config = parse_config(words)
    except ExpertMeshError as error:  # which would be the same on every worker, each time
        print(f"train_ep.py: error: {error}", file=sys.stderr)
        return 2
    of_ray = Path(f"{config.output_dir}-ray").resolve()
    TorchTrainer(
        train,
        train_loop_config={"words": words},
        scaling_config=ray.train.ScalingConfig(num_workers=int(argv[0]), use_gpu=not config.use_cpu),
        run_config=ray.train.RunConfig(
            storage_path=str(of_ray), failure_config=ray.train.FailureConfig(max_failures=MAX_FAILURES)
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
