"""--tf32: where it is possible, and what it sets."""

from collections.abc import Iterator

import pytest
import torch

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.model_setup.tf32 import set_tf32
from tests.gpus import SetCapability


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_it_is_as_the_flag_says_each_time(set_capability: SetCapability) -> None:
    """The second model of a process too, after one with it."""
    set_capability((9, 0))
    assert not torch.backends.cuda.matmul.allow_tf32
    for is_on in (True, False, True):
        set_tf32(is_on, "cuda")
        assert torch.backends.cuda.matmul.allow_tf32 == is_on
        assert torch.get_float32_matmul_precision() == ("high" if is_on else "highest")
    set_tf32(False, "cpu")
    assert not torch.backends.cuda.matmul.allow_tf32


def test_where_there_is_none(set_capability: SetCapability) -> None:
    with pytest.raises(ExpertMeshError, match="--tf32 needs a GPU; this run is on cpu; leave it out"):
        set_tf32(True, "cpu")
    set_capability((7, 5))
    with pytest.raises(ExpertMeshError, match=r"8\.0 \(Ampere\) or more; this one has 7\.5"):
        set_tf32(True, "cuda")
    assert not torch.backends.cuda.matmul.allow_tf32
