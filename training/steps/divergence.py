"""The divergence from the reference in the loss of labelled answers, estimated without gradients.

KTO measures rewards from a point z, the KL divergence of the policy from the reference, which it estimates as the mean
log-probability ratio of answers behind other prompts, or 0 where that is negative (arXiv 2402.01306, section 4.2). Here
the mean is over all samples of a step, or of an evaluation, which no layout changes; trl has one for each micro-batch
of all ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...sharding.mesh import Mesh
from ..data.batch import Batch, LossInputs, Padding, collate_rows
from ..data.sequences import LabelledRows
from ..loss.preference import KL, REFERENCE
from .evaluate import by_length, head_outputs, inference


def with_divergence(model: Any, batches: Sequence[Batch]) -> Sequence[Batch]:
    """A step's micro-batches, whose loss now knows the divergence, if it needs it. All ranks call it together."""
    others = [batch.mismatched for batch in batches if batch.mismatched is not None]
    if not others:
        return batches
    found = _divergence(model, others, others[0].tokens_BS.device)
    told = []
    for batch in batches:
        assert batch.for_loss is not None
        inputs = {**batch.for_loss.inputs, KL: found.expand(batch.for_loss.num_samples)}
        told.append(replace(batch, for_loss=replace(batch.for_loss, inputs=inputs), mismatched=None))
    return told


def of_evaluation(
    model: Any,
    rows: LabelledRows,
    per_device: int,
    mesh: Mesh,
    padding: Padding,
    inputs_of: Callable[[list[int]], LossInputs],
) -> Callable[[list[int]], LossInputs]:
    """What makes the inputs of an evaluation's batches, with the divergence. All ranks call it together.

    Args:
        inputs_of: makes them without it.
    """
    mine = by_length(rows, per_device, mesh)
    others = (
        collate_rows(rows.mismatched, numbers, mesh.cp_group, padding, inputs_of(numbers).mismatched)
        for numbers in mine
    )
    found = _divergence(model, others, torch.device(mesh.grid.device_type)).cpu()

    def inputs(numbers: list[int]) -> LossInputs:
        known = inputs_of(numbers).by_sample
        return LossInputs({**known, KL: found.expand(len(known[REFERENCE]))})

    return inputs


def _divergence(model: Any, others: Iterable[Batch], device: torch.device) -> Tensor:
    """An fp64 scalar on the device.

    Args:
        others: this rank's batches of mismatched answers, equally many on all ranks.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with inference(model):
        for several, heads in head_outputs(model, others, device, by_token=True):
            for batch, logprobs_N in zip(several, heads, strict=False):  # a pipeline's last stage may be elsewhere
                told = batch.for_loss
                assert told is not None
                sums[0] += (told.sums(logprobs_N) - told[REFERENCE]).sum()
                sums[1] += told.num_samples
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).clamp(min=0)
