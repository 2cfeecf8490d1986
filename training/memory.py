"""What a rank will hold, forecast before the weights are read, and what it did hold."""

import os
import resource
import sys
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints import ModelSource
from moe import ExpertMeshError, KernelChoice
from moe.exceptions import FORECAST
from sharding import Ranks, Topology
from sharding.planner.memory import Memory, moments, peak
from sharding.planner.setting import Setting
from sharding.planner.shapes import shape_of_model
from sharding.planner.table import memory_terms
from training.config import TrainConfig
from training.inputs import Inputs

NEAR = 0.9
"""From this share of the memory on, a forecast that fits comes with a warning."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Forecast:
    """A rank's memory in bytes.

    Attributes:
        when: the moment of a step at which `memory` is what it holds.
        memory: by terms.
        least: at the moment at which what any batch needs, however short, is most.
        before: what the process holds before its model is made; 0 on a GPU.
        available: what it may hold, `before` included.
    """

    when: str
    memory: Memory
    least: Memory
    before: float
    available: float

    @property
    def total(self) -> float:
        return self.memory.total + self.before

    def lines(self) -> list[str]:
        """The terms, and a warning where it will be close."""
        before = f", on top of the {self.before / 2**30:,.2f} GiB that the process holds already" if self.before else ""
        lines = [
            f"memory a rank, forecast: {memory_terms(self.memory)}, in the {self.when}{before}; "
            f"{self.available / 2**30:,.1f} GiB are there"
        ]
        if self.total > NEAR * self.available:
            lines.append(
                f"warning: that is {self.total / self.available:.0%} of the memory; "
                "--gradient-checkpointing, a larger --ep-size, fewer rows or shorter ones would make it less"
            )
        return lines

    def check(self, world_size: int) -> None:
        """
        Raises:
            ExpertMeshError: what any batch needs, however short, does not fit.
        """
        m = self.least
        needed = m.lasting + m.gathered + self.before
        if needed <= self.available:
            return
        terms = {"parameters": m.parameters, "gradients": m.gradients, "optimizer state": m.optimizer}
        terms |= {"gathered layers": m.gathered, "the process itself": self.before}
        said = " + ".join(f"{name} {n / 2**30:,.1f}" for name, n in terms.items() if n)
        # the gathered layers are as large on any number of ranks
        room = max(self.available - self.before - m.gathered, 1.0)
        raise ExpertMeshError(
            f"--model does not fit: {said} = {needed / 2**30:,.1f} GiB a rank, and there are "
            f"{self.available / 2**30:,.1f} GiB; use {ceil(m.lasting * world_size / room)} ranks or more, "
            "--optim adamw_torch_8bit or adamw_bf16, or --offload; --force tries all the same"
        )


def forecast(
    model: Any,
    source: ModelSource,
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    inputs: Inputs,
    ranks: Ranks,
) -> Forecast | None:
    """Of the rank that holds the most, for rows as long as the longest (of packed ones, --max-seq-length); None for a
    family, or with frozen parameters, which the planner's formulas do not hold for.

    Args:
        model: on the meta device, not sharded yet.
    """
    if source.model_type not in FORECAST or config.freeze or config.adapter != "none":
        return None
    rows = inputs.training
    longest = 1 if rows is None else config.max_seq_length if config.packing else int(rows.lengths.max())
    trained = 1.0 if rows is None else int(rows.samples.targets.sum()) / int(rows.samples.lengths.sum())
    device: Any = ranks.device.type
    setting = Setting(
        topology.world_size,
        topology.ep_size,
        topology.dense_shard,
        micro_batch=config.per_device_train_batch_size,
        seq_length=longest,
        accumulation=config.forwards(ranks.world_size),
        checkpointing=config.gradient_checkpointing,
        keep_expert_products=config.keep_expert_products,
        bf16=config.bf16,
        optimizer=config.optim,
        expert_kernel=kernel.name,
        reshard_after_forward=config.reshard_after_forward,
        # host memory is the device's own on a CPU
        offload=config.offload and device == "cuda",
        offload_activations=config.offload_activations and device == "cuda",
        trained=trained,
        device=device,
    )
    shape = shape_of_model(model, source.config)
    when, memory = peak(shape, setting)
    least = max((m for _, m in moments(shape, setting)), key=lambda m: m.lasting + m.gathered)
    before = 0 if device == "cuda" else resident()
    return Forecast(when, memory, least, before, available_memory(ranks.device, before))


def beside(forecast: Forecast | None, measured: float) -> str:
    """What was measured, in bytes, next to what was forecast, in a line."""
    told = f"memory a rank: peak {measured / 2**30:,.2f} GiB measured"
    if forecast is None:
        return told
    before = f" ({forecast.before / 2**30:,.2f} of them before the model was made)" if forecast.before else ""
    return f"{told}, {forecast.total / 2**30:,.2f} GiB forecast{before}"


def available_memory(device: torch.device, before: float) -> float:
    """Bytes that this rank may hold: of a GPU all; of a host what is free there, or under the limit of the process's
    cgroup, shared among the node's ranks, and what the rank holds already."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    free = [n for n in (_host_free(), _cgroup_free()) if n is not None]
    return before + min(free) / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free else float("inf")


def _host_free() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_free() -> float | None:
    """None without a limit. Page cache counts as free: it gives way."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, current = ((_CGROUP / name).read_text(encoding="utf-8").strip() for name in (limit, used))
            stat = (_CGROUP / used).with_name("memory.stat").read_text(encoding="utf-8").split()
            return None if most == "max" else float(most) - float(current) + float(stat[stat.index(cache) + 1])
        except (OSError, ValueError):
            continue
    return None


def resident() -> float:
    """Bytes that this process holds in memory; where the system does not say, the most it ever held."""
    try:
        return float(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
    except OSError:
        return _most_resident()


def _most_resident() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def measured_peak(device: torch.device) -> float:
    """The most bytes that a rank has held since it started, of all ranks the largest: on a GPU what torch has allocated
    there, else the process's resident memory. All ranks call it together."""
    held = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _most_resident()
    largest = torch.tensor(held, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
