"""--tf32: where it is possible, and what it sets."""

from collections.abc import Iterator

import pytest
import torch

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.model_setup.tf32 import compute_in_tf32


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_it_is_off_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert not torch.backends.cuda.matmul.allow_tf32
    compute_in_tf32("cuda")
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExpertMeshError, match="--tf32 needs a GPU; this run is on cpu; leave it out"):
        compute_in_tf32("cpu")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    with pytest.raises(ExpertMeshError, match=r"8\.0 \(Ampere\) or more; this one has 7\.5"):
        compute_in_tf32("cuda")
    assert not torch.backends.cuda.matmul.allow_tf32
