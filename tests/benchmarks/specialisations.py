"""Prints, as JSON, how often each Triton kernel would be compiled in a run whose tensors have these numbers of rows.

Run by `test_kernels.py`, with the interpreter switched off."""

import json
from collections import defaultdict
from collections.abc import Callable

import torch

from benchmarks.kernel_calls import Example
from benchmarks.kernels import launches_of

ROWS = (1, 2, 3, 16, 17, 30, 48, 513, 1024, 8193)
"""As routing and batches have them: one, multiples of 16, and others, for one and several programs."""
WIDTHS = (64, 24)
"""A multiple of 16, and none."""
EXPERTS = 3


def _swiglu(rows: int, width: int) -> None:
    from expertmesh.moe.kernels.swiglu_triton import fused_backward, fused_forward

    grad, gate, up = torch.zeros(3, rows, width).bfloat16().unbind()
    fused_forward(gate, up)
    fused_backward(grad, gate, up)


def _weighed(rows: int, width: int) -> None:
    from expertmesh.moe.kernels.swiglu_triton import fused_backward, fused_forward
    from expertmesh.moe.kernels.weighing_triton import fused_weighed, fused_weighed_backward

    (grad, gate, up), weights = torch.zeros(3, rows, width).bfloat16().unbind(), torch.zeros(rows)
    fused_forward(gate, up, weights)
    fused_backward(grad, gate, up, weights)
    fused_weighed(gate, weights)
    fused_weighed_backward(grad, gate, weights)


def _joined_swiglu(rows: int, width: int) -> None:
    """Of a width that is no multiple of 16, one row alone, which is contiguous, is a case of its own."""
    from expertmesh.moe.kernels.swiglu_triton import fused_forward, fused_joined_backward

    if rows > 1 or width % 16 == 0:
        gate_up = torch.zeros(rows, 2 * width).bfloat16()
        fused_forward(*gate_up.chunk(2, dim=1))
        fused_joined_backward(torch.zeros(rows, width).bfloat16(), gate_up)


def _permute(rows: int, width: int) -> None:
    from expertmesh.moe.dispatch.permute_triton import fused_combine_backward, fused_gather_sum, fused_spread

    tokens, sent = torch.zeros(rows, width), torch.zeros(2 * rows, width)
    position, weights = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 2)
    fused_spread(tokens, position, None, 2 * rows)
    fused_gather_sum(sent, position, None, weights, torch.float32)
    fused_combine_backward(tokens, sent, weights, position, None)


def _fp8(rows: int, width: int) -> None:
    from expertmesh.moe.kernels.fp8_triton import fused_rows, fused_runs

    x = torch.zeros(rows, width).bfloat16()
    fused_rows(x)
    fused_rows(x, torch.zeros(rows, dtype=torch.int32))
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    fused_runs(x, ends, ends, -(-rows // 16) * 16 + 16 * EXPERTS)


def _loss(rows: int, width: int) -> None:
    from expertmesh.training.loss.head_triton import fused_gradient, fused_losses_and_gradient, fused_row_figures

    logits, targets = torch.zeros(rows, width), torch.zeros(rows + 1, dtype=torch.int64)[1:]
    for some, weights in ((targets, None), (targets.clone(), None), (targets, torch.zeros(rows + 1)[1:])):
        fused_losses_and_gradient(logits, some, weights)
        highest, exp_sums, _ = fused_row_figures(logits, some)
        fused_gradient(logits, some, highest, exp_sums, weights)


def _megablocks(rows: int, width: int) -> None:
    """stk's kernels take the number of rows, each expert's padded to a multiple of 128; matrices are so too."""
    from expertmesh.moe.kernels.expert_rows import ExpertRows
    from expertmesh.moe.kernels.megablocks import megablocks_sparse

    if width == WIDTHS[0]:
        experts = ExpertRows(torch.tensor([rows // 2, 0, rows - rows // 2]), rows)
        weights = [torch.zeros(EXPERTS * 4 * width, 2 * width).bfloat16().requires_grad_() for _ in range(3)]
        rows_RD = torch.zeros(rows, 2 * width).bfloat16().requires_grad_()
        megablocks_sparse(rows_RD, experts, *weights).sum().backward()


CALLS: tuple[Callable[[int, int], None], ...] = (_swiglu, _weighed, _joined_swiglu, _permute, _fp8, _loss, _megablocks)


def main() -> None:
    # of each kernel, what it is made for: the call, the width, dtypes and constants of the source's own; and of each of
    # these, what Triton compiles it for
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for call in CALLS:
        for width in WIDTHS:
            for rows in ROWS:
                for launch in launches_of(Example(lambda _, rows=rows: call(rows, width), torch.float32)):  # type: ignore[misc]  # noqa: B023
                    constants = {p.name: launch.constants.get((p.num,)) for p in launch.kernel.params if p.is_constexpr}
                    types = [kind for name, kind in launch.signature.items() if name.endswith("_ptr")]
                    # MegaBlocks' own are tuned: each of their configurations is tried
                    tuned = launch.options if call is _megablocks else None
                    made_for = str((call.__name__, width, constants, types, tuned))
                    compiled_for = str((launch.signature, launch.constants, launch.attributes, launch.options))
                    found[f"{launch.kernel.__module__}.{launch.kernel.__name__}"][made_for].add(compiled_for)
    most = {name: max(map(sorted, several.values()), key=len) for name, several in found.items()}
    print(json.dumps(most))


if __name__ == "__main__":
    main()
