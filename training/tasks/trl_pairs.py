"""trl's DPOTrainer on an engine: its batches, and what its loss needs of the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ..data.batch import IGNORED
from ..engine.engine import Engine
from .dpo import SFT, TARGETS
from .reference_logprobs import REFERENCE

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""In which trl has the reference's log-probabilities."""


def pairs_in_turn(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as an engine takes it, of one of trl's, in which all chosen answers come before the rejected ones."""
    tokens_BS, mask_BS, answer_BS = (
        inputs[name].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        for name in ("input_ids", "attention_mask", "completion_mask")
    )
    labels_BS = tokens_BS.masked_fill(answer_BS == 0, IGNORED)
    batch: dict[str, Any] = {"input_ids": tokens_BS, "attention_mask": mask_BS, "labels": labels_BS}
    if COLUMNS[0] in inputs:
        reference = torch.stack([inputs[name].double() for name in COLUMNS], dim=1).flatten()
        targets = (labels_BS[:, 1:] != IGNORED).sum(dim=1).double()
        batch["loss_inputs"] = {REFERENCE: reference, TARGETS: targets, SFT: torch.zeros_like(targets)}
    return batch


def with_reference(
    engine: Engine, dataset: Any, collate: Callable[[list[Any]], Mapping[str, Any]], batch_size: int
) -> Any:
    """A data set with the columns of the reference's log-probabilities: of the model as it is. All ranks call it
    together.

    Raises:
        ExpertMeshError: it has no length.
    """
    if not hasattr(dataset, "add_column"):
        raise ExpertMeshError(
            "DPOTrainer on an engine needs a datasets.Dataset: the reference reads it before training"
        )
    ranks, device = engine.ranks, engine.ranks.device
    mine = range(ranks.rank, len(dataset), ranks.world_size)
    parts = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]
    found = engine.logprobs([pairs_in_turn(collate([dataset[i] for i in part])) for part in parts])
    sums_P2 = torch.zeros(len(dataset), 2, dtype=torch.float64, device=device)
    for part, logprobs_BS in zip(parts, found, strict=True):
        assert isinstance(logprobs_BS, Tensor)
        sums_P2[list(part)] = logprobs_BS.double().sum(dim=1).view(-1, 2)
    dist.all_reduce(sums_P2)
    for name, values_P in zip(COLUMNS, sums_P2.cpu().unbind(dim=1), strict=True):
        dataset = dataset.add_column(name, values_P.tolist())
    return dataset
