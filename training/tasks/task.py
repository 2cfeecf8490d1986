"""What is learned, and what it needs of a run: a `Task`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...checkpoints.hf.source import ModelSource
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks
from ..config.train_config import TrainConfig
from ..data.batch import BatchMaker, LossInputs
from ..data.samples import Samples
from ..data.sequences import Rows
from ..engine.engine import Engine
from ..loss.objective import Objective
from ..start.fingerprints import Facts
from ..start.inputs import Inputs

InputsOf = Callable[[list[int]], LossInputs | None]
"""Makes what the loss of a micro-batch needs from the numbers of its entries; None: it needs no log-probabilities."""


class BatchInputs(Protocol):
    """What the loss needs of some data beside log-probabilities."""

    def within(self, rows: Rows, together: Sequence[int]) -> InputsOf:
        """For micro-batches of entries of `rows`.

        Args:
            together: the entries whose loss is one mean: those of a step, or of an evaluation.
        """


def samples_in(rows: Rows, numbers: Iterable[int]) -> Tensor:
    """Numbers of the samples, or pairs, in entries of the data."""
    return torch.tensor([sample for number in numbers for sample in rows.numbers(number)], dtype=torch.int64)


@dataclass(frozen=True)
class NoInputs:
    """Of a loss that needs nothing else: by_token, whether it is one of log-probabilities."""

    by_token: bool = False

    def within(self, rows: Rows, together: Sequence[int]) -> InputsOf:
        return lambda numbers: LossInputs() if self.by_token else None


@dataclass(frozen=True)
class TaskInputs:
    """Those of the data to train on and of those to evaluate on."""

    training: BatchInputs = NoInputs()
    evaluation: BatchInputs | None = None

    @classmethod
    def of(cls, parts: Mapping[str, BatchInputs]) -> "TaskInputs":
        """By what the data are for (see `Preparation.rows`)."""
        return cls(parts["training"], parts.get("evaluation"))


@dataclass(frozen=True)
class Preparation:
    """A run that is about to train.

    Attributes:
        batch_maker: of the data.
        at: is told of what takes long.
        note: takes lines for the log.
    """

    engine: Engine
    batch_maker: BatchMaker
    inputs: Inputs
    output_dir: Path
    resume_from: Path | None
    num_steps: int
    at: Callable[[str], object]
    note: Callable[[str], object]

    @property
    def config(self) -> TrainConfig:
        return self.engine.config

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    @property
    def rows(self) -> dict[str, Rows]:
        """The data by what they are for."""
        parts = {"training": self.inputs.training, "evaluation": self.inputs.evaluation}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class DataTraits:
    """What of some data decides how their loss is computed.

    is_weighted: whether they have weights. datasets: names of the data sets that they come from, by their numbers.
    """

    is_weighted: bool = False
    datasets: tuple[str, ...] = ()

    @classmethod
    def of(cls, samples: Samples) -> "DataTraits":
        return cls(samples.is_weighted, samples.names)


class Task:
    """What a run learns, from the check of its data to its loss. One is made for each run."""

    def objective(self, config: TrainConfig, data: DataTraits) -> Objective:
        """What is minimised."""
        raise NotImplementedError

    def example_inputs(self, config: TrainConfig, samples: int, targets: int) -> Mapping[str, Tensor]:
        """What a dry run's micro-batch of so many samples and targets has for the loss, by name."""
        return {}

    def check_weighted(self, config: TrainConfig) -> None:
        """
        Raises:
            ExpertMeshError: the loss is computed by what knows no weights, which the data have.
        """
        if not config.task_entry.reads("weight_column"):
            raise ExpertMeshError(
                f"--task {config.task}: reads no weights, which records of the data have; leave the weights out"
            )
        if config.train_mtp > 0:
            raise ExpertMeshError(
                "--train-mtp: does not work with data that have weights: drafts are of other tokens; leave out one of "
                "them"
            )

    def check(self, config: TrainConfig, training: Samples, evaluation: Samples | None) -> None:
        """
        Raises:
            ExpertMeshError: there are data that it cannot learn from.
        """
        if any(samples is not None and samples.is_weighted for samples in (training, evaluation)):
            self.check_weighted(config)
        if config.train_mtp > 0 and self.objective(config, DataTraits()).by_token:
            raise ExpertMeshError(
                f"--train-mtp: goes with the cross-entropy alone, and --task {config.task} has a loss of its own; "
                "leave it out"
            )

    def open(self, config: TrainConfig, student: ModelSource, inputs: Inputs, ranks: Ranks) -> Facts:
        """Open what it reads beside model and data, of which it gives the facts. All ranks call it together, as
        what follows."""
        return {}

    def before_loading(self, run: Preparation) -> None:
        """Compute what needs the memory that the model will take."""

    def inputs(self, run: Preparation) -> TaskInputs:
        """What batches need, once the model is loaded."""
        nothing = NoInputs(self.objective(run.config, DataTraits()).by_token)
        return TaskInputs(nothing, nothing)
