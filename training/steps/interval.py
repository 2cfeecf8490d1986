"""The steps between two lines of the log, from which metrics are taken."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...moe.experts.router_stats import Routing, over_ranks
from ...moe.hf_model.counts import ParameterCounts, training_flops
from ...sharding.runtime.memory import most_held, resident
from ..loss.balance import LossWeights
from .step import StepResult


@dataclass(frozen=True)
class ModelOnDevice:
    """What the speed of steps is measured against.

    Attributes:
        counts, config: of the model, for its floating point operations.
        top_k: experts per token.
        device: that this rank computes on.
        peak_tflops: what that could do at best; None where it is not known.
    """

    counts: ParameterCounts
    config: Any
    top_k: int
    device: torch.device
    peak_tflops: float | None


@dataclass
class Interval:
    """The steps since the last logged one: what metrics are taken from.

    Attributes:
        model: what these are steps of.
        steps: all; `finite`, those that made an update.
        epoch, learning_rate: at the last step.
        weights: of the auxiliary losses.
        seconds_in_all: since training began. seconds: of these steps, without pauses. seconds_waited: of those, for
            batches, on this rank.
        has_routing: whether a step was finite.
    """

    model: ModelOnDevice
    steps: list[StepResult]
    epoch: float
    learning_rate: float
    weights: LossWeights
    seconds_in_all: float
    seconds: float
    own_routing: Routing | None = field(repr=False)
    seconds_waited: float = 0.0

    @cached_property
    def finite(self) -> list[StepResult]:
        return [step for step in self.steps if step.is_finite]

    def total(self, name: str) -> int:
        """Sum of a count over all steps."""
        return sum(getattr(step, name) for step in self.steps)

    def mean(self, name: str, weighted_by: str | None) -> float | None:
        """Mean of a figure over the finite steps, weighted by a count of theirs; None where there are none."""
        weights = [1 if weighted_by is None else getattr(step, weighted_by) for step in self.finite]
        values = [getattr(step, name) for step in self.finite]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if values else None

    @cached_property
    def figures(self) -> dict[str, float]:
        """Means of what a loss of one's own tells, over the finite steps; nothing where there are none."""
        total = sum(step.weight for step in self.finite)
        names = self.finite[0].figures if self.finite else ()
        return {name: sum(step.figures[name] * step.weight for step in self.finite) / total for name in names}

    @property
    def has_routing(self) -> bool:
        return self.own_routing is not None

    @cached_property
    def routing(self) -> Routing:
        """Of the finite steps, over all ranks, which ask for it together."""
        assert self.own_routing is not None
        return over_ranks(self.own_routing)

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.model.top_k

    @cached_property
    def of_images(self) -> list[int]:
        """How many images, patches, and pairs of patches of one image; nothing where the model takes none."""
        return [sum(numbers) for numbers in zip(*(step.of_images for step in self.steps), strict=True)]

    @cached_property
    def tflops_per_second(self) -> float:
        """Of a rank."""
        pairs = [sum(numbers) for numbers in zip(*(step.pairs for step in self.steps), strict=True)]
        tokens, targets = self.total("tokens"), self.total("targets")
        tflops = training_flops(self.model.counts, self.model.config, tokens, targets, pairs, self.of_images) / 1e12
        return tflops / self.seconds / dist.get_world_size()

    @property
    def peak_tflops(self) -> float | None:
        """What the device could do at best."""
        return self.model.peak_tflops

    @property
    def most_memory(self) -> float:
        """Bytes that this rank has held at most, see `most_held`."""
        return most_held(self.model.device)

    @property
    def host_memory(self) -> float:
        """Bytes of host memory that this process holds now."""
        return resident()

    @property
    def is_on_gpu(self) -> bool:
        return self.model.device.type == "cuda"

    @property
    def gpu_utilization(self) -> float | None:
        """As the driver samples it, from 0 to 1; the GPU is not waited for. None where it cannot be read."""
        try:
            return torch.cuda.utilization(self.model.device) / 100
        except Exception:  # nvidia-ml-py may be missing, or refuse a part of a GPU: only a figure is lost
            return None
