"""What a rank needs to run its stages of a pipeline: attached to a model, which is then cut when it is sharded.

Stages on different ranks exchange lists of tensors whose shapes both sides know, in asynchronous batches. Parameters
that several stages use, of which each has a copy (tied embeddings, say), get the sum of their gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.kernels.weight_gradients import WeightGradients
from ...moe.util.step_parts import register_step_part
from ..collectives.pipeline_groups import PipelineGroups
from ..mesh import Mesh
from ..stages import Stages
from ..state import StateTensor, local_tensor, trainable_of
from .balance import cut_stages
from .schedule import ScheduleName
from .survey import survey

register_step_part(__name__, "pipeline")

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass
class Pipeline:
    """stages: of the model, as this rank sees them. mesh: this rank's. schedule: the order in which a rank works on
    micro-batches. chunks: stages of a rank. later: where backwards leave experts' weight gradients, once there is
    one."""

    stages: Stages
    mesh: Mesh
    schedule: ScheduleName
    chunks: int
    later: WeightGradients | None = None

    @property
    def groups(self) -> PipelineGroups:
        """The ranks that a micro-batch goes through."""
        assert self.mesh.pipeline is not None
        return self.mesh.pipeline


def cut_into_stages(
    model: Any,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
    layers: Sequence[int] | None = None,
) -> None:
    """Say which layers of a model stand on which stage, before it is sharded. All ranks call it together.

    Args:
        model: assembled, on the meta device.
        compute_dtype: of its matmuls.
        chunks: stages per rank.
        layers: how many each stage has; None: balanced by floating point operations.

    Raises:
        ExpertMeshError: the model cannot be cut so.
    """
    groups = mesh.pipeline
    assert groups is not None
    surveyed = survey(model, compute_dtype)
    stages = Stages(surveyed, cut_stages(surveyed, len(groups.ranks), chunks, layers), len(groups.ranks), groups.index)
    holders = [stages.pp_ranks(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups.share(several for several in holders if len(several) > 1)
    model.stages = stages
    model.pipeline = Pipeline(stages, mesh, schedule, chunks)


def pipeline_of(model: Any) -> Pipeline | None:
    """Of a model that is cut into stages; None of one that is not."""
    pipeline: Pipeline | None = getattr(model, "pipeline", None)
    return pipeline


def stage_group(model: Any) -> dist.ProcessGroup | None:
    """The ranks that share a micro-batch's tokens: those of one pp index; None: all."""
    pipeline = pipeline_of(model)
    return None if pipeline is None else pipeline.mesh.stage_group


@dataclass(frozen=True)
class Under:
    """An exchange under way. sent: stays in memory until it has gone."""

    works: list[Any]
    sent: list[Tensor]


class Messages:
    """The exchanges of one rank in one direction, at most one of them under way.

    Args:
        group: of the direction.
        device: that tensors are received on.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._under: Under | None = None

    def begin(self, send: Sequence[Tensor], to: int, shapes: Shapes, source: int) -> list[Tensor]:
        """Begin to send and to receive, in one batch, once the exchange before it is over.

        Args:
            send: tensors for the rank `to`; those without elements are left out, as are those to be received.
            shapes: of the tensors from the rank `source`.

        Returns:
            The tensors that are received, to be read after `wait`.
        """
        self.wait()
        sent = [tensor.contiguous() for tensor in send if tensor.numel() > 0]
        received = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        batch = [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        batch += [dist.P2POp(dist.irecv, tensor, source, self.group) for tensor in received if tensor.numel() > 0]
        self._under = Under(dist.batch_isend_irecv(batch) if batch else [], sent)
        return received

    def wait(self) -> None:
        """Wait until the exchange under way, if any, is over."""
        if self._under is not None:
            for work in self._under.works:
                work.wait()
            self._under = None


@contextmanager
def adding_to_shared(model: Any, pipeline: Pipeline) -> Iterator[None]:
    """Within it, gradients are computed; afterwards those of parameters that several pp indices hold are, on each, the
    sum of theirs, added to what was there before. All ranks call it together."""
    shared = shared_parameters(model)
    before = [part.tensor.grad for part in shared]
    for part in shared:
        part.tensor.grad = None
    yield
    for part, earlier in zip(shared, before, strict=True):
        _add_up(part, pipeline)
        if earlier is not None:
            assert part.tensor.grad is not None
            local_tensor(part.tensor.grad).add_(local_tensor(earlier))


def shared_parameters(model: Any) -> list[StateTensor]:
    """Those of this rank's trained parameters that other pp indices hold too, in the model's order."""
    return [part for part in trainable_of(model).values() if len(part.layout.pp_ranks or ()) > 1]


@torch.no_grad()
def _add_up(part: StateTensor, pipeline: Pipeline) -> None:
    """A stage may have no gradient of a parameter that it holds: zeros, then."""
    if part.tensor.grad is None:
        part.tensor.grad = torch.zeros_like(part.tensor)
    gradient: Tensor = local_tensor(part.tensor.grad)
    assert part.layout.pp_ranks is not None
    dist.all_reduce(gradient, group=pipeline.groups.sharing[part.layout.pp_ranks])
