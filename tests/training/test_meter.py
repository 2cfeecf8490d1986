"""Rates of devices, and what a meter keeps."""

import math
import weakref
from typing import Any

import pytest
import torch

from expertmesh.moe.experts.router_stats import Routing
from expertmesh.training.monitoring.meter import Meter, peak_tflops
from expertmesh.training.step import StepResult


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
