"""Log-probabilities of preference pairs, or of labelled answers, by the reference: the model before the first step.

They are computed once, before anything is trained, and kept in the output directory, where a resumed run finds them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...checkpoints.files.directories import write_errors
from ...checkpoints.files.kept import damage, record_kept, recorded_key
from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ..data.batch import LossInputs, Padding, collate_rows
from ..data.samples import Labelled, Pairs, Samples
from ..data.sequences import LabelledRows, Rows
from ..loss.preference import DESIRABLE, REFERENCE, SFT, TARGETS
from ..steps.evaluate import by_length, head_outputs, inference

FILE, RECORD = "reference.safetensors", "reference.json"
_MISSING, _OTHER = "is not there", "is of another model or other data"


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


@dataclass(frozen=True)
class LabelledInputs:
    """What the loss of labelled answers needs beside log-probabilities.

    desirable_A: 1 for a desirable answer, else 0, fp64. reference_A2: log-probabilities by the reference of each
    answer, and of the one behind the same prompt in its place, fp64. estimates: whether the loss needs the latter.
    """

    desirable_A: Tensor
    reference_A2: Tensor
    estimates: bool

    def within(self, rows: Rows, together: Sequence[int]) -> Callable[[list[int]], LossInputs]:
        """As `PairInputs.within`."""

        def inputs(numbers: list[int]) -> LossInputs:
            here = _pairs_of(rows, numbers)
            known, others = self.reference_A2[here].unbind(1)
            mismatched = LossInputs({REFERENCE: others}) if self.estimates else None
            return LossInputs({REFERENCE: known, DESIRABLE: self.desirable_A[here]}, mismatched=mismatched)

        return inputs


def _pairs_of(rows: Rows, numbers: Iterable[int]) -> Tensor:
    """Numbers of the pairs, or labelled answers, in entries of the data."""
    return torch.tensor([pair for number in numbers for pair in rows.numbers(number)], dtype=torch.int64)


@dataclass(frozen=True)
class References:
    """Of what is trained on and of what is evaluated on."""

    training: PairInputs | LabelledInputs
    evaluation: PairInputs | LabelledInputs | None


class ReferencePass:
    """Computes what is not kept.

    Args:
        model: before it is trained.
        per_device: entries of the data in a micro-batch.
        padding: how long sequences become.
        key: of the log-probabilities (see `reference_key`), on rank 0.
        tell: is told of a damaged file, on rank 0.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any,
        ranks: Ranks,
        per_device: int,
        padding: Padding,
        key: str,
        tell: Callable[[str], object],
    ):
        self.model, self.mesh, self.ranks = model, mesh, ranks
        self.per_device, self.padding, self.key, self.tell = per_device, padding, key, tell

    def run(
        self, directory: Path, rows: Rows, held_out: Rows | None, can_compute: bool, estimates: bool = True
    ) -> tuple[References, bool]:
        """(log-probabilities by the reference, whether they were kept). All ranks call it together.

        Args:
            directory: where they are kept.
            estimates: whether a loss of labelled answers has a divergence.
            can_compute: whether the model is the reference; not where a resumed run has not read its weights.

        Raises:
            ExpertMeshError: they are not there and cannot be computed, or cannot be written.
        """
        parts = {"training": rows} if held_out is None else {"training": rows, "evaluation": held_out}
        found = self._kept(directory / FILE, parts, can_compute)
        was_kept = found is not None
        if found is None:
            found = {name: self._of_both(part, estimates) for name, part in parts.items()}
            with raise_together(), write_errors(directory):
                if self.ranks.rank == 0:
                    with whole(directory / FILE, durable=True) as partial:
                        save_file(found, partial)
                    record_kept(directory / RECORD, self.key, [directory / FILE])
        inputs = {name: _inputs(part.samples, found[name], estimates) for name, part in parts.items()}
        return References(inputs["training"], inputs.get("evaluation")), was_kept

    def _kept(self, path: Path, parts: Mapping[str, Rows], can_compute: bool) -> dict[str, Tensor] | None:
        """What rank 0 finds in the file, if it is of this model and these data."""
        told: list[Any] = [None, ""]
        with raise_together(patient=self.ranks):
            if self.ranks.rank == 0:
                told = [*_read(path, self.key)]
                if told[0] is None and not can_compute:
                    raise ExpertMeshError(
                        f"--resume: {told[1]}; it has the log-probabilities of the model that the run began "
                        "with, which this run has not read: bring the file back, or begin anew"
                    )
                if told[1] and not told[1].endswith((_MISSING, _OTHER)):
                    self.tell(f"note: {told[1]}; the reference's log-probabilities are computed anew")
        dist.broadcast_object_list(told, src=0)
        found: dict[str, Tensor] | None = told[0]
        if found is not None:
            assert all(len(found[name]) == len(part.samples) for name, part in parts.items())
        return found

    def _of_both(self, rows: Rows, estimates: bool) -> Tensor:
        """(P, 2) fp64 on the host, of each pair's chosen and rejected sample, or of a labelled answer and another one
        behind the same prompt, if that is needed."""
        if not isinstance(rows, LabelledRows):
            return self._computed(rows, 2)
        own = self._computed(rows, 1)
        return torch.cat([own, self._computed(rows.mismatched, 1) if estimates else torch.zeros_like(own)], dim=1)

    def _computed(self, rows: Rows, each: int) -> Tensor:
        """(samples, each) fp64 on the host, of as many sequences' samples."""
        mine = by_length(rows, self.per_device, self.mesh)
        batches = (collate_rows(rows, numbers, self.mesh.cp_group, self.padding, LossInputs()) for numbers in mine)
        device = self.ranks.device
        found = torch.zeros(len(rows.samples), each, dtype=torch.float64, device=device)
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
                        found[pairs.to(device)] = sums.view(-1, each)
        dist.all_reduce(found)
        return found.cpu()


def _inputs(samples: Samples, reference_P2: Tensor, estimates: bool) -> PairInputs | LabelledInputs:
    if isinstance(samples, Labelled):
        return LabelledInputs(samples.is_desirable.double(), reference_P2, estimates)
    assert isinstance(samples, Pairs)
    return PairInputs(samples.targets_P2, reference_P2)


def _read(path: Path, key: str) -> tuple[dict[str, Tensor] | None, str]:
    """(the tensors, or why not)."""
    if not path.exists():
        return None, f"{path}: {_MISSING}"
    record = path.with_name(RECORD)
    kept = recorded_key(record)
    if kept != key:
        return None, f"{path}: {_OTHER}" if kept else f"{record}: is damaged, or not there"
    said = damage(record, [path])
    return (None, said) if said else (load_file(path), "")
