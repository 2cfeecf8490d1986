"""A script for a process that has flash-attn-4: from torch's operators to the package's kernels, which are compiled for
the compute capability that its environment variables name, and not run.

    python -m tests.training.compile_flash_4 MAJOR KEY_WIDTH VALUE_WIDTH WINDOW

Tensors are fake, as the package takes them to compile without a GPU.
"""

import sys
from typing import Any
from unittest import mock

import torch

from expertmesh.moe.torch_private import FakeTensorMode
from expertmesh.training.attention import flash_4
from expertmesh.training.attention.flash_kernels import FLASH_KERNELS, activate

POSITIONS, HEADS, GROUPS = 300, 8, 2


def compiled(key_width: int, value_width: int, window: int) -> None:
    from torch.nn.attention import _fa4

    def tensor(heads: int, width: int) -> torch.Tensor:
        return torch.empty(POSITIONS, heads, width, device="cuda", dtype=torch.bfloat16)

    query, key, value = tensor(HEADS, key_width), tensor(GROUPS, key_width), tensor(GROUPS, value_width)
    ends = torch.empty(4, device="cuda", dtype=torch.int32)
    common = (ends, ends, 193, 193, 0.0, window == 0)
    seen: dict[str, Any] = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    out, lse, state, unused, _ = _fa4._fa4_flash_attention_forward_impl(query, key, value, *common, False, **seen)
    assert out.shape == (POSITIONS, HEADS, value_width)
    assert (lse.shape, lse.dtype) == ((HEADS, POSITIONS), torch.float32)
    gradients = _fa4._fa4_flash_attention_backward_impl(
        torch.empty_like(out), query, key, value, out, lse, *common, state, unused, **seen
    )
    assert [x.shape for x in gradients] == [x.shape for x in (query, key, value)]


def main() -> None:
    major, *case = map(int, sys.argv[1:])
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, 0)),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        assert flash_4.lacking() == ""
        activate(FLASH_KERNELS[0])
        with FakeTensorMode():
            compiled(*case)


if __name__ == "__main__":
    main()
