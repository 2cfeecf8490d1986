"""Rates of devices, and what a meter keeps."""

import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe.experts.model_facts import Attention
from expertmesh.moe.experts.router_stats import NO_ROUTING, Routing
from expertmesh.moe.hf_model.counts import ParameterCounts
from expertmesh.training import metrics as of_metrics
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.monitoring import meter as of_meter
from expertmesh.training.monitoring.meter import Meter, measured, peak_tflops
from expertmesh.training.steps.interval import Interval
from expertmesh.training.steps.step import StepResult


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", 165),
        ("", None),
    ],
)
def test_peak(device: str, expected: float | None) -> None:
    """Names as the drivers give them; nothing is taken for another because its name holds that one's."""
    assert peak_tflops(device) == expected


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_a_meter_keeps_no_steps_routing(loss: float) -> None:
    """Of a Trainer that logs nothing it would keep those of all steps."""
    counts: Any = None
    meter = Meter(counts, None, 2, torch.device("cpu"), bf16=False)
    kept = []
    for _ in range(3):
        routing = Routing(torch.ones(2, 4, dtype=torch.int64), torch.ones(2), torch.ones(2))
        kept.append(weakref.ref(routing.counts_LE))
        meter.add(StepResult(loss, 0.0, 0.0, 1.0, 8, 4, (16,), routing))
    del routing
    # the first is what the others were added to
    assert [one() for one in kept] == [None] * 3
    assert meter.routing is None if math.isnan(loss) else meter.routing.counts_LE.sum() == 24  # type: ignore[union-attr]


def test_metrics_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the other one with twice as much: sums, means and maxima; what a rank does not know is no number."""

    def all_reduce(values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        other = 2 * values
        values.copy_(torch.maximum(values, other) if op == dist.ReduceOp.MAX else values + other)

    def metric(name: str, over_ranks: str | None, value: float | None = 3.0) -> Any:
        return SimpleNamespace(
            name=name, of="steps", over_ranks=over_ranks, value=lambda _: value, is_logged=lambda _: True
        )

    metrics = [metric(name, name) for name in ("sum", "mean", "max")]
    metrics += [metric("own", None), metric("unknown", "max", None)]
    monkeypatch.setattr(of_metrics, "METRICS", metrics)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    found = measured("steps", None, torch.device("cpu"))
    assert math.isnan(found.pop("unknown"))
    assert found == {"sum": 9.0, "mean": 4.5, "max": 6.0, "own": 3.0}


def test_means_are_over_what_counts_of_the_finite_steps() -> None:
    unused: Any = None
    routing = Routing(torch.ones(2, 4, dtype=torch.int64), torch.ones(2), torch.ones(2))
    steps = [
        StepResult(loss, 0.0, 0.0, norm, 8, targets, (16,), routing)
        for loss, norm, targets in ((2.0, 1.0, 1), (4.0, 3.0, 3), (math.nan, 1.0, 5))
    ]
    interval = Interval(unused, steps, 1.0, 0.1, unused, 1.0, 1.0, None)
    assert interval.mean("loss", "targets") == (2.0 * 1 + 4.0 * 3) / 4
    assert interval.mean("grad_norm", None) == 2.0
    assert interval.total("targets") == 9
    assert Interval(unused, steps[2:], 1.0, 0.1, unused, 1.0, 1.0, None).mean("loss", "targets") is None


@pytest.mark.parametrize("bf16", [True, False])
def test_mfu_by_hand(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 60,000 tokens in half a second, on an H100 of two ranks: 989 TFLOP/s is its peak in bf16. A run in
    fp32 is told none: relative to a rate that it cannot have, it would be wrong."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(of_meter.time, "perf_counter", lambda: 10.0)
    # of 5e9 parameters a token uses 1e9, 2e8 of them in the head and as many in an embedding
    sizes = (5_000_000_000, 4_000_000_000, 200_000_000, 200_000_000, 1_000_000_000)
    counts = ParameterCounts(*sizes, attention=(Attention(width=4096, window=0),))
    meter = Meter(counts, SimpleNamespace(tie_word_embeddings=False), 2, torch.device("cuda"), bf16)
    for _ in range(2):
        meter.add(StepResult(1.0, 0.0, 0.0, 1.0, 60_000, 30_000, (30_000_000,), NO_ROUTING))
    monkeypatch.setattr(of_meter.time, "perf_counter", lambda: 10.5)
    found = meter.metrics(LossWeights(0.0, 0.0), 1.0, 0.1, lambda metric: metric.name in ("mfu", "tflops_per_second"))
    flops = 2 * 6 * (60_000 * 600_000_000 + 30_000 * 200_000_000 + 30_000_000 * 4096)
    tflops = flops / 0.5 / 2 / 1e12
    assert found.pop("tflops_per_second") == pytest.approx(tflops, rel=1e-6)
    assert found == ({"mfu": pytest.approx(tflops / 989, abs=1e-4)} if bf16 else {})
