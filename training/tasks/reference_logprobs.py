"""Log-probabilities by the reference: the model before the first step.

They are computed once, before anything is trained, and kept in the output directory, where a resumed run finds them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...checkpoints.files.directories import write_errors
from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ..data.batch import BatchMaker, LossInputs, collate_rows
from ..data.sequences import Rows
from ..engine.engine import Engine
from ..start.fingerprints import reference_key
from ..steps.evaluate import by_length, head_outputs, inference
from .kept import KeptPass
from .task import BatchInputs, Preparation, TaskInputs, samples_in

FILE, RECORD = "reference.safetensors", "reference.json"
REFERENCE = "reference"
"""Input by sample: the reference's log-probability."""
_WHAT = "the reference's log-probabilities"


class ReferencePass:
    """Computes log-probabilities by a model that has not been trained.

    Args:
        maker: how batches are made.
    """

    def __init__(self, engine: Engine, maker: BatchMaker):
        self.engine, self.maker = engine, maker

    def computed(self, rows: Rows) -> Tensor:
        """(samples, sequences of each) fp64 on the host."""
        model, mesh, device = self.engine.model, self.engine.mesh, self.engine.ranks.device
        mine = by_length(rows, self.engine.config.per_device_eval_batch_size, mesh)
        batches = (collate_rows(rows, numbers, mesh.cp_group, self.maker, LossInputs()) for numbers in mine)
        each = rows.samples.kind.sequences
        found = torch.zeros(len(rows.samples), each, dtype=torch.float64, device=device)
        following = iter(mine)
        with inference(model):
            for several, heads in head_outputs(model, batches, device, by_token=True):
                for place, batch in enumerate(several):
                    entries = samples_in(rows, next(following))
                    if place >= len(heads):  # a pipeline's last stage is elsewhere
                        continue
                    sums = batch.of_loss.sums(heads[place])
                    if len(sums):
                        found[entries.to(device)] = sums.view(-1, each)
        dist.all_reduce(found)
        return found.cpu()


def references(
    run: Preparation,
    noun: str,
    compute: Callable[[ReferencePass, Rows], Tensor],
    inputs: Callable[[Rows, Tensor], BatchInputs],
) -> TaskInputs:
    """What batches need of a reference. All ranks call it together.

    Args:
        noun: what a number of the data is, in words.
        compute: log-probabilities of some rows.
        inputs: what batches of some rows need, of them.

    Raises:
        ExpertMeshError: as `kept_or_computed`.
    """
    run.at(_WHAT)
    engine, config = run.engine, run.config
    # an adapter that has not been trained changes nothing
    can_compute = run.resume_from is None or (config.adapter != "none" and not config.init_adapter)
    reference = ReferencePass(engine, run.batch_maker)
    found, was_kept = kept_or_computed(
        *(run.output_dir, run.rows, reference_key(config, engine.facts), can_compute),
        *(lambda part: compute(reference, part), run.ranks, engine.tell),
    )
    how = "read from" if was_kept else "computed, and kept in"
    run.note(f"{_WHAT} of {len(run.rows['training'].samples):,} {noun}: {how} {FILE}")
    return TaskInputs.of({name: inputs(part, found[name]) for name, part in run.rows.items()})


def kept_or_computed(
    directory: Path,
    parts: Mapping[str, Rows],
    key: str,
    can_compute: bool,
    compute: Callable[[Rows], Tensor],
    ranks: Ranks,
    tell: Callable[[str], object],
) -> tuple[dict[str, Tensor], bool]:
    """(log-probabilities of each part of the data, whether they were kept by an earlier start of the run).

    Args:
        directory: where they are kept. key: of them, on rank 0.
        can_compute: whether the model is the reference; not where a resumed run has not read its weights.
        tell: is told of a damaged file, on rank 0.

    Raises:
        ExpertMeshError: on all ranks: they are not there and cannot be computed, or cannot be written.
    """
    path = directory / FILE

    def refuse(wrong: str, is_other: bool) -> None:
        if not can_compute:
            raise ExpertMeshError(
                f"--resume: {wrong}; it has the log-probabilities of the model that the run began "
                "with, which this run has not read: bring the file back, or begin anew"
            )

    def make() -> None:
        found = {name: compute(part) for name, part in parts.items()}
        with raise_together(), write_errors(directory):
            if ranks.rank == 0:
                with whole(path, durable=True) as partial:
                    save_file(found, partial)

    was_kept = KeptPass(directory / RECORD, [path], key, _WHAT, ranks, tell).get(make, refuse)
    of_all: list[Any] = [load_file(path) if ranks.rank == 0 else None]
    dist.broadcast_object_list(of_all, src=0)
    (found,) = of_all
    assert all(len(found[name]) == len(part.samples) for name, part in parts.items())
    return found, was_kept
