"""What a rank will hold, forecast before the weights are read. By the same forecast is chosen how a pipeline is run,
where that was left open."""

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoints.hf.source import ModelSource
from ...checkpoints.training_state.marker import read_marker, whole_checkpoints
from ...moe.kernels.expert_kernels import KernelChoice
from ...moe.util.errors import ExpertMeshError
from ...sharding.pipeline.schedule import ScheduleName
from ...sharding.runtime.memory import available_memory, resident
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.topology import Topology, ranks_per_equal_node
from ..config.train_config import TrainConfig, flags_of_config
from ..data.batch import Padding
from ..data.sequences import Rows
from ..inputs import Inputs
from .coverage import NO_EFFECT, NOT_MODELLED
from .memory import NEAR, Memory
from .planner.peak_memory import Peak, peak
from .planner.schedule_choice import choose_schedule
from .planner.search import Cluster
from .planner.step_order import PlannedRun
from .rehearsal.run_setting import planned
from .tables import memory_terms
from .this_machine import this_machine


@dataclass(frozen=True)
class ChosenPipeline:
    """How a pipeline is run, by a forecast. layers: of each stage. why: this schedule, and balance: these stages, in a
    few words."""

    schedule: ScheduleName
    layers: tuple[int, ...]
    why: str
    balance: str

    def left_open(self, config: TrainConfig) -> dict[str, Any]:
        """What was chosen, by the names of those settings that leave it open."""
        chosen = {"pipeline_schedule": str(self.schedule), "pipeline_layers": ",".join(map(str, self.layers))}
        return {name: value for name, value in chosen.items() if getattr(config, name) is None}


@dataclass(frozen=True)
class Forecast:
    """A rank's memory in bytes.

    Attributes:
        when: the moment of a step at which `memory` is what it holds.
        memory: by terms.
        least: the peak of what any batch needs, however short.
        before: what the process holds before its model is made; 0 on a GPU.
        available: what it may hold, `before` included.
        pipeline: how it is run, where there is one.
    """

    when: str
    memory: Memory
    least: Memory
    before: float
    available: float
    pipeline: ChosenPipeline | None = None

    @property
    def total(self) -> float:
        return self.memory.total + self.before

    def chosen(self, config: TrainConfig) -> dict[str, Any]:
        """What was chosen of what the settings leave open, by their names."""
        return {} if self.pipeline is None else self.pipeline.left_open(config)

    def line(self) -> str:
        """What is forecast, in a line."""
        return f"{self.total / 2**30:,.2f} GiB per rank by forecast, of {self.available / 2**30:,.1f} GiB available"

    def details(self) -> list[str]:
        """The terms, and a warning where it will be close."""
        before = f", on top of the {self.before / 2**30:,.2f} GiB that the process uses already" if self.before else ""
        lines = [f"memory per rank, forecast: {memory_terms(self.memory)}, in the {self.when}{before}"]
        if self.total > NEAR * self.available:
            lines.append(
                f"warning: the forecast is {self.total / self.available:.0%} of the memory; "
                "--gradient-checkpointing, a larger --ep-size, smaller micro-batches or shorter sequences reduce it"
            )
        return lines

    def check(self, world_size: int, config: TrainConfig) -> None:
        """
        Raises:
            ExpertMeshError: what any batch needs, however short, does not fit; with what tries which run would.
        """
        m = self.least
        needed = m.lasting + m.gathered + self.before
        if needed <= self.available:
            return
        terms = {"parameters": m.parameters, "gradients": m.gradients, "optimizer state": m.optimizer}
        terms |= {"gathered layers": m.gathered, "the process itself": self.before}
        said = " + ".join(f"{name} {n / 2**30:,.1f}" for name, n in terms.items() if n)
        if self.before:
            # plans are of GPUs
            instead = "more ranks, another --optim, or --adapter lora may need less memory"
        else:
            instead = f"to find settings that fit, run `{_plan_line(config, world_size, self.available)}`"
        raise ExpertMeshError(
            f"--model does not fit: {said} = {needed / 2**30:,.1f} GiB per rank, of "
            f"{self.available / 2**30:,.1f} GiB available; {instead}; --force starts anyway"
        )


def _plan_line(config: TrainConfig, world_size: int, memory: float) -> str:
    """The command that plans this run on as many GPUs of so many bytes, with its layout left open."""
    here = ranks_per_equal_node(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    words = ["--gpus", str(world_size), "--gpus-per-node", str(here)]
    words += ["--gpu-memory", f"{int(memory / 2**20)}MiB"]
    without = {*_SEARCHED, *NOT_MODELLED, *NO_EFFECT}
    words += flags_of_config(config, ("model", "bf16", "max_seq_length", "optim"), never=without)
    return f"python -m expertmesh.sharding plan {shlex.join(words)}"


_SEARCHED = (
    *("ep_size", "dense_shard", "tp_size", "pp_size", "pipeline_schedule", "pipeline_chunks", "pipeline_layers"),
    *("per_device_train_batch_size", "gradient_checkpointing", "keep_expert_products", "offload_activations"),
    "elastic",
)
"""Settings of the layout, with what is only taken beside them."""


@dataclass(frozen=True)
class NoForecast:
    """why: there is none."""

    why: str
    pipeline: None = None

    def chosen(self, config: TrainConfig) -> dict[str, Any]:
        """Nothing."""
        return {}

    def line(self) -> str:
        return f"no forecast: {self.why}"

    def details(self) -> list[str]:
        """Nothing."""
        return []

    def check(self, world_size: int, config: TrainConfig) -> None:
        """Accept: what is not known is not refused."""


def forecast(
    source: ModelSource,
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    inputs: Inputs,
    ranks: Ranks,
    padding: Padding,
) -> Forecast | NoForecast:
    """Forecast the memory of the rank that holds the most, for sequences as long as the longest becomes (of data
    that are streamed: --max-seq-length). Rank 0 measures the model for all; all ranks call it together.

    A run that resumes on as many ranks keeps the pipeline that it had, where its settings leave it open.
    """
    told: list[Any] = [None]
    # measuring a large model may take longer than a collective's time limit
    with raise_together(patient=ranks):
        if ranks.rank == 0:
            try:
                recorded = recorded_pipeline(config, topology.world_size)
                run = _planned(source, topology, kernel, replace(config, **recorded), inputs, ranks, padding)
                # without training there is no schedule to choose
                is_open = topology.pp_size > 1 and inputs.training is not None
                told = [_choose(run, kernel, config, ranks, recorded) if is_open else (peak(run), None)]
            except Exception as error:  # a run does not depend on it: what cannot be measured may still be trained
                kind = "" if isinstance(error, ExpertMeshError) else f"{type(error).__name__}: "
                told = [" ".join(f"{kind}{error}".split())[:200]]
    dist.broadcast_object_list(told, src=0)
    (found,) = told
    if isinstance(found, str):
        return NoForecast(found)
    held, pipeline = found
    before = _before(ranks)
    return Forecast(held.when, held.memory, held.least, before, available_memory(ranks.device, before), pipeline)


def _before(ranks: Ranks) -> float:
    """Bytes that this process holds before its model is made."""
    return 0.0 if ranks.device.type == "cuda" else resident()


def _planned(
    source: ModelSource,
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    inputs: Inputs,
    ranks: Ranks,
    padding: Padding,
) -> PlannedRun:
    rows = inputs.training
    longest = padding.within(config.max_seq_length).length(longest_sequence(rows, config))
    trained = 1.0 if rows is None else int(rows.samples.targets.sum()) / int(rows.samples.lengths.sum())
    # fp8 is what --expert-precision says
    name = config.expert_kernel if config.expert_precision == "fp8" else kernel.kernel.entry.recorded_as
    flags = replace(config, expert_kernel=name)
    device: Any = ranks.device.type
    # a micro-batch may be larger than the data
    most = config.per_device_train_batch_size if rows is None else min(config.per_device_train_batch_size, len(rows))
    sizes: dict[str, Any] = dict(seq_length=longest, micro_batch=most * config.sequences_per_row)
    return planned(flags, source.config, topology.world_size, device, **sizes, trained=trained, said=source.said)


def longest_sequence(rows: Rows | None, config: TrainConfig) -> int:
    """Tokens of the longest sequence, as long as the data are known: of packed pairs, half of what is one sequence."""
    if rows is None:
        return 2
    if config.streaming:
        return config.max_seq_length
    return -(-int(rows.lengths.max()) // (config.sequences_per_row if config.packing else 1))


def recorded_pipeline(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Of the pipeline's settings that are left open, those with which the run that is resumed ran; nothing where it ran
    on other ranks, or cannot be read, of which is told later."""
    if config.pp_size == 1 or not config.resume:
        return {}
    directory = Path(config.output_dir) / "checkpoints"
    for path in whole_checkpoints(directory) if config.resume == "auto" else [Path(config.resume)]:
        with suppress(ExpertMeshError, OSError):
            marker = read_marker(path)
            there = marker["settings"]
            is_alike = all(there.get(name) == getattr(config, name) for name in ("pp_size", "pipeline_chunks"))
            if not is_alike or marker["world_size"] != world_size:
                return {}
            open_ones = (name for name in ("pipeline_schedule", "pipeline_layers") if getattr(config, name) is None)
            return {name: there.get(name) for name in open_ones}
    return {}


def _choose(
    run: PlannedRun, kernel: KernelChoice, config: TrainConfig, ranks: Ranks, recorded: dict[str, Any]
) -> tuple[Peak, ChosenPipeline | None]:
    before = _before(ranks)
    cluster = this_machine(config, ranks, NEAR * available_memory(ranks.device, before) - before)
    # whose matmuls are another package's cannot leave their weight gradients for later
    can_queue = kernel.kernel.product is not None
    held, chosen = choose_pipeline(run, cluster, replace(config, **recorded), can_queue)
    why, balance = ("as in the resumed run" if recorded.get(f"pipeline_{name}") else "" for name in _CHOSEN)
    return held, replace(chosen, why=why or chosen.why, balance=balance or chosen.balance)


_CHOSEN = ("schedule", "layers")


def choose_pipeline(
    run: PlannedRun, cluster: Cluster, config: TrainConfig, can_queue: bool = True
) -> tuple[Peak, ChosenPipeline]:
    """Choose what the settings of a pipeline leave open.

    Args:
        cluster: with the memory that a rank may take: what comes without a warning.
        can_queue: whether the expert kernel can leave weight gradients for later.

    Returns:
        What the rank that holds the most holds then, and the choice.
    """
    chosen, why = choose_schedule(run, cluster, config.pipeline_schedule, can_queue)
    layers = chosen.setting.stage_layers
    assert layers is not None
    balance = "balanced by forecast seconds" if config.pipeline_layers is None else "as asked"
    return chosen.peak, ChosenPipeline(chosen.setting.schedule, layers, why, balance)


def beside(forecast: Forecast | NoForecast, measured: float) -> str:
    """What was measured, in bytes, next to what was forecast, in a line."""
    told = f"memory per rank: peak {measured / 2**30:,.2f} GiB measured"
    if isinstance(forecast, NoForecast):
        return told
    before = f" ({forecast.before / 2**30:,.2f} of them before the model was made)" if forecast.before else ""
    return f"{told}, {forecast.total / 2**30:,.2f} GiB forecast{before}"
