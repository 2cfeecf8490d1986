"""Figures of a logging interval: losses, speed, memory, routing."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...moe.hf_model.counts import ParameterCounts, training_flops
from ..loss.balance import LossWeights
from ..loss.routing_figures import Routing, over_ranks, routing_metrics
from ..planning.rank_memory import measured_peak
from ..step import StepResult

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
    """

    def __init__(self, counts: ParameterCounts, config: Any, top_k: int, device: torch.device, bf16: bool):
        self.counts = counts
        self.config = config
        self.top_k = top_k
        self.device = device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_tflops(name) if bf16 else None
        self.started = time.perf_counter()
        self._begin(self.started)

    def _begin(self, now: float) -> None:
        self.begun = now
        self.seconds_paused = 0.0
        self.steps: list[StepResult] = []
        self.routing: Routing | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.steps

    def add(self, result: StepResult) -> None:
        """One step more."""
        self.steps.append(result)
        if result.is_finite:
            self.routing = result.routing if self.routing is None else self.routing + result.routing

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training: evaluation, sample generations, saving, comparing replicas, writing a profile."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the update may still be under way there
        begun = time.perf_counter()
        yield
        self.seconds_paused += time.perf_counter() - begun

    def metrics(self, weights: LossWeights) -> dict[str, Any]:
        """Figures of the steps since the last call, over all ranks, which call it together: losses are means over
        target tokens, counts are sums, the norm is the last step's. Speed leaves out pauses.

        Tokens count whether or not their step was skipped, being not finite; losses, norm and routing are those of the
        other steps. Where there are none, losses and norm are None, and there is nothing of the routing."""
        now = time.perf_counter()
        seconds = now - self.begun - self.seconds_paused
        tokens, targets = (sum(getattr(s, n) for s in self.steps) for n in ("tokens", "targets"))
        pairs = [sum(numbers) for numbers in zip(*(s.pairs for s in self.steps), strict=True)]
        tflops = training_flops(self.counts, self.config, tokens, targets, pairs) / 1e12
        speed = tflops / seconds / dist.get_world_size()
        finite = [s for s in self.steps if s.is_finite]
        metrics: dict[str, Any] = {"steps": len(self.steps)}
        if len(finite) < len(self.steps):
            metrics["skipped_steps"] = len(self.steps) - len(finite)
        metrics |= {
            "seconds": round(now - self.started, 3),
            "loss": _mean([s.loss for s in finite], [s.targets for s in finite]),
            "grad_norm": finite[-1].grad_norm if finite else None,
        }
        if weights.balance > 0:
            metrics["balance_loss"] = _mean([s.balance_loss for s in finite], [1] * len(finite))
        if weights.z > 0:
            metrics["z_loss"] = _mean([s.z_loss for s in finite], [s.tokens for s in finite])
        metrics |= {
            "tokens": tokens,
            "target_tokens": targets,
            "tokens_per_second": round(tokens / seconds, 1),
            "tflops_per_second": round(speed, 4),
        }
        if self.peak is not None:
            metrics["mfu"] = round(speed / self.peak, 4)
        metrics["peak_memory_mb"] = round(measured_peak(self.device) / 1e6, 1)
        if self.routing is not None:
            metrics |= routing_metrics(over_ranks(self.routing), self.top_k)
        self._begin(now)
        return metrics


def _mean(values: Sequence[float], weights: Sequence[int]) -> float | None:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if values else None
