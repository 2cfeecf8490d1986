"""Figures of a logging interval: losses, speed, memory, routing."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...moe.experts.router_stats import NO_ROUTING, Routing
from ...moe.hf_model.counts import ParameterCounts
from ...moe.util.telling import telling
from ..loss.balance import LossWeights
from ..metrics import Metric, metrics_of
from ..steps.interval import Interval, ModelOnDevice
from ..steps.step import StepResult

# dense bf16 rates of NVIDIA's data sheets, in 1e12 floating point operations a second, by words of the device's name
_PEAK_TFLOPS = {
    "B300": 2250,
    "B200": 2250,
    "GB200": 2500,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "A40": 150,
    "A10G": 70,
    "A10": 125,
    "RTX 4090": 165,
}


def peak_tflops(device_name: str) -> float | None:
    """What a GPU could do at best in bf16; None for one that is not in the table."""
    names = sorted(_PEAK_TFLOPS, key=len, reverse=True)
    return next((_PEAK_TFLOPS[name] for name in names if re.search(rf"\b{name}\b", device_name)), None)


class Meter:
    """Adds up steps until they are logged, and the time between.

    Each logging interval begins where the one before it ended, so that intervals and pauses together are all the time
    there was: waiting for other ranks, and logging itself, count as training.

    Args:
        counts, config: of the model, for its floating point operations.
        top_k: experts per token.
        device: that this rank computes on.
        bf16: whether it computes in bf16, in which case MFU is given where the device's rate is known.
        warn: is told of a metric that fails, which then is None; without it, its error is raised.
    """

    def __init__(
        self,
        counts: ParameterCounts,
        config: Any,
        top_k: int,
        device: torch.device,
        bf16: bool,
        warn: Callable[[str], object] | None = None,
    ):
        self.warn = warn
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.model = ModelOnDevice(counts, config, top_k, device, peak_tflops(name) if bf16 else None)
        self.started = time.perf_counter()
        self._begin(self.started)

    def _begin(self, now: float) -> None:
        self.begun = now
        self.seconds_paused = 0.0
        self.seconds_waited = 0.0
        self.steps: list[StepResult] = []
        self.routing: Routing | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.steps

    def add(self, result: StepResult) -> None:
        """One step more."""
        # where the routing went is added up: each step's own would fill a device that logs seldom
        self.steps.append(replace(result, routing=NO_ROUTING))
        if result.is_finite:
            self.routing = result.routing if self.routing is None else self.routing + result.routing

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for the next batches, on the host."""
        begun = time.perf_counter()
        yield
        self.seconds_waited += time.perf_counter() - begun

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training: evaluation, sample generations, saving, comparing replicas, writing a profile."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the update may still be under way there
        begun = time.perf_counter()
        yield
        self.seconds_paused += time.perf_counter() - begun

    def metrics(
        self, weights: LossWeights, epoch: float, learning_rate: float, only: Callable[[Metric], bool] = lambda _: True
    ) -> dict[str, Any]:
        """METRICS of the steps since the last call, over all ranks, which call it together. Speed leaves out pauses.

        Tokens count whether or not their step was skipped, being not finite; losses, norm and routing are those of the
        other steps. Where there are none, losses and norm are None, and there is nothing of the routing.

        Args:
            only: those to be taken.
        """
        now = time.perf_counter()
        seconds = now - self.begun - self.seconds_paused
        taken = (now - self.started, seconds, self.routing, self.seconds_waited)
        interval = Interval(self.model, self.steps, epoch, learning_rate, weights, *taken)
        metrics = measured(
            "steps", interval, self.model.device, only, self.steps[0].figures if self.steps else (), self.warn
        )
        self._begin(now)
        return metrics


def measured(
    of: Literal["steps", "evaluation", "answers"],
    known: Any,
    device: torch.device,
    only: Callable[[Metric], bool] = lambda _: True,
    figures: Iterable[str] = (),
    warn: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """METRICS of an `Interval`, an `Evaluation` or a `Scored`, by name. All ranks call it together.

    Args:
        figures: names of those that the loss has given, of which data sets may have metrics.
        warn: is told of a metric that fails, which then is None.

    Raises:
        ValueError: a metric's value is not what metrics.jsonl can have of it, and there is no `warn`.
    """
    wanted = [metric for metric in metrics_of(figures) if metric.of == of and only(metric) and metric.is_logged(known)]
    metrics = {metric.name: _value(metric, known, warn) for metric in wanted}
    for how in ("sum", "mean", "max"):
        names = [metric.name for metric in wanted if metric.over_ranks == how]
        if names:
            own = [math.nan if metrics[name] is None else metrics[name] for name in names]
            values = torch.tensor(own, dtype=torch.float64, device=device)
            dist.all_reduce(values, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
            metrics |= zip(names, (values / (dist.get_world_size() if how == "mean" else 1)).tolist(), strict=True)
    return metrics


def _value(metric: Metric, known: Any, warn: Callable[[str], object] | None) -> Any:
    if warn is not None:
        with telling(f"the metric {metric.name!r} is missing", warn):
            return _value(metric, known, None)
        return None
    value, of_each_rank = metric.value(known), metric.over_ranks != "alike"
    if not _can_be_logged(value, of_each_rank):
        kinds = "a number or None" if of_each_rank else "a number, None, or a list of them"
        raise ValueError(f"the metric {metric.name!r}: its value is {value!r:.80}, not {kinds}")
    return value


def _can_be_logged(value: Any, of_each_rank: bool) -> bool:
    if isinstance(value, list):
        return not of_each_rank and all(_can_be_logged(each, of_each_rank) for each in value)
    return value is None or isinstance(value, int | float)
