"""Log-probabilities of preference pairs by the reference: the model as it is before the first step.

They are computed once, before anything is trained, and kept in the output directory, where a resumed run finds them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.files.directories import write_errors
from ..moe.util.atomic_write import whole
from ..moe.util.errors import ExpertMeshError
from ..sharding.runtime.process import Ranks, raise_together
from .data.batch import LossInputs, Padding, collate_rows
from .data.samples import Pairs
from .data.sequences import PairRows, Rows
from .evaluate import by_length, head_outputs, inference
from .loss.preference import REFERENCE, SFT, TARGETS

FILE = "reference.safetensors"


@dataclass(frozen=True)
class PairInputs:
    """What the loss of preference pairs needs beside log-probabilities.

    targets_P2: target tokens of the chosen and of the rejected one of each pair. reference_P2: their log-probabilities
    by the reference, fp64.
    """

    targets_P2: Tensor
    reference_P2: Tensor

    def within(self, rows: Rows, together: Sequence[int]) -> Callable[[list[int]], LossInputs]:
        """What makes the inputs of a batch from the numbers of its entries of `rows`.

        Args:
            together: the entries whose loss is one mean: those of a step, or of an evaluation.
        """
        pairs = _pairs_of(rows, together)
        # by which a target token's share in the mean of their chosen answers becomes one in a mean over pairs
        share = len(pairs) / max(int(self.targets_P2[pairs, 0].sum()), 1)

        def inputs(numbers: list[int]) -> LossInputs:
            here = _pairs_of(rows, numbers)
            sft_P2 = torch.tensor([share, 0.0], dtype=torch.float64).expand(len(here), 2)
            by_sample = {REFERENCE: self.reference_P2[here], TARGETS: self.targets_P2[here].double(), SFT: sft_P2}
            return LossInputs({name: values.flatten() for name, values in by_sample.items()})

        return inputs


def _pairs_of(rows: Rows, numbers: Iterable[int]) -> Tensor:
    """Numbers of the pairs in entries of the data."""
    return torch.tensor([pair for number in numbers for pair in rows.numbers(number)], dtype=torch.int64)


@dataclass(frozen=True)
class References:
    """Of the pairs to train on and of those to evaluate on."""

    training: PairInputs
    evaluation: PairInputs | None


class ReferencePass:
    """Computes what is not kept.

    Args:
        model: before it is trained.
        per_device: entries of the data in a micro-batch.
        padding: how long sequences become.
        facts: of what the log-probabilities depend on: the model, the data, and how both are read.
    """

    def __init__(
        self, model: Any, mesh: Any, ranks: Ranks, per_device: int, padding: Padding, facts: Mapping[str, Any]
    ):
        self.model, self.mesh, self.ranks = model, mesh, ranks
        self.per_device, self.padding, self.facts = per_device, padding, facts

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    def run(self, directory: Path, rows: Rows, held_out: Rows | None, can_compute: bool) -> tuple[References, bool]:
        """(log-probabilities by the reference, whether they were kept). All ranks call it together.

        Args:
            directory: where they are kept.
            can_compute: whether the model is the reference; not where a resumed run has not read its weights.

        Raises:
            ExpertMeshError: they are not there and cannot be computed, or cannot be written.
        """
        parts = {"training": rows} if held_out is None else {"training": rows, "evaluation": held_out}
        found = self._kept(directory / FILE, parts, can_compute)
        was_kept = found is not None
        if found is None:
            found = {name: self._computed(part) for name, part in parts.items()}
            with raise_together(), write_errors(directory):
                if self.ranks.rank == 0:
                    with whole(directory / FILE) as partial:
                        save_file(found, partial, {"fingerprint": self.fingerprint})
        inputs = {name: PairInputs(_pairs(part).targets_P2, found[name]) for name, part in parts.items()}
        return References(inputs["training"], inputs.get("evaluation")), was_kept

    def _kept(self, path: Path, parts: Mapping[str, Rows], can_compute: bool) -> dict[str, Tensor] | None:
        """What rank 0 finds in the file, if it is of this model and these data."""
        told: list[Any] = [None, ""]
        with raise_together(patient=self.ranks):
            if self.ranks.rank == 0:
                told = [*_read(path, self.fingerprint)]
                if told[0] is None and not can_compute:
                    raise ExpertMeshError(
                        f"--resume: {path}: {told[1]}; it has the log-probabilities of the model that the run began "
                        "with, which this run has not read: bring the file back, or begin anew"
                    )
        dist.broadcast_object_list(told, src=0)
        found: dict[str, Tensor] | None = told[0]
        if found is not None:
            assert all(len(found[name]) == len(part.samples) for name, part in parts.items())
        return found

    def _computed(self, rows: Rows) -> Tensor:
        """(P, 2) fp64 on the host, of each pair's chosen and rejected sample."""
        mine = by_length(rows, self.per_device, self.mesh)
        batches = (collate_rows(rows, numbers, self.mesh.cp_group, self.padding, LossInputs()) for numbers in mine)
        device = self.ranks.device
        sums_P2 = torch.zeros(len(rows.samples), 2, dtype=torch.float64, device=device)
        following = iter(mine)
        with inference(self.model):
            for several, heads in head_outputs(self.model, batches, device, by_token=True):
                for place, batch in enumerate(several):
                    pairs = _pairs_of(rows, next(following))
                    if place >= len(heads):  # a pipeline's last stage is elsewhere
                        continue
                    assert batch.for_loss is not None
                    sums = batch.for_loss.sums(heads[place])
                    if len(sums):
                        sums_P2[pairs.to(device)] = sums.view(-1, 2)
        dist.all_reduce(sums_P2)
        return sums_P2.cpu()


def _pairs(rows: Rows) -> Pairs:
    assert isinstance(rows, PairRows)
    return rows.samples


def _read(path: Path, fingerprint: str) -> tuple[dict[str, Tensor] | None, str]:
    """(the tensors, or why not)."""
    if not path.exists():
        return None, "is not there"
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("fingerprint") != fingerprint:
                return None, "is of another model or other data"
            return {name: file.get_tensor(name) for name in file.keys()}, ""  # noqa: SIM118
    except Exception as error:
        return None, f"cannot be read: {error}"
