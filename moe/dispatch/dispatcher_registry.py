"""What a dispatcher is: how tokens travel to their experts, and results back.

A dispatcher is plain data and one function, no `nn.Module`: `send` begins to send rows and returns a `Sent`. What is
computed between `send`, each part's `arrive` and `give_back`, and `combine` overlaps the all-to-alls.

Shape suffixes: T tokens on this rank, D model width, E experts, K experts per token, R rows of a part (chunk) that this
rank receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.expert_rows import ExpertRows
from ..kernels.gathered_rows import GatheredRows
from ..util.entry_checks import check_fields
from .dispatcher_entries import DISPATCHERS, DispatcherEntry


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of an ep group by their nodes. across: the N ranks of this one's place on their nodes. inside: the L
    ranks of this node."""

    across: dist.ProcessGroup
    inside: dist.ProcessGroup


class ExpertChunk(Protocol):
    """The rows of some consecutive experts of this rank: one chunk.

    experts: how many rows each has.
    """

    @property
    def experts(self) -> ExpertRows: ...

    def gather(self) -> GatheredRows | None:
        """Asked, if at all, before `arrive`, by who will ask `weigh` too: what `arrive` then fills, as it gives the
        rows of tokens, of which the experts' are to be gathered; None: it gives these."""
        ...

    def arrive(self, sent_RD: Tensor) -> Tensor:
        """Rows sorted by expert, once they have been received."""
        ...

    def weigh(self) -> Tensor | None:
        """Asked, if at all, between `arrive` and `give_back`: the weights of the rows' choices, (R,), by which what is
        given back has been multiplied then; None: it has not.

        What notes that, or `gather`, must be no dataclass, of which FSDP would hand a copy to the module that asks.
        """
        ...

    def give_back(self, rows_RD: Tensor) -> Tensor:
        """Begin to send the experts' results back; returns what `Sent.combine` takes."""
        ...


class Sent(Protocol):
    """All of a layer's rows.

    rows: those of each part, to be read by its `arrive` alone.
    """

    @property
    def rows(self) -> Sequence[Tensor]: ...

    @property
    def parts(self) -> Sequence[ExpertChunk]: ...

    @property
    def reads_outputs(self) -> bool:
        """Whether `give_back` reads the values of the rows that it gets in this forward, not only their shape."""
        ...

    def combine(self, returned: Sequence[Tensor]) -> Tensor:
        """out_TD: for each token the weighted sum of its experts' rows; zero for padding."""
        ...


class Dispatcher(Protocol):
    """What brings a layer's tokens to its experts.

    is_remote: whether to other ranks, so that something else can be computed meanwhile. in_words: what the first lines
    of a run's log say of it; empty: nothing.
    """

    @property
    def is_remote(self) -> bool: ...

    @property
    def in_words(self) -> str: ...

    def send(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, counts_E: Tensor, has_padding: bool) -> Sent:
        """
        Args:
            x_TD: tokens.
            experts_TK: int64 expert of each choice; E stands for padding, which is not routed.
            weights_TK: fp32 or wider weight of each choice; that of padding may be anything.
            counts_E: int64, how many entries of experts_TK name each expert.
            has_padding: whether any entry may be E. Without padding the host need not wait for the device.
        """
        ...


@dataclass(frozen=True)
class DispatchOptions:
    """What a layer's dispatcher is made of.

    Attributes:
        num_experts: E, of which each rank has as many.
        group: the ep ranks.
        num_parts: chunks in which rows are sent, so that one's all-to-all overlaps another's GEMMs.
        nodes: for one that goes by nodes; else None.
        sum_dtype: of sums that are sent back, and of those of gradients; None: the tokens'.
    """

    num_experts: int
    group: dist.ProcessGroup
    num_parts: int
    nodes: NodeGroups | None
    sum_dtype: torch.dtype | None


def register_dispatcher(entry: DispatcherEntry) -> None:
    """Make a dispatcher known to `--dispatch` and its `auto`, to checks, `--help` and forecasts. To be called on all
    ranks, before flags are read.

    Raises:
        ValueError: its name is taken, or something does not go together or is missing.
    """
    what, known = f"--dispatch {entry.name}", DISPATCHERS.entries()
    check_fields(what, entry)
    DISPATCHERS.check_other_names(entry, lambda each: each.elsewhere)
    if entry.by_nodes and entry.without_nodes not in [other.name for other in known if not other.by_nodes]:
        raise ValueError(f"{what}: is by_nodes, and {entry.without_nodes} without_nodes is none that is not")
    if not entry.by_nodes and entry.without_nodes != entry.name:
        raise ValueError(f"{what}: is not by_nodes, and {entry.without_nodes} without_nodes")
    DISPATCHERS.register(entry)
