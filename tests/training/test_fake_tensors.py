"""Tensors that hold no memory: what operators gave is given again, and looks as torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.torch_private import FakeTensor
from expertmesh.training.planning.rehearsal.fake_tensors import _KNOWN, FakeTensors

aten = torch.ops.aten
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda x, w: x @ w,
    "cast": lambda x, w: x.to(torch.bfloat16),
    "transposed": lambda x, w: aten.add.Tensor(x.t(), 1),
    "view": lambda x, w: x[1:, :2],
    "unsafe view": lambda x, w: aten._unsafe_view.default(x, [24]),
    "parts": lambda x, w: aten.split_with_sizes.default(x, [1, 3]),
    "several": lambda x, w: aten.native_layer_norm.default(x, [6], None, None, 1e-5),
    "in place": lambda x, w: x.mul_(2),
    "into another": lambda x, w: aten.mm.out(x, w, out=torch.empty(4, 4)),
    "made": lambda x, w: torch.arange(4, dtype=torch.int32),
    "one of two types": lambda x, w: [aten.full.default([2], 1), aten.full.default([2], 1.0)],
}


def looks(result: Any, *given: Tensor) -> list[tuple[Any, ...]]:
    tensors = result if isinstance(result, list | tuple) else [result]
    storages = [tensor.untyped_storage()._cdata for tensor in given]
    return [
        (
            *(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes()),
            [t.untyped_storage()._cdata == storage for storage in storages],
            [t is each for each in given],
        )
        for t in tensors
    ]


@pytest.mark.parametrize("name", CALLS)
def test_what_was_given_before_looks_as_it_did(name: str) -> None:
    seen = []
    with FakeTensors(), torch.no_grad():
        for _ in range(3):
            x, w = torch.empty(4, 6), torch.empty(6, 4)
            seen.append(looks(CALLS[name](x, w), x, w))
    assert seen[0] == seen[1] == seen[2]


def test_what_is_given_again_is_made_as_torch_makes_it() -> None:
    with FakeTensors() as mode, torch.no_grad():
        x, w = torch.empty(4, 6), torch.empty(6, 4)
        own: Any = [x @ w for _ in range(3)][-1]
        by_torch = FakeTensor(mode, torch.empty(4, 4, device="meta"), own.fake_device)
        assert vars(own) == vars(by_torch)
        assert torch._C._dispatch_keys(own) == torch._C._dispatch_keys(by_torch)
        assert (own.requires_grad, own.is_leaf) == (by_torch.requires_grad, by_torch.is_leaf)


def test_results_of_data_are_not_kept() -> None:
    with FakeTensors():
        x = torch.empty(3, 3)
        for size in (2, 5):
            x.resize_(size, size)
            assert (x + 1).shape == (size, size)
        # every element counts
        assert x.nonzero().shape == (25, 2)
        known = len(_KNOWN)
        assert (x + 1).shape == (5, 5)
        assert len(_KNOWN) == known
