"""The same figures from our ranks, by the doors that users take: `expertmesh.load`, `step` and `export`."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.samples import Sample
from tests.distributed.reference import in_full
from tests.fuzz.draw import Draw
from tests.fuzz.expected import OPTIMIZER, STEPS
from tests.parity.reference import labels_of

Step = tuple[float, float, float, float]
"""Loss, gradient norm, balancing loss, z-loss."""


def trained(path: Path, drawn: Draw, flags: Mapping[str, Any], out: Path) -> str | tuple[list[Step], dict[str, Any]]:
    """Load, train, and export on the ranks of the current process group.

    Args:
        path: the model.
        out: where the model is exported: "loaded" before, "updated" after the first step.

    Returns:
        Why it was refused; or figures of each step and, on rank 0, adapters.
    """
    warnings.simplefilter("ignore")
    settings: Any = {**OPTIMIZER, **drawn.flags, **flags}
    try:
        engine = expertmesh.load(path, use_cpu=True, **settings)
    except ExpertMeshError as error:
        return str(error)
    if not drawn.has_adapters:
        engine.export(out / "loaded")
    micro_batches = [drawn.rows[number :: drawn.micro_batches] for number in range(drawn.micro_batches)]
    batches = [batch_of(rows[engine.data_rank :: engine.data_size], drawn) for rows in micro_batches]
    steps = []
    for number in range(STEPS):
        found = engine.step(batches)
        steps.append((found.loss, found.grad_norm, found.balance_loss, found.z_loss))
        if number == 0 and not drawn.has_adapters:
            engine.export(out / "updated")
    adapters = {name: p for name, p in engine.model.named_parameters() if p.requires_grad} if drawn.has_adapters else {}
    return steps, in_full(adapters)


def batch_of(rows: Sequence[Sequence[Sample]], drawn: Draw) -> dict[str, torch.Tensor] | None:
    """Rows as a data collator of transformers makes them."""
    if not rows:
        return None
    length = max(sum(len(sample.tokens) for sample in row) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": [], "position_ids": []}
    for row in rows:
        tokens = [token for sample in row for token in sample.tokens]
        padding = length - len(tokens)
        positions = [place for sample in row for place in range(len(sample.tokens))]
        batch["input_ids"].append(tokens + [0] * padding)
        batch["labels"].append(
            [label for sample in row for label in labels_of(sample.tokens, sample.is_trained)] + [-100] * padding
        )
        batch["attention_mask"].append([1] * len(tokens) + [0] * padding)
        batch["position_ids"].append(positions + [0] * padding)
    if "packing" not in drawn.flags:
        del batch["position_ids"]
    found = {name: torch.tensor(values) for name, values in batch.items()}
    return found | drawn.image_inputs([sample for row in rows for sample in row], found["input_ids"])
