"""What a rank needs to run its stages of a pipeline: attached to a model, which is then cut when it is sharded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...moe.kernels.weight_gradients import WeightGradients
from ..collectives.pipeline_groups import PipelineGroups
from ..mesh import Mesh
from ..stages import Stages
from .balance import cut_stages
from .schedule import ScheduleName
from .survey import survey


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
        layers: how many each stage has; None: such that all take equally long.

    Raises:
        ExpertMeshError: the model cannot be cut so.
    """
    groups = mesh.pipeline
    assert groups is not None
    found = survey(model, compute_dtype)
    stages = Stages(found, cut_stages(found, len(groups.ranks), chunks, layers), len(groups.ranks), groups.index)
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
