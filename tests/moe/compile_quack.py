"""A script for a process that has quack-kernels: the stand-in of tests is held against the package, and its kernels, as
ours calls them, are compiled for the compute capability that its environment variables name, and not run.

    python -m tests.moe.compile_quack MAJOR
"""

import inspect
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from expertmesh.moe.kernels import quack
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.gathered_rows import GatheredRows
from tests.cute_dsl import MULTIPROCESSORS
from tests.moe import quack_stand_in

D, WIDTH, ROWS = 256, 128, 300
COUNTS = [0, 5, 2, 0]


def check_signatures(package: Any) -> None:
    """Arguments of the stand-in's functions are the package's, with the same defaults."""
    for name in quack.TAKEN:
        theirs = inspect.signature(getattr(package, name)).parameters
        for argument in inspect.signature(getattr(quack_stand_in, name)).parameters.values():
            assert theirs[argument.name].default == argument.default, (name, argument.name)


def check_stand_in(package: Any) -> None:
    """The package's references for its kernels are code of torch: they compute the same."""
    bounds = torch.tensor([0, *COUNTS]).cumsum(0, dtype=torch.int32)
    sizes = (sum(COUNTS), 16), (len(COUNTS), 2 * 24, 16), (len(COUNTS), 24, 16), (sum(COUNTS), 2 * 24)
    rows, gate_up, w2, gradient = (torch.randn(size) for size in sizes)
    by_row, over_rows = {"cu_seqlens_m": bounds}, {"cu_seqlens_k": bounds}
    calls: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
        ("gemm", (rows, w2.transpose(1, 2)), by_row),
        ("gemm", (gradient, gate_up), by_row | {"concat_layout": ("B",)}),
        ("gemm", (gradient.t(), rows), over_rows),
        ("gemm", (gradient.t(), rows), over_rows | {"concat_layout": ("out",)}),
        ("gemm_gated", (rows, gate_up.transpose(1, 2)), by_row | {"activation": "swiglu", "concat_layout": ("B",)}),
        ("gemm_dgated", (rows, w2.transpose(1, 2), gradient), by_row | {"activation": "swiglu"}),
    ]
    for name, operands, options in calls:
        mine = getattr(quack_stand_in, name)(*operands, tuned=False, **options)
        theirs = getattr(package, f"{name}_ref")(*operands, **options)
        torch.testing.assert_close(mine, theirs)
    check_gathering(package, bounds, rows, w2)
    # its reference has no weights of rows: those of a gradient times its weight, as they are linear in that
    scale, how = torch.rand(len(rows)), {"activation": "swiglu", "cu_seqlens_m": bounds}
    weighed: Any = how | {"tuned": False, "colvec_scale": scale, "colvec_reduce": True}
    mine = quack_stand_in.gemm_dgated(rows, w2.transpose(1, 2), gradient, **weighed)
    d_before, hidden = package.gemm_dgated_ref(rows * scale[:, None], w2.transpose(1, 2), gradient, **how)
    products = package.gemm_ref(rows, w2.transpose(1, 2), **by_row)
    theirs = d_before, hidden * scale[:, None], (products * hidden).sum(dim=1)
    torch.testing.assert_close(mine, theirs)


def check_gathering(package: Any, bounds: Tensor, rows: Tensor, w2: Tensor) -> None:
    tokens, token = rows[:3], torch.tensor([2, 0, 1, 0, 2, 1, 1], dtype=torch.int32)
    gathered: Any = {"cu_seqlens_m": bounds, "A_idx": token}
    mine = quack_stand_in.gemm(tokens, w2.transpose(1, 2), tuned=False, **gathered)
    torch.testing.assert_close(mine, package.gemm_ref(tokens, w2.transpose(1, 2), **gathered))
    gathered = {"cu_seqlens_k": bounds, "A_idx": token}
    theirs = package.gemm_ref(tokens.t(), rows, **gathered)
    for layout in ((), ("out",)):
        # written transposed, as our weights lie; the package's reference knows halves of rows alone
        mine = torch.empty(len(COUNTS), rows.shape[1], rows.shape[1]).transpose(1, 2)
        quack_stand_in.gemm(tokens.t(), rows, mine, tuned=False, concat_layout=layout, **gathered)
        torch.testing.assert_close(mine, torch.cat([theirs[..., ::2], theirs[..., 1::2]], -1) if layout else theirs)


def compiled() -> None:
    """On tensors of a CPU, whose results are whatever memory holds: nothing is launched."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    experts = ExpertRows(torch.tensor([ROWS]), ROWS)
    weights_R = torch.rand(ROWS, requires_grad=True)
    rows, gate_up, w2 = tensor(ROWS, D), tensor(1, 2 * WIDTH, D), tensor(WIDTH, D)
    weight, tokens, gathered = tensor(1, WIDTH, D), tensor(ROWS // 2, D), GatheredRows()
    gathered.put("token_R", torch.arange(ROWS, dtype=torch.int32) // 2)
    gathered.put("grad_sums_UD", torch.empty_like(tokens))
    for out, inputs in (
        (quack.quack_joined(rows, experts, gate_up, w2), (rows, gate_up, w2)),
        (
            quack.quack_joined(rows, replace(experts, weights_R=weights_R), gate_up, w2),
            (rows, gate_up, w2, weights_R),
        ),
        (
            quack.quack_joined(tokens, replace(experts, weights_R=weights_R, gathered=gathered), gate_up, w2),
            (tokens, gate_up, w2, weights_R),
        ),
        (quack.quack_product(rows, experts, weight), (rows, weight)),
    ):
        gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
        assert [gradient.shape for gradient in gradients] == [each.shape for each in inputs]


def main() -> None:
    major = int(sys.argv[1])
    assert quack._lacking() == ""
    from quack import gemm, gemm_interface
    from quack.gemm_runtime import host

    check_signatures(gemm_interface)
    check_stand_in(gemm_interface)
    launch = mock.Mock()
    with ExitStack() as stack:
        for module in (gemm, host):
            stack.enter_context(mock.patch.object(module, "launch_gemm", launch))
            clusters = mock.Mock(return_value=MULTIPROCESSORS[major])
            stack.enter_context(mock.patch.object(module, "get_max_active_clusters", clusters))
        compiled()
    assert launch.call_count == 6 + 6 + 6 + 3


if __name__ == "__main__":
    main()
