"""What of a linear layer the ranks of a tensor-parallel group divide."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor


class DividingRanks(Protocol):
    """The ranks that divide a layer; see `TPGroup`."""

    @property
    def size(self) -> int: ...

    def all_reduce_max(self, x: Tensor) -> Tensor: ...

    def sum_scatter(self, x: Tensor, dim: int) -> Tensor: ...

    def mine(self, x: Tensor, dim: int = 0) -> Tensor: ...


def part_of(parameter: Tensor, rows: int, ranks: DividingRanks) -> Tensor:
    """This rank's rows, so many, of a parameter that is divided, or of which every rank has all: of one that is not
    placed yet, say."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local if len(local) == rows else ranks.mine(local)


@dataclass(frozen=True)
class Division:
    """What of a linear layer ranks divide.

    Attributes:
        of: its outputs or its inputs, of which this rank has a part, as its weight has the rows or columns; or nothing:
            all ranks multiply the same, and of the output's gradient each has one summand.
        rows: of its weight on each rank, if it is divided; None: its parameters are parts already.
    """

    of: Literal["outputs", "inputs", "nothing"]
    ranks: DividingRanks
    rows: int | None = None

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        """What this rank computes with in the place of a parameter: its rows; of an adapter, which is not divided, what
        goes with them. None for the bias of a layer that is divided by its inputs: it is added once, to the sum."""
        if self.rows is None:
            return parameter
        if name in ("lora_A", "lora_B"):
            is_cut = name == ("lora_A" if self.of == "inputs" else "lora_B")
            return self.ranks.mine(parameter, dim=int(self.of == "inputs")) if is_cut else parameter
        if name == "bias" and self.of == "inputs":
            return None
        return part_of(parameter, self.rows, self.ranks)
