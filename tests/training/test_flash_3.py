"""Flash attention 3 takes the place of torch's operators where it is installed, and what keeps it from that is told."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.attention import flash_3
from expertmesh.training.attention.flash_3 import use_flash_attention_3
from expertmesh.training.config.train_config import TrainConfig
from tests.gpus import SetCapability
from tests.tiny import tiny_config

PACKAGE = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="model", dataset=["data"], **settings)


@pytest.fixture
def installed(set_capability: SetCapability, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for the package, on a Hopper."""
    file = tmp_path / "flash_attn_interface.py"
    file.write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    set_capability((9, 0))
    yield file
    sys.modules.pop("flash_attn_interface", None)


def on_ranks(monkeypatch: pytest.MonkeyPatch, *others: str) -> Ranks:
    """One rank of several; the others have these obstacles."""

    def gather(into: list[Any], mine: Any) -> None:
        into[:] = [mine, *others]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    return Ranks(0, 1 + len(others), torch.device("cuda"), dist.HashStore())


def model(**changes: Any) -> Any:
    return build_model(tiny_config(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is called here is for a CPU")
def test_torchs_operators_are_replaced(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that our attention calls: what now answers is what asks for CUDA's tensors on behalf of the package."""
    ranks = on_ranks(monkeypatch)
    assert use_flash_attention_3(model(), config(), ranks) == (
        "flash attention 3 (flash_attn_interface) computes flash attention"
    )
    try:
        assert current_flash_attention_impl() == "FA3"
        x, key = torch.randn(4, 2, 8, dtype=torch.bfloat16), torch._C.DispatchKey.CUDA
        ends, lse, unused = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(2, 4), torch.empty(0)
        common = (ends, ends, 4, 4, 0.0, True)
        with pytest.raises(RuntimeError, match="FA3 flash_attention forward unsupported: inputs must be CUDA tensors"):
            torch.ops.aten._flash_attention_forward.default._op_dk(key, x, x, x, *common, False)
        with pytest.raises(RuntimeError, match="FA3 flash_attention backward unsupported: inputs must be CUDA tensors"):
            torch.ops.aten._flash_attention_backward.default._op_dk(key, x, x, x, x, x, lse, *common, unused, unused)
        # and once more does nothing
        assert use_flash_attention_3(model(), config(), ranks) is not None
        # the next model of the process has what it asks for
        use_flash_attention_3(model(), config(deterministic=True), ranks)
        assert current_flash_attention_impl() is None
        use_flash_attention_3(model(), config(), ranks)
        use_flash_attention_3(model(), config(), Ranks(0, 1, torch.device("cpu"), dist.HashStore()))
        assert current_flash_attention_impl() is None
    finally:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()


@pytest.mark.parametrize(
    ("changes", "settings", "capability", "said"),
    [
        ({}, {}, (8, 0), r"Hopper\); this one has 8\.0"),
        ({}, {}, (10, 0), r"Hopper\); this one has 10\.0"),
        ({"attention_dropout": 0.1}, {}, (9, 0), r"no dropout; this model's attention_dropout is 0\.1"),
        ({}, {"deterministic": True}, (9, 0), "--deterministic uses torch's own"),
    ],
)
def test_what_keeps_it_out_is_told(
    set_capability: SetCapability,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    settings: dict[str, Any],
    capability: tuple[int, int],
    said: str,
) -> None:
    set_capability(capability)
    found = use_flash_attention_3(model(**changes), config(**settings), on_ranks(monkeypatch))
    assert found is not None
    assert re.search(f"^flash attention 3 is not used: .*{said}", found), found
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('undefined symbol: _ZN3c104cuda')", "cannot be imported: ImportError: undefined symbol"),
        ("import torch", "has no operator flash_attn_3::"),
    ],
)
def test_a_package_that_does_not_work_is_told(
    installed: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    installed.write_text(source)
    if "no operator" in said:
        monkeypatch.setattr(torch.ops, "flash_attn_3", object())
    found = use_flash_attention_3(model(), config(), on_ranks(monkeypatch))
    assert found is not None
    assert said in found
    assert current_flash_attention_impl() is None


def test_ranks_compute_alike(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All with it, or none."""
    found = use_flash_attention_3(model(), config(), on_ranks(monkeypatch, "", flash_3._NOT_INSTALLED))
    assert found == "flash attention 3 is not used: on rank 2 flash_attn_interface is not installed"
    assert current_flash_attention_impl() is None


def test_torch_that_cannot_take_it(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", refuse)
    with pytest.raises(ExpertMeshError, match="that is installed: no such operator; uninstall flash_attn_3"):
        use_flash_attention_3(model(), config(), on_ranks(monkeypatch))


def test_nothing_is_said_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_flash_attention_3(model(), config(), on_ranks(monkeypatch, flash_3._NOT_INSTALLED)) is None
    on_cpu = Ranks(0, 1, torch.device("cpu"), dist.HashStore())
    assert use_flash_attention_3(model(), config(), on_cpu) is None
