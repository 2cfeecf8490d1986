"""Where all-to-alls run beside grouped GEMMs these leave multiprocessors free, in forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from expertmesh.moe.kernels.carve_out import LEFT
from expertmesh.moe.kernels.kernel_entries import KERNELS
from tests.moe.kernel_contract import rows_of
from tests.tiny import tiny_block

get_left: Any = torch._C._get_sm_carveout_experimental


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What each grouped GEMM was told."""
    told: list[int | None] = []
    grouped_mm = F.grouped_mm

    def record(*given: Any, **settings: Any) -> torch.Tensor:
        told.append(get_left())
        return grouped_mm(*given, **settings)

    monkeypatch.setattr(F, "grouped_mm", record)
    return told


@pytest.mark.parametrize("name", ["fused", "joined", "product"])
@pytest.mark.parametrize("is_beside", [False, True])
def test_forward_and_backward(left: list[int | None], name: str, is_beside: bool) -> None:
    x, experts = torch.randn(5, 8, requires_grad=True), rows_of([2, 3], is_beside=is_beside)
    w1, v1, w2 = (torch.randn(2 * 4, 8, requires_grad=True) for _ in range(3))
    kernel = KERNELS.get("torch-grouped").code
    assert kernel.fused is not None
    assert kernel.joined is not None
    assert kernel.product is not None
    if name == "fused":
        out = kernel.fused(x, experts, w1, v1, w2)
    elif name == "joined":
        out = kernel.joined(x, experts, torch.cat([w1, v1]).view(2, 8, 8), w2)
    else:
        out = kernel.product(x, experts, w1.view(2, 4, 8))
    out.sum().backward()
    assert len(left) == {"fused": 9, "joined": 6, "product": 3}[name]
    assert set(left) == {LEFT if is_beside else None}
    assert get_left() is None


def test_an_error_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **settings: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(F, "grouped_mm", fail)
    product = KERNELS.get("torch-grouped").code.product
    assert product is not None
    with pytest.raises(RuntimeError, match="no memory"):
        product(torch.randn(5, 8), rows_of([2, 3], is_beside=True), torch.randn(2, 4, 8))
    assert get_left() is None


def test_on_a_cpu_and_in_one_chunk_nothing_is_left(left: list[int | None]) -> None:
    tiny_block("torch-grouped")(torch.randn(1, 5, 32))
    assert set(left) == {None}
