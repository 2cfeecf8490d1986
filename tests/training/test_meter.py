"""Rates of devices."""

import pytest

from expertmesh.training.monitoring.meter import peak_tflops


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
