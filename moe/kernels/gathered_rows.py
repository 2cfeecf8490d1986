"""Rows that a kernel's GEMMs read where tokens lie, in place of copies in the order of experts.

To give each of a token's experts on a rank a row of its own, U rows are read and R written: in forward, in a
recomputation, and of the gradients of what the experts' sums are. A GEMM that is told which row is whose
(`moe.kernels.quack`) does without. What it makes, R rows, is summed up by token as before.

autograd would want gradients of the shape of what they are of. So they are handed over beside it: the node that sums
results up puts theirs, (U, D), and gets the experts to run with a placeholder; the experts put that of their rows,
(R, D), for the node that brought the tokens.

Shape suffixes: U rows of tokens on this rank, R rows sorted by expert, D model width.
"""

from typing import Literal

from torch import Tensor

_What = Literal["token_R", "grad_sums_UD", "grad_rows_RD"]


class GatheredRows:
    """What is handed over of one call of experts. Each is put by one and taken by another, and then no longer held.

    token_R: int32; row r is row token_R[r] of the tokens' rows. grad_sums_UD: gradient of the sums of the experts'
    results, in the rows' dtype. grad_rows_RD: gradient of the rows.
    """

    def __init__(self) -> None:
        self._held: dict[_What, Tensor] = {}

    def put(self, what: _What, tensor: Tensor) -> None:
        assert what not in self._held, what
        self._held[what] = tensor

    def take(self, what: _What) -> Tensor:
        return self._held.pop(what)
