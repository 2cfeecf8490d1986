"""What autograd keeps of the positions that a region of tensor parallelism gathers: this rank's own, which are gathered
once more in backward (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

All linear layers that a region begins with save its input for the gradients of their weights, and so do modules that
every rank computes alike. It is gathered for the first of them whose backward runs, and goes with the last.

Shape suffixes: n ranks of the group, S positions, L = S/n of them on this rank.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...moe.torch_private import _top_saved_tensors_default_hooks
from ...sharding.collectives.tensor_parallel import TPGroup


def is_kept_otherwise() -> bool:
    """Whether what is computed now is not kept by autograd, or by hooks of someone else's: of checkpointed layers
    nothing is, and what their recomputation gathers is all used at once."""
    return not torch.is_grad_enabled() or _top_saved_tensors_default_hooks(False) is not None


class KeptPositions(saved_tensors_hooks):
    """Within it autograd keeps, in the place of each tensor that `note` has been told of and its views, this rank's
    part."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        # each tensor with its version; they are held, so that no other tensor gets the storage of one
        self._noted: dict[int, tuple[Tensor, int, _Positions]] = {}

    def note(self, gathered: Tensor, group: TPGroup, part: Tensor, dim: int) -> None:
        """gathered: all ranks' `part`s, one after the other along `dim`, which nothing has saved yet."""
        positions = _Positions(group, part.detach(), dim, gathered.stride())
        self._noted[gathered.untyped_storage()._cdata] = (gathered.detach(), gathered._version, positions)

    def _pack(self, tensor: Tensor) -> Any:
        gathered, version, positions = self._noted.get(tensor.untyped_storage()._cdata, (tensor, -1, None))
        if positions is None or tensor._version != version or tensor.dtype != gathered.dtype:
            return tensor
        offset = int(tensor.storage_offset() - gathered.storage_offset())
        return partial(positions.view, tensor.size(), tensor.stride(), offset)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._noted.clear()


def _unpack(saved: Any) -> Tensor:
    tensor: Tensor = saved if isinstance(saved, Tensor) else saved()
    return tensor


class _Positions:
    """All ranks' positions, gathered when they are first asked for. Only what autograd has packed refers to them, and
    it gives that up one after the other."""

    def __init__(self, group: TPGroup, part: Tensor, dim: int, stride: tuple[int, ...]):
        self.group, self.part, self.dim, self.stride = group, part, dim, stride
        self.version = part._version
        self.gathered: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A tensor that was saved, which lay so in those of forward."""
        if self.gathered is None:
            assert self.part._version == self.version, "a region's input is not written to before its backward"
            gathered = self.group.all_gather(self.part, self.dim)
            if gathered.stride() != self.stride:
                other = torch.empty_strided(gathered.shape, self.stride, dtype=gathered.dtype, device=gathered.device)
                gathered = other.copy_(gathered)
            self.gathered = gathered
        return self.gathered.as_strided(size, stride, offset)
