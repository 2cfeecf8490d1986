"""The machine that a run is on, as the planner's cost model sees it: by its name, without measuring anything."""

import re

import torch

from ...moe.util.process_place import process_place
from ...sharding.runtime.process import Ranks
from ..config.train_config import TrainConfig
from .planner.costs import Cluster
from .planner.hardware import DEVICES, Device, Hardware, Link, preset, products_in

UNKNOWN_GPU, NETWORK = "H100", "infiniband-ndr"
"""Whose rates are taken for a GPU without a preset, and for what joins nodes, of which a run knows nothing. They are
those that `plan` assumes, and decide only between ways to run one pipeline, not whether it runs."""

CPU = Hardware(
    "a CPU",
    Device(86e9, 86e9, 17e9, 0.0, 86e9),
    *(Link(0.17e9, 2e-4), Link(0.17e9, 2e-4)),
)
"""Measured by `mesh --check` on two ranks of one thread, AMD EPYC with 2 cores, torch 2.13, gloo. Only their ratios
count."""


def this_machine(config: TrainConfig, ranks: Ranks, memory: float) -> Cluster:
    """The cluster of a run, all of whose nodes are taken to be like this rank's.

    Args:
        memory: bytes that a rank may take.

    Raises:
        ExpertMeshError: the experts' matmuls are to run in fp8, which this GPU does not have.
    """
    hardware = (
        CPU if ranks.device.type == "cpu" else preset(known_gpu(torch.cuda.get_device_name(ranks.device)), NETWORK)
    )
    hardware = products_in(hardware, config.bf16, config.tf32, config.in_fp8)
    return Cluster(hardware, process_place().ranks_here, memory)


def known_gpu(device_name: str) -> str:
    """The preset of a GPU that calls itself so, such as "NVIDIA H100 80GB HBM3"."""
    return next((name for name in DEVICES if re.search(rf"\b{name}\b", device_name)), UNKNOWN_GPU)
