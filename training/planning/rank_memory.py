"""What a rank will hold, forecast before the weights are read."""

import shlex
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from ...checkpoints.hf.source import ModelSource
from ...moe.kernels.expert_kernels import KernelChoice
from ...moe.torch_private import forget_process_groups
from ...moe.util.child import in_child
from ...moe.util.errors import ExpertMeshError
from ...moe.util.process_place import process_place
from ...moe.util.telling import telling
from ...sharding.runtime.memory import available_memory, resident
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.topology import Topology, ranks_per_equal_node
from ..config.train_config import TrainConfig, flags_of_config
from ..data.batch import BatchMaker
from ..data.sequences import Rows
from ..start.inputs import Inputs
from .coverage import NO_EFFECT, NOT_MODELLED
from .imbalance import GivenRouting
from .memory import NEAR, Memory
from .planner.account import Account
from .planner.asked import Asked
from .planner.forecasts import Forecasts
from .planner.pipelines import pipelined
from .tables import memory_terms
from .this_machine import this_machine


class Peak(NamedTuple):
    """What a rank holds at its peak, when that is, and the bytes of what it has in a training checkpoint."""

    when: str
    memory: Memory
    saved: float


@dataclass(frozen=True)
class Forecast:
    """A rank's memory in bytes.

    Attributes:
        why_not: there is no forecast; empty where there is one.
        when: the moment of a step at which `memory` is what it holds.
        memory: by terms. What lasts, and what is gathered, any batch needs, however short.
        before: what the process holds before its model is made; 0 on a GPU.
        available: what it may hold, `before` included.
        copies: of what a training checkpoint has of the rank, in host memory, while it is written.
        beyond: what these add to the most that a rank holds whose memory is the host's; 0 on a GPU.
    """

    why_not: str = ""
    when: str = ""
    memory: Memory = field(default_factory=Memory)
    before: float = 0.0
    available: float = float("inf")
    copies: float = 0.0
    beyond: float = 0.0

    @property
    def total(self) -> float:
        return self.memory.total + self.before + self.beyond

    def of_run(self, config: TrainConfig, num_steps: int, dense: float = 0.0) -> "Forecast":
        """Of a run of so many steps: with the copies that it makes for its training checkpoints, if it does.

        Args:
            dense: bytes of the non-expert parameters, which it keeps gathered while it generates, if it does; the KV
                cache is not known.
        """
        generating = replace(self.memory, activations=0.0, gathered=dense, working=0.0)
        if num_steps and (config.generate_steps or config.eval_generate) and generating.total > self.memory.total:
            generated = replace(self, memory=generating, when="generation of answers")
            return generated.of_run(config, num_steps)
        if not (config.save_steps and config.async_save and num_steps):
            return replace(self, copies=0.0)
        # those of the last step have no activations beside them
        is_within = config.save_steps < num_steps or config.evaluates
        beside = self.memory.total if is_within else self.memory.lasting
        beyond = max(beside + self.copies - self.memory.total, 0.0) if self.before else 0.0
        return replace(self, beyond=beyond)

    def line(self) -> str:
        """What is forecast, in a line."""
        if self.why_not:
            return f"no forecast: {self.why_not}"
        return f"{self.total / 2**30:,.2f} GiB per rank by forecast, of {self.available / 2**30:,.1f} GiB available"

    def details(self, world_size: int, config: TrainConfig) -> list[str]:
        """The terms, and a warning where it will be close."""
        if self.why_not:
            return []
        before = f", on top of the {self.before / 2**30:,.2f} GiB that the process uses already" if self.before else ""
        lines = [f"memory per rank, forecast: {memory_terms(self.memory)}, in the {self.when}{before}"]
        if self.copies:
            where = f", {self.beyond / 2**30:,.2f} GiB beyond that peak" if self.before else ", in host memory"
            lines.append(
                f"copies for a training checkpoint, forecast: {self.copies / 2**30:,.2f} GiB per rank{where}; "
                "--no-async-save makes none"
            )
        if self.total > NEAR * self.available:
            lines.append(
                f"warning: the forecast is {self.total / self.available:.0%} of the memory; "
                "--gradient-checkpointing, a larger --ep-size, smaller micro-batches or shorter sequences reduce it"
                + (", and so does --no-async-save" if self.beyond else "")
                + ("" if self.before else f"; {self._planned(world_size, config)}")
            )
        return lines

    def check(self, world_size: int, config: TrainConfig) -> None:
        """
        Raises:
            ExpertMeshError: what any batch needs, however short, does not fit; with what tries which run would.
        """
        m = self.memory
        needed = m.lasting + m.gathered + self.before
        if needed <= self.available:
            return
        terms = {"parameters": m.parameters, "gradients": m.gradients, "optimizer state": m.optimizer}
        terms |= {"gathered layers": m.gathered, "the process itself": self.before}
        said = " + ".join(f"{name} {n / 2**30:,.1f}" for name, n in terms.items() if n)
        # plans are of GPUs
        smaller = "more ranks, another --optim, or --adapter lora may need less memory"
        instead = smaller if self.before else self._planned(world_size, config)
        raise ExpertMeshError(
            f"--model does not fit: {said} = {needed / 2**30:,.1f} GiB per rank, of "
            f"{self.available / 2**30:,.1f} GiB available; {instead}; --force starts anyway"
        )

    def _planned(self, world_size: int, config: TrainConfig) -> str:
        return f"to find settings that fit, run `{_plan_line(config, world_size, self.available)}`"


def _plan_line(config: TrainConfig, world_size: int, memory: float) -> str:
    """The command that plans this run on as many GPUs of so many bytes, with its layout left open."""
    here = ranks_per_equal_node(world_size, process_place().ranks_here)
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


def forecast_rank(
    source: ModelSource,
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    inputs: Inputs,
    ranks: Ranks,
    maker: BatchMaker,
) -> Forecast:
    """Forecast the memory of the rank that holds the most, for sequences as long as the longest becomes (of data
    that are streamed: --max-seq-length). Rank 0 finds it out for all; all ranks call it together."""
    told: list[Any] = [None]
    # dry runs of a large model may take longer than a collective's time limit
    with raise_together(patient=ranks):
        if ranks.rank == 0:
            with telling() as failed:  # what has no forecast may still be trained
                told = [_forecast(source, _asked(topology, kernel, config, inputs, ranks, maker))]
            if failed:
                told = [failed[0][:200]]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], str):
        return Forecast(told[0])
    when, memory, saved = told[0]
    with telling() as failed:
        before = _before(ranks)
        return Forecast("", when, memory, before, available_memory(ranks.device, before), saved)
    return Forecast(failed[0][:200])


def _forecast(source: ModelSource, asked: Asked) -> Peak:
    """What a rank holds."""
    # to which a dry run adds a layer for multi-token prediction by itself
    plain = replace(source, mtp=None)
    forecasts = Forecasts(plain.said, partial(getattr, plain, "config"), asked.device)
    if asked.config.pp_size == 1 and (known := forecasts.known(asked)) is not None:
        return _held(known, asked)
    # it has the process group of a run, and dry runs make one of their own
    return in_child(partial(_forecast_alone, forecasts, asked))


def _forecast_alone(forecasts: Forecasts, asked: Asked) -> Peak:
    forget_process_groups()
    ranks = [asked]
    if asked.config.pp_size > 1:
        asked = replace(asked, config=forecasts.with_stages(asked.config))
        ranks = pipelined(forecasts, asked).rehearsed()
    return _held(max(map(forecasts.account, ranks), key=lambda account: account.memory.peak), asked)


def _held(account: Account, asked: Asked) -> Peak:
    """On a GPU with what lies beside tensors, and without what is in host memory."""
    is_gpu, peak = asked.device == "cuda", account.memory
    return Peak(peak.when, account.on_card(asked.cluster.memory) if is_gpu else peak.kinds, peak.trained + peak.state)


def _before(ranks: Ranks) -> float:
    """Bytes that this process holds before its model is made."""
    return 0.0 if ranks.device.type == "cuda" else resident()


def _asked(
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    inputs: Inputs,
    ranks: Ranks,
    maker: BatchMaker,
) -> Asked:
    """The step of a run with the longest of its sequences."""
    rows = inputs.training
    longest = maker.within(config.max_seq_length).length(longest_sequence(rows, config))
    trained = None if rows is None else trained_share(rows)
    # fp8 is what --expert-precision says
    name = config.expert_kernel if config.expert_precision == "fp8" else kernel.kernel.recorded_as
    # a micro-batch may be larger than the data
    most = config.per_device_train_batch_size if rows is None else min(config.per_device_train_batch_size, len(rows))
    settings = replace(config, expert_kernel=name, max_seq_length=longest, per_device_train_batch_size=most)
    device: Any = ranks.device.type
    before = _before(ranks)
    cluster = this_machine(config, ranks, available_memory(ranks.device, before) - before)
    image_tokens = 0 if rows is None else rows.samples.most_image_tokens
    routing = GivenRouting(samples=1, trained=trained, image_tokens=image_tokens)
    return Asked(settings, topology.world_size, cluster, 0, routing, device)


def trained_share(rows: Rows) -> float | None:
    """The fraction of tokens that have a loss; None: all but the first of each sequence, as where nothing is known."""
    targets, tokens = int(rows.samples.targets.sum()), int(rows.samples.lengths.sum())
    return None if targets == tokens - len(rows) else targets / tokens


def longest_sequence(rows: Rows | None, config: TrainConfig) -> int:
    """Tokens of the longest sequence, as long as the data are known: of packed pairs, half of what is one sequence."""
    if rows is None:
        return 2
    if config.streaming:
        return config.max_seq_length
    return -(-int(rows.lengths.max()) // (config.sequences_per_row if config.packing else 1))


def beside(forecast: Forecast, measured: float) -> str:
    """What was measured, in bytes, next to what was forecast, in a line."""
    told = f"memory per rank: peak {measured / 2**30:,.2f} GiB measured"
    if forecast.why_not:
        return told
    before = f" ({forecast.before / 2**30:,.2f} of them before the model was made)" if forecast.before else ""
    return f"{told}, {forecast.total / 2**30:,.2f} GiB forecast{before}"
